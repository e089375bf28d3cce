"""Where the model is.

Owns the way from `--model` to a folder on this machine and the id under which the model is served. Runs at start, in
the main thread; may fetch from the hub, and says so. Never loads a weight.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from server.config.user_path import NoSuchHome, user_path
from server.errors import StartupError
from server.model_files.hub import hub_folder, hub_id_of, snapshot, whole_snapshot
from server.model_files.progress import ReportProgress, to_log
from server.model_files.starter import NAME, ensure_starter
from server.model_files.weights import FUSE
from server.settings import Settings

_PART = r"[a-z0-9_](?:[a-z0-9._-]*[a-z0-9_])?"
_HUB_ID = re.compile(rf"{_PART}/{_PART}", re.IGNORECASE | re.ASCII)
_ADDRESS = re.compile(r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)", re.IGNORECASE)


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
    return at_hand(settings.model) or ModelLocation(hub_folder(settings.model, report).absolute(), settings.model)


def at_hand(model: str) -> ModelLocation | None:
    """The model that is named by its folder; None for a hub id. Raises StartupError for what is neither, at once."""
    try:
        folder = user_path(model)
        if folder.is_dir():
            return _folder(folder)
        there = folder.exists()
        link = folder.is_symlink()
    except NoSuchHome as error:
        raise StartupError(f"--model {model}: {error}") from None
    except OSError as error:
        raise StartupError(f"--model {model} can't be looked at: {error.strerror or error}") from None
    if there:
        raise StartupError(f"--model {model} is a file; an MLX model is a folder{_format(folder)}")
    if link:
        raise StartupError(f"--model {model} is a link to something that isn't there")
    if _HUB_ID.fullmatch(model):
        return None
    raise StartupError(f"--model {model}: there is no such folder, and it is no hub id either{_meant(model)}")


def _format(file: Path) -> str:
    if file.suffix.lower() == ".gguf":
        return ", and GGUF isn't read"
    return ""


def _meant(model: str) -> str:
    """The hub id in what was given: the address of its page, or with a revision behind it."""
    shown = _ADDRESS.sub("", model.strip())
    given = re.split(r"[@:?#]|(?<=[^/])/(?:tree|blob|resolve)/", shown.rstrip("/"))[0]
    if given != model and _HUB_ID.fullmatch(given):
        return f"; did you mean {given}?"
    return ""


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
        reason = "it has no config.json"
        if (folder / "adapter_config.json").is_file():
            reason = f"it is an adapter, {FUSE}"
        raise StartupError(f"--model {given} is no MLX model: {reason}")
    return ModelLocation(folder, hub_id_of(given.absolute()) or name or "model")
