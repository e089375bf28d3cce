"""One page of all that the laboratory measured: `python -m loadtests.report [--data FOLDER …] [--out FOLDER]`.

Reads the CSV files of `count`, `residency`, `cache_kinds`, `pinned`, `attention_paths`, `kv_passes` and `endurance` in
the folders and writes `report.html`, which needs no other file, and `report.md`: the answers at a glance, and for each
question a verdict computed from the rows, the published figure beside ours, ratios with their range, plots, and what
was not proven.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests.lab.experiment import RESULTS, read_rows

TITLE = "Five findings about local inference, asked again of MLX, and two questions of our own"
PROGRAMS = ("residency", "count", "cache_kinds", "pinned", "attention_paths", "kv_passes", "endurance")
UNPROVEN = [
    "No figure was taken on Metal. `make bench` on a Mac runs all of it and ends with one file to send.",
    "Finding 1 was published of mlx-lm itself, on Metal; findings 2 to 5 of Candle on Metal and Transformers on MPS. "
    "None of those models and machines was used here: ratios within one machine compare, absolute figures don't.",
    "Weights are random but for the starter model: speeds, bytes and buffers don't depend on them, texts do.",
    "Most cases are one process with two or three recorded runs. That says how far runs of one process are apart; it "
    "does not say how far days are apart.",
]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", type=Path, default=[RESULTS], help="folders with CSV files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of report.html and report.md")
    return parser.parse_args(arguments)


def read(folders: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """Rows by program, of all folders."""
    return {name: [row for folder in folders for row in read_rows(folder / f"{name}.csv")] for name in PROGRAMS}


def lead(sheets: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What the page is about, and where its figures are from."""
    rows = [row for own in sheets.values() for row in own if row["device"]]
    places = sorted({f"{row['device']} ({row['system']})" for row in rows})
    versions = sorted({f"mlx {row['mlx']} with mlx-lm {row['mlx_lm']}" for row in rows})
    return [
        "Findings 1 to 5 were published by others, the first of mlx-lm itself and the rest of other engines. Here "
        "they are measured on MLX: with mlx-lm's own loop and caches, and in Marathon, a server that makes every "
        "cache array concrete with the step that touched it. Questions A and B are ours. Verdicts are computed from "
        "the rows.",
        f"Measured on: {'; '.join(places)}. Nothing was measured on Metal. Versions: {'; '.join(versions)}. Each "
        "table says which device, commit and day a row is from. The glossary and the models are at the end.",
    ]


def compose(sheets: dict[str, list[dict[str, Any]]]) -> Any:
    """The whole report. Needs matplotlib and MLX."""
    from loadtests.lab import catalogue, findings, page
    from loadtests.lab.answers.together import together

    found = findings.every(sheets)
    whole = {name: findings.measured(rows) for name, rows in sheets.items()}
    close = page.Chapter("What was not proven", (), UNPROVEN)
    chapters = [*together(whole), close, *catalogue.chapters(whole)]
    return page.Document(TITLE, lead(sheets), findings.summary(found), found, chapters)


def main() -> int:
    asked = parse()
    sheets = read(asked.data)
    if not any(sheets.values()):
        print(f"no CSV file of the laboratory in {', '.join(map(str, asked.data))}", file=sys.stderr)
        return 2
    try:
        from loadtests.lab import page

        composed = compose(sheets)
    except ImportError as error:
        print(f"the report needs matplotlib and MLX, which `make install` brings: {error}", file=sys.stderr)
        return 2
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "report.html").write_text(page.html(composed), encoding="utf-8")
    (asked.out / "report.md").write_text(page.markdown(composed), encoding="utf-8")
    print(f"{asked.out / 'report.html'}\n{asked.out / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
