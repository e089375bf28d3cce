"""Where the model is.

Owns the way from `--model` to a folder on this machine and the id under which the model is served. Runs at start, in
the main thread; may fetch from the hub, and says so. Never loads a weight.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from server.errors import StartupError
from server.model_files.hub import hub_folder, hub_id_of, snapshot, whole_snapshot
from server.model_files.progress import ReportProgress, to_log
from server.model_files.starter import NAME, ensure_starter
from server.settings import Settings

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """A model's folder, and its id."""

    path: Path
    name: str


def locate(settings: Settings, report: ReportProgress = to_log) -> ModelLocation:
    """Raises StartupError with one line when there is no such model. `report` hears how far a fetch is, at least every
    few seconds; what it raises ends that."""
    if settings.model is None:
        return ModelLocation(ensure_starter(settings.cache_dir, report), NAME)
    return at_hand(settings.model) or ModelLocation(hub_folder(settings.model, report), settings.model)


def at_hand(model: str) -> ModelLocation | None:
    """The model that is named by its folder; None for a hub id. Raises StartupError for what is neither, at once."""
    folder = Path(model).expanduser()
    try:
        if folder.is_dir():
            return _folder(folder)
        there = folder.exists()
        link = folder.is_symlink()
    except OSError as error:
        raise StartupError(f"--model {model} can't be looked at: {error.strerror or error}") from None
    if there:
        raise StartupError(f"--model {model} is a file; an MLX model is a folder")
    if link:
        raise StartupError(f"--model {model} is a link to something that isn't there")
    if _HUB_ID.fullmatch(model):
        return None
    raise StartupError(f"--model {model}: there is no such folder, and it is no hub id either")


def _folder(given: Path) -> ModelLocation:
    """The files are those of the moment, wherever a link leads later: each engine must load the same ones. The name is
    the one that was given, not that of a link's target; of a folder in the hub's cache it is the model's."""
    folder = given.resolve()
    if given.name not in ("", ".."):
        name = given.name
    else:
        name = folder.name
    if hub_id_of(folder) and not (folder / "config.json").is_file():
        folder = snapshot(folder) or whole_snapshot(folder) or folder
    if not (folder / "config.json").is_file():
        raise StartupError(f"--model {given} is no MLX model: it has no config.json")
    return ModelLocation(folder, hub_id_of(given.absolute()) or name or "model")
