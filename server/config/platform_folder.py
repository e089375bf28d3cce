"""Where a program of this user keeps its files, by the custom of the platform.

Owns the name of Marathon's own folder. Runs in every process. Creates nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

NAME = "mlx-marathon"


def platform_folder(variable: str, *, elsewhere: str, mac: str) -> Path:
    """Name the folder below that of the environment `variable` where it is set, else below `elsewhere`, or on a Mac
    below `mac`, in the user's home."""
    if root := os.environ.get(variable):
        return Path(root) / NAME
    place = elsewhere
    if sys.platform == "darwin":
        place = mac
    return Path.home() / place / NAME
