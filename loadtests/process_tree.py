"""CPU time and memory of a process and all that it started.

Reads /proc on Linux and asks `ps` elsewhere. Runs in the load tests' own process; changes nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    cpu_seconds: float  # its own and that of children it has waited for
    memory_bytes: int
    born: str = ""  # tells it from a later process with the same pid, where the system says so


def processes() -> list[Process]:
    """Every process that this user can see."""
    return _from_proc() if sys.platform == "linux" else from_ps(_ps())


def descendants(pid: int, known: list[Process] | None = None) -> list[Process]:
    """The process and everything below it, the process first."""
    known = processes() if known is None else known
    found = [process for process in known if process.pid == pid]
    for process in found:
        found += [child for child in known if child.parent == process.pid]
    return found


def cpu_seconds(pid: int) -> float:
    return sum(process.cpu_seconds for process in descendants(pid))


def memory_bytes(pid: int) -> int:
    """Resident bytes of the tree; pages that its processes share count once where the system says so (PSS)."""
    return sum(_proportional(process) for process in descendants(pid))


def _proportional(process: Process) -> int:
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return process.memory_bytes
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def _from_proc() -> list[Process]:
    tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it ended meanwhile
            fields = stat.rpartition(")")[2].split()
            cpu, memory = sum(map(int, fields[11:15])) / tick, int(fields[21]) * page
            found.append(Process(int(entry.name), int(fields[1]), cpu, memory, fields[19]))
    return found


def lives(process: Process) -> bool:
    """Whether that very process still runs; one that only waits to be reaped counts as well."""
    return any(known.pid == process.pid and known.born == process.born for known in processes())


def _ps() -> str:
    return subprocess.run(["ps", "-axo", "pid=,ppid=,rss=,time="], capture_output=True, text=True, check=True).stdout


def from_ps(text: str) -> list[Process]:
    """From the columns pid, ppid, rss in KiB and CPU time as `[[days-]hours:]minutes:seconds`."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    return [Process(int(pid), int(parent), _seconds(time), int(rss) * 1024) for pid, parent, rss, time in rows]


def _seconds(text: str) -> float:
    days, _, clock = text.rpartition("-")
    total = 0.0
    for part in clock.split(":"):
        total = total * 60 + float(part)
    return total + 86400 * int(days or 0)
