"""The ids of an answer's tool calls.

Owns the rule that no two calls of a conversation share an id, and the forms of ids that models insist on. One `CallIds`
belongs to one answer and runs on the event loop. Never looks at what is called.
"""

from __future__ import annotations

import hashlib
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

    `parser` is the name of the model's tool format, `earlier` are the ids of the conversation. With a `seed` the same
    answer gets the same ids whenever it is read.
    """

    def __init__(
        self,
        parser: str = "",
        earlier: Iterable[str] = (),
        new_id: Callable[[], str] | None = None,
        *,
        seed: str = "",
    ) -> None:
        self._taken = set(earlier)
        self._counts = parser == "kimi_k2"
        self._short = parser == "mistral"
        self._seed = seed
        self._drawn = 0
        self._make = new_id
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

    def _new_id(self) -> str:
        if self._make is not None:
            return self._make()
        if self._seed:
            return self._seeded()
        if self._short:
            return _short_id()
        return random_id()

    def _seeded(self) -> str:
        """The next id that follows from the seed."""
        self._drawn += 1
        digits = hashlib.sha256(f"{self._seed} {self._drawn}".encode()).hexdigest()
        if self._short:
            return digits[:_MISTRAL_LENGTH]
        return "call_" + digits[:24]


def _short_id() -> str:
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(_MISTRAL_LENGTH))


def _is_short(given: str) -> bool:
    return len(given) == _MISTRAL_LENGTH and all(char in _ALPHANUMERIC for char in given)
