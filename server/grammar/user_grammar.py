"""Checks of a user's grammar in Lark before any work, beyond those of llguidance.

Owns the rewriting of the grammar: the schemas in it get the options that every other schema has, and tokens are named
by id. Runs in the server's worker thread. Text that the reader of grammars doesn't understand stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from llguidance import LLMatcher

from server.errors import InvalidValue
from server.grammar import build, greedy, lark, terminals
from server.grammar.checker import Prove
from server.grammar.lark import Definition, Word
from server.grammar.productive import endless_rule, is_rule
from server.grammar.walk import TOO_COMPLEX

_IDS = re.compile(r"<\[[\^\d,*-]*\]>")
MANY_WORDS = 200  # of a rule: llguidance's limit is reached with about 1,000 alternatives
MOST_WIDE = 20  # the longest rules are looked at
_BLANKS = ("whitespace_flexible", "whitespace_pattern")


@dataclass(frozen=True, slots=True)
class Tokens:
    """The model's tokens, as a grammar may name them: `id_of` a text, and how many ids may be drawn."""

    id_of: Callable[[str], int | None]
    count: int


def checked(grammar: str, param: str, tokens: Tokens, prove: Prove) -> str:
    """Return the grammar, ready for llguidance. Raises InvalidValue for one that no answer can follow to its end."""
    try:
        words = lark.words(grammar)
        _check_options(words, param)
        _check_rules(grammar, words, param, prove)
        grammar, endless = greedy.joined(grammar, prove)
        words = lark.words(grammar)
    except lark.Unread:
        return grammar
    if endless:
        raise _refusal(param, f"{endless[:200]} goes on through what follows it: no text could end")
    made = []
    place = 0
    for word, text in _replaced(words, param, tokens, prove):
        made += [grammar[place : word.start], text]
        place = word.end
    return "".join([*made, grammar[place:]])


def _check_options(words: Sequence[Word], param: str) -> None:
    for word in lark.every(words):
        if word.text == "%llguidance" and isinstance(word.value, dict) and word.value.get("allow_invalid_utf8"):
            raise _refusal(param, "an answer is text, so that allow_invalid_utf8 can't be honoured")


def _check_rules(grammar: str, words: Sequence[Word], param: str, prove: Prove) -> None:
    """Check the rules of a grammar, and those of the grammars in it."""
    try:
        definitions = lark.definitions(grammar, words)
    except lark.Unread:
        return
    barren = terminals.barren(words, definitions, prove)
    if name := endless_rule(definitions, barren):
        if name in barren:
            raise _refusal(param, f"no text matches the terminal {name[:200]!r}")
        raise _refusal(param, f"the rule {name!r} leads back to itself, or to what nothing matches: no text could end")
    _check_width(grammar, words, definitions, param, prove)
    for word in words:
        if word.kind == "grammar":
            _check_rules(grammar, word.words, param, prove)


def _check_width(
    grammar: str, words: Sequence[Word], definitions: Sequence[Definition], param: str, prove: Prove
) -> None:
    """Check long rules, each as the start of an answer: one that is too wide there is too wide everywhere."""
    until = monotonic() + build.LOOK_SECONDS
    long = sorted((one for one in definitions if is_rule(one) and len(one.body) > MANY_WORDS), key=_length)
    for one in long[:MOST_WIDE]:
        said = prove(LLMatcher.grammar_from_lark(_begun_with(grammar, words, one.name)))
        if said.startswith(TOO_COMPLEX):
            raise _refusal(param, f"the rule {one.name[:200]!r}: {said}")
        if monotonic() > until:
            return


def _length(definition: Definition) -> int:
    return -len(definition.body)


def _begun_with(grammar: str, words: Sequence[Word], name: str) -> str:
    """Return the grammar of these words with another rule as its start."""
    made = []
    place = words[0].start
    end = words[-1].end
    if name == "start":
        return grammar[place:end]
    for word in words:
        if word.kind == "name" and word.text.lstrip("?!") == "start":
            made += [grammar[place : word.end], "_of_all"]
            place = word.end
    return "".join([*made, grammar[place:end], f"\nstart: {name}"])


def _refusal(param: str, reason: str) -> InvalidValue:
    return InvalidValue(f"{param}: this can't be enforced: {reason}", param=param)


# ---------------------------------------------------------------- what is written anew
def _replaced(words: Sequence[Word], param: str, tokens: Tokens, prove: Prove) -> Iterator[tuple[Word, str]]:
    """Return the words that llguidance gets in another form, in their order."""
    for word in lark.every(words):
        if word.kind == "json" and isinstance(word.value, dict | bool):
            yield word, _schema(word.value, param, prove)
        elif word.kind == "token":
            yield word, _token(word.text, param, tokens)


def _schema(schema: Any, param: str, prove: Prove) -> str:
    try:
        build.check(schema, f"{param}: %json", prove)
    except InvalidValue as error:
        error.param = param
        raise
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    return build.json_rule(schema, _options(own))


def _options(asked: Any) -> dict[str, Any]:
    """Return the options of a schema: its author chooses the white space, but no keyword is ignored."""
    own = {}
    if isinstance(asked, dict):
        own = {key: value for key, value in asked.items() if value is not None}
    options = build.OPTIONS | own | {key: build.OPTIONS[key] for key in ("lenient", "coerce_one_of")}
    if not any(key in own for key in _BLANKS):
        return options
    return {key: value for key, value in options.items() if key in own or key != "whitespace_pattern"}


def _token(text: str, param: str, tokens: Tokens) -> str:
    """Return a token by its id. Raises InvalidValue for one that the model can't draw."""
    if _IDS.fullmatch(text):
        beyond = [number for number in re.findall(r"\d+", text) if int(number[:20]) >= tokens.count]
        if beyond:
            raise _refusal(param, f"{text[:200]} names the id {beyond[0][:20]}; this model has {tokens.count}")
        return text
    token = tokens.id_of(text)
    if token is None or token >= tokens.count:
        raise _refusal(param, f"this model has no token {text[:200]!r}")
    return f"<[{token}]>"
