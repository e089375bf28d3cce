"""Turns of a conversation, rewritten to what a chat template can take.

Owns where the text of a turn goes that a template would refuse or leave out. Runs in the server's worker thread; pure.
Never drops, repeats or reorders what was said, and decides by what stands before a turn and beside it, so that a
conversation that goes on keeps its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest

from server.text.templates.abilities import Abilities
from server.text.templates.turn import Message, Think, Turn, message, turns
from server.text.tokens.encoding import Shield

Turns = list[Turn]

_HOSTS = ("user", "tool")  # roles whose turns take in what a template has no place for


def fit(messages: Iterable[Message], able: Abilities, shield: Shield, think: Think | None = None) -> list[Message]:
    """The same conversation in messages that a template takes, text shielded. `think`: the tags around reasoning."""
    said = turns(messages, shield, think)
    front = next((n for n, turn in enumerate(said) if turn.role != "system"), len(said))
    systems = said[:front]
    rest = said[front:]
    arranged = _opened(systems, _folded(rest, able), able)
    apart = [part for turn in arranged for part in _apart(turn, able)]
    merged = [_one(run) for run in _runs(apart, lambda first, second: _must_join(first, second, able))]
    return [message(turn, able) for turn in _alternating(merged, able)]


# ---------------------------------------------------------------- system messages
def _opened(systems: Turns, rest: Turns, able: Abilities) -> Turns:
    """System messages at the front as one, where the template has them, and behind it a turn of the user's if it needs
    one."""
    if systems and not able.system:
        return _before(replace(_one(systems), role="user"), rest)
    if systems:
        systems = [_one(systems)]
    if not able.openings and (not rest or rest[0].role != "user"):
        return [*systems, Turn("user", []), *rest]
    return systems + rest


def _before(turn: Turn, rest: Turns) -> Turns:
    """A turn of the user's in front of others, one with the next if that is the user's, too."""
    if rest and rest[0].role == "user":
        return [replace(rest[0], texts=turn.texts + rest[0].texts), *rest[1:]]
    return [turn, *rest]


def _folded(said: Turns, able: Abilities) -> Turns:
    """Later system messages become part of the user's or tool's turn before them, else of the one behind them. Between
    turns of the assistant's, and behind the last of them, they are one of the user's. Where the template shows them
    they stay, but never between a call and its result."""
    made: Turns = []
    waiting: list[str] = []
    runs = [_one(run) for run in _runs(said, lambda first, second: first.role == second.role == "system")]
    for turn, following in zip_longest(runs, runs[1:]):
        if turn.role != "system":
            if waiting and turn.role not in _HOSTS:
                made.append(Turn("user", waiting))
                waiting = []
            made.append(replace(turn, texts=waiting + turn.texts))
            waiting = []
        elif able.later and (following is None or following.role != "tool"):
            made.append(turn)
        elif made and made[-1].role in _HOSTS:
            made[-1] = replace(made[-1], texts=made[-1].texts + turn.texts)
        else:
            waiting = turn.texts
    if waiting:
        return [*made, Turn("user", waiting)]
    return made


# ---------------------------------------------------------------- turns in a row
def _apart(turn: Turn, able: Abilities) -> Iterator[Turn]:
    """Text apart from calls, and calls apart from each other, for templates that would show but one; nothing of a turn
    in which the assistant said nothing, for those that refuse it."""
    if turn.role == "assistant" and not able.blanks and not (any(turn.texts) or turn.calls or turn.thoughts):
        return
    if turn.calls and not able.spoken and any(turn.texts):
        yield replace(turn, calls=[])
        turn = replace(turn, texts=[], thoughts=[])
    if able.several or len(turn.calls) < 2:
        yield turn
        return
    yield replace(turn, calls=turn.calls[:1])
    for call in turn.calls[1:]:
        yield replace(turn, texts=[], thoughts=[], calls=[call])


def _must_join(first: Turn, second: Turn, able: Abilities) -> bool:
    """Whether two turns in a row must be one. What is said after a call stays after it."""
    if first.role != second.role or first.calls or (second.calls and not able.spoken):
        return False
    may_follow = {"user": able.users, "assistant": able.answers, "tool": able.rows}
    return not may_follow.get(first.role, True)


def _runs(said: Turns, together: Callable[[Turn, Turn], bool]) -> Iterator[Turns]:
    run: Turns = []
    for turn in said:
        if run and not together(run[-1], turn):
            yield run
            run = []
        run.append(turn)
    if run:
        yield run


def _one(run: Turns) -> Turn:
    """One turn of several of the same role."""
    if len(run) == 1:
        return run[0]
    texts = [text for turn in run for text in turn.texts]
    thoughts = [thought for turn in run for thought in turn.thoughts]
    return replace(run[0], texts=texts, thoughts=thoughts, calls=run[-1].calls)


def _alternating(said: Turns, able: Abilities) -> Turns:
    """An empty turn of the other side between two of one side that calls or results keep apart, or between results and
    the user's turn. Where the assistant's can't be empty, what the user says becomes part of the result before it."""
    made: Turns = []
    last = ""
    for turn in said:
        behind = ""
        if made:
            behind = made[-1].role
        if turn.speaks and _clash(turn.role, last, behind, able):
            if turn.role == "user" and behind == "tool" and not able.blanks:
                made[-1] = replace(made[-1], texts=made[-1].texts + turn.texts)
                continue
            made.append(Turn("assistant" if turn.role == "user" else "user", []))
        if turn.speaks:
            last = turn.role
        made.append(turn)
    return made


def _clash(role: str, last: str, behind: str, able: Abilities) -> bool:
    """Whether a turn can't come `behind` one of that role, where `last` was the last to speak."""
    may_follow = {"user": able.users, "assistant": able.answers}
    return (role == last and not may_follow[role]) or (role == "user" and behind == "tool" and not able.after)
