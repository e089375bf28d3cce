"""The ids of an answer's tool calls.

Owns the rule that no two calls of a conversation share an id, and the forms of ids that models insist on. One `CallIds`
belongs to one answer and runs on the event loop. Never looks at what is called.
"""

from __future__ import annotations

import re
import secrets
import string
import uuid
from collections.abc import Callable, Iterable

_COUNTED = re.compile(r"(?P<head>.+):(?P<number>\d{1,9})", re.DOTALL)
_ALPHANUMERIC = string.ascii_letters + string.digits
_MISTRAL_LENGTH = 9  # Mistral's templates refuse a history with ids of any other length


def random_id() -> str:
    """An id of the form that OpenAI's have."""
    return "call_" + uuid.uuid4().hex[:24]


class CallIds:
    """Gives each call an id that neither this answer nor the conversation before it has; mutable, owned by the answer.

    `parser` is the name of the model's tool format, `earlier` are the ids of the conversation.
    """

    def __init__(self, parser: str = "", earlier: Iterable[str] = (), new_id: Callable[[], str] | None = None) -> None:
        self._taken = set(earlier)
        self._counts = parser == "kimi_k2"
        self._short = parser == "mistral"
        self._new_id = new_id or (_short_id if self._short else random_id)
        self._next = 1 + max((int(m["number"]) for m in map(_COUNTED.fullmatch, self._taken) if m), default=-1)

    def take(self, name: str, given: object = None) -> str:
        """The id of the answer's next call. `given` is the model's own, which is kept where it can be."""
        written = ""
        if isinstance(given, str):
            written = given
        if self._counts:
            chosen = self._counted(name, written)
        else:
            chosen = self._plain(written)
        self._taken.add(chosen)
        return chosen

    def _counted(self, name: str, given: str) -> str:
        """Kimi counts the calls of a whole conversation, but many an answer begins again at 0."""
        match = _COUNTED.fullmatch(given)
        number = max(self._next, int(match["number"]) if match else 0)
        self._next = number + 1
        return f"{match['head'] if match else given or 'functions.' + name}:{number}"

    def _plain(self, given: str) -> str:
        fits = bool(given) and (not self._short or _is_short(given))
        chosen = given
        if not fits:
            chosen = self._new_id()
        while chosen in self._taken:
            chosen = self._new_id()
        return chosen


def _short_id() -> str:
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(_MISTRAL_LENGTH))


def _is_short(given: str) -> bool:
    return len(given) == _MISTRAL_LENGTH and all(char in _ALPHANUMERIC for char in given)
