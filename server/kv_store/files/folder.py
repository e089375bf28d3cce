"""The folder of kept caches: where files lie, whose it is at the moment, how much it holds, and how it is cleared.

Owns the names of files and the lock. Runs in every process: the engine writes and reads, `marathon cache` shows and
clears. Only the holder of the lock writes, and the system frees it with its process.

    FOLDER/lock
    FOLDER/models.json             hashes of models' files
    FOLDER/<root>/model.json       which model, in words
    FOLDER/<root>/paces.json       how fast its caches and its prompts are read
    FOLDER/<root>/<name>.kv        pieces and states, as `record` has them
    FOLDER/<root>/tail.<n>.log     the newest positions of live rows, as `tail_log` has them
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from pathlib import Path

from server.config.file_lock import try_lock
from server.config.whole_file import write_whole
from server.kv_store.files.keys import KEY_BYTES
from server.kv_store.files.record import Kind

SUFFIX = ".kv"
LOCK = "lock"
HASHES = "models.json"
ABOUT = "model.json"
PACES = "paces.json"
TAIL = "tail.*.log"
FOLDER_MODE = 0o700
FILE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class Name:
    """What a file's name says, so that nothing has to be opened to find one.

    Attributes:
        origin: the key at `start`; of a state its own.
        parts: a bit for each cache of the model that is in it.
    """

    kind: Kind
    start: int
    end: int
    origin: bytes
    key: bytes
    parts: int

    def __str__(self) -> str:
        fields = (self.kind, str(self.start), str(self.end), self.origin.hex(), self.key.hex(), f"{self.parts:x}")
        return ".".join(fields) + SUFFIX

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """Read a name; None if it isn't one."""
        try:
            kind, start, end, origin, key, parts = text.removesuffix(SUFFIX).split(".")
            name = cls(_kind(kind), int(start), int(end), bytes.fromhex(origin), bytes.fromhex(key), int(parts, 16))
        except ValueError:
            return None
        if str(name) != text or not 0 <= name.start <= name.end:
            return None
        return name


def _kind(text: str) -> Kind:
    if text == "piece":
        return "piece"
    if text == "state":
        return "state"
    raise ValueError(text)


@dataclass(frozen=True, slots=True)
class Found:
    """A file that lies in the folder."""

    path: Path
    name: Name
    size: int
    used: float  # seconds since the epoch


def files(folder: Path) -> Iterator[Found]:
    """Every file of every model; what isn't one by its name, and what vanishes meanwhile, is left out."""
    for model in _models(folder):
        with contextlib.suppress(OSError), os.scandir(model) as entries:
            for entry in entries:
                name = Name.parse(entry.name)
                if name is not None:
                    yield from _found(entry, name)


def _found(entry: os.DirEntry[str], name: Name) -> Iterator[Found]:
    with contextlib.suppress(OSError):
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(found.st_mode):
            yield Found(Path(entry.path), name, found.st_size, found.st_mtime)


def open_file(path: Path) -> tuple[FileIO, int]:
    """Open a file of the folder for reading; returns its size with it, or -1 for what is none: something else in its
    place may be endless, or never open. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(file)
    size = -1
    if stat.S_ISREG(found.st_mode):
        size = found.st_size
    return FileIO(file), size


def _models(folder: Path) -> list[Path]:
    """The folders of models. Anything else that lies there isn't Marathon's, and stays."""
    with contextlib.suppress(OSError):
        return sorted(path for path in folder.iterdir() if _is_of_model(path))
    return []


def _is_of_model(path: Path) -> bool:
    is_named = len(path.name) == 2 * KEY_BYTES and set(path.name) <= set("0123456789abcdef")
    return is_named and path.is_dir() and not path.is_symlink()


def prepare(folder: Path) -> None:
    """Make the folder, for its owner alone. One that exists stays as open as it is, unless it is a model's: what is
    written lies in those. Raises OSError."""
    try:
        folder.mkdir(parents=True, mode=FOLDER_MODE)
    except FileExistsError:
        if not _is_of_model(folder):
            return
    folder.chmod(FOLDER_MODE)


def note_model(folder: Path, model: str) -> None:
    """Write down in words which model a folder of files belongs to; where there is no room for that, what lies there
    is as useful without. Raises OSError if there is no folder."""
    prepare(folder)
    about = json.dumps({"model": model}) + "\n"
    with contextlib.suppress(OSError):
        write_whole(folder / ABOUT, about.encode(), FILE_MODE)


def sweep(folder: Path) -> None:
    """Remove what a writer that was killed left half written."""
    for path in chain(folder.glob(f"{HASHES}.*.part"), *(model.glob("*.part") for model in _models(folder))):
        with contextlib.suppress(OSError):
            path.unlink()


class FolderLock:
    """One process may write into a folder; the lock goes with the process."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._file: int | None = None

    def take(self) -> bool:
        """Take the lock if it is free; whether it is ours now. Raises OSError if there can be none."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        if not try_lock(file):
            os.close(file)
            return False
        self._file = file
        return True

    def take_again(self) -> bool:
        """The same where the file that was locked has gone from the folder."""
        before = self._file
        if not self.take():
            return False
        if before is not None:
            os.close(before)
        return True

    @property
    def is_there(self) -> bool:
        """Whether the file that is locked still lies in the folder: without it, another process could take a lock."""
        if self._file is None:
            return False
        try:
            there = self._path.stat(follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._file))

    def release(self) -> None:
        """Let go of it; harmless if it isn't held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


# ---------------------------------------------------------------- for people
@dataclass(frozen=True, slots=True)
class FolderUsage:
    """What the folder holds of one model."""

    model: str
    files: int
    size: int  # bytes
    tokens: int  # that its pieces stand for, each prefix once
    used: float  # when one was last used, in seconds since the epoch
    oldest: float  # and when the one that was used longest ago was


def usage(folder: Path) -> list[FolderUsage]:
    """What lies in the folder, by model, the largest first."""
    by_model: dict[Path, list[Found]] = {}
    for found in files(folder):
        by_model.setdefault(found.path.parent, []).append(found)
    listed = [_usage(model, of_model) for model, of_model in by_model.items()]
    return sorted(listed, key=lambda one: one.size, reverse=True)


def _usage(model: Path, of_model: list[Found]) -> FolderUsage:
    spans = {(found.name.key, found.name.start): found.name for found in of_model if found.name.kind == "piece"}
    return FolderUsage(
        _model_name(model),
        len(of_model),
        sum(found.size for found in of_model),
        sum(name.end - name.start for name in spans.values()),
        max(found.used for found in of_model),
        min(found.used for found in of_model),
    )


def is_in_use(folder: Path) -> bool:
    """Whether a process holds the folder's lock."""
    lock = FolderLock(folder)
    if not (folder / LOCK).is_file():
        return False
    is_free = lock.take()
    lock.release()
    return not is_free


def _model_name(model: Path) -> str:
    try:
        return str(json.loads((model / ABOUT).read_text("utf-8"))["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return model.name


def clear(folder: Path) -> int:
    """Remove all that is kept, and nothing else; returns the bytes that it held. Safe while an engine uses the folder,
    which then reads the prompts again. Raises OSError for what can't be removed."""
    size = 0
    for found in files(folder):
        found.path.unlink(missing_ok=True)
        size += found.size
    sweep(folder)
    for model in _models(folder):
        for path in [model / ABOUT, model / PACES, *model.glob(TAIL)]:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else lies there
            model.rmdir()
    return size
