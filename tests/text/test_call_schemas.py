"""Calls of tools with any schema, in every format: the name and the arguments are those that were meant."""

from __future__ import annotations

import importlib
import itertools
import json
from typing import Any

import pytest
from call_writers import AMBIGUOUS, WRITERS, strings
from calling import function
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from spelling import Spelled, answer, cuts, state, tool_format

from server.text.detokenizer import Answer

Schema = dict[str, Any]
Drawn = tuple[Schema, Any]  # a schema, and a value that it admits

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)
TAGS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "</parameter>", "<arg_key>", "</arg_value>"),
    *("</param>", "</invoke>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call_end|>", "call:f{", "<tool_call|>", "]]>"),
    *("<|close|>argument<|sep|>", "</longcat_arg_value>", "</longcat_tool_call>", "<end_function_call>"),
    *("\n", '"', "'", "\\", "\\n", "{", "}", "[", ")", ",", ": ", "null", "5", "true", "é🎉", "\u2028", " "),
]
TEXTS = st.lists(st.sampled_from(TAGS) | st.text(max_size=3), max_size=4).map("".join)
BORDERS = st.sampled_from([0, -1, 2**31, 2**53 + 1, -(2**63), 2**64, 10**30])
FLOATS = st.sampled_from([0.5, -1e-7, 1.5e300, 5e-324, 0.1]) | st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.from_regex(r"\A[a-z_][a-zA-Z0-9_]{0,8}\Z").filter(lambda name: name not in ("true", "false", "null"))
KEYS = NAMES | st.sampled_from(
    ["größe", "名前", "name", "type", "id", "arguments", "text", "a-b", "a.b", "$ref", "@type"]
)
FUNCTIONS = NAMES | st.sampled_from(
    ["get-time", "mcp__a-b__c", "v1.files.read", "a.b-c_d", "f5", "größe", "名前", "5f", "ns::f", "a/b"]
)


def of(schema: Schema, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Drawn]:
    return values.map(lambda value: (schema, value))


@st.composite
def choices(draw: st.DrawFn) -> Drawn:
    """An enum, with the types of its members or none."""
    listed = draw(st.lists(TEXTS, min_size=1, max_size=3, unique=True))
    listed += draw(st.lists(BORDERS | st.booleans() | st.none(), max_size=2))
    listed = [one for one in listed if isinstance(one, str) or json.dumps(one) not in listed]
    return {"enum": listed}, draw(st.sampled_from(listed))


SCALARS = st.one_of(
    of({"type": "string"}, TEXTS),
    of({"type": "integer"}, BORDERS | st.integers()),
    of({"type": "number"}, BORDERS | FLOATS),
    of({"type": "boolean"}, st.booleans()),
    of({"type": "null"}, st.none()),
    choices(),
)


def objects(inner: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
    return st.dictionaries(KEYS, inner, max_size=3).map(
        lambda members: (
            {"type": "object", "properties": {key: schema for key, (schema, _) in members.items()}},
            {key: value for key, (_, value) in members.items()},
        )
    )


def arrays(inner: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
    return st.lists(inner, max_size=3).map(
        lambda items: (
            {"type": "array", "items": {"anyOf": [schema for schema, _ in items]} if items else {}},
            [value for _, value in items],
        )
    )


def unions(one: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
    """Without a string: in a format of texts, what may be one is one."""
    others = st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "integer"}])
    single = one.filter(lambda drawn: drawn[0].get("type") in ("integer", "boolean", "null", "array", "object"))
    return st.tuples(single, others, st.sampled_from(["anyOf", "oneOf"])).map(
        lambda made: ({made[2]: [made[0][0], made[1]]}, made[0][1])
    )


NESTED = st.recursive(SCALARS, lambda inner: objects(inner) | arrays(inner), max_leaves=5)
VALUES = NESTED | unions(NESTED)


def read_answer(parser: str, tools: list[dict[str, Any]], parts: list[str] | list[bytes]) -> Answer:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    tokenizer = Spelled(None, tool_format(parser, module.tool_call_start, module.tool_call_end))
    text = state(tokenizer, tools=tools)
    pieces = itertools.chain(*(text.feed([token]) for token in tokenizer.tokens(parts)))
    return answer([*pieces, *text.finish(cut=False)])


KEYS_OF_SPELLED = ["a b", "a/b", "x y z", "it's", "a&b", "größe (cm)"]


@pytest.mark.parametrize("parser", ["gemma4", "function_gemma", "pythonic"])
@pytest.mark.parametrize("key", [*KEYS_OF_SPELLED, "a:b", "x[0]", "a=b"])
def test_a_name_that_a_tool_declares_may_be_none_of_a_programming_language(parser: str, key: str) -> None:
    tools = [function("get time", {"type": "object", "properties": {key: {"type": "string"}, "o": {}}})]
    inner = {KEYS_OF_SPELLED[0]: 1} | {one: {"x": "y"} for one in KEYS_OF_SPELLED if one == key}
    arguments = {key: "x", "o": inner}
    text = WRITERS[parser]([("get time", arguments)] * 2)
    for parts in ([text], list(text)):
        found = read_answer(parser, tools, parts)
        assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [("get time", arguments)] * 2
        assert found.content == ""


def exactly(value: Any) -> str:
    """In which true isn't 1 and 1 isn't 1.0."""
    return json.dumps(value, sort_keys=True)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(WRITERS)), FUNCTIONS, st.dictionaries(KEYS, VALUES, max_size=3), SIZES)
def test_a_call_of_any_schema_is_what_the_model_meant(
    parser: str, name: str, members: dict[str, Drawn], sizes: list[int]
) -> None:
    schema = {"type": "object", "properties": {key: one for key, (one, _) in members.items()}}
    arguments = {key: value for key, (_, value) in members.items()}
    ambiguous = AMBIGUOUS.get(parser, lambda _: False)
    assume(not any("\r" in text or ambiguous(text) for text in strings(arguments)))
    text = WRITERS[parser]([(name, arguments)])
    tools = [function(name, schema)]
    plain = read_answer(parser, tools, [text])
    assert [(call.name, exactly(json.loads(call.arguments))) for call in plain.calls] == [(name, exactly(arguments))]
    assert plain.content == ""
    assert read_answer(parser, tools, list(cuts(text.encode(), itertools.cycle(sizes)))) == plain
