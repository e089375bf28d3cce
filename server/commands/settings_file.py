"""What `marathon config` prints: a settings file with every setting, its meaning and its default.

Owns that text, which is made of the settings' fields. Pure; each line of a setting is commented out, and what remains
when the marks are taken away is the default.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from server.config.sources import variable
from server.settings import GROUPS, SIZES, in_words

WIDTH = 100
EXAMPLES: dict[Any, object] = {str: "…", Path: "/path/to/it", int: 65536, float: 600.0}
HEAD = f"""\
# Settings of Marathon: marathon serve --config FILE
#
# Every setting with its default; take the mark off a line to change it. A value on the command line or in the
# environment, such as {variable("port")}, wins over this file. `marathon check --config FILE` shows what holds."""


def example(parts: Mapping[str, type[BaseModel]] = GROUPS) -> str:
    """The file's text."""
    sections = ("\n".join(_section(title, part)) for title, part in parts.items())
    return "\n\n\n".join([HEAD, *sections])


def _section(title: str, part: type[BaseModel]) -> Iterator[str]:
    yield f"# {title} ".ljust(WIDTH, "-")
    for name, field in part.model_fields.items():
        yield ""
        yield from (f"# {line}" for line in textwrap.wrap(field.description or "", WIDTH - 2))
        yield f"#{name} = {_value(name, field)}"


def _value(name: str, field: FieldInfo) -> str:
    """The default as TOML writes it, or an example where a setting is absent by default."""
    if field.default is None:
        return f"{_example(name, field)}  # an example; absent by default"
    if name in SIZES and field.default:
        return json.dumps(in_words(name, field.default))
    return json.dumps(field.default)


def _example(name: str, field: FieldInfo) -> str:
    if name in SIZES:
        return '"8GiB"'
    kinds = get_args(field.annotation) or (field.annotation,)
    return json.dumps(EXAMPLES[kinds[0]], ensure_ascii=False)
