"""Where a chaos mode plays, and what it found.

Owns the server of a mode from start to end, and the check that nothing of it is left. Runs in the process of
`loadtests.chaos`, which never imports MLX.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from loadtests import harness, process_tree
from loadtests.chaos.monitor import Monitor
from loadtests.harness import Server

RECOMPUTED_SHARE = 0.02  # of the tokens, with KV on disk
_LABEL = re.compile(r'"([^"]*)"')


@dataclass(slots=True)
class Findings:
    """What a mode measured, and everything that shouldn't have been."""

    name: str
    figures: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    lost: dict[str, float] = field(default_factory=dict)  # engines, by reason

    def add(self, other: Findings) -> None:
        """The same mode in another server; figures that are counts add up."""
        for name, value in other.figures.items():
            self.figures[name] = self.figures.get(name, 0) + value
        self.problems += other.problems
        self.notes += other.notes
        self.actions += other.actions
        self.lost = other.lost

    def watch(self, monitor: Monitor) -> None:
        """What a monitor has seen, once it has left."""
        self.figures |= {"samples": len(monitor.samples), "slowest sample s": monitor.slowest()}
        self.problems += monitor.problems()

    def restarts(self, reason: str) -> float:
        return self.lost.get(reason, 0)

    def thresholds(self, action: str) -> list[float]:
        return [act["threshold"] for act in self.actions if act["action"] == action]

    @staticmethod
    def actions_of(server: Server, action: str) -> list[float]:
        """Thresholds of the server's acts of that name so far, oldest first."""
        acts = json.loads(server.get("/debug/guard")[1])["actions"]
        return [act["threshold"] for act in acts if act["action"] == action]


def by_label(server: Server, name: str) -> dict[str, float]:
    """A metric with one label."""
    samples = server.metric(name).items()
    return {(found[1] if (found := _LABEL.search(labels)) else ""): value for labels, value in samples}


@dataclass(slots=True)
class Scenario:
    """One mode with one model."""

    mode: str
    model: Path
    logs: Path
    quick: bool
    rng: random.Random
    kv_disk: str = "0"
    left: list[str] = field(default_factory=list)  # what servers left behind
    servers: int = 0
    current: Server | None = None

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def log_path(self) -> Path:
        self.servers += 1
        return self.logs / f"{self.mode}-{self.model.name}-{self.servers}.log"

    @contextlib.contextmanager
    def server(self, **options: object) -> Iterator[Server]:
        """A server that is ready; when it ends it must end well and leave no process."""
        common: dict[str, object] = {
            "access_log": "off",
            "keepalive_seconds": 1,
            "max_rows": 8,
            "kv_disk": self.kv_disk,
            "kv_disk_folder": self.logs / f"kv-{self.mode}-{self.model.name}",
        }
        with harness.marathon(self.model, self.log_path(), **(common | options)) as server:
            self.current = server
            yield server
            self.current = None
            if server.process.poll() is None:
                family = process_tree.descendants(server.pid)
                server.stop()
                self.left += leftovers(server, family)

    def progress(self) -> str:
        """What the newest server has done so far."""
        if self.current is None:
            return f"server {self.servers + 1} starts"
        try:
            tokens = sum(self.current.metric("marathon_generation_tokens_total").values())
            lost = sum(self.current.metric("marathon_engine_restarts_total").values())
        except (OSError, HTTPException):  # it may be stopped on purpose
            return f"server {self.servers} doesn't answer"
        return f"server {self.servers} has generated {tokens:,.0f} tokens and lost {lost:.0f} engines"

    def findings(self, server: Server, label: str, count: float) -> Findings:
        """Read from a server that still runs."""
        resumed = by_label(server, "marathon_resumed_generations_total")
        recomputed = by_label(server, "marathon_recomputed_tokens_total")
        figures = {
            label: count,
            "resumes": sum(resumed.values()),
            "recomputed tokens": sum(recomputed.values()),
            "generated tokens": sum(server.metric("marathon_generation_tokens_total").values()),
        }
        findings = Findings(self.mode, figures)
        findings.actions = json.loads(server.get("/debug/guard")[1])["actions"]
        findings.lost = by_label(server, "marathon_engine_restarts_total")
        return findings


def leftovers(server: Server, family: list[process_tree.Process]) -> list[str]:
    """How a server that was ended left the house."""
    problems = []
    if server.process.returncode != 0:
        problems.append(f"the server ended with {server.process.returncode}: {server.last_words(300)}")
    for process in family[1:]:
        now = next((p for p in process_tree.processes() if p.pid == process.pid), None)
        if now is not None and now.cpu_seconds >= process.cpu_seconds:
            problems.append(f"process {process.pid} is left")
    return problems


def obtain(name: str, folder: Path) -> Path:
    """The tiny model of that name, written by a child process unless it is there."""
    path = folder / name
    if not (path / "tokenizer.json").exists():
        code = "import sys, pathlib; from loadtests import zoo; zoo.write(sys.argv[1], pathlib.Path(sys.argv[2]))"
        subprocess.run([sys.executable, "-c", code, name, str(path)], check=True, env=harness.environment())
    return path
