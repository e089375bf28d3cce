"""The laboratory as a whole: `python -m loadtests.lab soak` and `python -m loadtests.lab bench [--model FOLDER]`.

`soak` counts to 20,000 through a server with a tiny model. `bench` runs every program but the long one over a tiny
model, or with `--model` all of them over that one. Both say first what they will run and about how long that takes,
go on after a part that fails, and end with the report and one zip file of it and its CSV files. The exit code is 0
when every bound holds.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from loadtests.lab.experiment import parser_of
from loadtests.lab.suite import Part, announce, report, run

TINY = "llama"
AMPLE = 3.0  # times the estimate after which a suite is given up


def soak() -> list[Part]:
    return [Part("count", ("--shape", "smollm3"), 400)]


def bench() -> list[Part]:
    """Every kind of measurement, over tiny models."""
    few = ("llama", "qwen3_5", "smollm3", "nemotron_h")
    return [
        Part("residency", ("--families", *few), 150),
        Part("pinned", ("--shape", *few), 40),
        Part("cache_kinds", ("--shape", TINY, "--prompts", "513", "2049", "--runs", "2"), 120),
        Part("attention_paths", ("--shape", TINY, "--prompts", "513", "2049", "--runs", "2"), 120),
        Part("kv_passes", ("--shape", TINY), 450),
        Part("count", ("--shape", "qwen3_5", "--tokens", "5000"), 90),
    ]


def bench_of(model: str) -> list[Part]:
    """All of it over one real model; the bare patterns need none. The times are those of a model of 3 B on a laptop."""
    return [
        Part("residency", ("--families",), 30),
        Part("pinned", ("--shape", model), 60),
        Part("cache_kinds", ("--shape", model), 600),
        Part("attention_paths", ("--shape", model), 300),
        Part("kv_passes", ("--shape", model), 600),
        Part("count", ("--shape", model), 900),
        Part("endurance", ("--shape", model, "--minutes", "20"), 1230),
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("suite", choices=("soak", "bench"), help="what is run")
    parser.add_argument("--model", help="a folder, for bench: everything over this model")
    return parser.parse_args(arguments)


def parts_of(asked: argparse.Namespace) -> list[Part]:
    if asked.suite == "soak":
        return soak()
    return bench_of(asked.model) if asked.model else bench()


def packed(folder: Path) -> Path:
    """One file of the report and its rows."""
    path = folder / "laboratory.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted([*folder.glob("*.csv"), *folder.glob("report.*")]):
            archive.write(file, file.name)
    return path


def main() -> int:
    asked = parse()
    parts = parts_of(asked)
    announce(parts)
    status = run(parts, asked.out, AMPLE * sum(part.seconds for part in parts), asked.commit)
    if report(asked.out):
        print(f"to send: {packed(asked.out)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
