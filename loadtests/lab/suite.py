"""Several programs one after another, within a time: each is a process of its own, and one that fails doesn't stop the
others.

Owns the plan's parts, the clock over all of them, and the list of those that failed. Never imports MLX.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from loadtests import harness

END_SECONDS = 5.0  # to end a program that is out of time
LEAST_SECONDS = 15.0  # a part isn't begun with less
AMPLE = 3.0  # a part is ended after so many times its estimate,
SPARE_SECONDS = 60.0  # and so much more


@dataclass(frozen=True, slots=True)
class Part:
    """One program with its arguments, and about how long it takes."""

    program: str
    arguments: tuple[str, ...]
    seconds: float

    @property
    def words(self) -> str:
        return " ".join(("loadtests." + self.program, *self.arguments))


def announce(parts: Sequence[Part]) -> None:
    """Say what will be run and how long it takes."""
    many = "1 part" if len(parts) == 1 else f"{len(parts)} parts"
    print(f"{many}, about {sum(part.seconds for part in parts) / 60:.0f} minutes in all:", flush=True)
    for part in parts:
        print(f"  {part.seconds:4.0f} s  {part.words}", flush=True)


def run(parts: Sequence[Part], out: Path, seconds: float, commit: str) -> int:
    """Runs all parts that there is time for; 1 when one failed, missed a bound, or found no time."""
    ends = monotonic() + seconds
    troubles = []
    for part in parts:
        left = ends - monotonic()
        outcome = "no time left"
        if left >= LEAST_SECONDS:
            outcome = _run(part, out, min(left, SPARE_SECONDS + AMPLE * part.seconds), commit)
        print(f"== {part.words}: {outcome}", flush=True)
        if outcome != "done":
            troubles.append(f"{part.words}: {outcome}")
    for trouble in troubles:
        print(f"NOT AS IT SHOULD BE  {trouble}", flush=True)
    return 1 if troubles else 0


def _run(part: Part, out: Path, seconds: float, commit: str) -> str:
    """How the part ended, in words."""
    command = [sys.executable, "-m", f"loadtests.{part.program}", *part.arguments, "--out", str(out)]
    process = harness.start([*command, "--commit", commit])
    began = monotonic()
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # its children end with it, or with their own limit
        status = _end(process)
        return f"ended after {monotonic() - began:.0f} s, out of time"
    return {0: "done", 1: "missed a bound, or a case failed"}.get(status, f"ended with {status}")


def _end(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def report(out: Path) -> bool:
    """Write the report of the rows in `out`; whether there is one."""
    return harness.start([sys.executable, "-m", "loadtests.report", "--data", str(out), "--out", str(out)]).wait() == 0
