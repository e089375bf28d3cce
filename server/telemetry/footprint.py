"""What the system charges this process for, in bytes, and giving back what isn't needed.

Owns three system calls. Runs in any thread. On macOS the resident size misses what Metal holds, so the physical
footprint is read, the figure that Activity Monitor shows; on Linux it is the resident size.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_RUSAGE_V0 = 0
_RUSAGE_BYTES = 96
_FOOTPRINT_AT = 72  # ri_phys_footprint, after a 16-byte uuid and seven 64-bit fields


def footprint() -> int:
    """0 where the system doesn't say."""
    try:
        if sys.platform == "darwin":
            return _macos()
        return _linux()
    except (OSError, AttributeError, ValueError):
        return 0


def give_back() -> None:
    """Let glibc's malloc return what was freed: it keeps it for later, spread over its heap, so that a process which
    takes and frees buffers of many sizes only grows. Other C libraries return it by themselves."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def total_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return total


def _linux() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _macos() -> int:
    buffer = ctypes.create_string_buffer(_RUSAGE_BYTES)
    if ctypes.CDLL(None).proc_pid_rusage(os.getpid(), _RUSAGE_V0, buffer):
        return 0
    return ctypes.c_uint64.from_buffer(buffer, _FOOTPRINT_AT).value
