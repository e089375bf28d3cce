"""What `marathon cache` shows and clears: the KV of rows that servers keep on disk.

Owns the words and the figures. Runs in the main thread of a short-lived process. Reads names, sizes and times of files,
never what is in them; `clear` removes them, also while a server uses the folder, which then reads prompts again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from server.check import in_gigabytes
from server.commands.status import columns
from server.config.cache_folder import KEPT_KV, cache_folder
from server.errors import StartupError
from server.kv_store.files import folder as kept
from server.kv_store.files.folder import FolderUsage
from server.settings import Settings, load_from, read_sources
from server.status.verdict import duration

HEAD = ("model", "files", "size", "tokens", "last used", "oldest")


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What lies on disk. `limit`: bytes that the settings allow, 0 for none; times in seconds since 1970."""

    folder: str
    limit: int
    in_use: bool
    bytes: int
    models: list[FolderUsage]
    now: float


def show(config: str | None, folder: Path | None, *, as_json: bool) -> int:
    """Print what is kept and return 0. Raises StartupError for a folder that can't be read."""
    report = read(load_from(read_sources({}, config)), folder)
    if as_json:
        print(json.dumps(as_object(report), indent=2))
    else:
        print("\n".join(lines(report)))
    return 0


def clear(config: str | None, folder: Path | None, *, as_json: bool) -> int:
    """Remove what is kept, say how much it was, and return 0. Raises StartupError for what can't be removed."""
    home = place(load_from(read_sources({}, config)), folder)
    try:
        removed = kept.clear(home)
    except OSError as error:
        raise StartupError(f"{error.filename or home}: {error.strerror}") from None
    if as_json:
        print(json.dumps({"folder": str(home), "removed_bytes": removed}, indent=2))
    else:
        print(f"{in_gigabytes(removed)} of KV removed from {home}.")
    return 0


def place(settings: Settings, folder: Path | None) -> Path:
    """The folder that is meant: the one given, else the settings'. Raises StartupError if something else lies there."""
    home = folder or settings.kv_disk_folder or cache_folder(settings.cache_dir) / KEPT_KV
    if home.exists() and not home.is_dir():
        raise StartupError(f"{home} is no folder")
    return home


def read(settings: Settings, folder: Path | None) -> CacheReport:
    """Read what lies in the folder. Raises StartupError if it can't be read."""
    home = place(settings, folder)
    try:
        models = kept.usage(home)
        in_use = kept.is_in_use(home)
    except OSError as error:
        raise StartupError(f"{error.filename or home}: {error.strerror}") from None
    size = sum(one.size for one in models)
    return CacheReport(str(home), settings.kv_disk, in_use, size, models, time.time())


def as_object(report: CacheReport) -> dict[str, object]:
    """The report for programs; ages in seconds."""
    models = [
        {
            "model": one.model,
            "files": one.files,
            "bytes": one.size,
            "tokens": one.tokens,
            "last_used_seconds": report.now - one.used,
            "oldest_seconds": report.now - one.oldest,
        }
        for one in report.models
    ]
    return {
        "folder": report.folder,
        "limit_bytes": report.limit,
        "in_use": report.in_use,
        "bytes": report.bytes,
        "models": models,
    }


def lines(report: CacheReport) -> Iterator[str]:
    """The report for a terminal."""
    yield f"{in_gigabytes(report.bytes)} of KV in {report.folder}, {_terms(report)}."
    if report.models:
        yield from columns([HEAD, *(_cells(one, report.now) for one in report.models)])
        yield "It is made of conversations; `marathon cache clear` removes it."


def _terms(report: CacheReport) -> str:
    limit = f"{in_gigabytes(report.limit)} allowed"
    if not report.limit:
        limit = "switched off (--kv-disk)"
    if report.in_use:
        return f"{limit}, in use by a server"
    return limit


def _cells(one: FolderUsage, now: float) -> tuple[str, ...]:
    ages = (f"{duration(max(0.0, now - used))} ago" for used in (one.used, one.oldest))
    return (one.model, f"{one.files:,}", in_gigabytes(one.size), f"{one.tokens:,}", *ages)
