"""The arguments of a tool call by its tool's JSON schema.

Owns the one conversion for all formats: what may be a string stays the text that the model wrote, and a text is read as
something else only where the schema leaves no string. What can't be read stays text, so that no call is lost for it.
Runs on the event loop; pure. Schemas are looked at no deeper than the type of the value in question: whether an object
has the right members is the tool's business.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from server.text.calls.literals import MAX_DIGITS, container

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NULLS = ("null", "none", "")
_BOOLEANS = {"true": True, "false": False}
_LOOSE_BOOLEANS = {"yes": True, "on": True, "1": True, "no": False, "off": False, "0": False}
_UNIONS = ("anyOf", "oneOf")
# Types as other languages call them, which some clients send and no check refuses.
_ALIASES = {
    "str": "string", "text": "string", "int": "integer", "int32": "integer", "int64": "integer", "long": "integer",
    "float": "number", "double": "number", "bool": "boolean", "list": "array", "tuple": "array", "dict": "object",
    "map": "object", "none": "null", "nonetype": "null",
}  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip
# Keywords that imply the type where a schema doesn't name it.
_IMPLIED = {
    "properties": "object", "additionalProperties": "object", "patternProperties": "object",
    "items": "array", "prefixItems": "array", "minItems": "array", "maxItems": "array", "uniqueItems": "array",
    "minimum": "number", "maximum": "number", "exclusiveMinimum": "number", "exclusiveMaximum": "number",
    "multipleOf": "number", "pattern": "string", "format": "string", "minLength": "string", "maxLength": "string",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Value:
    """An argument as the model wrote it: what its format says it is, and its text. Where a format has but text, both
    are the text."""

    literal: Any
    text: str

    @classmethod
    def plain(cls, text: str) -> Value:
        return cls(text, text)

    @classmethod
    def typed(cls, literal: Any) -> Value:
        """Raises ValueError for what JSON can't carry."""
        return cls(literal, literal if isinstance(literal, str) else dumped(literal))


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call as the model wrote it. `arguments` are JSON text where its format has JSON."""

    name: str
    arguments: Mapping[str, Value] | str
    id: object = None


class Parameters:
    """The schema of a tool's arguments."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self._root = schema or {}

    @classmethod
    def named(cls, name: str, tools: list[dict[str, Any]] | None) -> Parameters:
        """Those of the tool with this name; without one anything goes."""
        functions = (tool.get("function") or {} for tool in tools or [])
        return cls(next((f.get("parameters") for f in functions if f.get("name") == name), None))

    def convert(self, values: Mapping[str, Value]) -> str:
        """The arguments as JSON text."""
        try:
            return dumped({key: self.fit(key, value) for key, value in values.items()})
        except ValueError:
            return dumped({key: value.text for key, value in values.items()})

    @property
    def names(self) -> list[str]:
        """Those of the arguments that stand in the schema itself."""
        properties = self._root.get("properties")
        if isinstance(properties, Mapping):
            return [str(name) for name in properties]
        return []

    def declare(self, key: str) -> bool:
        return any(True for _ in self._declared(self._root, key, set()))

    def fit(self, key: str, value: Value) -> Any:
        """The first reading of a value that its schema admits."""
        with contextlib.suppress(RecursionError):  # of a schema with a chain of a thousand references
            schemas = list(self._declared(self._root, key, set())) or list(self._others(self._root))
            for reading in _readings(value):
                if all(self._admits(schema, reading, {}) for schema in schemas):
                    return reading
        return value.literal

    # ---------------------------------------------------------------- which schemas hold for a key
    def _declared(self, schema: Any, key: str, seen: set[int]) -> Iterator[Any]:
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return
        seen.add(id(schema))
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            yield properties[key]
        for part in (self._target(schema), *_parts(schema, "allOf")):
            yield from self._declared(part, key, seen)
        for name in _UNIONS:
            found = [one for part in _parts(schema, name) for one in self._declared(part, key, seen)]
            yield from [{"anyOf": found}] if found else []

    def _others(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """What holds for keys that aren't declared. Patterns aren't tried: each of theirs may be the one."""
        patterns = schema.get("patternProperties")
        found = []
        if isinstance(patterns, Mapping):
            found = list(patterns.values())
        if isinstance(rest := schema.get("additionalProperties"), Mapping):
            found.append(rest)
        elif found and rest is not False:
            found.append(True)
        if found:
            yield {"anyOf": found}

    # ---------------------------------------------------------------- whether a schema admits a value
    def _admits(self, schema: Any, value: Any, seen: dict[int, bool]) -> bool:
        if not isinstance(schema, Mapping):
            return schema is not False
        if id(schema) not in seen:
            seen[id(schema)] = False  # a schema that leads back to itself admits nothing by that
            seen[id(schema)] = self._judge(schema, value, seen)
        return seen[id(schema)]

    def _judge(self, schema: Mapping[str, Any], value: Any, seen: dict[int, bool]) -> bool:
        if value is None and schema.get("nullable") is True:
            return True
        every = [self._target(schema), *_parts(schema, "allOf")]
        some = [parts for parts in (_parts(schema, name) for name in _UNIONS) if parts]
        return (
            _is_listed(schema, value)
            and _is_typed(schema, value)
            and not self._is_excluded(schema.get("not"), value, seen)
            and all(self._admits(part, value, seen) for part in every)
            and all(any(self._admits(part, value, seen) for part in parts) for parts in some)
        )

    def _is_excluded(self, schema: Any, value: Any, seen: dict[int, bool]) -> bool:
        """Only by its type or as one of a list: that's all that is looked at."""
        shallow = isinstance(schema, Mapping) and bool(schema) and schema.keys() <= {"type", "enum", "const"}
        return shallow and self._admits(schema, value, seen)

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """What `$ref` leads to; anything goes where that isn't found."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return True
        found: Any = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and len(name) < 6:
                found = dict(enumerate(found)).get(int(name), True)
            elif isinstance(found, Mapping):
                found = found.get(name, True)
            else:
                found = True
        return found


def names_of(tools: list[dict[str, Any]] | None) -> list[str]:
    """The names of the tools."""
    return [str((tool.get("function") or {}).get("name") or "") for tool in tools or []]


def _parts(schema: Mapping[str, Any], name: str) -> list[Any]:
    parts = schema.get(name)
    if isinstance(parts, list):
        return parts
    return []


def _is_typed(schema: Mapping[str, Any], value: Any) -> bool:
    named = schema.get("type")
    if named is None and not _has_more_keywords(schema):
        named = [_IMPLIED[word] for word in schema if word in _IMPLIED] or None
    names = named
    if isinstance(named, str):
        names = [named]
    if not isinstance(names, list):
        return True
    return any(_is_of(name, value) for name in names)


def _has_more_keywords(schema: Mapping[str, Any]) -> bool:
    """Whether something else than a single keyword says which values there are."""
    return any(word in schema for word in ("enum", "const", "$ref", "allOf", *_UNIONS))


def _is_of(name: Any, value: Any) -> bool:
    """Whether a value has this type; a type that isn't known admits anything."""
    lowered = ""
    if isinstance(name, str):
        lowered = name.strip().lower()
    types = _TYPES.get(_ALIASES.get(lowered, lowered))
    if types is None:
        return True
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _is_listed(schema: Mapping[str, Any], value: Any) -> bool:
    listed = schema.get("enum")
    if isinstance(listed, list) and not any(_same(one, value) for one in listed):
        return False
    return "const" not in schema or _same(schema["const"], value)


def _same(one: Any, other: Any) -> bool:
    """Equality of JSON, in which true isn't 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list | dict) and type(one) is type(other):
        return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    return bool(one == other)


# ---------------------------------------------------------------- what a text may stand for
def _readings(value: Value) -> Iterator[Any]:
    """All that an argument may stand for, the most likely first."""
    yield value.literal
    if not isinstance(value.literal, str):
        yield value.text
    word = value.text.strip()
    lowered = word.lower()
    if lowered in _NULLS:
        yield None
    if lowered in _BOOLEANS:
        yield _BOOLEANS[lowered]
    yield from _numbers(word)
    if (found := container(word)) is not None:
        yield found
    if lowered in _LOOSE_BOOLEANS:
        yield _LOOSE_BOOLEANS[lowered]


def _numbers(word: str) -> Iterator[int | float]:
    """A number as it is written, and the whole number that it is: `5.0` and `1e3` are integers, too."""
    if len(word) > MAX_DIGITS or not _NUMBER.fullmatch(word):
        return
    if word.lstrip("+-").isdecimal():
        yield int(word)
        return
    if math.isfinite(value := float(word)):
        yield value
    exact = Decimal(word)
    if abs(exact.adjusted()) < MAX_DIGITS and exact == exact.to_integral_value():
        yield int(exact)


def dumped(value: Any) -> str:
    """JSON text. Half a character, which JSON can escape and UTF-8 can't carry, stays escaped. Raises ValueError for
    what JSON can't carry."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if _is_encodable(text):
            return text
        return json.dumps(value)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _is_encodable(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False
