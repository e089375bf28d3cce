"""What a model's JSON files say of it: how long its context is, which ids end a text.

Owns the spellings of these facts, so that the server, which reads them before an engine is up, and the engine come to
the same answers. Runs in both processes, once a start; pure functions but for `read`. Never imports MLX or a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from server.errors import one_line

CONFIG = "config.json"
_FILES = (CONFIG, "tokenizer_config.json")
TOKENIZER = "tokenizer.json"
LFS_POINTER = b"version https://git-lfs"  # how the files of a clone begin that Git LFS hasn't fetched
USUAL_CONTEXT = 32768  # positions, where the files don't say
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "max_context_length",
    "context_length",
    "seq_length",
    "n_ctx",
    "model_max_length",
)
_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
_SCALINGS = ("rope_scaling", "rope_parameters")
_LONGEST = 1 << 27  # tokenizers without a limit of their own name an absurd one, such as 1e30


def read(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object among the model's files; {} where the file is missing or broken, since loading the model fails
    with a better message."""
    try:
        value = json.loads((folder / name).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if isinstance(value, dict):
        return value
    return {}


def fault(folder: Path, *, typed: bool = False) -> str:
    """What is wrong with the model's JSON files, in words; empty if nothing is. Loading would fail, and blame another
    file or none. `typed`: the config must name the kind of model."""
    for name in _FILES:
        value, reason = json_object(folder / name)
        if reason:
            return f"{name} {reason}"
        if typed and name == CONFIG and not (folder / name).exists():
            return f"there is no {name}" if folder.is_dir() else "the folder is gone"
        if typed and name == CONFIG and not isinstance(value.get("model_type"), str):
            return f"{name} names no model_type"
    return ""


def tokenizer_fault(folder: Path) -> str:
    """What is wrong with tokenizer.json, in words; empty if nothing that can be seen without loading it."""
    value, reason = json_object(folder / TOKENIZER)
    if not reason and value and not isinstance(value.get("model"), dict):
        reason = "is no tokenizer: it has no `model`"
    if reason:
        return f"{TOKENIZER} {reason}"
    return ""


def json_object(file: Path) -> tuple[dict[str, Any], str]:
    """The JSON object in a file, {} where there is no file; and what is wrong with it."""
    try:
        content = file.read_bytes()
        if content.startswith(LFS_POINTER):
            return {}, "is a pointer of Git LFS; `git lfs pull` fetches the file itself"
        value = json.loads(content.decode("utf-8"))
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"can't be read: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        return {}, f"can't be read: {one_line(error)}"
    if not isinstance(value, dict):
        return {}, "is no JSON object"
    return value, ""


def context_of(folder: Path) -> int:
    """Positions that the model in `folder` was made for."""
    return context_length(read(folder, "config.json"), read(folder, "tokenizer_config.json"))


def context_length(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> int:
    """Positions that the model was made for: what its config says, else what its tokenizer's does, else the usual.

    A scaling of the positions that names their original number may lengthen what the config says; most configs have
    counted it in already.
    """
    parts = list(_language_parts(config))
    named = next((found for part in parts if (found := _named_context(part))), 0)
    scaled = max(map(_scaled_context, parts))
    return max(named, scaled) or _positions(tokenizer_config.get("model_max_length")) or USUAL_CONTEXT


def eos_ids(*files: Mapping[str, Any]) -> list[int]:
    """The ids that end a text by any of the files, each once, in their order."""
    found: dict[int, None] = {}
    for file in files:
        for part in _language_parts(file):
            value = part.get("eos_token_id")
            named = value if isinstance(value, list) else [value]
            found |= {token: None for token in named if _is_id(token)}
    return list(found)


def _language_parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config, and the parts of it that are about the language model, outermost first."""
    yield config
    for name in _LANGUAGE_PARTS:
        part = config.get(name)
        if isinstance(part, dict):
            yield from _language_parts(part)


def _named_context(part: Mapping[str, Any]) -> int:
    return next((found for key in _CONTEXT_KEYS if (found := _positions(part.get(key)))), 0)


def _scaled_context(part: Mapping[str, Any]) -> int:
    """The original positions times the factor; 0 where the config doesn't name both."""
    for name in _SCALINGS:
        scaling = part.get(name)
        if not isinstance(scaling, dict):
            continue
        original = _positions(scaling.get("original_max_position_embeddings"))
        factor = scaling.get("factor")
        if original and isinstance(factor, int | float) and factor >= 1:
            return _positions(original * factor)
    return 0


def _positions(value: Any) -> int:
    """0 for what is no number of positions."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LONGEST:
        return 0
    return int(value)


def _is_id(token: Any) -> TypeGuard[int]:
    return isinstance(token, int) and not isinstance(token, bool) and token >= 0
