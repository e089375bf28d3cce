"""Rules of a user's grammar that no finite text can follow.

Owns the search for them in a grammar in Lark: a rule whose every alternative needs a rule like it, or a terminal that
nothing matches. llguidance accepts such a grammar wherever a token may come first, and the row fails in mid-answer or
goes on until its last token. Runs in the server's worker thread; pure.

The verdict errs towards accepting: what isn't read here is taken to end.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from server.grammar.lark import Definition, Unread, Word

MOST_PASSES = 20  # over all rules; what isn't decided by then is accepted
MOST_DEPTH = 100  # of groups in groups
_NONE = re.compile(r"\{\s*(?:0\s*)?(?:,|\})|~\s*0\.\.")
_OF_TERMINALS = frozenset({"stop", "suffix", "lazy", "max_tokens", "temperature"})  # attributes
Need = list["Needed"]  # alternatives
Needed = list["str | Need"]  # names of rules and terminals, and groups, all of which are needed


def is_rule(definition: Definition) -> bool:
    """Return whether a name may refer to rules: terminals can't, nor rules with attributes that make them terminals."""
    keys = {word.text for word in definition.attributes if word.kind == "name"}
    return not definition.is_terminal and not keys & _OF_TERMINALS


def endless_rule(definitions: Sequence[Definition], barren: Collection[str] = ()) -> str:
    """Return a name that `start` needs and no finite text can follow; empty if there is none. `barren`: terminals,
    by name or as they are written in a rule, that no text matches."""
    rules: dict[str, Need] = {one: [[one]] for one in barren}
    try:
        read = {one.name: _alternatives(one.body, 0, 0, barren)[0] for one in definitions if is_rule(one)}
    except (Unread, IndexError):
        return ""
    rules = read | rules
    ending: set[str] = set()
    for _ in range(MOST_PASSES):
        known = len(ending)
        for name, need in reversed(rules.items()):
            if name not in ending and _ends(need, ending, rules):
                ending.add(name)
        if len(ending) == known:
            return _reached(rules, ending, barren)
    return ""


def _reached(rules: dict[str, Need], ending: set[str], barren: Collection[str]) -> str:
    """Return the endless name that `start` needs in one of its alternatives, directly or not; terminals first."""
    endless = [name for name in reached(rules) if name in rules and name not in ending]
    return next((name for name in endless if name in barren), next(iter(endless), ""))


def reached(rules: dict[str, Need]) -> list[str]:
    """Return `start` and the names that it needs in one of its alternatives, directly or not."""
    left = ["start"]
    seen = dict.fromkeys(left)
    while left:
        fresh = [one for one in _named(rules.get(left.pop(), [])) if one not in seen]
        seen.update(dict.fromkeys(fresh))
        left += fresh
    return list(seen)


def _named(need: Need) -> Iterator[str]:
    for needed in need:
        for part in needed:
            if isinstance(part, str):
                yield part
            else:
                yield from _named(part)


def _ends(need: Need, ending: set[str], rules: dict[str, Need]) -> bool:
    return any(all(_part_ends(part, ending, rules) for part in needed) for needed in need)


def _part_ends(part: str | Need, ending: set[str], rules: dict[str, Need]) -> bool:
    if isinstance(part, str):
        return part in ending or part not in rules
    return _ends(part, ending, rules)


# ---------------------------------------------------------------- reading
def _alternatives(body: Sequence[Word], place: int, depth: int, barren: Collection[str]) -> tuple[Need, int]:
    """Return the alternatives up to the end of the rule or group, and the place of that end."""
    if depth > MOST_DEPTH:
        raise Unread
    need: Need = [[]]
    while place < len(body):
        word = body[place]
        if word.text in (")", "]"):
            return need, place
        if word.text == "|":
            need.append([])
        elif word.text in ("(", "["):
            inner, place = _alternatives(body, place + 1, depth + 1, barren)
            need[-1].append([[]] if word.text == "[" else inner)
        else:
            place = _add(need[-1], body, place, barren)
        place += 1
    return need, place


def _add(needed: Needed, body: Sequence[Word], place: int, barren: Collection[str]) -> int:
    """Add a word to the names that an alternative needs. Returns the place of the last word read."""
    word = body[place]
    if word.kind == "often":
        if word.text in ("*", "?") or _NONE.match(word.text):
            needed.pop()
    elif word.kind == "name" or word.text in barren:
        needed.append(word.text)
    elif word.kind in ("text", "token", "json", "grammar", "inner"):
        needed.append([[]])
    elif word.kind == "range" or body[place : place + 2][-1].text == ">":  # "a".."z", and -> name
        return place + 1 + (word.kind != "range")
    elif word.kind != "line":
        raise Unread
    return place
