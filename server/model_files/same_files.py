"""Whether a model's files are still those that an earlier engine of this server loaded.

Owns which files count and what is kept of each: those from which mlx-lm makes the model. The tokenizer's aren't among
them, since the server reads these once and goes on with what it has. Runs in the engine process, before the weights
are read and after. Where `stat` says the same as before, no file is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from server.errors import StartupError
from server.ipc.messages import FileStates
from server.model_files.fingerprint import samples
from server.model_files.weights import INDEX, weight_files

_NAMED = 3  # files that have changed; the others are counted


def file_states(folder: Path, known: FileStates | None = None) -> FileStates:
    """What identifies the content of each file that makes the model in `folder`: what `stat` says of it, and the digest
    of samples of it, which is taken from `known` where `stat` says the same.

    Raises OSError, and StartupError where weights are missing.
    """
    weights = weight_files(folder)
    others = [path for path in (folder / "config.json", folder / INDEX, *sorted(folder.glob("*.py"))) if path.is_file()]
    states: FileStates = {}
    for path in (*others, *weights):
        name = path.relative_to(folder).as_posix()
        stat = _stat(path)
        before = (known or {}).get(name)
        states[name] = before if before is not None and before[0] == stat else (stat, _digest(path))
    return states


def require_same(known: FileStates, now: FileStates, since: str, mend: str = "") -> None:
    """Raises StartupError where the content of files is another than it was `since` a moment, which is put in words. It
    names them, and says how to `mend` that."""
    names = [name for name in sorted({*known, *now}) if _content(known, name) != _content(now, name)]
    if names:
        raise StartupError(f"its files have changed {since}: {_listed(names)}{mend}")


def _stat(path: Path) -> str:
    """What changes when a file does. The time of change can't be set back, unlike that of modification."""
    stat = path.stat()
    return f"{stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def _digest(path: Path) -> str:
    total = hashlib.sha256()
    for sample in samples(path):
        total.update(sample)
    return total.hexdigest()


def _content(states: FileStates, name: str) -> str | None:
    state = states.get(name)
    if state is None:
        return None
    return state[1]


def _listed(names: Iterable[str]) -> str:
    first, others = list(names)[:_NAMED], list(names)[_NAMED:]
    return ", ".join(first) + (f" and {len(others)} more" if others else "")
