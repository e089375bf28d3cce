"""Where the model is.

Owns the way from `--model` to a folder on this machine and the id under which the model is served. Runs at start, in
the main thread; may fetch from the hub, and says so. Never loads a weight.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from server.errors import StartupError
from server.settings import Settings
from server.starter import NAME, ensure_starter

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Located:
    """A model's folder, and its id."""

    path: Path
    name: str


def locate(settings: Settings) -> Located:
    """Raises StartupError with one line when there is no such model."""
    if settings.model is None:
        return Located(ensure_starter(settings.cache_dir, _tell), NAME)
    folder = Path(settings.model).expanduser()
    if folder.is_dir():
        return _folder(folder.resolve())
    if folder.exists():
        raise StartupError(f"--model {settings.model} is a file; an MLX model is a folder")
    if _HUB_ID.fullmatch(settings.model):
        return Located(_fetched(settings.model), settings.model)
    raise StartupError(f"--model {settings.model}: there is no such folder, and it is no hub id either")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _folder(folder: Path) -> Located:
    if not (folder / "config.json").is_file():
        raise StartupError(f"--model {folder} is no MLX model: it has no config.json")
    return Located(folder, folder.name)


def _fetched(hub_id: str) -> Path:
    """By mlx-lm's own loader, from the hub or its cache."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)  # this process never computes
    from mlx_lm.utils import _download

    try:
        return Path(_download(hub_id))
    except Exception as error:  # the hub's client has a tree of its own, and the network another
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise StartupError(f"--model {hub_id} can't be fetched from the hub: {reason[:300]}") from error
