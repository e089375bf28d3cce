"""What `marathon check` prints: effective settings, versions, model, device and limits.

Owns that text. Runs in the main thread of a short-lived process; the device is asked about in a child, so that this
process, like the server, never creates one. Never prints an API key.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import server
from server.api.middleware.security import read_keys
from server.config.cache_folder import cache_folder
from server.config.sources import Sources
from server.errors import StartupError
from server.model_files.locate import ModelLocation, locate
from server.model_files.weights import weight_files
from server.settings import GROUPS, Settings, in_words
from server.text.tokenizer import Tokenizer

LIBRARIES = ("mlx", "mlx-lm", "tokenizers", "transformers", "llguidance", "fastapi", "uvicorn")
DEVICE_SECONDS = 120


def report(settings: Settings, sources: Sources) -> str:
    """All of it. Raises StartupError where the server couldn't start."""
    read_keys(settings)
    model = locate(settings)
    tokenizer = Tokenizer.load(model.path, trust_remote_code=settings.trust_remote_code)
    device = ask_device(settings)
    return "\n\n".join(
        [
            section("Settings", effective(settings, sources)),
            section("Versions", versions()),
            section("Model", facts_of(model, tokenizer) | {"fits": fits(model.path, device["memory_limit_bytes"])}),
            section("Device and limits", device | {"cache_folder": cache_folder(settings.cache_dir)}),
        ]
    )


def section(title: str, facts: Mapping[str, Any]) -> str:
    width = max(map(len, facts), default=0)
    return "\n".join([title, *(f"  {name:{width}}  {_word(value)}" for name, value in facts.items())])


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(str, value)) or "-"
    if value in (None, ""):
        return "-"
    return str(value)


def effective(settings: Settings, sources: Sources) -> dict[str, str]:
    """Each setting; one that isn't at its default with that default and with the place where it was set."""
    names = [name for part in GROUPS.values() for name in part.model_fields]
    return {name: _effective(name, getattr(settings, name), sources.origin(name)) for name in names}


def _effective(name: str, value: Any, origin: str) -> str:
    default = Settings.model_fields[name].default
    if value == default:
        return _shown(name, value)
    return f"{_shown(name, value)}  (default {_shown(name, default)}; set by {origin})"


def _shown(name: str, value: Any) -> str:
    if value in (None, [], ""):
        return "-"
    if name == "api_key":  # never the keys themselves
        return f"{len(value)} given"
    return in_words(name, value)


def fits(folder: Path, limit: int) -> str:
    """Whether the weights in `folder` leave room under the memory limit for what generations hold."""
    try:
        weights = sum(file.stat().st_size for file in weight_files(folder))
    except StartupError as error:
        return f"no: {error}"
    sizes = f"weights {in_gigabytes(weights)} of {in_gigabytes(limit)}"
    if weights >= limit:
        return f"no: {sizes}; try a smaller or more strongly quantised model, or another --memory-limit"
    return f"yes: {sizes}; {in_gigabytes(limit - weights)} are left for generations and prefixes"


def in_gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"


def versions() -> dict[str, str]:
    python = sys.version.split()[0]
    return {"marathon": server.__version__, "python": python, **{name: version(name) for name in LIBRARIES}}


def facts_of(model: ModelLocation, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the model's files say, and the sampling values that a request without its own gets."""
    form = tokenizer.tool_format
    return {
        "id": model.name,
        "folder": model.path,
        "vocabulary": tokenizer.vocab_size,
        "context": tokenizer.context,
        "end tokens": sorted(tokenizer.eos_ids),
        "chat template": tokenizer.has_template,
        "tool format": form.name if form else "plain JSON",
        "reasoning": " … ".join(tokenizer.think) if tokenizer.think else None,
        "default sampling": [f"{name}={value:g}" for name, value in defaults(tokenizer).items()],
    }


def defaults(tokenizer: Tokenizer) -> dict[str, float]:
    return {"temperature": 1.0, "top_p": 1.0} | tokenizer.defaults


def ask_device(settings: Settings) -> dict[str, Any]:
    """Facts about the device, from a process that may create it."""
    asked = settings.for_a_process()
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-m", "server.engine.device"],
            input=asked + "\n",
            capture_output=True,
            text=True,
            timeout=DEVICE_SECONDS,
            check=True,
        )
        facts: dict[str, Any] = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise StartupError(f"the device can't be asked: {error}") from None
    if "error" in facts:
        raise StartupError(facts["error"])
    return facts
