"""What a chat template can take, as a value.

Owns the names of the abilities. `trials` finds out which ones a template has, `conversation`
rewrites conversations for those that it lacks. Never renders.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Abilities:
    """The defaults are those of a template that takes every conversation as it is.

    Attributes:
        parts: it wants contents as lists of parts.
        system: it shows a system message at the front, and there.
        later: it shows a later system message as a segment of its own.
        openings: the first turn need not be the user's.
        listed: the tools must be a list, even if there are none.
        blanks: the assistant may have said nothing.
        users, answers: several turns of the user's, or of the assistant's, may follow each other.
        results: it shows messages of role tool.
        calls: it shows tool calls, and messages of role tool as their results. What is below matters only then.
        several: one message may have several calls.
        rows: several results may follow each other.
        after: a turn of the user's may follow results.
        spoken: a message with calls may have text as well.
        short_ids: a call's id must have nine letters or digits.
    """

    parts: bool = False
    system: bool = True
    later: bool = True
    openings: bool = True
    listed: bool = False
    blanks: bool = True
    users: bool = True
    answers: bool = True
    results: bool = True
    calls: bool = True
    several: bool = True
    rows: bool = True
    after: bool = True
    spoken: bool = True
    short_ids: bool = False
