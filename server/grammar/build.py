"""Wishes about the answer's form → grammars.

Owns the llguidance grammars of JSON answers and forced tool calls, and the search for the place in a schema that is at
fault. Runs in the server's worker thread; pure. It only checks that a grammar can be built, within bounds: the masks
are the engine's work.

A grammar covers the whole answer. Where the model may reason first, the reasoning is free and ends with its tag.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from server.errors import InvalidValue, UnsupportedParameter
from server.grammar import checker
from server.grammar.checker import Prove
from server.grammar.llguidance_limits import hazard
from server.ipc.messages import Grammar

# One space, or a new line and its indentation: free enough for any style, and no model can fill its answer with it.
WHITESPACE = r"( |\n[ ]{0,40})"
OPTIONS = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
MAX_CALLS = 16
MAX_LOOKS = 200  # at parts of a schema, in search of the one at fault
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag of the model's format: its text, and its id if it is one special token."""

    text: str
    special: int | None = None

    @property
    def symbol(self) -> str:
        """How a grammar refers to it."""
        return f"<[{self.special}]>" if self.special is not None else quoted(self.text)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The tags around reasoning, and whether the prompt has already opened it."""

    start: Tag
    end: Tag
    opened: bool


@dataclass(frozen=True, slots=True)
class Calls:
    """Which calls the answer may consist of.

    Attributes:
        functions: (name, parameters, where the parameters stand in the request).
        several: more than one call is allowed.
    """

    start: Tag
    end: Tag
    functions: Sequence[tuple[str, dict[str, Any] | None, str]]
    several: bool


def answer(
    schema: Any = None,
    *,
    rule: str = "",
    param: str = "",
    calls: Calls | None = None,
    reasoning: Reasoning | None = None,
    prove: Prove = checker.fault,
) -> Grammar:
    """The grammar of an answer that is JSON of `schema`, or follows `rule`, or is calls, whichever are given. `prove`
    says what llguidance has against a grammar.

    Raises InvalidValue that names the place in the request at fault.
    """
    bodies, rules = [], []
    if schema is not None:
        check(schema, param, prove)
        rule = json_rule(schema)
    if rule:
        bodies.append("answer")
        rules.append(f"answer: {rule}")
    if calls is not None:
        bodies.append("calls")
        rules += _call_rules(calls, prove)
    lark = "\n".join([f"start: {_thought(reasoning)}({' | '.join(bodies)})", *rules, *_thought_rules(reasoning)])
    if fault := _fault(lark, prove):
        raise InvalidValue(f"{param or 'tools'}: this can't be enforced: {fault}", param=param or "tools")
    return Grammar(LLMatcher.grammar_from_lark(lark))


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Any) -> str:
    """A schema inside a grammar. A schema's own `x-guidance` can't loosen our options."""
    inner = {} if schema is True else schema
    return "%json " + json.dumps({**inner, "x-guidance": OPTIONS}, ensure_ascii=False)


def _call_rules(calls: Calls, prove: Prove) -> Iterator[str]:
    more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if calls.several else ""
    yield f"calls: call{more}"
    yield f'call: {calls.start.symbol} "\\n" ({" | ".join(f"f{i}" for i in range(len(calls.functions)))}) "\\n" ' + (
        calls.end.symbol
    )
    for index, (name, parameters, param) in enumerate(calls.functions):
        schema = ANY_OBJECT | (parameters or {})
        check(schema, param, prove)
        head = quoted(f'{{"name": {json.dumps(name)}, "arguments": ')
        yield f'f{index}: {head} a{index} "}}"'
        yield f"a{index}: {json_rule(schema)}"


def _thought(reasoning: Reasoning | None) -> str:
    if reasoning is None:
        return ""
    return "thought " if reasoning.opened else "(opening thought)? "


def _thought_rules(reasoning: Reasoning | None) -> Iterator[str]:
    if reasoning is None:
        return
    if not reasoning.opened:
        yield f"opening: {reasoning.start.symbol}"
    yield "thought: musing gap"
    if reasoning.end.special is not None:
        yield f"musing: free {reasoning.end.symbol}"
        yield "free: /(?s:.*)/"
    else:
        yield f"musing[suffix={reasoning.end.symbol}]: /(?s:.*)/"
    yield r"gap: /\n{0,2}/"


# ---------------------------------------------------------------- faults
def check(schema: Any, param: str, prove: Prove = checker.fault) -> None:
    """Raises InvalidValue, naming the innermost place at fault, when a schema can't be enforced."""
    if schema is False:
        raise InvalidValue(f"{param}: no answer could follow the schema `false`", param=param)
    try:
        fault = _fault(f"start: {json_rule(schema)}", prove)
    except RecursionError:
        fault = "it is nested too deeply"
    if fault:
        place, inner = _innermost(schema, param, fault, prove)
        raise InvalidValue(f"{place}: this schema can't be enforced: {inner}", param=place)


def _fault(lark: str, prove: Prove) -> str:
    """What is wrong with a grammar, in one line; empty if nothing is."""
    if dangerous := hazard(lark):
        return dangerous
    first = prove(LLMatcher.grammar_from_lark(lark)).removeprefix("at 1(8): failed to compile JSON schema: ")
    return " ".join(first.partition("\n   1 |")[0].split())[:500]


def _innermost(schema: Any, place: str, fault: str, prove: Prove) -> tuple[str, str]:
    """Goes down as long as a part is at fault by itself."""
    looks = MAX_LOOKS
    shared = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    found = True
    while found and looks > 0:
        found = False
        for name, part in parts(schema):
            looks -= 1
            if looks < 0:
                break
            if inner := _fault(f"start: {json_rule(shared | part)}", prove):
                schema, place, fault, found = part, place + name, inner, True
                break
    return place, fault


def parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly inside a schema, with their paths from it."""
    if not isinstance(schema, dict):
        return
    for key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
        yield from _objects(key, schema.get(key))
    for key in ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"):
        if isinstance(part := schema.get(key), dict):
            yield f".{key}", part
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(items := schema.get(key), list):
            yield from ((f".{key}[{i}]", item) for i, item in enumerate(items) if isinstance(item, dict))


def _objects(key: str, value: Any) -> Iterable[tuple[str, dict[str, Any]]]:
    members = value.items() if isinstance(value, dict) else ()
    return ((f".{key}.{name}", part) for name, part in members if isinstance(part, dict))


def unsupported(format_name: str, param: str) -> UnsupportedParameter:
    """For models whose calls aren't JSON."""
    return UnsupportedParameter(
        f"{param}: a call can't be forced with this model, whose tool format is {format_name!r}", param=param
    )
