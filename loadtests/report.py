"""One page of all that the laboratory measured: `python -m loadtests.report [--data FOLDER …] [--out FOLDER]`.

Reads the CSV files of `count`, `residency`, `cache_kinds`, `pinned`, `attention_paths`, `kv_passes` and `endurance` in
the folders and writes `report.html`, which needs no other file, and `report.md`: what was asked, the published figure
beside ours, ratios, plots, and what was not proven.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests.lab.experiment import RESULTS, read_rows

TITLE = "Five findings about local inference, asked again of MLX"
PROGRAMS = ("residency", "count", "cache_kinds", "pinned", "attention_paths", "kv_passes", "endurance")
UNPROVEN = [
    "No figure was taken on Metal. `make bench` on a Mac runs all of it and ends with one file to send.",
    "The published figures come from other engines and machines. Ratios within one machine compare, absolute figures "
    "don't.",
    "Weights are random but for the starter model: speeds, bytes and buffers don't depend on them, texts do.",
    "Where several rows of one measurement are there, the tables have their medians; a CSV row has the drift of the "
    "machine while it was taken, and figures with much drift deserve a second run.",
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
    commits = sorted({row["commit"] for row in rows})
    return [
        "Measurements that others published of other engines, made again on MLX: with mlx-lm's own loop and caches, "
        "and in Marathon, a server that makes every cache array concrete with the step that touched it.",
        f"Measured on: {'; '.join(places)}. Versions: {'; '.join(versions)}. Commits: {', '.join(map(str, commits))}.",
    ]


def main() -> int:
    asked = parse()
    sheets = read(asked.data)
    if not any(sheets.values()):
        print(f"no CSV file of the laboratory in {', '.join(map(str, asked.data))}", file=sys.stderr)
        return 2
    try:
        from loadtests.lab import findings, page
    except ImportError as error:
        print(f"the report needs matplotlib, which `make install` brings: {error}", file=sys.stderr)
        return 2
    found = findings.every(sheets)
    asked.out.mkdir(parents=True, exist_ok=True)
    text = lead(sheets)
    (asked.out / "report.html").write_text(page.html(TITLE, text, found, UNPROVEN), encoding="utf-8")
    (asked.out / "report.md").write_text(page.markdown(TITLE, text, found, UNPROVEN), encoding="utf-8")
    print(f"{asked.out / 'report.html'}\n{asked.out / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
