"""What models showed when they were tried out, kept on disk, so that a restart doesn't try them out again.

Owns those files, one a trial of a model as it lies in its folder, this version of the trial, of MLX and of mlx-lm, and
this device. Runs in the engine process's main thread, before the loop. A file that can't be read or written is no
fault: the model is tried out then.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from server.config.whole_file import write_whole

KEPT = 128  # files, the newest
_PACKAGES = ("mlx", "mlx-lm")

Result = TypeVar("Result")

log = logging.getLogger("marathon.engine")


class TrialResults(Generic[Result]):
    """The results of one kind of trial in one folder.

    Args:
        kind: the class of a result; msgspec writes and reads it.
        device: in words, with its memory; what a model showed on another isn't asked for.
        code: the modules that try models out; with others the trial is made again.
    """

    def __init__(self, kind: type[Result], folder: Path, device: str, code: Iterable[Path]) -> None:
        self._kind = kind
        self._folder = folder
        self._around = [
            kind.__name__,
            device,
            platform.machine(),
            str(os.cpu_count()),
            *(f"{p} {version(p)}" for p in _PACKAGES),
        ]
        self._around += [hashlib.sha256(path.read_bytes()).hexdigest() for path in code]

    def recall(self, model: Path) -> Result | None:
        """What the model in the folder `model` showed; None if it wasn't tried out here as it is now."""
        try:
            return msgspec.json.decode(self._file(model).read_bytes(), type=self._kind)
        except (OSError, msgspec.MsgspecError):
            return None

    def keep(self, model: Path, result: Result) -> None:
        """For the next start. A result that wouldn't come back as it is isn't kept."""
        encoded = msgspec.json.encode(result)
        if msgspec.json.decode(encoded, type=self._kind) != result:
            log.debug("what the model showed can't be written down")
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._file(model), encoded)
            self._drop_oldest()
        except OSError as error:
            words = "what the model showed can't be kept in %s, and each start tries it out again: %s"
            log.warning(words, self._folder, error.strerror)

    def _drop_oldest(self) -> None:
        files = sorted(self._folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files[KEPT:]:
            file.unlink(missing_ok=True)

    def _file(self, model: Path) -> Path:
        facts = [*self._around, str(model.resolve()), *_files(model)]
        return self._folder / (hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32] + ".json")


def _files(model: Path) -> list[str]:
    """Name, size and time of change of each file of a model, and the content of its config."""
    found = [(file, file.stat()) for file in sorted(model.iterdir()) if file.is_file()]
    config = (model / "config.json").read_text(encoding="utf-8", errors="replace")
    return [config, *(f"{file.name} {stat.st_size} {stat.st_mtime_ns}" for file, stat in found)]
