"""Terminals of a user's grammar that go on through whatever follows them.

llguidance's lexer takes the longest text for a terminal, so that `/.*/ "b"` never comes to its "b", and its answer to
no end. Owns the search for such pairs: a terminal that matches its own text with the next one's behind it. Two
terminals become one, which may end there; where a rule follows, a terminal that repeats short ones becomes a rule. Runs
in the server's worker thread. What isn't tried in time is taken to end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from time import monotonic

from llguidance import LLMatcher

from server.grammar import lark
from server.grammar.checker import NO_TEXT, Prove
from server.grammar.lark import Definition, Word
from server.grammar.productive import is_rule
from server.grammar.terminals import made_of

MOST_LOOKS = 100
LOOK_SECONDS = 1.0
MOST_STEPS = 10  # from a name to what it stands for
MOST_ROUNDS = 10  # each joins two terminals of a row
NAME = "JOINED_TERMINAL"
_OF_JSON = {"json": [r'/[\[{"0-9tfn-]/']}  # what its values begin with
_UNBOUNDED = re.compile(r"[*+]|\{\d*,\}")
_CHARACTERS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]")
_EMPTY = ('""', '""i')
_OTHER_WAYS = ("|", "(", "[")
_AT_LEAST_ONCE = re.compile(r"\+|\{\s*[1-9]\d*\s*(?:,[^}]*)?\}|~\s*[1-9].*")


@dataclass(frozen=True, slots=True)
class Pair:
    """A terminal and what follows it: `words` of one rule, the same `definition`.

    Attributes:
        terminal: the first of them, by name or as it is written.
        followers: terminals of which one has to come behind it.
        joined: both as one terminal; empty where a rule follows.
        loose: where the terminal is named, if it may become a rule.
    """

    definition: Definition
    words: Sequence[Word]
    terminal: str
    followers: Sequence[str]
    joined: str
    loose: Sequence[Word] = ()


class GreedyTerminals:
    """The definitions of one grammar, and which of its terminals never come to an end."""

    def __init__(
        self, found: Sequence[Word], definitions: Sequence[Definition], bases: dict[str, str], prove: Prove
    ) -> None:
        """`bases`: of joined terminals, the first that they are made of, with whose texts theirs begin."""
        self._head = [word.text for word in found if word.text.startswith("%import")]
        self._ignores = any(word.text.startswith("%ignore") for word in found)
        self._rules = {one.name: one for one in definitions if is_rule(one)}
        self._terminals = {one.name: one for one in definitions if one.is_terminal and not one.attributes}
        self._found = found
        self._bases = bases
        self._prove = prove

    def pairs(self) -> list[Pair]:
        """Those that don't end. With `%ignore` something else may follow each terminal, so that it may end there."""
        if self._ignores:
            return []
        return [
            pair for pair in islice(self._candidates(monotonic() + LOOK_SECONDS), MOST_LOOKS) if self._is_dead(pair)
        ]

    def _candidates(self, until: float) -> Iterator[Pair]:
        for rule in self._rules.values():
            body = [word for word in rule.body if word.kind != "line"]
            for place, (first, second) in enumerate(pairwise(body)):
                terminal = self._terminal(first)
                if terminal and monotonic() < until and self._is_unbounded(terminal):
                    yield from self._pair(rule, [first, second, *body[place + 2 : place + 3]], terminal)

    def _pair(self, rule: Definition, words: list[Word], terminal: str) -> Iterator[Pair]:
        """With the word behind, which may say how often the second one comes."""
        if words[2:] and words[2].kind != "often":
            words.pop()
        if not all(_AT_LEAST_ONCE.fullmatch(word.text) for word in words[2:]):
            return
        if follower := self._terminal(words[1]):
            often = "".join(word.text for word in words[2:])
            yield Pair(rule, words, terminal, [follower], f"{terminal} {follower}{often}")
        elif firsts := _OF_JSON.get(words[1].kind) or self._firsts(words[1].text, 0):
            loose = self._loose(terminal)
            if loose or not any(word.text in _OTHER_WAYS for word in rule.body):
                yield Pair(rule, words, terminal, firsts, "", loose)

    def _loose(self, terminal: str) -> list[Word]:
        """Where a terminal is named that is made of short ones in the way of a rule; none where it can't be a rule."""
        definition = self._terminals.get(terminal)
        if definition is None or any(word.text in ("&", "~") for word in definition.body):
            return []
        if any(word.text.startswith("/") and _is_long(word.text) for word in definition.body):
            return []
        if any(word.text == terminal for other in self._terminals.values() for word in other.body):
            return []
        return [word for word in self._found if word.text == terminal]

    def _terminal(self, word: Word) -> str:
        """The terminal that a word is or stands for; empty if it is something else."""
        for _ in range(MOST_STEPS):
            if word.kind == "text" or word.text in self._terminals:
                return word.text
            rule = self._rules.get(word.text)
            if word.kind != "name" or rule is None or len(rule.body) != 1 or rule.attributes:
                return ""
            word = rule.body[0]
        return ""

    def _firsts(self, name: str, steps: int) -> list[str]:
        """The texts that a rule begins with; none where they aren't plain."""
        rule = self._rules.get(name)
        if rule is None or steps > MOST_STEPS:
            return []
        firsts: list[str] = []
        begins = True
        for word, behind in pairwise([*(word for word in rule.body if word.kind != "line"), None]):
            assert word is not None
            if begins:
                inner = _OF_JSON.get(word.kind) or self._plain(word, steps)
                if not inner or (behind is not None and behind.kind in ("often", "range")) or inner[0] in _EMPTY:
                    return []
                firsts += inner
            begins = word.text == "|"
        return firsts

    def _plain(self, word: Word, steps: int) -> list[str]:
        if word.text.startswith('"'):
            return [word.text]
        return self._firsts(word.text, steps + 1)

    def _is_unbounded(self, terminal: str) -> bool:
        sources = [self._terminals[name].source for name in made_of(terminal, self._terminals)]
        return not terminal.startswith('"') and any(_is_long(one) for one in (terminal, *sources))

    def _is_dead(self, pair: Pair) -> bool:
        return all(self._goes_on(pair.terminal, one) for one in pair.followers)

    def _goes_on(self, terminal: str, follower: str) -> bool:
        """Whether the terminal takes each text of the other for more of its own."""
        base = self._bases.get(terminal, terminal)
        names = dict.fromkeys(name for one in (terminal, base, follower) for name in made_of(one, self._terminals))
        sources = [self._terminals[name].source for name in names]
        behind = f"{NAME}: (({terminal}) ({follower})) & ~({base})"
        question = "\n".join([*self._head, f"start: {NAME}", behind, *sources])
        return self._prove(LLMatcher.grammar_from_lark(question)) == NO_TEXT


def _is_long(source: str) -> bool:
    """Whether a text of any length may follow what is written; signs in a class or behind a backslash are none."""
    return bool(_UNBOUNDED.search(_CHARACTERS.sub("", source)))


def joined(grammar: str, prove: Prove) -> tuple[str, str]:
    """The grammar with its pairs mended, and what a terminal is called for which that can't be done: empty if none is.

    Raises lark.Unread.
    """
    bases: dict[str, str] = {}
    until = monotonic() + LOOK_SECONDS
    for _ in range(MOST_ROUNDS):
        if monotonic() > until:
            break
        dead = [pair for found in _scopes(lark.words(grammar)) for pair in _pairs(grammar, found, bases, prove)]
        for pair in dead:
            if not (pair.joined or pair.loose):
                return grammar, bases.get(pair.terminal, pair.terminal)
        if not dead:
            break
        grammar = _mended(grammar, dead, bases)
    return grammar, ""


def _scopes(found: Sequence[Word]) -> Iterator[Sequence[Word]]:
    """The words of a grammar, and of those in it."""
    yield found
    for word in found:
        if word.kind == "grammar":
            yield from _scopes(word.words)


def _pairs(grammar: str, found: Sequence[Word], bases: dict[str, str], prove: Prove) -> list[Pair]:
    try:
        definitions = lark.definitions(grammar, found)
    except lark.Unread:
        return []
    return GreedyTerminals(found, definitions, bases, prove).pairs()


def _mended(grammar: str, dead: Sequence[Pair], bases: dict[str, str]) -> str:
    if loose := {word.start: word for pair in dead for word in pair.loose}:
        return _edited(grammar, [(one.start, one.end, f"{one.text.lower()}_in_parts") for one in loose.values()])
    edits: list[tuple[int, int, str]] = []
    for pair in dead:
        if edits and pair.words[0].start < edits[-2][1]:  # the next round has the second of two that overlap
            continue
        name = f"{NAME}_{len(bases)}"
        bases[name] = bases.get(pair.terminal, pair.terminal)
        end = pair.definition.body[-1].end
        edits.append((pair.words[0].start, pair.words[-1].end, f"{name} "))
        edits.append((end, end, f"\n{name}: {pair.joined}\n"))
    return _edited(grammar, edits)


def _edited(grammar: str, edits: list[tuple[int, int, str]]) -> str:
    parts = []
    place = 0
    for start, end, text in sorted(edits):
        parts += [grammar[place:start], text]
        place = end
    return "".join([*parts, grammar[place:]])
