"""Character classes of a schema's patterns, so that llguidance spells them rightly in JSON.

Owns one stand-in for a fault of llguidance 1.9.1: a class that has a control character which JSON writes as `\\u00XX`,
and not both the quote and the backslash, lets the one that it leaves out pass as `\\"` or `\\\\`. Such a class is cut
down to what it has besides those characters; line breaks, tabs and form feeds stay. Runs in the server's worker thread;
pure.
"""

from __future__ import annotations

import re

_WRITTEN = r"[^\x00-\x07\x0b\x0e-\x1f]"  # what JSON doesn't write as \u00XX
_BEGINS = re.compile(r"\[\^?\]?")  # of a class: a bracket that closes nothing is in it
_ATOM = r"(?:\\.|[^\\])"
_ITEM = re.compile(rf"({_ATOM})(?:-({_ATOM}))?", re.DOTALL)
_PRINTED = re.compile(r"""(?:[^\\\[\]&~\x00-\x1f]|\\[dwstnrf.,:;@#%&~'"`=<>!\-/+*?(){}\[\]^$|\\_ ])+""")
_FAMILIES = frozenset("dws")
_COMPLEMENTS = ("\\D", "\\W", "\\S")  # each has the quote, the backslash and every odd character but few


def spellable(pattern: str) -> str:
    """The pattern, with each class that could be spelled wrongly cut down."""
    made: list[str] = []
    position = 0
    while position < len(pattern):
        end = position + 1
        if pattern[position] == "\\":
            end += 1
        elif pattern[position] == "[":
            end = _end(pattern, position)
        made.append(_cut_down(pattern[position:end]))
        position = end
    return "".join(made)


def _end(pattern: str, start: int) -> int:
    """Where the class that begins at `start` ends; classes in it are part of it."""
    depth = 0
    position = start
    while position < len(pattern):
        char = pattern[position]
        if char == "\\":
            position += 1
        elif char == "[":
            depth += 1
            position += len(_begin(pattern, position)) - 1
        elif char == "]":
            depth -= 1
            if not depth:
                return position + 1
        position += 1
    return len(pattern)


def _begin(pattern: str, start: int) -> str:
    found = _BEGINS.match(pattern, start)
    assert found is not None
    return found[0]


def _cut_down(part: str) -> str:
    if not part.startswith("[") or not part.endswith("]") or _is_right(part[1:-1]):
        return part
    return f"[{part}&&{_WRITTEN}]"


def _is_right(inside: str) -> bool:
    """Whether a class surely has no odd character, or the quote and the backslash beside them."""
    if not inside.startswith("^"):
        return bool(_PRINTED.fullmatch(inside)) or any(family in inside for family in _COMPLEMENTS)
    left_out = inside[1:]
    if not _PRINTED.fullmatch(left_out):
        return False
    return not any(_has(left_out, char) for char in '"\\')


def _has(inside: str, char: str) -> bool:
    return any(_spans(first, last, char) for first, last in _ITEM.findall(inside))


def _spans(first: str, last: str, char: str) -> bool:
    if first[0] == "\\" and first[-1] in _FAMILIES:
        return False
    return first[-1] <= char <= (last or first)[-1]
