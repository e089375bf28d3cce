"""Findings as one HTML page that needs no other file, and as Markdown. Pure text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

STYLE = """
:root { color-scheme: light dark; --line: #8886; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; } h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
table { border-collapse: collapse; font-size: 0.85rem; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; } figure svg { width: 100%; height: auto; } figcaption { font-size: 0.85rem; }
@media print { body { max-width: none; margin: 0; font-size: 11pt; } figure, table { break-inside: avoid; } }
"""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text, the first row being the head."""

    caption: str
    rows: Sequence[Sequence[str]]


@dataclass(slots=True)
class Finding:
    """One question and its answer."""

    title: str
    asked: str
    source: str
    answer: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[tuple[str, str]] = field(default_factory=list)  # caption, SVG
    unproven: str = ""


def html(title: str, lead: Sequence[str], findings: Sequence[Finding], close: Sequence[str]) -> str:
    body = [f"<h1>{escape(title)}</h1>", *_paragraphs(lead)]
    for finding in findings:
        body += _html_of(finding)
    body += ["<h2>What was not proven</h2>", "<ul>", *(f"<li>{escape(line)}</li>" for line in close), "</ul>"]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    page = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{page}\n</body></html>\n'


def _paragraphs(texts: Sequence[str]) -> list[str]:
    return [f"<p>{escape(text)}</p>" for text in texts]


def _html_of(finding: Finding) -> list[str]:
    lines = [f"<h2>{escape(finding.title)}</h2>"]
    for word, text in (("Asked", finding.asked), ("Published", finding.source)):
        lines.append(f"<p><strong>{word}.</strong> {escape(text)}</p>")
    lines += [f"<p><strong>On MLX.</strong> {escape(finding.answer[0])}</p>", *_paragraphs(finding.answer[1:])]
    lines += [f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" for caption, svg in finding.plots]
    lines += [line for table in finding.tables for line in _html_table(table)]
    return [*lines, f"<p><strong>Not proven.</strong> {escape(finding.unproven)}</p>"]


def _html_table(table: Table) -> list[str]:
    lines = [f"<h3>{escape(table.caption)}</h3>", "<table>"]
    for number, row in enumerate(table.rows):
        kind = "td" if number else "th"
        lines.append("<tr>" + "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in row) + "</tr>")
    return [*lines, "</table>"]


def markdown(title: str, lead: Sequence[str], findings: Sequence[Finding], close: Sequence[str]) -> str:
    lines = [f"# {title}", "", "\n\n".join(lead), ""]
    for finding in findings:
        lines += [f"## {finding.title}", "", f"**Asked.** {finding.asked}", "", f"**Published.** {finding.source}", ""]
        lines += ["**On MLX.** " + "\n\n".join(finding.answer), ""]
        for table in finding.tables:
            lines += [table.caption + ":", "", *_markdown_table(table), ""]
        lines += [f"**Not proven.** {finding.unproven}", ""]
    return "\n".join([*lines, "## What was not proven", "", *(f"- {line}" for line in close)]) + "\n"


def _markdown_table(table: Table) -> list[str]:
    head, *rest = table.rows
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rest)]
