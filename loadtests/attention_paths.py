"""Fused attention against attention in steps: `python -m loadtests.attention_paths [--shape llama starter]`.

Runs the same model with `mx.fast.scaled_dot_product_attention` and with matrix product, mask, softmax, matrix product
in its place, over mlx-lm's step-allocated cache: peak memory, prefill tok/s, first token and decode tok/s as
`loadtests.cache_kinds` measures them. Then compares the logits of both ways at the end of prompts: the top token may
differ only where the margin between the steps' two best is smaller than the difference of both ways. Writes one CSV
row a run; its exit code is 0 when that rule holds everywhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from loadtests.lab.experiment import Bound, Case, Experiment, Row, carry_out, parser_of

FIGURES = ("run", "peak_mib", "weights_mib", "prefill_tok_s", "first_ms", "decode_tok_s")
APART = ("positions", "top_differs", "against_the_rule", "largest_difference", "smallest_margin")
COLUMNS = ("shape", "path", "prompt", "tokens", *FIGURES, "ids", *APART)
COMPARED = [512, 2048, 4096]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", nargs="+", default=["llama"], help="family, small, llama-1b, starter, or a folder")
    parser.add_argument("--prompts", nargs="*", type=int, default=[513, 2049, 4097], help="tokens, where it is timed")
    parser.add_argument("--compared", nargs="*", type=int, default=COMPARED, help="tokens, where logits are compared")
    parser.add_argument("--tokens", type=int, default=128, help="that are generated")
    parser.add_argument("--runs", type=int, default=3, help="that are recorded, after one that isn't")
    return parser.parse_args(arguments)


def experiment(asked: argparse.Namespace) -> Experiment:
    common = {"tokens": asked.tokens, "runs": asked.runs, "window": 0}
    cases = []
    for shape in asked.shape:
        for prompt in asked.prompts:
            cases += [
                Case({"shape": shape, "path": path, "prompt": prompt} | common, prompt) for path in ("steps", "fused")
            ]
        cases += [Case({"shape": shape, "prompt": prompt}, prompt) for prompt in asked.compared]
    return Experiment("attention_paths", COLUMNS, cases, judge)


def judge(rows: list[Row]) -> list[Bound]:
    compared = [row for row in rows if "positions" in row]
    return [
        Bound(
            f"{row['shape']}, {row['prompt']} tokens: the top token differs at {row['top_differs']} of "
            f"{row['positions']} positions, {row['against_the_rule']} of them no near tie",
            not row["against_the_rule"],
        )
        for row in compared
    ]


def main() -> int:
    asked = parse()
    return carry_out(experiment(asked), asked)


if __name__ == "__main__":
    sys.exit(main())
