"""Mixed traffic for hours: `python -m loadtests.endurance [--minutes 60] [--shape qwen3_5]`.

Six clients ask a server for answers of every kind, drawn at random: short and long, with long prompts, with a schema,
with tools, streamed and whole; some leave in the middle, some ask for more than their deadline allows. Beside them
one agent's conversation grows turn by turn. After a third of the readings as warm-up: slopes an hour of live buffers,
bytes, tok/s and p99 of the time between pieces. Writes one CSV row a run; its exit code is 0 when every request had
one truthful ending, none is left running, and the most buffers and bytes of the later half of the readings are at
most `--growth` times those of the earlier half.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from loadtests.lab.experiment import Bound, Case, Experiment, Row, carry_out, parser_of

SLOPES = ("live_slope", "bytes_slope", "tok_s_slope", "p99_slope")
MEANS = ("live_mean", "bytes_mean", "tok_s_mean", "p99_mean", "live_growth", "active_growth")
ENDS = ("ran_minutes", "requests", "untruthful", "left_running", "readings")
COLUMNS = ("shape", "minutes", "seed", *ENDS, *SLOPES, *MEANS, "endings", "faults")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", nargs="+", default=["qwen3_5"], help="model, or a folder")
    parser.add_argument("--minutes", type=float, default=60.0, help="of traffic")
    parser.add_argument("--period", type=float, default=5.0, help="seconds between two readings")
    parser.add_argument("--growth", type=float, default=1.2, help="of buffers and bytes")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    return parser.parse_args(arguments)


def experiment(asked: argparse.Namespace) -> Experiment:
    common = {"minutes": asked.minutes, "period": asked.period, "seed": asked.seed}
    asked.limit = max(asked.limit, 60 * asked.minutes + 600)
    cases = [Case({"shape": shape} | common) for shape in asked.shape]

    def judge(rows: list[Row]) -> list[Bound]:
        return [bound for row in rows for bound in _bounds(row, asked.growth)]

    return Experiment("endurance", COLUMNS, cases, judge)


def _bounds(row: Row, growth: float) -> list[Bound]:
    name = row["shape"]
    words = f"{name}: {row['untruthful']} of {row['requests']} requests without one truthful ending {row['faults']}"
    bounds = [Bound(words.strip(), not row["untruthful"])]
    bounds.append(Bound(f"{name}: {row['left_running']:.0f} requests left running", not row["left_running"]))
    for kind in ("live", "active"):
        if f"{kind}_growth" in row:
            ratio = row[f"{kind}_growth"]
            bounds.append(Bound(f"{name}: {kind} of the later half is {ratio:.3f} of the earlier", ratio <= growth))
    return bounds


def main() -> int:
    asked = parse()
    return carry_out(experiment(asked), asked)


if __name__ == "__main__":
    sys.exit(main())
