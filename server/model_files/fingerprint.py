"""Whether two models are the same, by the content of their files; where the files lie counts for nothing.

Owns two digests, since two questions are asked:

- `answer_fingerprint`: would this model go on with a stored answer, and do its ids say the same text? The
  configuration, the code, the tokenizer and the chat template count. Of the weights it takes samples: the server
  process asks before an engine is up, and reading all weights would take as long as loading them.
- `cache_fingerprint`: would this model compute these caches? The configuration, the code, every byte of the weights
  and the version of mlx-lm count; the tokenizer doesn't, since caches follow from ids. A thread of the engine asks,
  and the hash of each file is kept in a file by path, size and time of change, so that weights are read for it once.

Never reads what a file means, and writes only the file of hashes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from server.config.whole_file import write_whole
from server.model_files.weights import weight_files

SAMPLE_BYTES = 1 << 16
SAMPLES = 8  # a file of weights, spread from its head to its end
KEPT_HASHES = 256  # of files, those that were asked for last
HASH_THREADS = 4
HEX_DIGITS = 32  # of a fingerprint

_CONFIGURATION = ("*.json", "*.py")  # some models bring code
_TEXT = ("*.jinja", "*.model", "*.txt", "*.tiktoken")
_WEIGHTS = ("*.safetensors", "*.gguf")
_TOKENIZER = (  # beginnings of the names of JSON and Python files that say nothing about the weights
    "tokenizer",
    "vocab",
    "special_tokens",
    "generation_config",
    "chat_template",
    "added_tokens",
    "merges",
)


def answer_fingerprint(folder: Path) -> str:
    """Digest all that decides which tokens a model draws and what they say, the weights by samples. Raises OSError."""
    whole = ((path.name, path.read_bytes()) for path in _found(folder, (*_CONFIGURATION, *_TEXT)))
    sampled = ((path.name, b"".join(samples(path))) for path in _found(folder, _WEIGHTS))
    return _fingerprint([*whole, *sampled])


def cache_fingerprint(folder: Path, hashes: Path) -> str:
    """Digest all that decides which caches a model computes, every byte of the weights with it.

    `hashes`: the file that keeps the hashes of files. Raises OSError, and StartupError where weights are missing.
    """
    code = [path for path in _found(folder, _CONFIGURATION) if not path.name.startswith(_TOKENIZER)]
    paths = [*code, *weight_files(folder)]
    found = _hashes(paths, hashes)
    hashed = [(path.name, value.encode()) for path, value in zip(paths, found, strict=True)]
    return _fingerprint([("mlx-lm", version("mlx-lm").encode()), *hashed])


def _found(folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    return (path for pattern in patterns for path in sorted(folder.glob(pattern)))


def _fingerprint(parts: Iterable[tuple[str, bytes]]) -> str:
    total = hashlib.sha256()
    for name, content in parts:
        total.update(f"{name} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()[:HEX_DIGITS]


def samples(path: Path) -> Iterator[bytes]:
    """The size of a file and pieces of it, spread from its head to its end: all of a small one. Raises OSError."""
    size = path.stat().st_size
    yield str(size).encode()
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)


# ---------------------------------------------------------------- hashes of whole files, kept in a file
def _hashes(paths: list[Path], file: Path) -> list[str]:
    kept = _read(file)
    states = [_state(path) for path in paths]
    with ThreadPoolExecutor(HASH_THREADS, "fingerprint") as threads:
        found = list(threads.map(lambda state, path: kept.get(state) or _hash(path), states, paths))
    asked = dict(zip(states, found, strict=True))
    others = {state: value for state, value in kept.items() if state not in asked}
    _write(file, others | asked)
    return found


def _state(path: Path) -> str:
    """What changes when a file does: in a model's folder files are replaced, or written anew."""
    stat = path.stat()
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"


def _hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read(file: Path) -> dict[str, str]:
    try:
        kept = json.loads(file.read_text("utf-8"))
        return {str(state): str(value) for state, value in kept.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _write(file: Path, hashes: dict[str, str]) -> None:
    newest = dict(list(hashes.items())[-KEPT_HASHES:])
    with contextlib.suppress(OSError):
        write_whole(file, json.dumps(newest).encode(), 0o600)
