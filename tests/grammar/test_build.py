"""Grammars of JSON answers and forced calls, tried with llguidance itself."""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from serving import TOKENIZER

from server.api.input import tools
from server.api.input.schema import ChatRequest
from server.errors import InvalidValue, UnsupportedParameter
from server.grammar import build
from server.grammar.build import Calls, CallStyle, FunctionRule, ReasoningRule
from server.ipc.sequence import Grammar
from server.text.tokenizer import ChatPrompt, Tokenizer
from server.text.tokens.control import Tags

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STYLE = CallStyle(('<tool_call>\n{"name": ',), (', "arguments": ',), ("}\n</tool_call>",), joint=("\n",), quotes=True)
CALLS = Calls(
    STYLE,
    [
        FunctionRule("get_time", CITY, "tools[0].function.parameters"),
        FunctionRule("no-args", None, "tools[1].function.parameters"),
    ],
    several=True,
)
THINK = ReasoningRule(("<think>",), ("</think>",), opened=False)
THINKING = ReasoningRule(("<think>",), ("</think>",), opened=True)


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer((TOKENIZER / "tokenizer.json").read_text())


def accepts(made: Grammar, text: str) -> bool:
    """The whole of `text` is an answer."""
    matcher = LLMatcher(tokenizer(), made.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer().tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_an_answer_follows_its_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}
    made = build.answer(schema | {"$defs": {"n": {"enum": [1, "é"]}}, "additionalProperties": False})
    for good in ('{"a": 1}', '{"a":1}', '{\n  "a": "é"\n}'):
        assert accepts(made, good)
    for bad in ('{"a": 2}', "{}", '{"a": 1, "b": 2}', 'x{"a": 1}', '{"a": 1}x'):
        assert not accepts(made, bad)


def test_white_space_cannot_go_on_for_ever() -> None:
    made = build.answer(build.ANY_OBJECT)
    assert accepts(made, '{"a": [1, {"b": null}]}')
    assert not accepts(made, '{"a":  1}')
    assert not accepts(made, '{"a":\n\n1}')
    loose = build.ANY_OBJECT | {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": None}}
    assert not accepts(build.answer(loose), '{"a":  1}'), "a client's own options don't count"


def test_a_forced_answer_is_calls_and_nothing_else() -> None:
    made = build.answer(calls=CALLS)
    assert accepts(made, call("get_time", city="Oslo"))
    assert accepts(made, call("no-args") + "\n" + call("get_time", city="Oslo"))
    for bad in ("hello", '{"a": 1}', call("get_time"), call("get_time", city=5), call("other"), call("no-args")[:-1]):
        assert not accepts(made, bad)
    single = build.answer(calls=replace(CALLS, several=False))
    assert not accepts(single, call("no-args") + "\n" + call("no-args"))


@pytest.mark.parametrize(
    "parameters",
    [{"type": ["object", "null"]}, {"type": ["null", "object"], "properties": {"a": {"type": "null"}}}, {}, None],
    ids=str,
)
def test_the_arguments_of_a_forced_call_are_an_object(parameters: dict[str, Any] | None) -> None:
    made = build.answer(calls=replace(CALLS, functions=[FunctionRule("f", parameters, "tools[0]")], several=False))
    assert accepts(made, call("f", a=None))
    assert not accepts(made, call("f").replace("{}", "null"))


@pytest.mark.parametrize("kind", ["string", "null", ["string", "null"]])
def test_a_forced_call_whose_arguments_are_no_object_is_refused(kind: Any) -> None:
    with pytest.raises(InvalidValue, match="arguments are an object") as caught:
        build.answer(
            calls=replace(CALLS, functions=[FunctionRule("f", {"type": kind}, "tools[0].function.parameters")])
        )
    assert caught.value.param == "tools[0].function.parameters.type"


def test_json_or_calls_when_both_are_allowed() -> None:
    made = build.answer(CITY, param="p", calls=CALLS)
    assert accepts(made, '{"city": "Oslo"}')
    assert accepts(made, call("no-args"))
    assert not accepts(made, "hello")


def test_reasoning_stays_free_before_the_answer() -> None:
    may, must = build.answer(CITY, reasoning=THINK), build.answer(CITY, reasoning=THINKING)
    thought = 'hm, {"city": 5} < perhaps </ think'
    assert accepts(may, '{"city": "Oslo"}')
    assert accepts(may, f'<think>{thought}</think>\n\n{{"city": "Oslo"}}')
    assert not accepts(may, thought)
    assert accepts(must, f'{thought}</think>{{"city": "Oslo"}}')
    assert not accepts(must, '{"city": "Oslo"}')


def test_tags_that_are_special_tokens_are_drawn_as_such() -> None:
    special = ReasoningRule((0,), (1,), opened=True)
    made = build.answer(CITY, reasoning=special)
    assert "<[1]>" in made.text
    assert accepts(made, 'hm<|im_start|>{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "strin"}, "S"),
        ({"properties": {"a": {"items": {"type": "strin"}}}}, "S.properties.a.items"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "uniqueItems": True}]}, "S.anyOf[1]"),
        ({"properties": {"a": {"$ref": "#/$defs/q"}}, "$defs": {"q": {"type": "no"}}}, "S.properties.a"),
        ({"$ref": "#/nowhere"}, "S"),
        ({"type": "string", "pattern": "(("}, "S"),
        ({"prefixItems": [{}, {"pattern": "(?=a)", "type": "string"}]}, "S.prefixItems[1]"),
        ({"enum": []}, "S"),
        (False, "S"),
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_place(schema: Any, place: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        build.check(schema, "S")
    assert caught.value.param == place


LOOPS: dict[str, dict[str, Any]] = {
    "itself": {"$ref": "#/$defs/itself"},
    "there": {"$ref": "#/$defs/back"},
    "back": {"$ref": "#/$defs/there"},
    "all": {"allOf": [{"$ref": "#/$defs/all"}]},
    "any": {"anyOf": [{"$ref": "#/$defs/any"}, {"$ref": "#/$defs/itself"}]},
    "one": {"oneOf": [{"$ref": "#/$defs/one"}]},
    "nested": {"type": "object", "properties": {"x": {"$ref": "#/$defs/nested"}}, "required": ["x"]},
    "listed": {"type": "array", "items": {"$ref": "#/$defs/listed"}, "minItems": 1},
    "in order": {"type": "array", "prefixItems": [{"$ref": "#/$defs/in%20order"}], "minItems": 1},
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(
    ("around", "place"),
    [
        ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, "S.properties.a"),
        ({"type": "object", "properties": {"a": {}}}, "S.properties.a"),
        ({"properties": {"a": {}}, "required": ["a"]}, "S.properties.a"),
        ({"type": "object", "additionalProperties": {}}, "S.additionalProperties"),
        ({"type": "array", "items": {}}, "S.items"),
        ({"type": "array", "items": {}, "minItems": 1}, "S.items"),
        ({"anyOf": [{"type": "null"}, {}]}, "S.anyOf[1]"),
    ],
    ids=str,
)
def test_a_reference_that_leads_only_to_itself_is_refused_by_its_place(
    around: dict[str, Any], place: str, name: str
) -> None:
    loop = {"$ref": f"#/$defs/{name.replace(' ', '%20')}"}
    schema = json.loads(json.dumps(around).replace("{}", json.dumps(loop))) | {"$defs": LOOPS}
    for refused in (
        lambda: build.answer(schema, param="S"),
        lambda: build.answer(calls=replace(CALLS, functions=[FunctionRule("f", schema, "S")])),
    ):
        with pytest.raises(InvalidValue, match=r"no text could follow it") as caught:
            refused()
        assert caught.value.param.startswith(place)


BACK = {"$ref": "#/$defs/loop"}
APART: dict[str, dict[str, Any]] = {
    "type apart": {"allOf": [{"type": "object"}], "properties": {"x": BACK}, "required": ["x"]},
    "need apart": {"type": "object", "properties": {"x": BACK}, "allOf": [{"required": ["x"]}]},
    "all apart": {"allOf": [{"type": "object"}, {"required": ["x"]}, {"properties": {"x": BACK}}]},
    "by choice": {"type": "object", "properties": {"x": BACK}, "anyOf": [{"required": ["x"]}]},
    "other member": {"type": "object", "additionalProperties": BACK, "required": ["x"]},
    "any member": {"type": "object", "additionalProperties": BACK, "minProperties": 1},
    "pattern": {"type": "object", "patternProperties": {"^x": BACK}, "required": ["x"]},
    "least apart": {"type": "array", "items": BACK, "allOf": [{"minItems": 1}]},
    "items apart": {"type": "array", "minItems": 1, "allOf": [{"items": BACK}]},
    "either": {"type": ["object", "array"], "properties": {"x": BACK}, "required": ["x"], "items": BACK, "minItems": 1},
}


@pytest.mark.parametrize("loop", APART.values(), ids=APART)
def test_what_makes_a_schema_endless_may_stand_in_several_places(loop: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": BACK}, "$defs": {"loop": loop}}
    with pytest.raises(InvalidValue, match=r"no text could follow it") as caught:
        build.check(schema, "S")
    assert caught.value.param.startswith("S.properties.a")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}}, "$defs": LOOPS | {"tree": {"type": "null"}}},
        {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 1},
        {"allOf": [{"type": ["object", "null"]}, {"required": ["next"]}, {"properties": {"next": {"$ref": "#"}}}]},
        {"properties": {"next": {"$ref": "#"}}, "allOf": [{"required": ["next"]}]},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "anyOf": [{"required": ["next"]}, {"required": []}]},
        {"type": "object", "patternProperties": {"^y": {"$ref": "#"}}, "required": ["x"]},
        {"type": ["object", "array"], "properties": {"next": {"$ref": "#"}}, "required": ["next"], "items": {}},
        {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 0},
    ],
    ids=lambda schema: str(schema)[:80],
)
def test_a_schema_that_contains_itself_and_comes_to_an_end_is_not_refused(schema: dict[str, Any]) -> None:
    build.answer(schema, param="S")


def test_too_large_and_too_deep_schemas_are_refused_before_any_work() -> None:
    wide = {"type": "object", "properties": {f"key{n}": {"type": "string"} for n in range(4000)}}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    for schema in (wide, deep):
        with pytest.raises(InvalidValue):
            build.answer(schema, param="S")


@pytest.mark.parametrize(
    "schema",
    [
        {"const": -(2**63)},
        {"type": "number", "const": -1e30},
        {"type": "integer", "enum": [1, -(2**63)]},
        {"const": [{"a": -1e19}]},
        {"multipleOf": 1_000_003},
        {"type": "number", "multipleOf": 99999.99},
        {"multipleOf": 1e300},
        {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
    ],
    ids=str,
)
def test_what_would_end_or_stall_the_process_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=r"number below|too many digits") as caught:
        build.answer({"type": "object", "properties": {"a": schema}}, param="S")
    assert caught.value.param.startswith("S.properties.a")
    with pytest.raises(InvalidValue, match=r"number below|too many digits"):
        build.answer(rule=f"%lark {{\nstart: %json {json.dumps(schema)}\n}}", param="grammar")
    with pytest.raises(InvalidValue) as caught:
        build.answer(calls=replace(CALLS, functions=[FunctionRule("f", {"properties": {"a": schema}}, "tools[0]")]))
    assert caught.value.param.startswith("tools[0]")


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [-(2**53), 0, 2**63 - 1, 2**60, 10**22]},
        {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
        {"multipleOf": 86_400},
        {"type": "number", "multipleOf": 0.01},
        {"anyOf": [{"multipleOf": 0.25}, {"multipleOf": 60}]},
        {"properties": {"multipleOf": {"type": "string"}, "const": {"type": "integer"}}},
    ],
    ids=str,
)
def test_what_only_looks_dangerous_is_not_refused(schema: dict[str, Any]) -> None:
    build.answer({"type": "object", "properties": {"a": schema}, "default": {"a": {"const": 5}}})


@pytest.mark.parametrize(
    "number", [2**53 + 1, -(2**53) - 1, 1_234_567_890_123_456_789, 2**63, 2**64 - 1, 2**100, 10**400]
)
def test_a_constant_that_would_lose_digits_is_refused(number: int) -> None:
    for schema in ({"const": number}, {"enum": ["a", [{"b": number}]]}):
        with pytest.raises(InvalidValue, match="last digits would be lost") as caught:
            build.answer({"type": "object", "properties": {"a": schema}}, param="S")
        assert caught.value.param == "S.properties.a"


WIDE = 2**53
FARTHEST = 2**63 - 1024


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"minimum": WIDE + 1}, [WIDE + 2], [WIDE, WIDE - 1]),
        ({"minimum": WIDE + 1, "maximum": WIDE + 3}, [WIDE + 2], [WIDE, WIDE + 4]),
        ({"maximum": -WIDE - 1}, [-WIDE - 2], [-WIDE, -WIDE + 1]),
        ({"exclusiveMinimum": WIDE + 1}, [WIDE + 4], [WIDE, WIDE + 1]),
        ({"exclusiveMaximum": WIDE + 1, "minimum": 0}, [WIDE - 1], [WIDE + 1, WIDE + 2]),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [0, -FARTHEST, FARTHEST], [2**63, -(2**63) - 1]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, FARTHEST], [2**64, -1]),
        ({"minimum": -1e308, "maximum": 1e308}, [5, -FARTHEST], []),
        ({"allOf": [{"minimum": WIDE + 1}, {"maximum": WIDE + 3}]}, [WIDE + 2], [WIDE, WIDE + 4]),
        ({"anyOf": [{"minimum": WIDE + 1}, {"maximum": 3.5}]}, [3, WIDE + 2], [4, WIDE]),
    ],
    ids=str,
)
def test_a_bound_that_is_no_double_is_rounded_inwards(schema: dict[str, Any], good: list[int], bad: list[int]) -> None:
    made = build.answer({"type": "array", "prefixItems": [{"type": "integer"} | schema], "items": False, "minItems": 1})
    for number in good:
        assert accepts(made, f"[{number}]"), number
    for number in bad:
        assert not accepts(made, f"[{number}]"), number


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.001", "0.25"], ["0", "0.0", "0.51", "-0"]),
        ({"exclusiveMinimum": 10, "exclusiveMaximum": 10.5}, ["10.1", "10.49999"], ["10", "10.0", "10.5", "9"]),
        ({"minimum": -0.01, "exclusiveMaximum": 0}, ["-0.01", "-0.005"], ["0", "-0", "0.0", "-0.02"]),
        ({"exclusiveMinimum": 99.5, "exclusiveMaximum": 100}, ["99.75"], ["100", "100.0", "99.5"]),
        ({"exclusiveMinimum": 0, "maximum": 1e-13}, ["0.0000000000001"], ["0", "0.0000000000002"]),
        ({"exclusiveMinimum": 0, "maximum": 1}, ["1", "0.001", "0.5"], ["0", "0.0", "1.1"]),
        ({"exclusiveMinimum": 2**53, "maximum": 2**53 + 0.5}, [], [str(2**53)]),
    ],
    ids=str,
)
def test_a_whole_number_that_is_excluded_stays_out(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    if not good:
        with pytest.raises(InvalidValue):
            build.answer({"type": "array", "items": {"type": "number"} | schema, "minItems": 1}, param="schema")
        return
    made = build.answer({"type": "array", "prefixItems": [{"type": "number"} | schema], "items": False, "minItems": 1})
    for number in good:
        assert accepts(made, f"[{number}]"), number
    for number in bad:
        assert not accepts(made, f"[{number}]"), number


SMALL = {"type": "object", "additionalProperties": {"type": "boolean"}}
WORD = {"type": "string", "maxLength": 3}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        *((WORD | {"format": name}, ['"x"', '""'], ['"xxxx"', "5"])
          for name in ("int64", "binary", "password", "uri-reference", "regex", "cuid", "e164", "")),
        ({"format": "double"}, ["5", '"x"'], []),
        ({"type": "integer", "format": "int32"}, ["5"], ["5.5"]),
        ({"type": "string", "format": "date"}, ['"2026-01-15"'], ['"x"']),
        (SMALL | {"propertyNames": {"type": "string"}}, ['{"a": true}', "{}"], ['{"a": 1}']),
        (SMALL | {"propertyNames": True, "properties": {"b": {}}}, ['{"b": 1, "a": true}'], ['{"a": 1}']),
        (SMALL | {"propertyNames": {"type": "string", "pattern": "^[ab]$"}}, ['{"a": true}'], ['{"c": true}']),
        (SMALL | {"propertyNames": {"enum": ["a", "b"]}, "required": ["b"]}, ['{"b": true}'], ['{"a": true}']),
        (SMALL | {"propertyNames": {"const": "a"}}, ['{"a": true}'], ['{"b": true}']),
        ({"type": "object", "propertyNames": {"enum": ["a"]}}, ['{"a": 1}'], ['{"b": 1}']),
        ({"anyOf": [{"not": {}}, {"type": "null"}]}, ["null"], ["1", "{}"]),
        ({"type": "object", "properties": {"a": {"not": {}}}}, ["{}", '{"b": 1}'], ['{"a": 1}']),
        ({"type": "null", "not": False}, ["null"], ["1"]),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, ['{"a": 1}'], ['{"b": 1}']),
        ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, ["[1]"], ["[1, 2]"]),
        ({"allOf": [{"type": "object"}], "unevaluatedProperties": True}, ['{"a": 1}'], ["1"]),
        ({"type": "array", "uniqueItems": False}, ["[1, 1]"], ["1"]),
        ({"type": "array", "minContains": 2, "if": True}, ["[]"], ["1"]),
        ({"type": "null", "then": {"const": 1}, "dependentRequired": {}, "dependencies": {}}, ["null"], ["1"]),
        (WORD | {"format": None, "pattern": None, "enum": None, "anyOf": None, "minimum": None}, ['"x"'], ['"xxxx"']),
        ({"type": "object", "properties": None, "required": None}, ['{"a": 1}'], ["1"]),
        ({"enum": [None, 1], "description": None}, ["null", "1"], ["2"]),
        ({"const": None}, ["null"], ["1"]),
        *(({"$schema": name, "type": "null"}, ["null"], ["1"]) for name in (
            "https://json-schema.org/draft-07/schema#", "http://json-schema.org/schema#", "mine",
            "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema")),
        ({"$id": "a b", "$defs": {"A": {"type": "null"}}, "$ref": "#/$defs/A"}, ["null"], ["1"]),
        *(({"$defs": {name: {"type": "null"}, "A": {}}, "$ref": f"#/$defs/{name}"}, ["null"], ["1"])
          for name in ("Box[int]", "List<A>", "a b", "größe", 'Pick<A,"x"|"y">')),
        ({"$defs": {"a%b": {"type": "null"}}, "$ref": "#/$defs/a%25b"}, ["null"], ["1"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_keyword_that_says_nothing_or_can_be_said_otherwise_is_taken(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    made = build.answer(schema, param="schema")
    for text in good:
        assert accepts(made, text), text
    for text in bad:
        assert not accepts(made, text), text


EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"


@pytest.mark.parametrize(
    ("pattern", "examples", "alphabet"),
    [
        (
            EMAIL,
            ["a@b.co", "a.b'c+d@x-1.y.org", "a..b@c.de", ".a@b.co", "a.@b.co", "a'@b.co", "a@b", "a@-b.co"],
            "a.'@-+co",
        ),
        (
            DURATION,
            ["P1W", "P1Y2M3DT4H5M6.5S", "PT1M", "P1M", "P", "PT", "P1YT", "P1W1D", "P1D1Y", "PT1S1M"],
            "PT1WYMDHS.",
        ),
        (DECIMAL, ["0", "-1.50", "+.5", "5.", "00", ".", "-", "+-1", "1e5", "", "1.2.3"], "+-.015"),
    ],
)
def test_a_librarys_pattern_with_look_around_is_enforced(pattern: str, examples: list[str], alphabet: str) -> None:
    made = build.answer({"type": "string", "pattern": pattern}, param="schema")
    letters = random.Random(5)
    drawn = ["".join(letters.choices(alphabet, k=letters.randint(1, 7))) for _ in range(1500)]
    matching = [text for text in drawn if re.search(pattern, text)]
    for text in [*examples, *drawn[:200], *matching[:200]]:
        assert accepts(made, json.dumps(text)) == bool(re.search(pattern, text)), text


CHARACTERS = ['"', "\\", "/", "a", "B", "7", "_", " ", "~", "\x00", "\x1b", "\x1f", "\n", "\t", "é", "😀"]
LEFT_OUT = [
    *(r'^[^\\/:*?"<>|]$', '^[^"]$', r"^[^\\]$", r"^[^/\\]$", r'^[^\s"]$', '^[^<>"]$', '^(?:[^"])$'),
    *(r'^([^"\\]|\\.)$', r"^[\x00-\x1f]$", r"^[^\x20-\x7e]$", r'^[^\n"]$', r"^[^\d\\]$", "^[^!-,]$"),
    *(r"^[^\]\\]$", r'^[^\]"]$', '^[^"a-]$', "^[a-z]$", r'^["\\]$', r"^[\s\S]$", r"^[^\x00-\x1f\\]$"),
    *("^[^a]$", "^[^!-~]$", r"^\[$", r"^[a\]]$", r'^\\[^"]$', "^.$"),
]  # fmt: skip


@pytest.mark.parametrize("pattern", LEFT_OUT)
def test_no_character_that_a_class_leaves_out_passes_as_an_escape(pattern: str) -> None:
    texts = [*CHARACTERS, *("\\" + char for char in CHARACTERS)]
    by_value = build.answer({"type": "string", "pattern": pattern})
    named = {"type": "object", "additionalProperties": False}
    by_name = [
        build.answer(named | {"patternProperties": {pattern: True}}),
        build.answer({"type": "object", "propertyNames": {"pattern": pattern}}),
    ]
    for text in texts:
        is_left_out = re.search(pattern, text) is None
        seen = accepts(by_value, json.dumps(text, ensure_ascii=False))
        assert not (seen and is_left_out), text
        for made in by_name:
            assert accepts(made, json.dumps({text: 1}, ensure_ascii=False)) == seen, text
        if text in ('"', "\\", "/", "a", "\n", "\t", "é", "😀") and not is_left_out:
            assert seen, text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "object", "propertyNames": {"minLength": 2}},
        {"type": "object", "propertyNames": {"pattern": "^a", "maxLength": 2}},
        {"type": "object", "propertyNames": {"enum": ["a"]}, "properties": {"a": {}}},
        {"allOf": [{"type": "object"}], "unevaluatedProperties": False},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"if": {"type": "null"}, "then": {"const": None}},
        {"not": {"type": "null"}},
        {"type": "array", "contains": {"const": 1}, "minContains": 1},
        {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]},
        {"type": None},
    ],
    ids=str,
)
def test_a_keyword_that_narrows_and_is_not_known_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        build.answer(schema, param="schema")


def test_lengths_may_be_written_with_a_point() -> None:
    made = build.answer(
        {"type": "array", "minItems": 2.0, "maxItems": 2.0, "items": {"type": "string", "maxLength": 1e0}}
    )
    assert accepts(made, '["a", "b"]')
    assert not accepts(made, '["a", "bc"]')
    assert not accepts(made, '["a"]')
    with pytest.raises(InvalidValue, match=r"1\.5"):
        build.answer({"type": "string", "maxLength": 1.5})


def test_what_is_no_keyword_keeps_its_numbers() -> None:
    value = {"minimum": -(2**62), "maxLength": 2.0, "items": {"maximum": 10**22}}
    made = build.answer({"enum": [value], "default": value, "properties": {"maxLength": {"type": "number"}}})
    assert accepts(made, json.dumps(value).replace("2.0", "2"))


def test_a_reference_to_an_anchor_is_no_reference_to_the_whole() -> None:
    made = build.answer({"$ref": "#foot", "$defs": {"x": {"$anchor": "foot", "type": "boolean"}}})
    assert accepts(made, "true")
    assert not accepts(made, "1")


def test_the_search_for_the_place_at_fault_ends_soon() -> None:
    """Each part may take as long to check as the whole."""
    asked = 0

    def prove(grammar: str) -> str:
        nonlocal asked
        asked += 1
        time.sleep(build.LOOK_SECONDS / 5)
        return "it can't"

    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"properties": {"a": schema}}
    with pytest.raises(InvalidValue, match="it can't"):
        build.answer(schema, param="schema", prove=prove)
    assert asked <= 8


def test_a_model_whose_calls_are_no_json_cannot_be_forced() -> None:
    class Other:
        tool_format = type("Form", (), {"name": "pythonic", "is_json": False})()
        vocab_size = 3

        def unspellable(self, rows: int) -> frozenset[int]:
            return frozenset()

        def tags(self, rows: int | None) -> Tags:
            return Tags((), {})

    request = ChatRequest.model_validate(
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required",
        }
    )
    other: Any = Other()
    with pytest.raises(UnsupportedParameter, match="pythonic"):
        tools.constraint(None, tools.read(request), ChatPrompt([1], [1], False), other)


def test_the_tags_of_a_real_tokenizer_are_found() -> None:
    tokenizer = Tokenizer.load(TOKENIZER, trust_remote_code=False)
    request = ChatRequest.model_validate(
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "get_time", "parameters": CITY}}],
            "tool_choice": {"type": "function", "function": {"name": "get_time"}},
        }
    )
    made = tools.constraint(None, tools.read(request), ChatPrompt([1], [1], False), tokenizer)
    assert made is not None
    assert accepts(made.grammar, call("get_time", city="Oslo"))
    assert not accepts(made.grammar, call("get_time", city="Oslo") + "\n" + call("get_time", city="Oslo"))


IN_PART = [
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1], ["1"]),
    ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}, [2], ["1"]),
    ({"type": "integer", "not": {"const": 3}}, 3, "3"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 3, "3"),
    ({"type": "integer", "if": {"minimum": 3}, "then": {"multipleOf": 2}}, 5, "5"),
    ({"type": "object", "properties": {"b": {"type": "null"}}, "dependentRequired": {"b": ["c"]}}, {}, {"b": 1}),
]


@pytest.mark.parametrize(("part", "followed", "broken"), IN_PART, ids=str)
def test_a_tool_that_is_not_strict_follows_what_can_be_enforced_of_its_schema(
    part: dict[str, Any], followed: Any, broken: Any
) -> None:
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"], "additionalProperties": False}
    function = FunctionRule("f", schema, "tools[0].parameters", strict=False)
    made = build.answer(calls=replace(CALLS, functions=[function], several=False))
    assert accepts(made, call("f", a=followed))
    assert not accepts(made, call("f", a=broken))
    assert not accepts(made, call("f"))
    with pytest.raises(InvalidValue) as caught:
        build.answer(calls=replace(CALLS, functions=[replace(function, strict=True)]))
    assert caught.value.param == "tools[0].parameters.properties.a"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"type": "file"},
        {"$ref": "https://example.org/schema"},
        {"$ref": "#/$defs/self"},
        {"type": "string", "pattern": "(?=a)b"},
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_followed_even_in_part_is_refused(part: dict[str, Any], strict: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": part, "list": {"type": "array", "uniqueItems": True}},
        "required": ["a"],
        "$defs": {"self": {"type": "object", "properties": {"a": {"$ref": "#/$defs/self"}}, "required": ["a"]}},
    }
    function = FunctionRule("f", schema, "tools[0].parameters", strict)
    with pytest.raises(InvalidValue, match=r"tools\[0\].parameters"):
        build.answer(calls=replace(CALLS, functions=[function]))
