"""Tools as a chat template may want them that can't be given them as they are.

Owns what is put in the place of members that a client may leave out, so that a template finds them. What the template
makes of it is for the model to read; what calls are held to stays the client's own schema. Pure; any thread.
"""

from __future__ import annotations

from typing import Any

_NAMES = ((bool, "boolean"), (int, "integer"), (float, "number"), (list, "array"), (dict, "object"))


def completed(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool with the members that a client may leave out: a description, parameters with their properties, and of
    each property one type."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    parameters = _typed({"type": "object", "properties": {}} | (function.get("parameters") or {}))
    described = {"description": function.get("description") or "", "parameters": parameters}
    return tool | {"function": function | described}


def _typed(schema: Any) -> Any:
    """A schema and those in it with one type each, as some templates want it: the first that isn't null."""
    if not isinstance(schema, dict):
        return {"type": "string"}
    options = [option for name in ("anyOf", "oneOf", "allOf") for option in _dicts(schema.get(name))]
    chosen: dict[str, Any] = next((option for option in options if option.get("type") != "null"), {})
    typed = chosen | schema
    kinds = typed.get("type")
    if isinstance(kinds, list):
        kinds = next((kind for kind in kinds if kind != "null"), None)
    typed["type"] = kinds if isinstance(kinds, str) else _implied(typed)
    if isinstance(properties := typed.get("properties"), dict):
        typed["properties"] = {name: _typed(part) for name, part in properties.items()}
    if "items" in typed:
        typed["items"] = _typed(typed["items"])
    return typed


def _dicts(found: Any) -> list[dict[str, Any]]:
    if isinstance(found, list):
        return [one for one in found if isinstance(one, dict)]
    return []


def _implied(schema: dict[str, Any]) -> str:
    """The type of which a schema speaks that names none."""
    if "properties" in schema:
        return "object"
    if "items" in schema:
        return "array"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    for value in values if isinstance(values, list) else []:
        for kind, name in _NAMES:
            if isinstance(value, kind):
                return name
    return "string"
