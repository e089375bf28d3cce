"""Locks on files by which processes of one machine keep out of each other's way.

Owns how such a lock is taken; the system frees it when its process ends, however that ends. Runs in every process.
"""

from __future__ import annotations

import fcntl
from typing import IO


def try_lock(file: int | IO[bytes]) -> bool:
    """Take the lock of an open file unless another process holds it. Raises OSError where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
