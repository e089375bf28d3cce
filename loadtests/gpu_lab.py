"""The laboratory on an NVIDIA GPU: `python -m loadtests.gpu_lab --out FOLDER [--minutes 8]`.

Runs the programs that need no HTTP on a llama of 1.2 B and a hybrid of 1.1 B with random weights in bfloat16, drawn on
the spot: the curve to 20,000 tokens at 1, 8 and 32 rows, cache kinds, attention paths, passes over the cache. Passes
are also measured on a llama of four layers with 128 heads, each with keys and values of its own: they are most of its
steps. The most important come first; a part that fails, or finds no time, is named at the end and doesn't stop the
others. Writes the programs' own CSV files. `--quick` takes tiny models, to see that it works; `--only` some of the
programs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from loadtests.lab.experiment import parser_of
from loadtests.lab.suite import Part, announce, run

LLAMA = "llama-1b"
MHA = "mha-1b"
HYBRID = "hybrid-1b"
PROGRAMS = ("count", "cache_kinds", "attention_paths", "kv_passes")


def parts() -> list[Part]:
    return [
        _lines(MHA, 70, "step", "concatenate", "contiguous", "rotating", "batched", "marathon", "marathon beside"),
        _lines(LLAMA, 50, "step", "concatenate", "quantised", "marathon", "rotating"),
        Part("attention_paths", ("--shape", LLAMA, "--prompts", "2049", "--runs", "2"), 40),
        Part("cache_kinds", ("--shape", LLAMA, "--prompts", "513", "4097", "--runs", "2"), 70),
        Part("count", ("--shape", LLAMA, "--direct", "--rows", "1"), 110),
        Part("count", ("--shape", LLAMA, "--direct", "--rows", "8", "32", "--real", "100"), 45),
        Part("count", ("--shape", HYBRID, "--direct", "--rows", "1", "8", "32", "--real", "100"), 60),
        _lines(HYBRID, 30, "step", "marathon"),
    ]


def _lines(shape: str, seconds: float, *kinds: str) -> Part:
    """In fewer rounds than usual, for the time that a GPU is lent."""
    return Part("kv_passes", ("--shape", shape, "--kinds", *kinds, "--rounds", "3"), seconds)


def quick_parts() -> list[Part]:
    """The same programs over a model of the zoo, in a minute."""
    contexts = ("--contexts", "64", "256", "--warm", "1", "--steps", "3", "--copy-mib", "1")
    return [
        Part("kv_passes", ("--shape", "llama", "--kinds", "step", "marathon", *contexts, "--r2", "-9"), 10),
        Part("attention_paths", ("--shape", "llama", "--prompts", "33", "--compared", "80", "--tokens", "4"), 10),
        Part("cache_kinds", ("--shape", "llama", "--prompts", "33", "--kinds", "step", "--tokens", "4"), 10),
        Part("count", ("--shape", "qwen3_5", "--direct", "--tokens", "2000", "--rows", "2", "--real", "10"), 10),
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=PROGRAMS, help="programs that are run")
    parser.add_argument("--quick", action="store_true", help="tiny models: shows that it works")
    return parser.parse_args(arguments)


def main() -> int:
    asked = parse()
    wanted = quick_parts() if asked.quick else parts()
    chosen = [part for part in wanted if part.program in asked.only]
    announce(chosen)
    return run(chosen, asked.out, 60 * asked.minutes, asked.commit)


if __name__ == "__main__":
    sys.exit(main())
