"""Which files a process has when it starts, and how many it may hold open.

Owns the limit of the server and its engines: raised where the system allows more, and kept while mlx-lm is imported;
and the standard files of a process that was started without. Runs in every process, at its start.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator

WANTED = 8192  # connections, and the files of a large model
_STANDARD = 3  # files that each process is started with


def fill_standard() -> None:
    """Lead standard files that are closed nowhere. A file or a connection that is opened later would get their number,
    and what libraries and child processes print would be written into it."""
    while (place := os.open(os.devnull, os.O_RDWR)) < _STANDARD:
        os.set_inheritable(place, True)
    os.close(place)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def raise_limit() -> None:
    """Up to what the system allows this process, where that is less than a server wants. Processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = WANTED
    if hard != resource.RLIM_INFINITY:
        allowed = min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with contextlib.suppress(OSError, ValueError):  # a Mac has a lower limit beside it
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Imports of mlx-lm leave the limit alone.

    It sets 2,048 of at most 4,096 when it is imported, which takes from a service what it was given for good, and fails
    for a user who is allowed fewer (https://github.com/ml-explore/mlx-lm/issues/1589). This may go once
    mlx-lm only raises the limit.
    """
    before = resource.setrlimit
    resource.setrlimit = _leave
    try:
        yield
    finally:
        resource.setrlimit = before


def _leave(kind: int, limits: tuple[int, int]) -> None:
    """What mlx-lm calls instead."""
