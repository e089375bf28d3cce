"""Which model it is, by the content of its files.

Owns the hashes of files, kept by path, size and time of change, so that a model's weights are read for it once. Runs in
a thread of the engine while the model loads. The path counts for nothing: a copy of a model is the same model, and
other weights at its place are another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from server.kv_store.files.keys import digest

KEPT = 256  # hashes of files, the newest
_CODE = ("*.json", "*.py")  # what else says how the weights are used
_NOT_THE_MODEL = (
    "tokenizer",
    "vocab",
    "special_tokens",
    "generation_config",
    "chat_template",
    "added_tokens",
    "merges",
)


def fingerprint(model: Path, weights: Iterable[Path], known: Path) -> bytes:
    """Hash a model's weights, its configuration and its own code, with the version of mlx-lm that runs it.

    `known`: the file of hashes. Raises OSError for a file that can't be read.
    """
    code = [path for pattern in _CODE for path in sorted(model.glob(pattern)) if _is_of_the_model(path)]
    kept = _kept(known)
    hashed = _hashed([*code, *weights], kept)
    _keep(known, kept | hashed)
    names = [path.name for path in code]
    return digest(version("mlx-lm").encode(), json.dumps(names).encode(), *(h.encode() for h in hashed.values()))


def _is_of_the_model(path: Path) -> bool:
    return not path.name.startswith(_NOT_THE_MODEL)


def _hashed(paths: list[Path], kept: dict[str, str]) -> dict[str, str]:
    places = [_place(path) for path in paths]
    with ThreadPoolExecutor(4, "kv fingerprint") as threads:
        found = threads.map(lambda pair: kept.get(pair[0]) or _hash(pair[1]), zip(places, paths, strict=True))
        return dict(zip(places, found, strict=True))


def _place(path: Path) -> str:
    stat = path.stat()
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"


def _hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _kept(known: Path) -> dict[str, str]:
    try:
        kept = json.loads(known.read_text("utf-8"))
        return {str(place): str(value) for place, value in kept.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _keep(known: Path, hashes: dict[str, str]) -> None:
    newest = dict(list(hashes.items())[-KEPT:])
    with contextlib.suppress(OSError):
        beside = known.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(newest), encoding="utf-8")
        beside.chmod(0o600)
        os.replace(beside, known)
