"""Arguments that are a JSON object and come in pieces.

Owns where the object ends, and the mending of what models get wrong in it although it has one meaning only: a line
break or another control character in a string, a quotation mark in one that can't be its end, a backslash that escapes
nothing, Python's words and quotation marks, a comma before a bracket, a comment, a name without quotation marks.
`NaN`, `Infinity` and other words that JSON doesn't
have become text, as what can't be read does in every format. Runs on the event loop; mutable, one for a call. Hands out
each piece at once, but for what its meaning depends on the next characters: a word, a number, a comma, an escape, a
quotation mark.
"""

from __future__ import annotations

import json
import re

_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_UNICODE = 6  # characters of an escape such as \u00e9
_WORDS = {"True": "true", "False": "false", "None": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NEARLY_NUMBER = re.compile(r"([+-]?)(0|[1-9][0-9]*)?(?:\.([0-9]*))?([eE][+-]?[0-9]+)?")
_IN_WORDS = frozenset("+-._$")
_CLOSING = {"{": "}", "[": "]"}
_FARTHEST = 200  # characters behind a quotation mark that say whether it ends its string
_NAME = re.compile(r"[\w.+$-]+\s*")


class JsonObject:
    """Reads one object.

    Attributes:
        in_string: what was read ends inside one of its strings.
        complete: its end was read.
        broken: what was read ends before a character of `ends`, outside of its strings.
    """

    def __init__(self, ends: str = "") -> None:
        self._ends = ends
        self._open: list[str] = []  # the brackets that will close what is open, the outermost first
        self._held = ""  # what needs the next characters to be understood
        self._place = ""  # of the string: "value" of a key, "item" of an array, else "key"
        self._quote = '"'  # the one that ends the string that is being read
        self._last = ""  # what stands before a string: a mark, or the beginning of what else was read last
        self._behind_quote: str | None = None  # what follows a quotation mark that may end its string
        self._comment = ""  # the beginning of a comment that is being left out, and its last character
        self.in_string = False
        self.complete = False
        self.broken = False

    @classmethod
    def mended(cls, text: str) -> str:
        """What is whole already; what follows the object stays as it is."""
        made = cls()
        ready, taken = made.read(text)
        return ready + made.ending() + text[taken:]

    def read(self, text: str) -> tuple[str, int]:
        """What to hand out, and how much of `text` belongs to the object."""
        read: list[str] = []
        for position, char in enumerate(text, 1):
            if char in self._ends and not (self.in_string or self._comment):
                self.broken = True
                return "".join(read), position - 1
            read.append(self._one(char))
            if self.complete:
                return "".join(read), position
        return "".join(read), len(text)

    def rest(self) -> str:
        """What wasn't handed out, when nothing follows."""
        settled = self._settle(is_end=True)
        if self._comment == "/":
            return settled + self._held + "/"
        return settled + self._held

    def ending(self) -> str:
        """What wasn't handed out of an object that its author takes for complete, and the brackets that it lacks. None
        are put behind a string that doesn't end: what belongs to it isn't known."""
        if self.in_string or not self._open:
            return self.rest()
        settled = self._settle(is_end=True)
        last = settled + self._meaning("}")
        self._held = ""
        return last + "".join(reversed(self._open))

    def _one(self, char: str) -> str:
        if self._behind_quote is None:
            return self._within(char) if self.in_string else self._between(char)
        self._behind_quote += char
        is_end = _is_end(self._behind_quote, self._quote, self._place)
        if is_end is None:
            return ""
        return self._settle(is_end=is_end)

    def _settle(self, *, is_end: bool) -> str:
        """What is known of a quotation mark, and what was read behind it."""
        behind = self._behind_quote
        if behind is None:
            return ""
        self._behind_quote = None
        self.in_string = not is_end
        mark = '"'
        if not is_end:
            mark = '\\"' if self._quote == '"' else self._quote
        return mark + "".join(map(self._one, behind))

    def _within(self, char: str) -> str:
        """The next character of a string."""
        if self._held:
            return self._escape(char)
        if char == "\\":
            self._held = char
            return ""
        if char == self._quote:
            self.in_string = False
            self._behind_quote = ""
            return ""
        if char == '"':
            return '\\"'
        return _plain(char)

    def _escape(self, char: str) -> str:
        """The next character behind a backslash."""
        held = self._held + char
        if (held[1] == "u" and len(held) == 2) or (held.startswith("\\u") and char in _HEX):
            self._held = held
            if len(held) < _UNICODE:
                return ""
        elif held.startswith("\\u"):  # as in C:\users
            before = "\\" + self._held
            self._held = ""
            return before + self._within(char)
        elif char == "'":
            held = char
        elif char not in _ESCAPED:
            held = "\\\\" + _plain(char)
        self._held = ""
        return held

    def _between(self, char: str) -> str:
        """The next character outside of strings."""
        if self._comment or char == "/":
            return self._remark(char)
        if self._goes_on(char):
            self._held += char
            return ""
        made = self._begun(char)
        if not char.isspace():
            self._last = char
        return made

    def _begun(self, char: str) -> str:
        """A character that doesn't go on with the one before it."""
        before = self._meaning(char)
        self._held = ""
        if char == "," or _is_of_word(char):
            self._held = char
            return before
        return before + self._mark(char)

    def _mark(self, char: str) -> str:
        """A character that is no part of a word."""
        if char in "\"'":
            self.in_string = True
            self._quote = char
            self._place = self._string_place()
            return '"'
        if char in _CLOSING:
            self._open.append(_CLOSING[char])
        elif char in "}]" and self._open:
            self._open.pop()
            self.complete = not self._open
        return char

    def _string_place(self) -> str:
        if self._open[-1:] != ["}"]:
            return "item"
        return "value" if self._last == ":" else "key"

    def _remark(self, char: str) -> str:
        """The next character of a comment, or of what begins like one and is none."""
        begun = self._comment
        if begun == "/" and char not in "/*":
            before = self._meaning("/")
            self._comment = ""
            self._held = ""
            return before + "/" + self._between(char)
        ends = (begun[:2] == "//" and char == "\n") or (begun == "/**" and char == "/")
        self._comment = "" if ends else begun[:2] + char
        return ""

    def _goes_on(self, char: str) -> bool:
        """Whether a character belongs to the word or comma that is held."""
        if self._held.startswith(","):
            return char.isspace()
        return _is_of_word(char)

    def _meaning(self, char: str) -> str:
        """What is held, when `char` follows."""
        held = self._held
        if held.startswith(","):
            return held[1:] if char in "}]" else held
        if held and char == ":":
            return json.dumps(held, ensure_ascii=False)
        return _literal(held)


def _is_end(behind: str, quote: str, place: str) -> bool | None:
    """Whether a quotation mark ends its string, by what is behind it; None: more must be read. Where both may be, it
    does."""
    rest = behind.lstrip()
    if place == "key" or len(behind) > _FARTHEST:
        return True
    if not rest:
        return None
    following = rest[1:].lstrip()
    if rest[0] == quote and rest == behind:
        return following[0] not in ",}]" if following else None
    if rest[0] == "," and place == "value":
        return _begins_member(following)
    return rest[0] in ",}]/" or rest[0] == quote


def _begins_member(text: str) -> bool | None:
    """Whether a member of an object begins so behind a comma; None: more must be read."""
    if not text:
        return None
    name = _NAME.match(text)
    if name is None:
        return text[0] in "\"'}/"
    if name.end() == len(text):
        return None
    return text[name.end()] == ":"


def _is_of_word(char: str) -> bool:
    return char.isalnum() or char in _IN_WORDS


def _literal(word: str) -> str:
    """A word or number outside of strings, as JSON has it; text if it has none such."""
    if word in ("", "true", "false", "null") or _NUMBER.fullmatch(word):
        return word
    if word in _WORDS:
        return _WORDS[word]
    nearly = _NEARLY_NUMBER.fullmatch(word)
    if nearly is None or not (nearly[2] or nearly[3]):
        return json.dumps(word, ensure_ascii=False)
    fraction = "" if nearly[3] is None else f".{nearly[3] or 0}"
    return f"{nearly[1].strip('+')}{nearly[2] or 0}{fraction}{nearly[4] or ''}"


def _plain(char: str) -> str:
    """A character of a string, escaped if JSON has it only so."""
    if char < " ":
        return json.dumps(char)[1:-1]
    return char
