"""The folder in which Marathon keeps what people made with it.

Owns where that is: unlike the cache, what lies in it can't be fetched or made again. Runs in every process. Creates
nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

JOURNAL = "journal.db"


def data_folder() -> Path:
    """Below `$XDG_DATA_HOME` where that is set, else in the platform's own place."""
    if root := os.environ.get("XDG_DATA_HOME"):
        return Path(root) / "mlx-marathon"
    place = ".local/share"
    if sys.platform == "darwin":
        place = "Library/Application Support"
    return Path.home() / place / "mlx-marathon"
