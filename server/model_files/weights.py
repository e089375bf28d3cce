"""Which files hold a model's weights, and whether they are whole.

Owns the reading of the index and of the files' heads, and the folder that mlx-lm is shown where the model's own holds
more files than belong to it. Runs in both processes: before a model is served from the hub's cache, and before an
engine loads one. Never reads a weight.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from server.errors import StartupError, one_line
from server.model_files.linked_folder import linked_folder
from server.model_files.model_config import LFS_POINTER

INDEX = "model.safetensors.index.json"
TAKEN = "model*.safetensors"  # by mlx-lm
_OTHERS = ("adapter*.safetensors", "*.safetensors", "*.gguf", "*.bin", "*.pt*", "*.npz")
FUSE = "of which `mlx_lm.fuse` makes a model, together with the model that it was trained on"
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_LONGEST_HEAD = 1 << 27  # bytes; safetensors' own limit is 100 MB
_NAMED = 3  # missing files; the others are counted

log = logging.getLogger("marathon")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index where there is one.

    Raises StartupError that names what is missing, cut off or no weights at all; the caller says in which model.
    """
    indexed = _indexed(folder)
    files = indexed or sorted(folder.glob(TAKEN))
    if not files:
        raise StartupError(f"it has no weights: there is no {TAKEN}{_other(folder)}")
    missing = [file.name for file in files if not file.is_file()]
    if missing := missing or ([] if indexed else _missing_shards(files)):
        raise StartupError(f"{_listed(missing)} missing")
    for file in files:
        if fault := _fault(file):
            raise StartupError(f"{file.name} {fault}")
    return files


@contextmanager
def only_weights(folder: Path) -> Iterator[Path]:
    """A folder in which mlx-lm finds the model's weights and no others: `folder` itself where that is so, else one of
    links, for as long as the block lasts. mlx-lm 0.32 loads whatever looks like weights, index or not; this may go once
    it reads the index."""
    files = weight_files(folder)
    if set(files) == set(folder.glob(TAKEN)):
        yield folder
        return
    others = {file.name: file for file in folder.iterdir() if file.suffix != ".safetensors"}
    weights = {f"model-{number:05}.safetensors": file for number, file in enumerate(files, 1)}
    with linked_folder(others | weights) as shown:
        yield shown


# ---------------------------------------------------------------- which
def _indexed(folder: Path) -> list[Path]:
    """The index's files; [] without an index, or where it is about other weights than those that are there."""
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        files = [folder / _within(name) for name in _names(json.loads(index.read_text("utf-8")))]
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{INDEX} is no index: {one_line(error)}") from None
    if not any(file.is_file() for file in files) and any(folder.glob(TAKEN)):
        log.warning("%s names none of the weights beside it; they are loaded without it", index)
        return []
    return files


def _names(index: Any) -> list[str]:
    """The files of an index, each once."""
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict):
        raise ValueError("it has no object `weight_map`")
    if odd := [name for name in names.values() if not isinstance(name, str)]:
        raise ValueError(f"{odd[0]!r} is no file name")
    return sorted(set(names.values()))


def _within(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
        raise ValueError(f"{name!r} is no file of weights in the model's folder")
    return str(path)


def _missing_shards(files: list[Path]) -> list[str]:
    """Of files that say in their names how many there are."""
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for file in files:
        if match := _SHARD.fullmatch(file.name):
            found[match[1], match[3]].add(int(match[2]))
    return [
        f"{name}-{number:0{len(total)}}-of-{total}.safetensors"
        for (name, total), numbers in found.items()
        for number in range(1, min(int(total), 9999) + 1)
        if number not in numbers
    ]


def _listed(names: list[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is"
    more = ""
    if len(names) > _NAMED:
        more = f" and {len(names) - _NAMED} more"
    return f"{', '.join(names[:_NAMED])}{more} are"


def _other(folder: Path) -> str:
    """Weights that mlx-lm doesn't take for a model's."""
    other = [file.name for pattern in _OTHERS for file in sorted(folder.glob(pattern))]
    if not other:
        return ""
    if other[0].startswith("adapter"):
        return f"; {other[0]} holds an adapter, {FUSE}"
    return f"; mlx-lm doesn't read {other[0]}"


# ---------------------------------------------------------------- whether they are whole
def _fault(file: Path) -> str | None:
    """Return what is wrong with the file, as far as its head and its size show."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            first = stream.read(len(LFS_POINTER))
            if first == LFS_POINTER:
                return "is a pointer of Git LFS; `git lfs pull` fetches the weights themselves"
            length = int.from_bytes(first[:8], "little")
            if len(first) < 8 or 8 + length > min(size, _LONGEST_HEAD):
                return f"is cut off, or no safetensors file ({size} bytes)"
            stream.seek(8)
            head = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in head.items() if name != "__metadata__"]
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return "is no safetensors file"
    whole = 8 + length + max(ends, default=0)
    if size < whole:
        return f"is cut off after {size} of {whole} bytes"
    return None
