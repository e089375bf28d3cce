"""Who an answer is, and whether it is kept.

Owns the ids that follow from an answer's own: an answer that is read again, by another reader or after a restart, has
the same items under the same ids. Runs in both the worker thread and on the event loop; pure but for the id that it
draws.
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass

ID = re.compile(r"(?:resp_|chatcmpl-)[0-9a-f]{24}")
_ITEM = re.compile(r"(?:msg|rs|fc|ctc)_([0-9a-f]{24})(i?)([0-9a-f]{4})")


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """The id of an answer, the second in which it was asked for, in unix time, and the name of its model."""

    id: str
    created: int
    model: str

    @classmethod
    def draw(cls, prefix: str, model: str) -> AnswerIdentity:
        """A new one; `prefix` is the protocol's, such as `resp_`."""
        return cls(prefix + secrets.token_hex(12), int(time.time()), model)

    def call_seed(self, choice: int) -> str:
        """The ids of one choice's calls follow from it."""
        return f"{self.id} {choice}"


def item_id(prefix: str, answer: str, place: int) -> str:
    """The id of the item at this place of the answer `resp_…`."""
    return f"{prefix}_{answer.partition('_')[2]}{place:04x}"


def input_item_id(answer: str, place: int) -> str:
    """The id of an item that the client gave none, at this place of the input of the answer `resp_…`."""
    return f"msg_{answer.partition('_')[2]}i{place:04x}"


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Where an item with an id of this server's lies: in the output or the input of the response `answer`."""

    answer: str
    is_input: bool
    place: int

    @classmethod
    def of(cls, id: str) -> ItemPlace | None:
        """None for an id that this server didn't make."""
        found = _ITEM.fullmatch(id)
        if found is None:
            return None
        return cls("resp_" + found[1], bool(found[2]), int(found[3], 16))


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a request wants its answer kept.

    Attributes:
        explicit: the client said so itself, rather than the default.
        background: the answer goes on without its client, and over restarts.
        own_input: what the client sent in this request, as a JSON list of input items or messages.
    """

    identity: AnswerIdentity
    explicit: bool
    background: bool
    metadata: dict[str, str]
    own_input: bytes
