"""Writes the table of docs/metrics.md from the families that the server declares.

python scripts/metrics_table.py           # rewrite the table
python scripts/metrics_table.py --check   # exit code 1 if it isn't up to date
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry

from server.metrics import Metrics
from server.telemetry.series import Family

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
BEGIN, END = "<!-- table: scripts/metrics_table.py -->\n", "<!-- end of table -->\n"


def row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    buckets = f" Buckets: {' '.join(f'{bound:g}' for bound in family.buckets)}." if family.buckets else ""
    return f"| `{family.name}` | {family.type} | {labels} | {family.help}{buckets} |\n"


def table(families: Iterable[Family]) -> str:
    rows = sorted(families, key=lambda family: family.name)
    return "| metric | type | labels | meaning |\n|---|---|---|---|\n" + "".join(map(row, rows))


def page(text: str) -> str:
    """The page with its table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE} has lost the marks around its table")
    return before + BEGIN + table(Metrics(CollectorRegistry()).families()) + END + after


def main(arguments: list[str], path: Path = PAGE) -> int:
    text = path.read_text()
    wanted = page(text)
    if "--check" not in arguments:
        path.write_text(wanted)
    elif wanted != text:
        print(f"{path} isn't up to date: run python scripts/metrics_table.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
