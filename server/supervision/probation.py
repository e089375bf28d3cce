"""Who comes back after an unplanned death, in which order, and who doesn't.

Owns the rules only: each generation carries its own `DeathRecord`, the scheduler carries the rules out. Pure
functions; any thread.

A crash doesn't say whose fault it was. So those that got a token since the death before come back first, those that
got none are on probation and come back one at a time, after all others have delivered a token. If the engine dies
while one is on probation, that one alone is blamed for the death. A generation that delivers the tokens asked of it
is off probation with a clean slate. An engine that dies with none on probation in it speaks for those that wait: each
is blamed for one death fewer.

Only deaths without a token can end a generation with an error: three in a row while it was on probation. One that gets
on ends by its limit sooner or later, however often the engine is killed, and so never has to be quarantined. Before it
comes to that the blame has to be sure:

- An engine must have lived for a while without the suspect before it is given one that was blamed already. Engines
  that are killed from outside as soon as they are ready die in that time, and it counts against none.
- The third trial is held with no other generation in the engine.
- When all that are on probation fare alike, the cause may be the machine's: then it takes eight deaths, unless others
  had got tokens from an engine that died as soon as the suspect had joined them.

Eight deaths with little progress between them mean a longer probation: a generation has to get further than it got
before. That finds a request that kills its engine every few tokens. After three such deaths with some tokens each it
runs apart: alone, and after the others. It still gets its tokens, but no longer at the cost of its neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

MAX_BLAMED = 3
MAX_ALIKE = 8  # deaths without a token, when others fare alike
MANY_DEATHS = 8
LONGEST_TRIAL = 64  # tokens
SETTLE_SECONDS = 1.0  # by which an engine must outlive those before it until a suspect may join
LONGEST_SETTLE = 10.0


@dataclass(slots=True)
class DeathRecord:
    """What earlier deaths say about one generation. Owned by it, written here."""

    deaths: int = 0  # unplanned ones that count against it
    blamed: int = 0  # of these, those it was on probation for, since it last came off
    barren: int = 0  # of these, those since its last token
    shown: bool = False  # at one of the barren ones others had got tokens from the same engine
    lived: float = 0.0  # the longest that one of the engines lived which died at a barren one, or idle since
    mark: int = 0  # tokens it had at the death before
    got: int = 0  # tokens it delivered between the last two deaths
    trial: int = 0  # tokens beyond `mark` that take it off probation; 0: it isn't on it


class Returner(Protocol):
    """What the rules need of a generation."""

    @property
    def seq(self) -> int: ...

    @property
    def past(self) -> DeathRecord: ...

    @property
    def generated(self) -> list[int]: ...


R = TypeVar("R", bound=Returner)


def progress(generation: Returner) -> int:
    """Tokens since the death before."""
    return len(generation.generated) - generation.past.mark


# ---------------------------------------------------------------- after a death
def record_death(aboard: Sequence[R], *, stalled: bool, age: float, absent: Collection[Returner] = ()) -> list[R]:
    """Takes note of the unplanned death of an engine that had been ready for `age` seconds and had begun to work on
    `aboard`, while `absent` waited to be continued. Returns those that have to end with an error."""
    tried = [generation for generation in aboard if generation.past.trial]
    if not tried:
        for generation in absent:
            _exonerate(generation.past, age, was_idle=not aboard)
    # A stall is often the machine's doing; in company it counts against none.
    blamed = tried or ([] if stalled and len(aboard) > 1 else list(aboard))
    for generation in blamed:
        generation.past.deaths += 1
    for generation in tried:
        _blame(generation, aboard, age)
    ended = [generation for generation in tried if _is_culprit(generation, [*aboard, *absent])]
    for generation in aboard:
        _set_trial(generation)
    return ended


def _exonerate(past: DeathRecord, age: float, *, was_idle: bool) -> None:
    """An engine died without it. One that had nothing to do shows that engines are killed soon after they are ready:
    the next one has to live for longer, so the last blame stays."""
    least = 0
    if was_idle:
        least = 1
    past.blamed = max(min(past.blamed, least), past.blamed - 1)
    past.barren = max(min(past.barren, least), past.barren - 1)
    if past.barren:
        past.lived = max(past.lived, age)


def _blame(generation: Returner, aboard: Iterable[Returner], age: float) -> None:
    past = generation.past
    past.blamed += 1
    if progress(generation):
        _clear(past)
        return
    past.barren += 1
    past.lived = max(past.lived, age)
    past.shown |= any(progress(other) > 0 for other in aboard if other is not generation)


def _clear(past: DeathRecord) -> None:
    past.barren = 0
    past.shown = False
    past.lived = 0.0


def _is_culprit(generation: Returner, everyone: Iterable[Returner]) -> bool:
    past = generation.past
    fare_alike = any(other.past.barren for other in everyone if other is not generation)
    return past.barren >= (MAX_ALIKE if fare_alike and not past.shown else MAX_BLAMED)


def _set_trial(generation: Returner) -> None:
    past = generation.past
    tokens = progress(generation)
    if tokens == 0:
        past.trial = max(past.trial, 1)
    elif past.trial or (past.deaths >= MANY_DEATHS and max(tokens, past.got) < LONGEST_TRIAL):
        past.trial = min(max(past.trial, tokens + 1), LONGEST_TRIAL)
    past.got = tokens
    past.mark = len(generation.generated)


# ---------------------------------------------------------------- coming off
def has_proved_itself(generation: Returner) -> bool:
    """On probation, and has delivered what was asked of it."""
    return 0 < generation.past.trial <= progress(generation)


def release(generation: Returner) -> None:
    """Off probation."""
    past = generation.past
    past.trial = past.blamed = 0
    _clear(past)
    if past.deaths >= MANY_DEATHS:
        past.deaths = 0


# ---------------------------------------------------------------- coming back
def order(generations: Sequence[R]) -> list[R]:
    """The order of return: one whose blame has to be made sure, so that it's over with; those not on probation by what
    they got done, the furthest first; those on probation, the least suspect first. Age decides between equals."""
    return sorted(generations, key=_rank)


def _rank(generation: Returner) -> tuple[int, ...]:
    past = generation.past
    if past.trial and past.blamed == MAX_BLAMED - 1:
        return (0, generation.seq)
    if past.trial:
        return (2, past.blamed, past.deaths, generation.seq)
    return (1, -(past.got + progress(generation)), generation.seq)


def runs_apart(past: DeathRecord) -> bool:
    """It is known to kill its engines: it comes after the others, those too that are new."""
    return past.trial > 0 and past.blamed >= MAX_BLAMED


def _runs_alone(past: DeathRecord) -> bool:
    return past.trial > 0 and past.blamed >= MAX_BLAMED - 1


def settle_seconds(past: DeathRecord) -> float:
    """How long an engine must have lived without it before it may join: longer than those did that died with it."""
    if not (past.trial and past.barren):
        return 0.0
    return min(past.lived + SETTLE_SECONDS, LONGEST_SETTLE)


def may_start(generation: Returner, running: Collection[Returner]) -> bool:
    """May it be continued beside `running`? On probation only as the only one of its kind, after all others have
    delivered; from the trial on that may be its last only alone, and nothing beside it."""
    if any(_runs_alone(g.past) for g in running) or (running and _runs_alone(generation.past)):
        return False
    return not generation.past.trial or all(not g.past.trial and progress(g) > 0 for g in running)
