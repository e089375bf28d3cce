"""The folder in which Marathon keeps what people made with it.

Owns where that is: unlike the cache, what lies in it can't be fetched or made again. Runs in every process. Creates
nothing.
"""

from __future__ import annotations

from pathlib import Path

from server.config.platform_folder import platform_folder

JOURNAL = "journal.db"


def data_folder() -> Path:
    """Below `$XDG_DATA_HOME` where that is set, else in the platform's own place."""
    return platform_folder("XDG_DATA_HOME", elsewhere=".local/share", mac="Library/Application Support")
