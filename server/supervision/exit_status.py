"""What the exit status of a process says.

Owns the words for it, whether it says anything about the work that the process had, and whether a process stands still.
Imports nothing of Marathon, since the process that checks grammars starts with it. Changes nothing.
"""

from __future__ import annotations

import os
import signal
import sys

DYING_SECONDS = 0.5  # from the end of a process's connection to that of the process
TRIES = 2  # of work whose process was ended from outside
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def describe_exit(status: int | None) -> str:
    """An exit status as people say it."""
    if status is None:
        return "didn't end"
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def was_ended_from_outside(status: int | None) -> bool:
    """An exit status that says nothing about the work under way: no process does that to itself."""
    return status is not None and -status in _FROM_OUTSIDE


def is_stopped(pid: int) -> bool:
    """Whether a child was stopped, by SIGSTOP or a debugger. False also where the system doesn't tell."""
    if sys.platform != "linux":  # Python's `waitid` isn't there on a Mac before 3.13
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended
        return False
