"""Small files that are there whole or not at all.

Owns how they are written: beside their place, then moved into it. Any process and any thread may write.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


def write_whole(file: Path, content: bytes, mode: int | None = None) -> None:
    """Write a file in the place of what was there; `mode`: its permissions, else the process's usual ones. Raises
    OSError, and then leaves all as it was."""
    beside = file.with_name(f"{file.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        beside.write_bytes(content)
        if mode is not None:
            beside.chmod(mode)
        os.replace(beside, file)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
