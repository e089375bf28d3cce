"""Question B: mixed traffic. Pure: rows of `loadtests.endurance` in, the finding out."""

from __future__ import annotations

from loadtests.lab import published
from loadtests.lab.page import Finding, Judgement, Table
from loadtests.lab.rows import Row, Rows, cell, devices, listed, taken

LONG_MINUTES = 30.0  # a shorter run says nothing of an hour
GROWTH = 1.05  # the second half's highest reading ÷ the first half's
SLOPES = {"live_slope": "buffers", "bytes_slope": "MiB", "tok_s_slope": "tok/s", "p99_slope": "p99 ms"}


def mixed(rows: Rows) -> Finding:
    """The finding, from rows without errors."""
    finding = Finding(
        "B. Mixed traffic (our question)",
        "Do buffers, bytes, speed and latency stay where they are under requests of every kind?",
        published.MIXED.text,
        _verdict(rows),
        short=published.MIXED.short,
    )
    finding.answer = [
        f"Measured on {listed(devices(rows))}: six clients with requests of many lengths, disconnects, deadlines, "
        "schemas and tools, and one conversation that grows. A truthful ending: one finish reason or one error that "
        "is the right one for the request, and nothing after it.",
        f"Slopes an hour are shown for runs of at least {LONG_MINUTES:.0f} minutes. For a shorter one the table has "
        "the means, and growth: the highest reading of the second half ÷ that of the first, after a third of the "
        "time as warm-up. Readings are taken during traffic, so that they rise and fall with it.",
    ]
    finding.tables = [_table(rows)]
    longest = max(row["ran_minutes"] for row in rows)
    finding.unproven = f"The longest run took {longest:.1f} minutes. Nothing is shown for hours, days or weeks." + (
        "" if longest < 60 else " Hours, not weeks."
    )
    return finding


def _is_long(row: Row) -> bool:
    return bool(row["ran_minutes"] >= LONG_MINUTES)


def _verdict(rows: Rows) -> Judgement:
    requests, wrong = (sum(row[name] for row in rows) for name in ("requests", "untruthful"))
    grown = max((row["live_growth"] for row in rows if row["live_growth"] != ""), default=float("nan"))
    word = "Can't tell"
    if any(map(_is_long, rows)):
        word = "Holds" if not wrong and grown <= GROWTH else "Doesn't hold"
    endings = (
        "each with one truthful ending" if not wrong else f"{wrong:.0f} of them with an ending that wasn't truthful"
    )
    said = f"{requests:.0f} requests, {endings}."
    if grown == grown:
        said += f" The highest count of live buffers of a run's second half is at most {grown:.3f} times the first's."
    longest = max(row["ran_minutes"] for row in rows)
    return Judgement(word, said, f"The longest run took {longest:.1f} minutes, {_enough(longest)}.")


def _enough(minutes: float) -> str:
    if minutes < LONG_MINUTES:
        return "which is too short to say anything of drift over hours"
    return "and nothing beyond that is shown"


def _table(rows: Rows) -> Table:
    head = [
        "model",
        "device",
        "minutes",
        "requests",
        "untruthful endings",
        "mean live buffers",
        "mean MiB",
        "mean tok/s",
    ]
    head += ["mean p99 ms between tokens", "growth of buffers", "growth of MiB"]
    head += [f"{words} an hour" for words in SLOPES.values()]
    return Table("Each run", [[*head, "taken"], *map(_line, rows)])


def _line(row: Row) -> list[str]:
    names = ("ran_minutes", "requests", "untruthful", "live_mean", "bytes_mean", "tok_s_mean", "p99_mean")
    figures = [cell(row[name]) for name in (*names, "live_growth", "active_growth")]
    slopes = [cell(row[name]) if _is_long(row) else "too short" for name in SLOPES]
    return [row["shape"], row["device"], *figures, *slopes, taken([row])]
