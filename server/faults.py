"""Deliberate failures, for tests and chaos runs. DANGEROUS: off unless `--faults` names them.

Owns the spec's grammar and the acts. The spec is checked in the server process, the acts happen in the engine, those at
a commit of the journal in the server.

    kill|abort|raise|stall|garbage @ prefill|decode|resume : STEP    at that chunk, step or resumed sequence
    poison@prefill:TOKEN | poison@decode:TOKEN                       dies whenever a prompt that begins with TOKEN is
                                                                     read, or after 5 tokens of such a prompt
    kill@before-commit:N   kill@after-commit:N               the server, before or after the journal's N-th commit
    full@commit:N          slow-commit:SECONDS               no room for that commit; each commit takes so much longer
    slow-disk[:BYTES]      full-disk                         the disk of kept KV: so many bytes a second, or full
    slow-start[:SECONDS]   fail-start[:TIMES]   leak:K               K live buffers a decode step without an owner

Several, separated by commas. A fault at a step happens in the server's first engine; `STEP*N` in each of the first N.
`full@commit:N*M` fails M commits from the N-th on.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass

from server.errors import StartupError

ACTS = ("kill", "abort", "raise", "stall", "garbage", "poison")
PLACES = ("prefill", "decode", "resume")
COMMITS = (("kill", "before-commit"), ("kill", "after-commit"), ("full", "commit"))
POISON_AFTER = 5  # output tokens
# Seconds, starts, buffers a step, seconds, bytes a second, whether.
_DEFAULTS = {
    "slow-start": "5",
    "fail-start": "1000000",
    "leak": "",
    "slow-commit": "",
    "slow-disk": "1000000",
    "full-disk": "1",
}
_SECONDS = ("slow-start", "slow-commit")


@dataclass(frozen=True, slots=True)
class Fault:
    """One act at one place; `step` counts from 1 (for poison: a token id)."""

    act: str
    place: str
    step: int
    engines: int = 1  # or commits


@dataclass(frozen=True, slots=True)
class Spec:
    """What `--faults` asks for."""

    faults: tuple[Fault, ...] = ()
    slow_start: float = 0.0  # seconds
    fail_start: int = 0  # starts
    leak: int = 0  # buffers a step
    slow_commit: float = 0.0  # seconds
    slow_disk: float = 0.0  # bytes a second; 0: as quick as it is
    full_disk: bool = False

    def __bool__(self) -> bool:
        return self != Spec()


def parse(text: str) -> Spec:
    """Raises StartupError that names the part it can't read."""
    faults: list[Fault] = []
    rest: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition(":")
        try:
            if "@" in name:
                faults.append(_fault(name, value))
            else:
                default = _DEFAULTS[name]
                rest[name] = _amount(value or default, whole=name not in _SECONDS)
        except (ValueError, KeyError):
            raise StartupError(f"--faults {part!r}: no such fault; see the README for the list") from None
    return Spec(
        tuple(faults),
        rest.get("slow-start", 0.0),
        int(rest.get("fail-start", 0)),
        int(rest.get("leak", 0)),
        rest.get("slow-commit", 0.0),
        rest.get("slow-disk", 0.0),
        bool(rest.get("full-disk")),
    )


def _fault(name: str, value: str) -> Fault:
    act, _, place = name.partition("@")
    in_engine = act in ACTS and place in PLACES and (act, place) != ("poison", "resume")
    if not in_engine and (act, place) not in COMMITS:
        raise ValueError(name)
    step, star, engines = value.partition("*")
    if act == "poison":
        return Fault(act, place, int(_amount(value, least=0)))
    return Fault(act, place, int(_amount(step)), int(_amount(engines)) if star else 1)


def _amount(value: str, *, whole: bool = True, least: int = 1) -> float:
    number = int(value) if whole else float(value)
    if not (least if whole else 0) <= number < 10**9:  # a NaN isn't
        raise ValueError(value)
    return number


class Faults:
    """Counts chunks, steps and resumes in the engine and acts when one is due. Owned by the loop."""

    def __init__(self, spec: Spec, *, epoch: int, write_garbage: Callable[[], None]) -> None:
        """Faults at a step belong to the first engines; poison, leak and slow start to each."""
        self.spec = spec
        self._epoch = epoch
        self._write_garbage = write_garbage
        self._counts = dict.fromkeys(PLACES, 0)

    def at_start(self) -> None:
        """Sleeps or ends the process, as asked for."""
        time.sleep(self.spec.slow_start)
        if self._epoch <= self.spec.fail_start:
            os._exit(3)

    def reached(self, place: str) -> None:
        """One more chunk, step or resumed sequence is about to run."""
        self._counts[place] += 1
        for fault in self.spec.faults:
            here = fault.act != "poison" and fault.place == place and self._epoch <= fault.engines
            if here and fault.step == self._counts[place]:
                self._act(fault.act)

    def poisoned(self, place: str, first_token: int, produced: int) -> None:
        """A row with a prompt that begins with `first_token` is at `place`."""
        for fault in self.spec.faults:
            due = place == "prefill" or produced >= POISON_AFTER
            if fault.act == "poison" and fault.place == place and fault.step == first_token and due:
                self._act("kill")

    @property
    def poison(self) -> frozenset[int]:
        """First tokens of poisonous prompts."""
        return frozenset(fault.step for fault in self.spec.faults if fault.act == "poison")

    def _act(self, act: str) -> None:
        if act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif act == "abort":
            os.abort()
        elif act == "stall":
            time.sleep(86400)
        elif act == "garbage":
            self._write_garbage()
        else:
            raise RuntimeError("[metal::malloc] Resource limit (499000) exceeded.")


class CommitFaults:
    """Counts the journal's commits in the server and acts when one is due. Owned by the journal's writer."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._begun = 0
        self._done = 0

    def before(self) -> None:
        """All is ready for a commit. Raises sqlite3.OperationalError where there is to be no room for it."""
        time.sleep(self._spec.slow_commit)
        self._begun += 1
        for fault in self._spec.faults:
            if fault.place == "before-commit" and fault.step == self._begun:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.place == "commit" and fault.step <= self._begun < fault.step + fault.engines:
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorname = "SQLITE_FULL"
                raise error

    def after(self) -> None:
        """A commit is done and hasn't been announced."""
        self._done += 1
        if any(fault.place == "after-commit" and fault.step == self._done for fault in self._spec.faults):
            os.kill(os.getpid(), signal.SIGKILL)
