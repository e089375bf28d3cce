"""Where a process's log goes, in words, for people who have to read it.

Owns nothing; looks at the descriptor of stderr. Pure otherwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

STDERR = 2
_F_GETPATH = 50  # of macOS's fcntl
_LONGEST_PATH = 1024


def log_place(environ: Mapping[str, str] = os.environ, descriptor: int = STDERR) -> str:
    """Say where what is written to the descriptor can be read."""
    try:
        status = os.fstat(descriptor)
        if os.isatty(descriptor):
            return "the terminal that the server was started in"
        if environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}" and "INVOCATION_ID" in environ:
            return f"journalctl _SYSTEMD_INVOCATION_ID={environ['INVOCATION_ID']}"
        path = _path(descriptor)
    except (OSError, ValueError):
        return "nowhere: the server's stderr is closed"
    if path == os.devnull:
        return f"nowhere: the server's stderr is {os.devnull}"
    if path.startswith("/") and os.path.isfile(path):
        return path
    return "a pipe, read by the program that started the server"


def _path(descriptor: int) -> str:
    """The path of an open file; what it isn't for a pipe."""
    if sys.platform == "darwin":
        import fcntl

        return fcntl.fcntl(descriptor, _F_GETPATH, bytes(_LONGEST_PATH)).rstrip(b"\0").decode(errors="replace")
    return os.readlink(f"/proc/self/fd/{descriptor}")
