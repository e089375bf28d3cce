"""A verdict on a server's state: whether it is healthy, and if not, what is wrong and what happens next.

Owns the rules and their words. Pure; the same for the live page, `marathon status` and `marathon top`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import msgspec

from server.model_files.progress import amount
from server.status.state import RowState, Status

Level = Literal["ok", "starting", "warning", "critical"]
MANY_DEATHS = 3  # in the window that `deaths` counts
SOON_SECONDS = 3600.0  # of time to exhaustion
LONG_PROMPT = 1000  # tokens
_ORDER = {"ok": 0, "starting": 1, "warning": 2, "critical": 3}


class Verdict(msgspec.Struct, frozen=True):
    """A judgement. `title`: a word or two; `sentences`: the reasons, the gravest first."""

    level: Level
    title: str
    sentences: list[str]


class Deaths(NamedTuple):
    """Engines that ended unplanned in the last ten minutes, and how many seconds ago the last of them did."""

    number: int = 0
    ago: float = 0.0


NONE = Deaths()


def judge(status: Status, deaths: Deaths = NONE) -> Verdict:
    """Return the verdict on a state, with a sentence for each thing that is wrong."""
    found = [finding for rule in _RULES for finding in rule(status, deaths)]
    found.sort(key=lambda finding: -_ORDER[finding[0]])
    level, title, _ = found[0]
    return Verdict(level, title, [sentence for _, _, sentence in found])


Finding = tuple[Level, str, str]


def _availability(status: Status, deaths: Deaths) -> Iterator[Finding]:
    engine = status.engine
    if status.draining:
        yield "warning", "Shutting down", "The server is shutting down: it finishes what it has and takes nothing new."
    elif engine.hopeless:
        reason = engine.down_reason or "see the log"
        yield "critical", "No engine", f"No engine can be started: {reason}. More are tried; new requests are refused."
    elif not engine.up and engine.epoch <= 1:
        yield "starting", "Loading", f"The model is being loaded: {_stage(status)}."
    elif not engine.up:
        sentence = f"The engine ended and a new one is loading ({_stage(status)}); {_kept(status)}."
        yield "warning", "Recovering", sentence


def _stage(status: Status) -> str:
    """Return what an engine that starts is busy with, and how far it is."""
    engine = status.engine
    stage = engine.stage or "the engine process starts"
    if engine.weights_read is None or not engine.weights_total:
        return stage
    share = engine.weights_read / engine.weights_total
    return f"{stage}, {amount(engine.weights_read, engine.weights_total)}, {share:.0%}"


def _kept(status: Status) -> str:
    count = len(status.rows) + status.more_rows
    if count == 0:
        return "no answer is under way"
    return (
        f"{_count(count, 'answer')} wait and will go on where they were"
        if count > 1
        else ("1 answer waits and will go on where it was")
    )


def _deaths(status: Status, deaths: Deaths) -> Iterator[Finding]:
    if deaths.number >= MANY_DEATHS:
        sentence = (
            f"The engine keeps dying: {deaths.number} times in the last ten minutes. Answers go on in a new engine "
            f"each time. The log says how each one ended: {status.log}."
        )
        yield "critical", "The engine keeps dying", sentence
    elif deaths.number:
        sentence = f"The engine died {_times(deaths.number)} in the last ten minutes"
        if survived := sum(status.engine.resumed.values()):
            sentence += f"; {_count(survived, 'answer')} went on"
        title = f"Healthy; recovered from a death {ago(deaths.ago)}"
        yield "ok", title, f"{sentence}. Nothing has to be done. The log says how it ended: {status.log}."


def _buffers(status: Status, deaths: Deaths) -> Iterator[Finding]:
    buffers = status.buffers
    seconds = status.seconds_to_exhaustion.get("buffers")
    if seconds is not None:
        pace = f"{buffers.per_token:.3g} a token" if buffers.per_token else "steadily"
        sentence = (
            f"Live buffers are leaking: they rise by {pace} and reach the limit in {duration(seconds)}. "
            "The engine is replaced before that, and answers go on."
        )
        yield ("critical" if seconds < SOON_SECONDS else "warning"), "A leak", sentence
    elif buffers.count is not None and buffers.limit:
        share = buffers.count / buffers.limit
        yield "ok", "Healthy", f"Live buffers are flat: {buffers.count:,} of {buffers.limit:,} ({share:.1%})."
    elif buffers.pending:
        sentence = f"{_count(buffers.pending, 'cache array')} pending: the cache guard evaluates them."
        yield "warning", "Pending arrays", sentence


def _memory(status: Status, deaths: Deaths) -> Iterator[Finding]:
    seconds = status.seconds_to_exhaustion.get("bytes")
    if seconds is not None and seconds < SOON_SECONDS:
        yield (
            "critical",
            "Memory runs out",
            f"Memory grows beyond what is known to be held; {duration(seconds)} are left.",
        )
    match status.pressure:
        case "reclaim":
            yield "ok", "Healthy", "Memory is getting short: kept prompts are given up to make room."
        case "hold":
            yield "warning", "Short of memory", "No new work starts until memory or buffers are free again."
        case "rotate":
            yield "warning", "About to rotate", "The engine is about to be replaced, and answers go on in the next one."


def _work(status: Status, deaths: Deaths) -> Iterator[Finding]:
    if not status.engine.up:
        return
    for row in status.rows:
        if row.state == "reading" and row.to_read and row.to_read >= LONG_PROMPT:
            yield "ok", "Healthy", f"A long prompt is being read: {_reading(row)}."
    queue = status.queue
    if queue.waiting:
        yield "ok", "Busy", f"{_count(queue.waiting, 'sequence')} waiting for room beside the {queue.running} running."
    elif queue.running:
        rate = f"{status.tokens_per_second:.3g} tokens a second"
        yield "ok", "Healthy", f"{_count(queue.running, 'sequence')} running, {rate} in all."
    else:
        yield "ok", "Healthy", "Ready; nothing is running."


def _reading(row: RowState) -> str:
    """Return how far a prompt is read, at what pace, and when it will be read."""
    read = row.read or 0
    total = row.to_read or 1
    words = f"{read:,} of {total:,} tokens ({read / total:.0%})"
    if row.read_per_second is None or row.read_seconds_left is None:
        return f"{words}; its pace isn't known yet"
    return f"{words}, {row.read_per_second:,.3g} a second, about {duration(row.read_seconds_left)} left"


def _journal(status: Status, deaths: Deaths) -> Iterator[Finding]:
    if status.journal is not None and status.journal.condition == "unavailable":
        sentence = f"Answers can't be stored: {status.journal.reason}. Requests that ask for it are refused."
        yield "warning", "Nothing is stored", sentence


Rule = Callable[[Status, Deaths], Iterator[Finding]]
_RULES: tuple[Rule, ...] = (_availability, _deaths, _buffers, _memory, _journal, _work)


def duration(seconds: float) -> str:
    """Return a time in words, such as `4 minutes`."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}s"
    return f"{seconds:.0f} seconds"


def ago(seconds: float) -> str:
    """Return how long ago something was, in whole minutes, since screen readers read each change out."""
    if seconds < 60:
        return "less than a minute ago"
    if seconds < 120:
        return "a minute ago"
    return f"{duration(seconds)} ago"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
