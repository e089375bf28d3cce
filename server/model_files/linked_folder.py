"""A folder of links, which shows a library other files than the model's own folder has.

Runs in both processes; the folder is gone at the end of its block. Never copies or changes a file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def linked_folder(files: Mapping[str, Path]) -> Iterator[Path]:
    """A folder that has `files` under the names given, for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="marathon-model-") as name:
        folder = Path(name)
        for shown, file in files.items():
            (folder / shown).symlink_to(file.absolute())
        yield folder
