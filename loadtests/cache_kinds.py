"""What each kind of KV cache costs: `python -m loadtests.cache_kinds [--shape llama] [--prompts 513 2049 4097]`.

Generates greedily with a repetition penalty in a bare loop over mlx-lm's concatenating cache, the same with a
contiguous copy, its step-allocated one, rotating, quantised and batched; one process a prompt and cache, one warm-up
and some recorded runs. Writes peak memory, prefill tok/s, first token and decode tok/s, one CSV row a run. Its exit
code is 0 when the kinds with the same arithmetic give the same ids in float32, and the step-allocated one has no
higher peak than the concatenating one over prompts of 512 tokens and more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median

from loadtests.lab.experiment import BFLOAT16, SHAPES, Bound, Case, Experiment, Row, carry_out, parser_of

KINDS = ("concatenate", "contiguous", "step", "rotating", "quantised", "batched")
EXACT = ("concatenate", "contiguous", "step")
FIGURES = ("run", "peak_mib", "weights_mib", "prefill_tok_s", "first_ms", "decode_tok_s", "ids")
COLUMNS = ("shape", "kind", "prompt", "tokens", "window", *FIGURES)
LONG = 512  # tokens of a prompt from which room for 256 more positions no longer decides the peak
MORE = 1.02  # a peak may be so many times another and still count as no higher


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", nargs="+", default=["llama"], help=SHAPES)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of cache")
    parser.add_argument("--prompts", nargs="+", type=int, default=[513, 2049, 4097], help="tokens")
    parser.add_argument("--tokens", type=int, default=128, help="that are generated")
    parser.add_argument("--runs", type=int, default=3, help="that are recorded, after one that isn't")
    parser.add_argument("--window", type=int, default=1024, help="positions of the rotating cache")
    return parser.parse_args(arguments)


def experiment(asked: argparse.Namespace) -> Experiment:
    common = {"tokens": asked.tokens, "runs": asked.runs, "window": asked.window}
    cases = [
        Case({"shape": shape, "kind": kind, "prompt": prompt} | common, cost=prompt)
        for shape in asked.shape
        for prompt in asked.prompts
        for kind in asked.kinds
    ]
    return Experiment("cache_kinds", COLUMNS, cases, judge)


def judge(rows: list[Row]) -> list[Bound]:
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["shape"], row["prompt"]), []).append(row)
    return [bound for group in groups.values() for bound in _bounds(group)]


def _bounds(rows: list[Row]) -> list[Bound]:
    where = f"{rows[0]['shape']}, prompt of {rows[0]['prompt']}"
    peaks = {kind: median(row["peak_mib"] for row in rows if row["kind"] == kind) for kind in {r["kind"] for r in rows}}
    found = []
    if {"concatenate", "step"} <= set(peaks) and rows[0]["prompt"] >= LONG:
        ratio = peaks["step"] / peaks["concatenate"]
        found.append(Bound(f"{where}: the step-allocated cache's peak is {ratio:.2f} of the other's", ratio <= MORE))
    texts = {row["ids"] for row in rows if row["kind"] in EXACT}
    if texts and rows[0]["shape"] not in BFLOAT16:  # where ties fall either way
        found.append(
            Bound(f"{where}: {len(texts)} different text(s) from the kinds with the same arithmetic", len(texts) == 1)
        )
    return found


def main() -> int:
    asked = parse()
    return carry_out(experiment(asked), asked)


if __name__ == "__main__":
    sys.exit(main())
