"""Who comes back after an unplanned death, in which order, and who doesn't.

Owns the rules only: each generation carries its own `Past`, the supervisor carries them out. Pure functions; any
thread.

A crash doesn't say whose fault it was. So nobody is blamed for having been there: those that got somewhere since the
death before come back first, those that didn't are on probation and come back one at a time, after all others have
delivered a token. If the engine dies while one is on probation, that one alone is blamed; three times, and it ends.
Whoever delivers the tokens asked of it is off probation with a clean slate. The blame may still be wrong, if one of
the others kills its engine every few tokens; so the last trial before the end is held with nobody else in the engine.
An engine that dies with nobody on probation in it speaks for those that wait: each has one strike fewer.

Eight deaths end a generation that was alone in each. In company eight deaths say as little about each as one did, so
there they mean a longer probation: it has to get further than it got before. That finds a request that kills its
engine every few tokens without taking those along that happened to run beside it. Who got far in one of its last two
engines doesn't do that, and is spared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

MAX_STRIKES = 3
MAX_DEATHS = 8
LONGEST_TRIAL = 64  # tokens


@dataclass(slots=True)
class Past:
    """What earlier deaths say about one generation. Owned by it, written here."""

    deaths: int = 0  # unplanned ones that count against it
    shared: bool = False  # others were blamed for one of them too
    strikes: int = 0  # of these, those it was on probation for, since it last came off
    mark: int = 0  # tokens it had at the death before
    got: int = 0  # tokens it delivered between the last two deaths
    trial: int = 0  # tokens beyond `mark` that take it off probation; 0: it isn't on it


class Returner(Protocol):
    """What the rules need of a generation."""

    @property
    def seq(self) -> int: ...

    @property
    def past(self) -> Past: ...

    @property
    def generated(self) -> list[int]: ...


R = TypeVar("R", bound=Returner)


def progress(generation: Returner) -> int:
    """Tokens since the death before."""
    return len(generation.generated) - generation.past.mark


def judge(aboard: Sequence[R], *, stalled: bool, absent: Iterable[Returner] = ()) -> list[R]:
    """Takes note of an unplanned death with `aboard` in the engine, while `absent` waited to be continued.

    Returns those that have to end with an error.
    """
    tried = [generation for generation in aboard if generation.past.trial]
    if aboard and not tried:
        for generation in absent:
            generation.past.strikes = max(0, generation.past.strikes - 1)
    # A stall is often the machine's doing; in company it counts against nobody.
    blamed = tried or ([] if stalled and len(aboard) > 1 else list(aboard))
    for generation in blamed:
        generation.past.deaths += 1
        generation.past.strikes += bool(tried)
        generation.past.shared |= len(blamed) > 1
    ended = [generation for generation in blamed if _is_convicted(generation.past)]
    for generation in aboard:
        _sentence(generation)
    return ended


def _is_convicted(past: Past) -> bool:
    return past.strikes >= MAX_STRIKES or (past.deaths >= MAX_DEATHS and not past.shared)


def _sentence(generation: Returner) -> None:
    past, tokens = generation.past, progress(generation)
    if tokens == 0:
        past.trial = max(past.trial, 1)
    elif past.trial or (past.deaths >= MAX_DEATHS and max(tokens, past.got) < LONGEST_TRIAL):
        past.trial = min(max(past.trial, tokens + 1), LONGEST_TRIAL)
    past.got, past.mark = tokens, len(generation.generated)


def has_proved_itself(generation: Returner) -> bool:
    """On probation, and has delivered what was asked of it."""
    return 0 < generation.past.trial <= progress(generation)


def acquit(generation: Returner) -> None:
    """Off probation."""
    past = generation.past
    past.trial = past.strikes = 0
    if past.deaths >= MAX_DEATHS:
        past.deaths, past.shared = 0, False


def order(generations: Sequence[R]) -> list[R]:
    """The order of return: one that has to be alone, so that it's over with; those not on probation by what they got
    done, the furthest first; those on probation, the least suspect first. Age decides between equals."""
    return sorted(generations, key=_rank)


def _rank(generation: Returner) -> tuple[int, ...]:
    past = generation.past
    if _is_last_trial(past):
        return (0, generation.seq)
    if past.trial:
        return (2, past.strikes, past.deaths, generation.seq)
    return (1, -(past.got + progress(generation)), generation.seq)


def _is_last_trial(past: Past) -> bool:
    return past.trial > 0 and past.strikes >= MAX_STRIKES - 1


def may_start(generation: Returner, running: Collection[Returner]) -> bool:
    """May it be continued beside `running`? On probation only as the only one of its kind, after all others have
    delivered; on its last trial only alone, and nobody beside it."""
    if any(_is_last_trial(g.past) for g in running) or (running and _is_last_trial(generation.past)):
        return False
    return not generation.past.trial or all(not g.past.trial and progress(g) > 0 for g in running)
