"""The five findings and our two questions, put together from the programs' rows, and the answers at a glance.

Pure: rows in, findings out. Each section is a module of `loadtests.lab.answers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from loadtests.lab.answers.fused import fused
from loadtests.lab.answers.kinds import kinds
from loadtests.lab.answers.leak import leak
from loadtests.lab.answers.long import long
from loadtests.lab.answers.mixed import mixed
from loadtests.lab.answers.passes import passes
from loadtests.lab.answers.pins import pins
from loadtests.lab.page import Finding, Table
from loadtests.lab.rows import Row, Rows

SECTIONS: dict[str, Callable[[Rows], Finding]] = {  # by program, in the order of the source; then our questions
    "residency": leak,
    "cache_kinds": kinds,
    "pinned": pins,
    "attention_paths": fused,
    "kv_passes": passes,
    "count": long,
    "endurance": mixed,
}
CASE = ("family", "arm", "pattern", "shape", "kind", "path", "way", "moment", "prompt", "rows")  # names a failed row


def every(sheets: Mapping[str, Rows]) -> list[Finding]:
    """All findings that there are rows of."""
    found = []
    for name, make in SECTIONS.items():
        rows = sheets.get(name, [])
        whole = measured(rows)
        if whole:
            finding = make(whole)
            finding.answer += _failed([row for row in rows if row not in whole])
            found.append(finding)
    return found


def measured(rows: Rows) -> list[Row]:
    """Those that have figures: no failed case, nor one that says why it can't be run."""
    return [row for row in rows if not row["error"] and not row.get("note")]


def _failed(rows: Rows) -> list[str]:
    words = [f"{_case(row)} ({row['error'] or row['note']})" for row in rows]
    return [f"Failed, and so not in the tables: {'; '.join(dict.fromkeys(words))}."] if words else []


def _case(row: Row) -> str:
    parts = [str(row[name]).removesuffix(".0") for name in CASE if row.get(name, "") != ""]
    return f"{', '.join([*parts, *filter(None, (row['device'],))])}, commit {row['commit']}"


def summary(findings: Sequence[Finding]) -> Table:
    """The answers at a glance."""
    head = ["question", "published", "verdict", "what it means for MLX", "how sure"]
    body = [
        [
            finding.title,
            finding.short,
            finding.verdict.word,
            finding.means or finding.verdict.said,
            finding.verdict.sure,
        ]
        for finding in findings
    ]
    return Table("The answers at a glance", [head, *body], words=True)
