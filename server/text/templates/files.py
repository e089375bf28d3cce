"""Where a model's files keep its chat template.

Owns the places that transformers' tokenizers don't read: chat_template.json and processor_config.json, in which
processors kept templates before chat_template.jinja, and sets of templates without one that is called default. Runs
once, when the tokenizer is loaded. Never renders.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.errors import StartupError

DEFAULT = "default"
_LATER = ("chat_template.json", "processor_config.json")

log = logging.getLogger("marathon")


def chat_template(folder: Path, own: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template, or several by name; None where transformers finds them itself, or there is none. `own`: what
    tokenizer_config.json says."""
    named = _named(own.get("chat_template"))
    files = _files(folder)
    if DEFAULT in (files or named) and files.get(DEFAULT, "x").strip():
        return None  # transformers reads the files, or if there are none what tokenizer_config.json says
    found = named | {name: source for name, source in files.items() if source.strip()}
    for name in _LATER:
        if DEFAULT not in found:
            found = _later(folder / name) | found
    if not found:
        return None
    found.setdefault(DEFAULT, next(iter(found.values())))
    if len(found) > 1:
        return found
    return found[DEFAULT]


def _later(file: Path) -> dict[str, str]:
    kept = _json(file)
    return _named(kept.get("chat_template") if isinstance(kept, dict) else kept)


def _files(folder: Path) -> dict[str, str]:
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files[DEFAULT] = folder / "chat_template.jinja"
    return {name: _text(file) for name, file in files.items()}


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError:  # transformers reads it again, and would fail without naming it
        raise StartupError(f"{file.name} isn't UTF-8 text") from None


def _named(value: Any) -> dict[str, str]:
    """Templates by name, in any of the forms in which they are written."""
    if isinstance(value, str):
        value = {DEFAULT: value}
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    if not isinstance(value, dict):
        return {}
    pairs = ((name, source) for name, source in value.items() if isinstance(name, str) and isinstance(source, str))
    return {name: source for name, source in pairs if source.strip()}


def _json(file: Path) -> Any:
    try:
        if file.is_file():
            return json.loads(file.read_text("utf-8"))
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s can't be read, and no chat template is taken from it: %s", file, error)
        return None
