"""Builds a grammar of the form that a request asks of its answer.

Owns the llguidance grammars of JSON answers and forced tool calls, and the search for the place in a schema that is at
fault. Runs in the server's worker thread; pure. Checks that a grammar can be built within bounds, and never computes a
mask: the engine does.

A grammar covers the whole answer. Where the model may reason first, the reasoning is free and ends with its tag.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from llguidance import LLMatcher

from server.errors import InvalidValue, UnsupportedParameter
from server.grammar import bounds, checker, endless, wide
from server.grammar.checker import Prove
from server.grammar.llguidance_limits import hazard
from server.grammar.walk import TOO_COMPLEX
from server.ipc.sequence import Grammar

# One space, or a new line and its indentation: free enough for any style, and no model can fill its answer with it.
WHITESPACE = r"( |\n[ ]{0,40})"
OPTIONS = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
# Keywords that llguidance doesn't know are passed over, and of `oneOf` several may hold.
LENIENT_OPTIONS = OPTIONS | {"lenient": True, "coerce_one_of": True}
# Any tokens that spell a text may be drawn. Else llguidance would choose the ones that the tokenizer makes of it.
NO_FORCING = '%llguidance {"no_forcing": true}'
MAX_CALLS = 16
MAX_LOOKS = 200  # at parts of a schema, in search of the one at fault
LOOK_SECONDS = 1.0  # of that search, which ends with the look under way: one may take as long as that at the whole
ANY_OBJECT: dict[str, Any] = {"type": "object"}
log = logging.getLogger("marathon.api")
Tag = tuple[str | int, ...]  # texts in ordinary tokens, and the ids of control tokens


@dataclass(frozen=True, slots=True)
class ReasoningRule:
    """Whether the answer may begin with reasoning, or has to.

    Attributes:
        opened: the prompt ends within reasoning, so that the answer has to close it.
        wanted: reasoning may have text; without that an opened one closes at once, and no other begins.
        behind: the text between reasoning and answer; None: up to two line breaks.
    """

    start: Tag
    end: Tag
    opened: bool
    wanted: bool = True
    behind: Tag = ()


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How the model writes its calls: `opening`, then each call with `joint` between two, then `closing`. A call is
    `before`, its name, `after`, its arguments as JSON, `tail`.

    Attributes:
        joint: None where an answer has one call at most.
        quotes: the name stands in JSON's quotation marks.
    """

    before: Tag
    after: Tag
    tail: Tag
    joint: Tag | None
    opening: Tag = ()
    closing: Tag = ()
    quotes: bool = False


@dataclass(frozen=True, slots=True)
class FreeCalls:
    """Calls in a format that has no grammar here: any text between their tags."""

    start: Tag
    end: Tag


@dataclass(frozen=True, slots=True)
class FunctionRule:
    """A function that an answer may call, and what its arguments follow.

    Attributes:
        parameters: the schema of its arguments.
        param: where that stands in the request.
        strict: the schema is refused unless the arguments can follow all of it; else they follow what they can.
    """

    name: str
    parameters: dict[str, Any] | None
    param: str
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls that the answer may consist of.

    Attributes:
        several: more than one call is allowed.
    """

    style: CallStyle
    functions: Sequence[FunctionRule]
    several: bool


def answer(
    schema: Any = None,
    *,
    rule: str = "",
    param: str = "",
    lead: Tag = (),
    calls: Calls | FreeCalls | None = None,
    reasoning: ReasoningRule | None = None,
    prove: Prove = checker.fault,
) -> Grammar:
    """Return the grammar of an answer that is JSON of `schema`, or follows `rule`, behind the tag `lead`, or is calls;
    of those given, any may come. `prove` returns llguidance's objection to a grammar, or an empty text.

    Raises InvalidValue that names the place in the request at fault.
    """
    bodies = []
    rules = []
    if schema is not None:
        check(schema, param, prove)
        rule = json_rule(schema)
    elif rule:
        _refuse(_fault(f"start: {rule}", prove), param)
    if rule:
        bodies.append("answer")
        rules += [f"answer: {symbols(lead)} form", f"form: {rule}"]
    if calls is not None:
        bodies.append("calls")
        rules += _free_rules("calls", calls.start, calls.end) if isinstance(calls, FreeCalls) else _calls(calls, prove)
    start = f"start: {_thought(reasoning)}({' | '.join(bodies)})"
    lark = "\n".join([NO_FORCING, start, *rules, *_thought_rules(reasoning)])
    _refuse(_fault(lark, prove), param or "tools")
    return Grammar(LLMatcher.grammar_from_lark(lark))


def _refuse(fault: str, param: str) -> None:
    if fault:
        raise InvalidValue(f"{param}: this can't be enforced: {fault}", param=param)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def symbols(tag: Tag) -> str:
    """Return what a grammar writes for a tag."""
    return " ".join(f"<[{part}]>" if isinstance(part, int) else quoted(part) for part in tag)


def json_rule(schema: Any, options: dict[str, Any] | None = None) -> str:
    """Return a schema as a rule of a grammar. `options` replace its own `x-guidance`, which can't loosen them."""
    inner = bounds.understood(schema)
    if isinstance(inner, bool):
        inner = {} if inner else {"anyOf": []}
    return "%json " + json.dumps({**inner, "x-guidance": options or OPTIONS}, ensure_ascii=False)


def _calls(calls: Calls, prove: Prove) -> Iterator[str]:
    style = calls.style
    several = calls.several and style.joint is not None
    more = ""
    if several:
        more = f" ({symbols(style.joint or ())} call){{0,{MAX_CALLS - 1}}}"
    yield f"calls: {symbols(style.opening)} call{more} {symbols(style.closing)}"
    yield f"call: {' | '.join(f'f{i}' for i in range(len(calls.functions)))}"
    for index, function in enumerate(calls.functions):
        name = json.dumps(function.name) if style.quotes else function.name
        head = (*style.before, name, *style.after)
        yield f"f{index}: {symbols(head)} a{index} {symbols(style.tail)}"
        yield f"a{index}: {_arguments_rule(function, prove)}"


def _arguments_rule(function: FunctionRule, prove: Prove) -> str:
    options = _enforced(ANY_OBJECT | (function.parameters or {}), function.param, prove, strict=function.strict)
    return json_rule(_arguments(function.parameters or {}, function.param), options)


def _arguments(parameters: dict[str, Any], param: str) -> dict[str, Any]:
    """Return the schema of a call's arguments, which are an object whatever else `parameters` admit."""
    kinds = parameters.get("type", "object")
    if kinds == "object" or (isinstance(kinds, list) and "object" in kinds):
        return parameters | ANY_OBJECT
    raise InvalidValue(f"{param}.type: a call's arguments are an object, not {kinds!r}", param=f"{param}.type")


def _thought(reasoning: ReasoningRule | None) -> str:
    if reasoning is None or not (reasoning.opened or reasoning.wanted):
        return ""
    if reasoning.opened:
        return "thought "
    return "(opening thought)? "


def _thought_rules(reasoning: ReasoningRule | None) -> Iterator[str]:
    if reasoning is None or not (reasoning.opened or reasoning.wanted):
        return
    if not reasoning.opened:
        yield f"opening: {symbols(reasoning.start)}"
    yield f"thought: musing {symbols(reasoning.behind) or 'gap'}"
    if reasoning.wanted:
        yield from _free_rules("musing", (), reasoning.end)
    else:
        yield f"musing: {symbols(reasoning.end)}"
    if not reasoning.behind:
        yield r"gap: /\n{0,2}/"


def _free_rules(name: str, start: Tag, end: Tag) -> Iterator[str]:
    """Return rules for any text of ordinary tokens between two tags; an empty `end` is the end of the answer."""
    if end and isinstance(end[0], str):
        yield f"{name}: {symbols(start)} {name}_text {symbols(end[1:])}"
        yield f"{name}_text[suffix={quoted(end[0])}]: /(?s:.*)/"
    else:
        yield f"{name}: {symbols(start)} {name}_text {symbols(end)}"
        yield f"{name}_text: /(?s:.*)/"


# ---------------------------------------------------------------- faults
def check(schema: Any, param: str, prove: Prove = checker.fault) -> None:
    """Check that a schema can be enforced. Raises InvalidValue that names the innermost place at fault."""
    if schema is False:
        raise InvalidValue(f"{param}: no answer could follow the schema `false`", param=param)
    _enforced(schema, param, prove)


def _enforced(schema: Any, param: str, prove: Prove, *, strict: bool = True) -> dict[str, Any]:
    """Return the options with which a schema is enforced: all of it if `strict`, else as much as can be."""
    _refuse_at(*endless.fault(schema, param))
    fault = _schema_fault(schema, prove)
    options = OPTIONS
    if fault and not strict and not _schema_fault(schema, prove, LENIENT_OPTIONS):
        log.info("%.200s: as much as can be enforced of it is followed: %s", param, fault)
        fault = ""
        options = LENIENT_OPTIONS
    _refuse_at(*_first_fault(schema, param, prove, fault))
    return options


def _refuse_at(place: str, fault: str) -> None:
    if fault:
        raise InvalidValue(f"{place}: this schema can't be enforced: {fault}", param=place)


def _first_fault(schema: Any, param: str, prove: Prove, fault: str) -> tuple[str, str]:
    """Return (place, reason) of `fault`, which is llguidance's objection to a schema; the reason is empty if it has
    none."""
    if not fault or fault.startswith(TOO_COMPLEX):
        return _widest_fault(schema, param, prove) or (param, fault)
    return _innermost(schema, param, fault, prove)


def _widest_fault(schema: Any, param: str, prove: Prove) -> tuple[str, str] | None:
    """Return (place, reason) of a part that is too wide; None if there is none, or none was found in time."""
    if not isinstance(schema, dict):
        return None
    until = monotonic() + LOOK_SECONDS
    for place, part in wide.widest(schema, endless.reachable(schema, param).values()):
        if monotonic() > until:
            break
        fault = _schema_fault(part, prove)
        if fault.startswith(TOO_COMPLEX):
            return place, fault
    return None


def _schema_fault(schema: Any, prove: Prove, options: dict[str, Any] | None = None) -> str:
    try:
        return _fault(f"start: {json_rule(schema, options)}", prove)
    except RecursionError:
        return "it is nested too deeply"


def _fault(lark: str, prove: Prove) -> str:
    """Return what is wrong with a grammar, in one line; empty if nothing is."""
    if dangerous := hazard(lark):
        return dangerous
    first = prove(LLMatcher.grammar_from_lark(lark)).removeprefix("at 1(8): failed to compile JSON schema: ")
    return " ".join(first.partition("\n   1 |")[0].split())[:500]


def _innermost(schema: Any, place: str, fault: str, prove: Prove) -> tuple[str, str]:
    """Return the innermost part that is at fault by itself and is found in time, as (place, reason)."""
    until = monotonic() + LOOK_SECONDS
    looks = MAX_LOOKS
    shared = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    found = True
    while found and looks > 0:
        found = False
        for name, part in parts(schema):
            looks -= 1
            if looks < 0 or monotonic() > until:
                return place, fault
            if inner := _schema_fault(shared | part, prove):
                schema = part
                place = place + name
                fault = inner
                found = True
                break
    return place, fault


def parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas directly inside a schema, with their paths from it."""
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
    if not isinstance(value, dict):
        return ()
    return ((f".{key}.{name}", part) for name, part in value.items() if isinstance(part, dict))


def unsupported(format_name: str, param: str) -> UnsupportedParameter:
    """Return the error for a model whose calls aren't JSON."""
    return UnsupportedParameter(
        f"{param}: a call can't be forced with this model, whose tool format is {format_name!r}", param=param
    )
