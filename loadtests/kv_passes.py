"""How often a decode step goes through the cache: `python -m loadtests.kv_passes [--shape llama] [--kinds step …]`.

Times decode steps over caches of 512 to 32,768 positions: five steps to warm up, then the median of fifteen. What
else the machine does only adds to a step, so that of eight rounds over all lengths each keeps its lowest median; the
shortest is measured once more at the end. Fits a line of latency against the bytes of keys and values. Its intercept is
a step over an empty cache; its slope gives the effective GB/s, and the copy bandwidth divided by that the passes. One
process a kind of cache; besides mlx-lm's, Marathon's own batch with one row, and with a second one twice as long.
Caches are filled with random keys and values. Writes one CSV row a point and one a line; its exit code is 0 when every
R² is at least `--r2`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from loadtests.lab.experiment import SHAPES, Bound, Case, Experiment, Row, carry_out, parser_of

KINDS = ("concatenate", "contiguous", "step", "rotating", "quantised", "batched", "marathon", "marathon beside")
CONTEXTS = [512, 1024, 2048, 4096, 8192, 16384, 32768]
POINT = ("point", "context", "kv_bytes", "ms")
COLUMNS = ("shape", "kind", *POINT, "intercept_ms", "gb_s", "copy_gb_s", "passes", "r2", "again")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", nargs="+", default=["llama"], help=SHAPES)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of cache, and Marathon's batch")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, help="positions")
    parser.add_argument(
        "--rounds", type=int, default=8, help="over all contexts, each of which keeps its lowest median"
    )
    parser.add_argument("--warm", type=int, default=5, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=15, help="steps that are timed")
    parser.add_argument("--copy-mib", type=int, default=1024, help="size of the array that is copied")
    parser.add_argument("--r2", type=float, default=0.98, help="smallest R²")
    return parser.parse_args(arguments)


def experiment(asked: argparse.Namespace) -> Experiment:
    common = {name: getattr(asked, name) for name in ("contexts", "rounds", "warm", "steps", "copy_mib")}
    cases = [Case({"shape": shape, "kind": kind} | common) for shape in asked.shape for kind in asked.kinds]

    def judge(rows: list[Row]) -> list[Bound]:
        return [
            Bound(
                f"{row['shape']}, {row['kind']}: {row['passes']:.2f} passes, R² {row['r2']:.4f}", row["r2"] >= asked.r2
            )
            for row in rows
            if row["point"] == "line"
        ]

    return Experiment("kv_passes", COLUMNS, cases, judge)


def main() -> int:
    asked = parse()
    return carry_out(experiment(asked), asked)


if __name__ == "__main__":
    sys.exit(main())
