"""Terminals of a user's grammar that no text matches.

Owns the search for them: a class without a character, an intersection of what has nothing in common. llguidance accepts
them wherever another token comes first, and the row fails when it gets there. Each is held against llguidance alone,
as far as there is time; what isn't tried is taken to match. Runs in the server's worker thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from time import monotonic

from llguidance import LLMatcher

from server.grammar.checker import NO_TEXT, Prove
from server.grammar.lark import Definition, Word
from server.grammar.productive import is_rule

MOST_LOOKS = 200
LOOK_SECONDS = 1.0
_MAY_BE_BARREN = re.compile(r"\[\^|&&|--|~~|\\[Pp]|[&~]")  # all else matches something


def barren(found: Sequence[Word], definitions: Sequence[Definition], prove: Prove) -> set[str]:
    """Terminals that no text matches: by name, or as they are written in a rule."""
    terminals = {one.name: one for one in definitions if not is_rule(one)}
    head = [word.text for word in found if word.text.startswith("%import")]
    until = monotonic() + LOOK_SECONDS
    dead = set()
    for piece in list(dict.fromkeys(_pieces(definitions, terminals)))[:MOST_LOOKS]:
        needed = [terminals[name].source for name in made_of(piece, terminals)]
        lark = "\n".join([*head, f"start: {piece}", *needed])
        if not _MAY_BE_BARREN.search(lark):
            continue
        said = prove(LLMatcher.grammar_from_lark(lark))
        if said == NO_TEXT:
            dead.add(piece)
        if said not in ("", NO_TEXT) or monotonic() > until:  # all of the grammar will be refused, by llguidance
            break
    return dead


def _pieces(definitions: Sequence[Definition], terminals: dict[str, Definition]) -> Iterator[str]:
    """What rules have of terminals."""
    for one in definitions:
        if is_rule(one):
            named = (word.text for word in one.body if word.kind == "text" or word.text in terminals)
            yield from (text for text in named if not text.startswith('"'))


def made_of(piece: str, terminals: dict[str, Definition]) -> list[str]:
    """The terminals that one is made of, itself among them."""
    left = [piece]
    needed: dict[str, None] = {}
    while left:
        name = left.pop()
        if name in terminals and name not in needed:
            needed[name] = None
            left += [word.text for word in terminals[name].body if word.kind == "name"]
    return list(needed)
