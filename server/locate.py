"""Where the model is.

Owns the way from `--model` to a folder on this machine and the id under which the model is served. Runs at start, in
the main thread; may fetch from the hub, and says so. Never loads a weight.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from server import open_files
from server.errors import StartupError
from server.settings import Settings
from server.starter import NAME, ensure_starter

log = logging.getLogger("marathon")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Located:
    """A model's folder, and its id."""

    path: Path
    name: str


def locate(settings: Settings, tell: Callable[[str], None] = log.info) -> Located:
    """Raises StartupError with one line when there is no such model. `tell` hears how far a fetch is, at least every
    few seconds; what it raises ends that."""
    if settings.model is None:
        return Located(ensure_starter(settings.cache_dir, tell), NAME)
    return at_hand(settings.model) or Located(_fetched(settings.model), settings.model)


def at_hand(model: str) -> Located | None:
    """The model that is named by its folder; None for a hub id. Raises StartupError for what is neither, at once."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _folder(folder.resolve())
    if folder.exists():
        raise StartupError(f"--model {model} is a file; an MLX model is a folder")
    if _HUB_ID.fullmatch(model):
        return None
    raise StartupError(f"--model {model}: there is no such folder, and it is no hub id either")


def _folder(folder: Path) -> Located:
    if not (folder / "config.json").is_file():
        raise StartupError(f"--model {folder} is no MLX model: it has no config.json")
    return Located(folder, folder.name)


def _fetched(hub_id: str) -> Path:
    """By mlx-lm's own loader, from the hub or its cache."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)  # this process never computes
    with open_files.kept():
        from mlx_lm.utils import _download

    try:
        return Path(_download(hub_id))
    except Exception as error:  # the hub's client has a tree of its own, and the network another
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise StartupError(f"--model {hub_id} can't be fetched from the hub: {reason[:300]}") from error
