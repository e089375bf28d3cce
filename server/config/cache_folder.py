"""The folder in which Marathon keeps what it has made.

Owns where that is, so that there is one place to look, to move (`--cache-dir`) and to remove: the starter model, what
models showed when they were tried out, rows' KV, and the built live-buffer counter lie in it. Runs in every process. It
creates nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TRIALS = "trials"  # what models showed when they were tried out
COUNTERS = "native"  # built live-buffer counters
KEPT_KV = "kv"  # rows' KV, unless another folder is set for it


def cache_folder(configured: Path | None = None) -> Path:
    """`configured`, else below `$XDG_CACHE_HOME` where that is set, else in the platform's own place."""
    if configured is not None:
        return configured
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "mlx-marathon"
    place = ".cache"
    if sys.platform == "darwin":
        place = "Library/Caches"
    return Path.home() / place / "mlx-marathon"
