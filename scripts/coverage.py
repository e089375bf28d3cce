"""Prints what share of the server's lines and branches the tests take, room by room.

    python scripts/coverage.py REPORT [--floor PERCENT] [FILE OR FOLDER …]

REPORT is the JSON that slipcover writes, as `make test` lets it. With files or folders named, prints which lines and
branches of theirs no test takes. Exits with 1 where the whole is below the floor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Files = dict[str, dict[str, Any]]


@dataclass(slots=True)
class Tally:
    """How many lines and branches there are, and how many of them no test took."""

    lines: int = 0
    lines_missed: int = 0
    branches: int = 0
    branches_missed: int = 0

    def add(self, summary: dict[str, int]) -> None:
        self.lines += summary["covered_lines"] + summary["missing_lines"]
        self.lines_missed += summary["missing_lines"]
        self.branches += summary["covered_branches"] + summary["missing_branches"]
        self.branches_missed += summary["missing_branches"]

    @property
    def percent(self) -> float:
        """Of lines and branches together; 100 where there are none."""
        whole = self.lines + self.branches
        if not whole:
            return 100.0
        return 100.0 * (1 - (self.lines_missed + self.branches_missed) / whole)

    def row(self, name: str) -> str:
        counts = f"{self.lines:7,} {self.lines_missed:7,} {self.branches:9,} {self.branches_missed:7,}"
        return f"{name:24} {counts} {self.percent:8.1f} %"


def room(path: str) -> str:
    """The folder below server/ that a file is in; `server` for the files at the top."""
    parts = Path(path).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def table(files: Files) -> Iterator[str]:
    """A header, a row for each room, and one for all."""
    rooms: defaultdict[str, Tally] = defaultdict(Tally)
    for path, found in files.items():
        rooms[room(path)].add(found["summary"])
    yield f"{'':24} {'lines':>7} {'missed':>7} {'branches':>9} {'missed':>7} {'taken':>10}"
    yield from (tally.row(name) for name, tally in sorted(rooms.items()))
    yield total(files).row("all")


def total(files: Files) -> Tally:
    whole = Tally()
    for found in files.values():
        whole.add(found["summary"])
    return whole


def missing(files: Files, places: Iterable[str]) -> Iterator[str]:
    """A line for each file in these places of which something was not taken."""
    wanted = [Path(place) for place in places]
    for path, found in sorted(files.items()):
        if not any(place in (Path(path), *Path(path).parents) for place in wanted):
            continue
        missed = [str(line) for line in found["missing_lines"]]
        missed += [f"{start}->{end}" for start, end in found["missing_branches"]]
        if missed:
            yield f"{path}: {', '.join(missed)}"


def main(arguments: list[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("report", type=Path, help="what slipcover wrote with --json")
    parser.add_argument("--floor", type=float, default=0.0, metavar="PERCENT", help="exit with 1 below it")
    parser.add_argument("places", nargs="*", help="files or folders whose lines without a test are printed")
    asked = parser.parse_args(arguments)
    files: Files = json.loads(asked.report.read_text(encoding="utf-8"))["files"]
    print("\n".join(missing(files, asked.places) if asked.places else table(files)))
    percent = total(files).percent
    if percent < asked.floor:
        print(f"{percent:.1f} % is taken; the floor is {asked.floor:g} %", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
