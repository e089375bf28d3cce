"""What `marathon status` prints, and the text that it shares with `marathon top`.

Owns that text: the verdict, the figures, the table of running generations. Runs in the main thread of a short-lived
process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

import httpx
import msgspec

from server.commands.remote import Remote, check
from server.errors import StartupError
from server.status.feed import Report
from server.status.state import RowState, Status
from server.status.verdict import Verdict, duration

ANSWER_SECONDS = 10.0
WELL = ("ok", "starting")
HEAD = ("id", "endpoint", "state", "age", "prompt", "tokens", "tok/s", "deaths survived")
COLOURS = {"ok": 32, "starting": 36, "warning": 33, "critical": 31}  # of the title, as ANSI numbers them

_decode = msgspec.json.Decoder(Report).decode


def show(remote: Remote, *, as_json: bool) -> int:
    """Print the server's state and return the exit code: 0 for ok and starting, else 1.

    Raises StartupError when no server answers.
    """
    body = fetch(remote)
    report = read(body, remote)
    if as_json:
        print(body.decode())
    else:
        print("\n".join(lines(report, coloured=is_coloured(sys.stdout))))
    return int(report.verdict.level not in WELL)


def fetch(remote: Remote) -> bytes:
    """Return the body of /status. Raises StartupError in one line."""
    try:
        with remote.client(ANSWER_SECONDS) as client:
            response = client.get("/status")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise remote.unreachable(error) from error
    check(response)
    return response.content


def read(body: bytes, remote: Remote) -> Report:
    """Decode a report. Raises StartupError where it is none."""
    try:
        return _decode(body)
    except msgspec.DecodeError as error:
        raise StartupError(f"what answers at {remote.url} is no Marathon of this version: {error}") from None


def is_coloured(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


# ---------------------------------------------------------------- text
def lines(report: Report, *, coloured: bool = False) -> list[str]:
    """Write a report for a terminal: verdict, figures, table."""
    status = report.status
    return [
        title(report.verdict, status, coloured=coloured),
        *(f"  {sentence}" for sentence in report.verdict.sentences),
        "",
        *(f"  {name:18}{words}" for name, words in (*figures(status), ("log", status.log))),
        *table(status),
    ]


def title(verdict: Verdict, status: Status, *, coloured: bool = False) -> str:
    words = verdict.title
    if coloured:
        words = f"\033[1;{COLOURS[verdict.level]}m{words}\033[0m"
    return f"{words}: {status.model}, marathon {status.version}, up for {duration(status.uptime_seconds)}"


def figures(status: Status) -> Iterator[tuple[str, str]]:
    """Name each figure that is known, with its value in words."""
    queue = status.queue
    yield "speed", f"{status.tokens_per_second:.1f} tokens/s"
    if status.first_token_seconds is not None:
        yield "first token", f"{status.first_token_seconds:.2f} s"
    yield "sequences", f"{queue.running} of {queue.batch_limit} running, {queue.waiting} of {queue.queue_limit} waiting"
    if status.memory.active is not None:
        yield "memory", _share(status.memory.active / 1e9, status.memory.limit and status.memory.limit / 1e9, " GB", 2)
    if status.buffers.count is not None:
        yield "live buffers", _share(status.buffers.count, status.buffers.limit, "", 0)
    elif status.buffers.pending is not None:
        yield "pending arrays", f"{status.buffers.pending:,}"
    for name, counts in (("engines replaced", status.engine.restarts), ("answers resumed", status.engine.resumed)):
        if any(counts.values()):
            yield name, ", ".join(f"{number} by {cause}" for cause, number in counts.items() if number)


def _share(part: float, whole: float | None, unit: str, digits: int) -> str:
    if whole is None:
        return f"{part:,.{digits}f}{unit}"
    return f"{part:,.{digits}f} of {whole:,.{digits}f}{unit}"


def table(status: Status) -> Iterator[str]:
    """Yield the running generations as lines of columns; nothing where there are none."""
    if not status.rows:
        return
    yield ""
    yield from columns([HEAD, *map(_cells, status.rows)])
    if status.more_rows:
        yield f"  … and {status.more_rows} more"


def _cells(row: RowState) -> tuple[str, ...]:
    state = row.state
    if row.read is not None and row.to_read:
        state = f"{state} {row.read / row.to_read:.0%}"
    if row.read_seconds_left is not None:
        state = f"{state}, {duration(row.read_seconds_left)} left"
    rate = "-"
    pace = row.tokens_per_second or row.read_per_second
    if pace is not None:
        rate = f"{pace:.1f}"
    return (
        str(row.seq),
        row.endpoint,
        state,
        f"{row.age_seconds:.0f} s",
        f"{row.prompt_tokens:,}",
        f"{row.tokens:,}/{row.max_tokens:,}",
        rate,
        str(row.survived),
    )


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield each row with its cells as wide as the widest of their column."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()
