"""Members of a request's objects: those that are declared, and those that are not.

Owns the walk through validated wire objects. Runs in the server's worker thread; pure. Never looks into values whose
form is the client's own, such as a JSON schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from server.api.input.schema import Wire


def unknown(body: Wire) -> list[str]:
    """Names of the members that no object of a body declares, such as `messages[].speaker`, each once."""
    return sorted(set(_unknown(body, "")))


def _unknown(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Wire):
        prefix = ""
        if path:
            prefix = f"{path}."
        yield from (prefix + name for name in value.model_extra or {})
        fields = type(value).model_fields
        for name in value.model_fields_set & fields.keys():
            yield from _unknown(getattr(value, name), prefix + (fields[name].alias or name))
    elif isinstance(value, list) and value and isinstance(value[0], Wire):
        for item in value:
            yield from _unknown(item, f"{path}[]")


def declared(value: Any) -> Any:
    """Wire objects as dictionaries of what they declare and the client gave."""
    if isinstance(value, Wire):
        members = ((name, getattr(value, name)) for name in type(value).model_fields)
        return {name: declared(member) for name, member in members if member is not None}
    if isinstance(value, list) and value and isinstance(value[0], Wire):
        return [declared(item) for item in value]
    return value
