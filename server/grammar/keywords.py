"""Keywords of a schema that llguidance doesn't know, where they say nothing or can be said in ones that it does.

Owns the rewriting of one schema, not of those inside it: `grammar/bounds` walks over them. A keyword that narrows what
is valid and can't be said otherwise stays, and is refused. Runs in the server's worker thread; pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from server.grammar.classes import spellable

Schema = dict[str, Any]

# All others only describe a string, as OpenAPI's `int64` and `password` do: in JSON Schema a format that the reader
# doesn't know asserts nothing.
_FORMATS = frozenset({
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"),
})  # fmt: skip
_DRAFT = re.compile(
    r"http://json-schema\.org/draft-0[3467]/schema#?|https://json-schema\.org/draft/20(?:19-09|20-12)/schema#?"
)
_IN_REFERENCES = "#/%:?&=+,;@!$'()*~"  # besides letters and digits, what a reference may hold as it is
# Absent where a program writes null for what its author left out.
_MAY_BE_NULL = frozenset({
    *("format", "pattern", "required", "properties", "items", "enum", "anyOf", "oneOf", "allOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("multipleOf", "$ref", "minProperties", "maxProperties", "additionalProperties"),
})  # fmt: skip
# What else a schema may say of its members, so that they are no longer all that stands beside `properties`.
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_REMARKS = frozenset({"title", "description", "$comment", "$schema"})
# Patterns that libraries write into every schema of theirs, with look-around, and the same without: zod 4.0's email and
# duration, pydantic 2.12's Decimal.
_WORD = r"[A-Za-z0-9_'+\-]"
_SECONDS = r"\d+(?:[.,]\d+)?S"
_TIME = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
_PATTERNS = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        rf"^(?:{_WORD}+\.)*{_WORD}*[A-Za-z0-9_+\-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{{2,}}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_TIME})?|{_TIME})$"
    ),
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+\-]?(?:\d+\.?\d*|\.\d+)$",
}
_NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}


def rewritten(schema: Schema) -> Schema | bool:
    """The same schema in keywords that llguidance knows, as far as there are such."""
    made = {key: value for key, value in schema.items() if not (value is None and key in _MAY_BE_NULL)}
    if "not" in made and _is_anything(made["not"]):
        return False
    made = {key: value for key, value in made.items() if not _says_nothing(made, key, value)}
    for key in ("$ref", "$id"):
        if isinstance(made.get(key), str):
            made[key] = quote(made[key], safe=_IN_REFERENCES)
    if isinstance(made.get("pattern"), str):
        made["pattern"] = spellable(_PATTERNS.get(made["pattern"], made["pattern"]))
    for key, other in _UNEVALUATED.items():
        if isinstance(made.get(key), bool | dict) and other not in made and not _combines(made):
            made[other] = made.pop(key)
    made = _named(made)
    if isinstance(made.get("patternProperties"), dict):
        made["patternProperties"] = {spellable(name): part for name, part in made["patternProperties"].items()}
    return made


def _is_anything(schema: Any) -> bool:
    return schema is True or schema == {}


def _combines(schema: Schema) -> bool:
    return any(word in schema for word in _COMBINING)


def _says_nothing(schema: Schema, key: str, value: Any) -> bool:
    rule = _RULES.get(key)
    if rule is not None:
        return rule(value)
    if key == "if":
        return "then" not in schema and "else" not in schema
    return key in _NEEDS and _NEEDS[key] not in schema


_RULES: dict[str, Callable[[Any], bool]] = {
    "format": lambda value: isinstance(value, str) and value not in _FORMATS,
    "$schema": lambda value: isinstance(value, str) and not _DRAFT.fullmatch(value),
    "uniqueItems": lambda value: value is False,
    "not": lambda value: value is False,
    "propertyNames": lambda value: value is True or (isinstance(value, dict) and _about_names(value) == {}),
    "unevaluatedProperties": _is_anything,
    "unevaluatedItems": _is_anything,
    "dependentSchemas": lambda value: value == {},
    "dependentRequired": lambda value: value == {},
    "dependencies": lambda value: value == {},
}


def _about_names(names: Schema) -> Schema:
    """What a schema of names says: all of them are strings anyway."""
    said = {key: value for key, value in names.items() if key not in _REMARKS}
    if said.get("type") == "string":
        del said["type"]
    return said


def _named(schema: Schema) -> Schema:
    """With names of properties that are listed, or follow a pattern, as such properties."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or "properties" in schema or "patternProperties" in schema:
        return schema
    made = {key: value for key, value in schema.items() if key != "propertyNames"}
    value = made.get("additionalProperties", True)
    made["additionalProperties"] = False
    match _about_names(names):
        case {"pattern": str(pattern), **others} if not others:
            return made | {"patternProperties": {pattern: value}}
        case {"enum": list(listed), **others} if not others:
            return made | {"properties": {name: value for name in listed if isinstance(name, str)}}
        case {"const": str(name), **others} if not others:
            return made | {"properties": {name: value}}
    return schema
