"""Rules of a user's grammar that no finite text can follow.

Owns the search for them in a grammar in Lark: a rule whose every alternative needs a rule like it. llguidance accepts
such a grammar wherever a token may come first, and the row fails in mid-answer or goes on until its last token. Runs in
the server's worker thread; pure.

The verdict errs towards accepting: what isn't read here (an attribute, a nested grammar, a terminal) is taken to end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

MOST_PASSES = 20  # over all rules; what isn't decided by then is accepted
MOST_DEPTH = 100  # of groups in groups
_TOKEN = re.compile(
    r"(?P<blank>[ \t\r]+|//[^\n]*|%(?:ignore|import|declare)\b[^\n]*)|(?P<line>\n)"
    r'|(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?:[^/\\\n]|\\.)+/[a-z]*|<[^>\n]*>)'
    r"|(?P<inner>%\w+)|(?P<name>[?!]?[A-Za-z_]\w*)|(?P<often>\{[^}\n]*\}|~[ \t]*\d+(?:\.\.\d+)?|[*+?])|(?P<sign>.)",
    re.ASCII,
)
_NONE = re.compile(r"\{\s*(?:0\s*)?(?:,|\})|~\s*0\.\.")
Token = tuple[str, str]
Need = list["Sequence"]  # alternatives
Sequence = list["str | Need"]  # names of rules and groups, all of which are needed


class Unread(Exception):
    """The grammar has something that isn't understood here."""


def endless_rule(lark: str) -> str:
    """The first rule on the way from `start` that no finite text can follow; empty if there is none."""
    try:
        rules = dict(_rules(_tokens(lark)))
    except (Unread, IndexError):
        return ""
    ending: set[str] = set()
    for _ in range(MOST_PASSES):
        known = len(ending)
        for name, need in reversed(rules.items()):
            if name not in ending and _ends(need, ending, rules):
                ending.add(name)
        if len(ending) == known:
            return _reached(rules, ending)
    return ""


def _reached(rules: dict[str, Need], ending: set[str]) -> str:
    """An endless rule that `start` needs in one of its alternatives, however far away."""
    left = ["start"]
    seen = set(left)
    while left:
        name = left.pop()
        if name in rules and name not in ending:
            return name
        fresh = [one for one in _named(rules.get(name, [])) if one not in seen]
        seen.update(fresh)
        left += fresh
    return ""


def _named(need: Need) -> Iterator[str]:
    for sequence in need:
        for part in sequence:
            if isinstance(part, str):
                yield part
            else:
                yield from _named(part)


def _ends(need: Need, ending: set[str], rules: dict[str, Need]) -> bool:
    return any(all(_part_ends(part, ending, rules) for part in sequence) for sequence in need)


def _part_ends(part: str | Need, ending: set[str], rules: dict[str, Need]) -> bool:
    if isinstance(part, str):
        return part in ending or part not in rules
    return _ends(part, ending, rules)


# ---------------------------------------------------------------- reading
def _tokens(lark: str) -> list[Token]:
    """The grammar's words. Raises Unread for a nested grammar that isn't JSON."""
    found: list[Token] = []
    place = 0
    while place < len(lark):
        match = _TOKEN.match(lark, place)
        if match is None:
            raise Unread
        place = match.end()
        if match.lastgroup == "inner":
            place = _behind(lark, place)
            found.append(("text", match[0]))
        elif match.lastgroup != "blank":
            found.append((str(match.lastgroup), match[0]))
    return found


def _behind(lark: str, place: int) -> int:
    """Where a JSON value that begins at `place` ends."""
    while place < len(lark) and lark[place].isspace():
        place += 1
    try:
        return json.JSONDecoder().raw_decode(lark, place)[1]
    except (ValueError, RecursionError):
        raise Unread from None


def _rules(tokens: list[Token]) -> Iterator[tuple[str, Need]]:
    place = 0
    while place < len(tokens):
        kind, word = tokens[place]
        if kind == "name" and tokens[place + 1] == ("sign", ":"):
            need, place = _alternatives(tokens, place + 2, 0)
            if not word.lstrip("?!_")[:1].isupper():  # a terminal; llguidance doesn't let it contain itself
                yield word.lstrip("?!"), need
        elif kind == "line" or word.startswith("%"):
            place += 1
        else:
            raise Unread


def _alternatives(tokens: list[Token], place: int, depth: int) -> tuple[Need, int]:
    """Alternatives up to the end of the rule or group, and the place of that end."""
    if depth > MOST_DEPTH:
        raise Unread
    need: Need = [[]]
    while place < len(tokens):
        kind, word = tokens[place]
        if kind == "line":
            if not _goes_on(tokens, place, depth):
                return need, place
        elif word in (")", "]"):
            return need, place
        elif word == "|":
            need.append([])
        elif word in ("(", "["):
            inner, place = _alternatives(tokens, place + 1, depth + 1)
            need[-1].append([[]] if word == "[" else inner)
        elif kind == "often":
            if word in ("*", "?") or _NONE.match(word):
                need[-1].pop()
        elif kind == "name":
            need[-1].append(word)
        elif kind == "text":
            need[-1].append([[]])
        else:
            raise Unread
        place += 1
    return need, place


def _goes_on(tokens: list[Token], place: int, depth: int) -> bool:
    """Whether a rule goes on behind a line's end."""
    while place < len(tokens) and tokens[place][0] == "line":
        place += 1
    return depth > 0 or (place < len(tokens) and tokens[place][1] == "|")
