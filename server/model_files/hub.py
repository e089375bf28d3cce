"""Models of the hub: from its cache on this machine, else fetched.

Owns the way from a hub id to a folder, the time that the hub is given to answer, and the sentence for each way in which
it may refuse. Runs at start, in the thread that looks for the model. Never asks the hub for what the cache has whole,
so that a slow or silent hub can't hold up a model that is here; `hf download` brings a newer one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from server.config import open_files
from server.errors import StartupError, one_line
from server.model_files import hub_progress
from server.model_files.progress import ReportProgress
from server.model_files.weights import weight_files

ANSWER_SECONDS = 10.0  # for the hub to say anything at all
_REPOSITORY = re.compile(r"models--(.+)")
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
TOKENIZERS = (*VOCABULARIES, "tokenizer_config.json")


def hub_folder(hub_id: str, report: ReportProgress) -> Path:
    """The model's folder. Raises StartupError with one line when there can be none."""
    if os.environ.get("MLXLM_USE_MODELSCOPE", "").lower() == "true":
        return _fetched(hub_id, None, report)  # mlx-lm asks another hub
    here = _cached(hub_id)
    if here is not None and (lack := lacks(here)) is None:
        report(f"{hub_id} is in the hub's cache ({here}); the hub isn't asked for a newer one")
        return here
    try:
        info = _knock(hub_id, report, lack if here is not None else None)
    except StartupError as error:
        if (earlier := whole_snapshot(_cache_of(hub_id))) is None:
            raise
        report(f"{error}; an earlier snapshot in the cache is whole and is served: {earlier}")
        return earlier
    folder = _fetched(hub_id, info, report)
    if lack := lacks(folder):
        raise StartupError(f"--model {hub_id} was fetched and can't be served: {lack}")
    return folder


def hub_id_of(folder: Path) -> str | None:
    """`org/name` for a snapshot in the hub's cache, or for all of that model in it; None for other folders."""
    repository = folder
    if folder.parent.name == "snapshots":
        repository = folder.parent.parent
    match = _REPOSITORY.fullmatch(repository.name)
    if match:
        return match[1].replace("--", "/")
    return None


def snapshot(repository: Path) -> Path | None:
    """The snapshot that a model's folder in the hub's cache has for `main`, or its only one."""
    try:
        main = repository / "snapshots" / (repository / "refs" / "main").read_text("utf-8").strip()
        if main.is_dir():
            return main
    except (OSError, ValueError):
        pass
    found = _snapshots(repository)
    if len(found) == 1:
        return found[0]
    return None


def whole_snapshot(repository: Path) -> Path | None:
    """The newest snapshot that lacks nothing: a download that was cut off leaves `main` with one that does."""
    return next((path for path in _snapshots(repository) if lacks(path) is None), None)


def _snapshots(repository: Path) -> list[Path]:
    """The newest first."""
    found = [path for path in repository.glob("snapshots/*") if path.is_dir()]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def lacks(folder: Path) -> str | None:
    """What a snapshot lacks of a whole model, in words."""
    if not (folder / "config.json").is_file():
        return "there is no config.json"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return "there is no tokenizer"
    try:
        weight_files(folder)
    except StartupError as error:
        return str(error)
    return None


def _cache_of(hub_id: str) -> Path:
    """Where the hub's cache keeps this model."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"


def _cached(hub_id: str) -> Path | None:
    folder = snapshot(_cache_of(hub_id))
    if folder is not None and folder.is_dir():
        return folder
    return None


# ---------------------------------------------------------------- asking the hub
def _knock(hub_id: str, report: ReportProgress, lack: str | None) -> Any:
    """Asks the hub whether it has the model, before mlx-lm is loaded, which takes seconds. Returns what the hub says of
    it and its files."""
    from huggingface_hub import HfApi, constants, get_session

    report(f"asking the hub at {constants.ENDPOINT} for {hub_id}; it has {ANSWER_SECONDS:g} s to answer")
    try:
        hooks = get_session().event_hooks["request"]
        hooks += [_limited] * (_limited not in hooks)
        info = HfApi().model_info(hub_id, files_metadata=True)
    except Exception as error:  # the hub's client has a tree of its own, and the network another
        here = "its cache has nothing of it"
        if lack:
            here = f"what its cache has of it isn't whole: {lack}"
        raise StartupError(f"--model {hub_id}: {_reason(hub_id, error)}; {here}") from error
    report(f"fetching {hub_id} from the hub at {constants.ENDPOINT}")
    return info


def _limited(request: Any) -> None:
    """Gives the hub a limited time for each answer for which its client, huggingface_hub 2.4, would wait for ever."""
    limits = request.extensions.get("timeout") or {}
    request.extensions["timeout"] = {phase: seconds or ANSWER_SECONDS for phase, seconds in limits.items()}


def _reason(hub_id: str, error: Exception) -> str:
    from huggingface_hub import constants

    kinds = {kind.__name__ for kind in type(error).__mro__}
    page = f"{constants.ENDPOINT}/{hub_id}"
    if "TimeoutException" in kinds or "Timeout" in kinds or isinstance(error, TimeoutError):
        return f"the hub at {constants.ENDPOINT} hasn't answered for {ANSWER_SECONDS:g} s"
    if "OfflineModeIsEnabled" in kinds:
        return "the hub isn't asked, since HF_HUB_OFFLINE is set"
    if "GatedRepoError" in kinds:
        return f"the hub gives it only to those who accepted its terms at {page}; HF_TOKEN says who asks"
    if "RepositoryNotFoundError" in kinds:
        return f"there is no {page}, or it is private and HF_TOKEN is needed"
    return f"the hub at {constants.ENDPOINT} can't be asked: {one_line(error)}"


def _fetched(hub_id: str, info: Any, report: ReportProgress) -> Path:
    """By mlx-lm's own loader, into the hub's cache. `info`: what the hub says of the model, if that was asked."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)  # this process never computes
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # they would be drawn over ours
    with open_files.kept():
        from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, _download

    files = hub_progress.wanted(info, DEFAULT_ALLOW_PATTERNS)
    try:
        with hub_progress.watched(hub_id, _cache_of(hub_id) / "blobs", files, report):
            return Path(_download(hub_id))
    except Exception as error:  # the hub's client has a tree of its own, and the network another
        raise StartupError(f"--model {hub_id} can't be fetched from the hub: {one_line(error)}") from error
