"""What `marathon models` lists: the models on this machine, what they take, and whether they fit.

Owns the search and the list. Runs in the main thread of a short-lived process; the device is asked about in a child, as
by `marathon check`. Reads configs and the heads of weights, never a weight.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from server.check import ask_device, in_gigabytes
from server.commands.status import columns
from server.config.cache_folder import cache_folder
from server.errors import StartupError
from server.model_files import kv_cost, model_config
from server.model_files.hub import hub_id_of, lacks, snapshot
from server.model_files.starter import NAME
from server.model_files.weights import weight_files
from server.settings import load_from, read_sources

HEAD = ("model", "weights", "KV a token", "context", "fits this machine")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine. Sizes in bytes; None where the files don't say.

    `longest`: positions of one sequence that fit beside the weights. `lack`: why the model can't be served at all.
    """

    name: str
    folder: str
    weights: int | None = None
    kv_per_token: int | None = None
    context: int | None = None
    longest: int | None = None
    fits: bool = False
    lack: str | None = None


def show(folders: list[Path], *, as_json: bool) -> int:
    """Print the list and return 0. Raises StartupError for a folder that isn't there and where the device can't be
    asked."""
    settings = load_from(read_sources({}, None))
    found = dict(places(cache_folder(settings.cache_dir), folders))
    limit: int = ask_device(settings)["memory_limit_bytes"]
    models = [look_at(name, folder, limit) for folder, name in found.items()]
    if as_json:
        print(json.dumps([asdict(model) for model in models], indent=2))
    else:
        print("\n".join(lines(models, limit)))
    return 0


# ---------------------------------------------------------------- which there are
def places(kept: Path, folders: list[Path]) -> Iterator[tuple[Path, str]]:
    """Yield each model's folder and the name to serve it by: the starter model, the hub's cache, then `folders`."""
    from huggingface_hub import constants

    if _is_model(kept / NAME):
        yield kept / NAME, NAME
    for repository in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        folder = snapshot(repository)
        if folder is not None and _is_model(folder):
            yield folder, hub_id_of(folder) or repository.name
    for folder in folders:
        yield from _below(folder)


def _below(folder: Path) -> Iterator[tuple[Path, str]]:
    if not folder.is_dir():
        raise StartupError(f"--folder {folder}: there is no such folder")
    for place in (folder, *sorted(folder.iterdir())):
        if _is_model(place):
            yield place.resolve(), str(place)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


# ---------------------------------------------------------------- what they take
def look_at(name: str, folder: Path, limit: int) -> LocalModel:
    """Read what a model's files say. `limit`: bytes that MLX may use on this machine."""
    if lack := lacks(folder):
        return LocalModel(name, str(folder), lack=lack)
    files = weight_files(folder)
    weights = sum(file.stat().st_size for file in files)
    context = model_config.context_of(folder)
    costs = kv_cost.layer_costs(model_config.read(folder, "config.json"), kv_cost.float_width(files))
    if costs is None:
        return LocalModel(name, str(folder), weights, context=context, fits=weights < limit)
    longest = kv_cost.longest(costs, limit - weights, context)
    per_token = sum(cost.per_position for cost in costs if not cost.cap)
    return LocalModel(name, str(folder), weights, per_token, context, longest, longest > 0)


# ---------------------------------------------------------------- text
def lines(models: list[LocalModel], limit: int) -> Iterator[str]:
    """Write the list for a terminal."""
    if not models:
        yield "There is no model on this machine yet; `marathon serve` fetches the starter model."
        return
    yield f"MLX may use {in_gigabytes(limit)} here."
    yield from columns([HEAD, *map(_cells, models)])


def _cells(model: LocalModel) -> tuple[str, ...]:
    if model.weights is None:
        return (model.name, "-", "-", "-", f"no: {model.lack}")
    kv = "unknown"
    if model.kv_per_token is not None:
        kv = f"{model.kv_per_token / 1000:,.1f} kB"
    return (model.name, in_gigabytes(model.weights), kv, f"{model.context:,}", _verdict(model))


def _verdict(model: LocalModel) -> str:
    if not model.fits:
        return "no: its weights alone fill the memory"
    if model.longest is None:
        return "yes, its weights"
    if model.longest == model.context:
        return "yes, with its whole context"
    return f"yes, up to {model.longest:,} tokens"
