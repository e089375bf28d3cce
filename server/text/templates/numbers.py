"""Numbers in a conversation, as they were written.

Owns the stand-ins for numbers that Python would write otherwise, as `1e2`, `12.50` or `-0`: a template gets another
float, which is replaced in what the template makes of it. So an earlier call is shown to the model as the model wrote
it, and a prompt begins like the one before it. Belongs to one rendering, in the server's worker thread. Never looks at
any other text.
"""

from __future__ import annotations

import re

# Floats that nothing else in a conversation is likely to be; the digits between are a count.
_STAND_IN = "7.3051987{:06}3e+211"
_STAND_INS = re.compile(r"7\.3051987(?P<count>[0-9]{6})3e\+211")
_MOST = 1_000_000


class NumberTexts:
    """The numbers of one rendering; mutable."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._known: dict[str, float] = {}

    def read(self, digits: str) -> float:
        """The float for a number of a JSON text that isn't whole, or its stand-in."""
        value = float(digits)
        if repr(value) == digits or len(self._texts) == _MOST:
            return value
        if digits not in self._known:
            self._known[digits] = float(_STAND_IN.format(len(self._texts)))
            self._texts.append(digits)
        return self._known[digits]

    def whole(self, digits: str) -> int | float:
        """The whole number of a JSON text, or its stand-in."""
        if digits == "-0":
            return self.read(digits)
        return int(digits)

    def shown(self, text: str) -> str:
        """The text with its numbers as they were written."""
        if not self._texts:
            return text
        return _STAND_INS.sub(self._written, text)

    def _written(self, match: re.Match[str]) -> str:
        count = int(match["count"])
        if count < len(self._texts):
            return self._texts[count]
        return match[0]
