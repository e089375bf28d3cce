"""The sampling values that a model's makers recommend, as far as they can be in force.

Owns the reading of generation_config.json. Runs when the tokenizer is loaded, and in the engine when the model is. Says
in the log what of it is out of range or no number, and never raises: a model isn't refused for a recommendation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server.model_files.linked_folder import linked_folder
from server.model_files.model_config import json_object

NAME = "generation_config.json"
RANGES: dict[str, tuple[float, float]] = {  # as for a request's own values
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 1 << 31),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 10),
}
WHOLE = frozenset({"top_k"})

log = logging.getLogger("marathon")


def read(folder: Path) -> dict[str, Any]:
    """What the file in the model's folder says; {} without one, and with a line in the log where it can't be read."""
    value, reason = json_object(folder / NAME)
    if reason:
        log.warning("%s is ignored, and with it what the model's makers recommend: it %s", folder / NAME, reason)
    return value


@contextmanager
def without_broken(folder: Path) -> Iterator[Path]:
    """A folder of which mlx-lm reads no broken generation_config.json: `folder` itself where that is so, else one of
    links, for as long as the block lasts. mlx-lm 0.32 ignores what isn't JSON and fails over JSON that is no object and
    over what isn't UTF-8; this may go once it ignores these too."""
    _, reason = json_object(folder / NAME)
    if not reason:
        yield folder
        return
    with linked_folder({file.name: file for file in folder.iterdir() if file.name != NAME}) as shown:
        yield shown


def defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """By the names of a request's fields; what is absent or null isn't there."""
    read = {name: _value(name, generation[name]) for name in RANGES if generation.get(name) is not None}
    return {name: value for name, value in read.items() if value is not None}


def _value(name: str, value: Any) -> float | None:
    """None where nothing can be made of it."""
    lowest, highest = RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return _said(name, value, "is no number and is ignored", None)
    if name in WHOLE and value not in (float("inf"), float("-inf")) and value != int(value):
        return _said(name, value, "is no whole number and is ignored", None)
    if value < lowest:
        return _said(name, value, "is too small and is ignored", None)
    if value > highest:
        return _said(name, value, f"is too large; {highest:g} is used", highest)
    return value


def _said(name: str, value: Any, what: str, used: float | None) -> float | None:
    log.warning("%s: %s %s %s", NAME, name, repr(value)[:60], what)
    return used
