"""The report as one HTML page that needs no other file, and as Markdown. Pure text.

Texts may have `[label](address)` and `code` between backticks, as in Markdown; nothing else is markup.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

STYLE = """
:root { color-scheme: light dark; --line: #8886; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; } h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
table { border-collapse: collapse; font-size: 0.8rem; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.6rem; text-align: right; vertical-align: top; }
th { vertical-align: bottom; min-width: 3.5rem; } td { font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, table.words th, table.words td { text-align: left; }
table.words { display: table; } table.words td:nth-child(4) { width: 38%; } table.words td:nth-child(5) { width: 24%; }
.verdict { border-left: 4px solid currentColor; padding: 0.1rem 0 0.1rem 0.9rem; }
figure { margin: 1.5rem 0; } figure svg { width: 100%; height: auto; } figcaption { font-size: 0.85rem; }
@media print {
  @page { size: A4 landscape; margin: 12mm; }
  body { max-width: none; margin: 0; font-size: 10pt; } table { font-size: 7.5pt; display: table; }
  th, td { padding: 0.15rem 0.3rem; min-width: 0; } figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
  figure svg { max-width: 20cm; }
}
"""
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
PLOTS = "The plots are in [report.html](report.html), the same report as one page."
CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text, the first row being the head; `words`: of sentences, and so aligned to the left."""

    caption: str
    rows: Sequence[Sequence[str]]
    words: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """The plain answer: a word for the table at the top, a sentence that says it, and one that says how sure."""

    word: str
    said: str
    sure: str


@dataclass(slots=True)
class Finding:
    """One question and its answer."""

    title: str
    asked: str
    source: str
    verdict: Judgement
    answer: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[tuple[str, str]] = field(default_factory=list)  # caption, SVG
    unproven: str = ""
    short: str = ""  # of what was published, for the table at the top
    means: str = ""  # for a user of MLX, with the figures; where it is empty, the verdict says it


@dataclass(frozen=True, slots=True)
class Chapter:
    """A part of the report that is no finding: paragraphs, a list, tables."""

    title: str
    paragraphs: Sequence[str] = ()
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """The whole page: what it is about, the answers at a glance, each answer, and what helps to read it."""

    title: str
    lead: Sequence[str]
    summary: Table
    findings: Sequence[Finding]
    chapters: Sequence[Chapter]


# ---------------------------------------------------------------- HTML
def html(report: Document) -> str:
    body = [f"<h1>{escape(report.title)}</h1>", *_paragraphs(report.lead), *_html_table(report.summary)]
    for finding in report.findings:
        body += _html_of(finding)
    for chapter in report.chapters:
        body += _html_chapter(chapter)
    head = f'<meta charset="utf-8"><title>{escape(report.title)}</title><style>{STYLE}</style>'
    head += '<meta name="viewport" content="width=device-width, initial-scale=1">'
    page = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{page}\n</body></html>\n'


def _inline(text: str) -> str:
    linked = LINK.sub(r'<a href="\2">\1</a>', escape(text, quote=False))
    return CODE.sub(r"<code>\1</code>", linked)


def _paragraphs(texts: Sequence[str]) -> list[str]:
    return [f"<p>{_inline(text)}</p>" for text in texts]


def _html_of(finding: Finding) -> list[str]:
    verdict = finding.verdict
    lines = [f"<h2>{escape(finding.title)}</h2>"]
    said = f"<strong>{escape(verdict.word)}.</strong> {_inline(verdict.said)} {_inline(verdict.sure)}"
    lines.append(f'<p class="verdict">{said}</p>')
    if finding.means:
        lines.append(f"<p><strong>What it means for MLX.</strong> {_inline(finding.means)}</p>")
    for word, text in (("Asked", finding.asked), ("Published", finding.source)):
        lines.append(f"<p><strong>{word}.</strong> {_inline(text)}</p>")
    lines += [f"<p><strong>On MLX.</strong> {_inline(finding.answer[0])}</p>", *_paragraphs(finding.answer[1:])]
    lines += [f"<figure>{svg}<figcaption>{_inline(caption)}</figcaption></figure>" for caption, svg in finding.plots]
    lines += [line for table in finding.tables for line in _html_table(table)]
    return [*lines, f"<p><strong>Not proven.</strong> {_inline(finding.unproven)}</p>"]


def _html_chapter(chapter: Chapter) -> list[str]:
    lines = [f"<h2>{escape(chapter.title)}</h2>", *_paragraphs(chapter.paragraphs)]
    if chapter.lines:
        lines += ["<ul>", *(f"<li>{_inline(line)}</li>" for line in chapter.lines), "</ul>"]
    return lines + [line for table in chapter.tables for line in _html_table(table)]


def _html_table(table: Table) -> list[str]:
    opening = '<table class="words">' if table.words else "<table>"
    lines = [f"<h3>{_inline(table.caption)}</h3>", opening]
    for number, row in enumerate(table.rows):
        kind = "td" if number else "th"
        lines.append("<tr>" + "".join(f"<{kind}>{_inline(cell)}</{kind}>" for cell in row) + "</tr>")
    return [*lines, "</table>"]


# ---------------------------------------------------------------- Markdown
def markdown(report: Document) -> str:
    lead = "\n\n".join([*report.lead, PLOTS])
    lines = [f"# {report.title}", "", lead, "", *_markdown_table(report.summary)]
    for finding in report.findings:
        lines += _markdown_of(finding)
    for chapter in report.chapters:
        lines += _markdown_chapter(chapter)
    return "\n".join(lines).rstrip() + "\n"


def _markdown_of(finding: Finding) -> list[str]:
    verdict = finding.verdict
    lines = [f"## {finding.title}", "", f"> **{verdict.word}.** {verdict.said} {verdict.sure}", ""]
    if finding.means:
        lines += [f"**What it means for MLX.** {finding.means}", ""]
    lines += [f"**Asked.** {finding.asked}", "", f"**Published.** {finding.source}", ""]
    lines += ["**On MLX.** " + "\n\n".join(finding.answer), ""]
    lines += [line for table in finding.tables for line in _markdown_table(table)]
    return [*lines, f"**Not proven.** {finding.unproven}", ""]


def _markdown_chapter(chapter: Chapter) -> list[str]:
    lines = [f"## {chapter.title}", ""]
    lines += [line for text in chapter.paragraphs for line in (text, "")]
    if chapter.lines:
        lines += [*(f"- {line}" for line in chapter.lines), ""]
    return lines + [line for table in chapter.tables for line in _markdown_table(table)]


def _markdown_table(table: Table) -> list[str]:
    head, *rest = table.rows
    rows = [[cell.replace("|", "\\|") for cell in cells] for cells in (head, ["---"] * len(head), *rest)]
    return [f"**{table.caption}**", "", *("| " + " | ".join(cells) + " |" for cells in rows), ""]
