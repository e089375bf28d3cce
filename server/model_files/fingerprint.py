"""Whether two folders hold the same model.

Owns a digest of what decides which tokens a model draws and what they say: its configuration, its tokenizer and its
chat template whole, and of the weights their sizes, their heads and samples, since reading all of them would take as
long as loading them. Runs in both processes; only reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

WHOLE = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
WEIGHTS = ("*.safetensors", "*.gguf")
SAMPLE_BYTES = 1 << 16
SAMPLES = 8  # a file of weights, spread from its head to its end


def fingerprint(folder: Path) -> str:
    """32 hexadecimal digits: the same for the same files, wherever they lie. Raises OSError."""
    total = hashlib.sha256()
    for pattern in WHOLE:
        for path in sorted(folder.glob(pattern)):
            _add(total, path.name, path.read_bytes())
    for pattern in WEIGHTS:
        for path in sorted(folder.glob(pattern)):
            _add(total, path.name, b"".join(_samples(path)))
    return total.hexdigest()[:32]


def _add(total: hashlib._Hash, name: str, content: bytes) -> None:
    total.update(f"{name} {len(content)}\n".encode())
    total.update(content)


def _samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield str(size).encode()
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)
