"""How far a download from the hub is, read off the hub's cache on disk.

Owns a thread that looks at the files while the hub's client writes them: its own bars come in several at once and
differ between its versions and ways of transfer, and the files don't. Never asks the hub for anything.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server.model_files.progress import ReportProgress, amount

LOOK_SECONDS = 1.0


def wanted(info: Any, patterns: list[str]) -> dict[str, int]:
    """Bytes of each file that is fetched, by its name in the cache's `blobs`; empty where the hub didn't say."""
    from huggingface_hub.utils._paths import filter_repo_objects

    siblings = getattr(info, "siblings", None) or []
    files = filter_repo_objects(siblings, allow_patterns=patterns, key=lambda file: file.rfilename)
    found = ((_blob(file), file.size) for file in files)
    return {blob: size for blob, size in found if blob and size is not None}


def _blob(file: Any) -> str | None:
    if file.lfs is not None:
        return str(file.lfs.sha256)
    blob: str | None = file.blob_id
    return blob


@contextmanager
def watched(name: str, blobs: Path, files: Mapping[str, int], report: ReportProgress) -> Iterator[None]:
    """Say each second how much of `files` lies in `blobs`, for as long as the block lasts."""
    over = threading.Event()

    def watch() -> None:
        total = sum(files.values())
        with contextlib.suppress(Exception):  # the start was given up; the block itself goes on to its end
            while total and not over.wait(LOOK_SECONDS):
                done = _on_disk(blobs, files)
                report(f"fetching {name}: {amount(done, total)}", done / total)

    thread = threading.Thread(target=watch, name="hub-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _on_disk(blobs: Path, files: Mapping[str, int]) -> int:
    """Bytes of `files` that are there, unfinished ones too, whose names are longer."""
    found: dict[str, int] = {}
    for path in blobs.glob("*"):
        blob = path.name.partition(".")[0]
        if blob in files:
            with contextlib.suppress(OSError):  # it has just been given its final name
                found[blob] = max(found.get(blob, 0), min(path.stat().st_size, files[blob]))
    return sum(found.values())
