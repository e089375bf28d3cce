"""The folder in which Marathon keeps what it has made.

Owns where that is, so that there is one place to look, to move (`--cache-dir`) and to remove: the starter model, what
models showed when they were tried out, rows' KV, and the built live-buffer counter lie in it. Runs in every process. It
creates nothing.
"""

from __future__ import annotations

from pathlib import Path

from server.config.platform_folder import platform_folder

TRIALS = "trials"  # what models showed when they were tried out
COUNTERS = "native"  # built live-buffer counters
KEPT_KV = "kv"  # rows' KV, unless another folder is set for it


def cache_folder(configured: Path | None = None) -> Path:
    """`configured`, else below `$XDG_CACHE_HOME` where that is set, else in the platform's own place."""
    if configured is not None:
        return configured
    return platform_folder("XDG_CACHE_HOME", elsewhere=".cache", mac="Library/Caches")
