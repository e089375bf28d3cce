"""Arguments by their schema: a text stays text wherever it may be one, and becomes what else the schema allows."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.calls.arguments import Parameters, Value

DEFS = {"$defs": {"Count": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}, "a/b": {"type": "boolean"}}}
INTEGER, NULL, STRING = {"type": "integer"}, {"type": "null"}, {"type": "string"}
INTEGER_OR_NULL = {"anyOf": [INTEGER, NULL]}


def read(schema: Any, text: str, **root: Any) -> Any:
    """What a text is for a parameter with this schema, by way of the JSON text that a client gets."""
    parameters = {"type": "object", "properties": {"p": schema}, **DEFS, **root}
    return json.loads(Parameters(parameters).convert({"p": Value.plain(text)}))["p"]


@pytest.mark.parametrize(
    "schema",
    [
        *(STRING, {"type": ["string", "null"]}, {"type": ["integer", "string"]}, {"anyOf": [INTEGER, STRING]}),
        *({"oneOf": [{"type": "object"}, STRING]}, {"allOf": [STRING]}, {"type": "string", "nullable": True}),
        *({}, True, {"description": "anything"}, {"$ref": "#/$defs/Missing"}, {"$ref": "http://elsewhere"}),
        {"$ref": "#anchor"},
        *({"type": "any"}, {"type": "STRING"}, {"format": "date"}, {"minLength": 1}, {"$ref": "#/$defs/Loop"}, None),
        *({"not": INTEGER}, {"not": {}}, {"anyOf": []}, {"type": 3}),
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize(
    "text", ["Oslo", "123", "007", "5.0", "true", "null", "None", "", '{"name": "demo"}', "[1, 2]", " x ", "\n", "é🎉"]
)
def test_what_may_be_a_string_stays_the_text(schema: Any, text: str) -> None:
    assert read(schema, text) == text


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        *((INTEGER, text, 5) for text in ("5", " 5\n", "5.0", "5.", "+5", "05", "0.5e1", "50e-1")),
        *((INTEGER, text, 1000) for text in ("1e3", "1E+3", "1000", "1000.00")),
        (INTEGER, "-3", -3),
        (INTEGER, "0", 0),
        (INTEGER, "12345678901234567890123", 12345678901234567890123),
        (INTEGER, "1e22", 10**22),
        ({"type": "number"}, "0.5", 0.5),
        ({"type": "number"}, ".5", 0.5),
        ({"type": "number"}, "007", 7),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "int"}, "5", 5),
        ({"type": "float"}, "2.5", 2.5),
        *(({"type": "boolean"}, text, True) for text in ("true", "True", "TRUE", " true", "yes", "on", "1")),
        *(({"type": "boolean"}, text, False) for text in ("false", "False", "no", "off", "0")),
        *((INTEGER_OR_NULL, text, None) for text in ("null", "None", "NULL", "none", "", " ")),
        (INTEGER_OR_NULL, "5", 5),
        ({"anyOf": [{"type": "boolean"}, NULL]}, "true", True),
        ({"type": ["boolean", "integer"]}, "1", 1),
        ({"type": ["boolean", "integer"]}, "true", True),
        ({"type": ["integer", "number"]}, "5.5", 5.5),
        ({"type": ["integer", "array"]}, "[5]", [5]),
        ({"type": "integer", "nullable": True}, "null", None),
        (NULL, "None", None),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": [1, "1"]}, "1", "1"),
        ({"enum": ["low", 1]}, "1", 1),
        ({"enum": ["low", "high", None]}, "null", None),
        ({"enum": [True, "auto"]}, "true", True),
        ({"enum": [[1, 2], {"a": 1}]}, "[1,2]", [1, 2]),
        ({"const": 5}, "5", 5),
        ({"const": False}, "False", False),
        ({"anyOf": [INTEGER, {"const": "auto"}]}, "7", 7),
        ({"anyOf": [INTEGER, {"const": "auto"}]}, "auto", "auto"),
        ({"allOf": [{"$ref": "#/$defs/Count"}], "description": "x"}, "5", 5),
        ({"$ref": "#/$defs/Count"}, "5", 5),
        ({"$ref": "#/$defs/a~1b"}, "true", True),
        ({"oneOf": [{"$ref": "#/$defs/Count"}, NULL]}, "null", None),
        ({"not": STRING}, "5", 5),
        ({"type": "array"}, '["a", 1, true, null]', ["a", 1, True, None]),
        ({"type": "array"}, "['a', 1, True, None]", ["a", 1, True, None]),
        ({"type": "array"}, "('a', (1, 2),)", ["a", [1, 2]]),
        ({"type": "array"}, '[{"a": True}, null]', [{"a": True}, None]),
        ({"type": "array", "items": STRING}, '["5", "{\\"a\\": 1}"]', ["5", '{"a": 1}']),
        ({"items": INTEGER}, "[1]", [1]),
        ({"type": "object"}, '{"a": "5", "b": {"c": "null"}}', {"a": "5", "b": {"c": "null"}}),
        ({"type": "object"}, "{'a': 'it\\'s', 'b': -1.5}", {"a": "it's", "b": -1.5}),
        ({"type": "object"}, '{"text": "two\nlines"}', {"text": "two\nlines"}),
        ({"properties": {"a": INTEGER}}, '{"a": 1}', {"a": 1}),
        ({"type": ["object", "null"]}, "", None),
        ({"type": "object"}, '{"half": "\\ud83d"}', {"half": "\ud83d"}),
    ],
    ids=str,
)
def test_a_text_is_converted_where_the_schema_leaves_no_string(schema: Any, text: str, value: Any) -> None:
    found = read(schema, text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        *((INTEGER, text) for text in ("2026-01-15", "5.5", "five", "", "null", "1_000", "0x10", "٣", "1,000", "NaN")),
        *((INTEGER, text) for text in ("1e999999999", "0e999999999", "9" * 5000, "true", "[5]")),
        *(({"type": "number"}, text) for text in ("NaN", "Infinity", "-inf", "1e999", "1.2.3", "e5")),
        *(({"type": "boolean"}, text) for text in ("maybe", "2", "", "null")),
        *(({"type": "array"}, text) for text in ("a, b", "[1", "{1, 2}", "[NaN]", "[1e999]", "[" * 5000, "[x]")),
        *(({"type": "object"}, text) for text in ("[1]", "{", "{a: 1}", "{1, 2}", "__import__('os')", '"{}"')),
        *(({"enum": [1, 2]}, text) for text in ("3", "one")),
        *((NULL, text) for text in ("nil", "0")),
        (False, "5"),
        ({"allOf": [INTEGER, STRING]}, "x"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_doesnt_convert_stays_text(schema: Any, text: str) -> None:
    assert read(schema, text) == text


def test_keys_are_found_wherever_the_schema_declares_them() -> None:
    def p(schema: dict[str, Any]) -> Any:
        return json.loads(Parameters(schema | DEFS).convert({"p": Value.plain("5")}))["p"]

    declared = {"properties": {"p": INTEGER}}
    found: list[dict[str, Any]] = [
        *({"allOf": [{}, declared]}, {"anyOf": [{"properties": {"q": STRING}}, declared]}, {"oneOf": [declared]}),
        *({"$ref": "#/definitions/A", "definitions": {"A": declared}}, {"additionalProperties": INTEGER}),
        *({"patternProperties": {"^p": INTEGER}, "additionalProperties": False}, declared),
        {"anyOf": [declared, {"properties": {"p": NULL}}]},
    ]
    for schema in found:
        assert p(schema) == 5, schema
    unknown: list[dict[str, Any]] = [
        *({}, {"additionalProperties": True}, {"additionalProperties": False}, {"properties": {"q": INTEGER}}),
        *({"patternProperties": {"^p": INTEGER}}, {"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"properties": None}),
        {"anyOf": [declared, {"properties": {"p": STRING}}]},
    ]
    for schema in unknown:
        assert p(schema) == "5", schema


def test_tools_without_parameters_take_text() -> None:
    tools: list[dict[str, Any]] = [{"function": {"name": "f"}}, {"function": {"name": "g", "parameters": {}}}]
    for name in ("f", "g", "unknown"):
        assert Parameters.named(name, tools).convert({"p": Value.plain("5")}) == '{"p": "5"}'


def test_a_value_that_its_format_types_is_kept_where_the_schema_admits_it() -> None:
    def typed(schema: Any, literal: Any, text: str) -> Any:
        return json.loads(Parameters({"properties": {"p": schema}}).convert({"p": Value(literal, text)}))["p"]

    assert typed({}, 5, "5") == 5
    assert typed(INTEGER, 5, "5") == 5
    assert typed(STRING, 123, "0123") == "0123"
    assert typed(STRING, {"a": 1}, '{"a": 1}') == '{"a": 1}'
    assert typed(INTEGER, "5", "5") == 5
    assert typed(INTEGER, "five", "five") == "five"
    assert typed({"type": "object"}, 5, "5") == 5


def test_schemas_that_lead_back_to_themselves_or_branch_without_end_are_read_in_no_time() -> None:
    branching = {f"A{n}": {"anyOf": [{"$ref": f"#/$defs/A{n + 1}"}] * 2} for n in range(60)}
    chain = {f"B{n}": {"$ref": f"#/$defs/B{n + 1}"} for n in range(5000)}
    root = {"$defs": {**branching, "A60": INTEGER, **chain}}
    assert read({"$ref": "#/$defs/A0"}, "x", **root) == "x"
    assert read({"$ref": "#/$defs/A0"}, "5", **root) == 5
    assert read({"$ref": "#/$defs/B0"}, "5", **root) == "5"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
SCHEMAS = st.recursive(
    st.booleans()
    | st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "number", "boolean", "null", "array"])})
    | st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=3)})
    | st.fixed_dictionaries({"const": VALUES}),
    lambda inner: (
        st.dictionaries(st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, min_size=1, max_size=3))
        | st.fixed_dictionaries({"type": st.just("object"), "properties": st.just({})})
    ),
    max_leaves=5,
)


@given(SCHEMAS, st.text(max_size=8) | VALUES.map(json.dumps))
def test_a_string_is_kept_exactly_where_a_validator_admits_it(schema: Any, text: str) -> None:
    found = read(schema, text)
    valid = jsonschema.Draft202012Validator(_shallow(schema)).is_valid
    if valid(text):
        assert found == text
    elif found != text:
        assert valid(found)


def _shallow(schema: Any) -> Any:
    """`oneOf` is read as `anyOf`: which one it is doesn't matter for the type."""
    if isinstance(schema, dict):
        return {"anyOf" if key == "oneOf" else key: _shallow(value) for key, value in _apart(schema)}
    return [_shallow(one) for one in schema] if isinstance(schema, list) else schema


def _apart(schema: dict[str, Any]) -> list[tuple[str, Any]]:
    """Two unions beside each other must both hold."""
    if "oneOf" in schema and "anyOf" in schema:
        return [("allOf", [*schema.get("allOf", []), {"anyOf": schema["oneOf"]}, {"anyOf": schema["anyOf"]}])]
    return list(schema.items())


@given(VALUES.filter(lambda value: not isinstance(value, str)))
def test_every_json_value_is_read_from_its_json_text(value: Any) -> None:
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    assert read({"type": names[type(value)]}, json.dumps(value)) == value


@given(VALUES.filter(lambda value: isinstance(value, list | dict)))
def test_every_value_is_read_from_pythons_literal_of_it(value: Any) -> None:
    assert read({"type": ["array", "object"]}, repr(value)) == value
