"""Bytes that caches own against bytes that they hold: `python -m loadtests.pinned [--shape llama qwen3_5 …]`.

A view of an array keeps the whole buffer behind it, and a pool may hand out a larger buffer than was asked for. Takes
rows of 63 to 300 tokens through the engine's executor and weighs their caches with `mx.get_array_buffer_size` after
prefill, decode, join and leave, those that a row takes along, and kept prefixes; beside them what mlx-lm's
BatchGenerator hands over at a row's end. In a batch it judges the arrays that hold positions: recurrent states are
made anew by each step, and `with_states` has the ratio with them. Writes one CSV row a moment; its exit code is 0
when Marathon nowhere pins more than 1.1 times what is owned.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from loadtests.lab.experiment import Bound, Case, Experiment, Row, carry_out, parser_of

MOST = 1.1
SHAPES = ["llama", "gemma3_text", "qwen3_5", "mamba2", "nemotron_h", "falcon_h1", "smollm3", "rwkv7", "deepseek_v32"]
COLUMNS = ("shape", "moment", "arrays", "owned", "pinned", "ratio", "with_states")
THEIRS = "mlx-lm, taken out"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="families, sizes, or folders")
    return parser.parse_args(arguments)


def experiment(asked: argparse.Namespace) -> Experiment:
    return Experiment("pinned", COLUMNS, [Case({"shape": shape}) for shape in asked.shape], judge)


def judge(rows: list[Row]) -> list[Bound]:
    return [
        Bound(f"{row['shape']}, {row['moment']}: {row['ratio']:.3f} × owned", row["ratio"] <= MOST)
        for row in rows
        if row["moment"] != THEIRS
    ]


def main() -> int:
    asked = parse()
    return carry_out(experiment(asked), asked)


if __name__ == "__main__":
    sys.exit(main())
