"""Rows, rounds and stages: how measurements are taken so that they can be compared.

Owns the order of things. A stage is one model with its targets running; in each of its rounds every row measures
every target, rows and targets in random order, all with the same requests. Round 0 warms up and doesn't count.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import monotonic, sleep

from loadtests.bench.ledger import Bar, Figures, Ledger, Verdict, judge, number, ratio
from loadtests.bench.targets import NAMES, Target, opened
from loadtests.harness import REST_SECONDS, ROOT, HarnessError
from loadtests.zoo.models import obtain, words

MEMORY = "memory"
WARM_UP, PROFILED = 0, 1  # rounds
WARM_UP_TOKENS, QUICK_TOKENS, QUICK_STREAMS = 64, 24, 4


@dataclass(frozen=True, slots=True)
class Work:
    """The scale and the randomness of one row in one round; every target gets the same."""

    random: random.Random
    quick: bool = False
    warm_up: bool = False
    profile: bool = False  # ask the target as well where its time went, which takes a second

    def tokens(self, wanted: int) -> int:
        """Length of an answer."""
        return min(wanted, QUICK_TOKENS if self.quick else WARM_UP_TOKENS if self.warm_up else wanted)

    def streams(self, wanted: int) -> int:
        return min(wanted, QUICK_STREAMS) if self.quick else wanted

    def prompt(self, tokens: int) -> str:
        """Text of exactly so many tokens that no request has had before."""
        return "".join(" " + word for word in self.random.choices(_words(), k=tokens))


@cache
def _words() -> list[str]:
    return words()


@dataclass(frozen=True, slots=True)
class Row:
    """One line or more of the table: how to measure a target, and what is promised."""

    name: str
    model: str
    measure: Callable[[Target, Work], Figures]
    bars: Sequence[Bar]
    targets: Sequence[str] = NAMES


@dataclass(slots=True)
class Plan:
    """What a run does."""

    rounds: int
    folder: Path  # of the models
    logs: Path
    targets: Sequence[str] = NAMES
    quick: bool = False
    seed: int = 0
    rows: int = 32  # sequences decoded together
    starts: int = 1  # of all targets, each followed by all rounds: two processes of one program differ by some percent
    earlier: Path = ROOT  # the checkout that `earlier` is served from
    deadline: float = float("inf")  # monotonic; no round begins that wouldn't end before it
    notes: list[str] = field(default_factory=list)


def memory_bars(model: str) -> list[Bar]:
    label = f"memory of the {model} server at rest after each round ÷ after the first"
    return [
        Bar(label, lambda one: one["marathon"]["growth"], "≤", 1.15, worst=True),
        Bar(f"earlier: {label}", lambda one: one["earlier"]["growth"], "≤", worst=True),
        Bar(f"memory of the {model} server at rest × earlier", ratio("bytes", "earlier")),
    ]


class Stage:
    """One model's rounds. Use once."""

    def __init__(self, model: str, rows: Sequence[Row], plan: Plan, ledger: Ledger) -> None:
        self._model, self._rows, self._plan, self._ledger = model, rows, plan, ledger
        self._taken: dict[str, list[dict[str, Figures]]] = {name: [] for name in [*(row.name for row in rows), MEMORY]}
        self._memory: dict[str, int] = {}

    def run(self) -> list[Verdict]:
        plan = self._plan
        wanted = [name for name in plan.targets if any(name in row.targets for row in self._rows)]
        folder = obtain(self._model, plan.folder)
        for start in range(plan.starts):
            self._memory.clear()
            order = wanted[:: -1 if start % 2 else 1]  # what is started first may find other memory
            with opened(folder, order, plan.logs, rows=plan.rows, earlier=plan.earlier) as targets:
                self._rounds(targets)
        bars = [(row.name, row.bars) for row in self._rows] + [(MEMORY, memory_bars(self._model))]
        return [verdict for name, own in bars for verdict in judge(name, own, self._taken[name], wanted)]

    def _rounds(self, targets: dict[str, Target]) -> None:
        plan = self._plan
        began, longest = monotonic(), 0.0
        for turn in range(plan.rounds + 1):
            if turn > 1 and monotonic() + longest > plan.deadline:
                self._say(f"{self._model}: time for {turn - 1} of {plan.rounds} rounds only")
                break
            self._round(turn, targets)
            longest, began = max(longest, monotonic() - began), monotonic()

    def _round(self, turn: int, targets: dict[str, Target]) -> None:
        order = random.Random(f"{self._plan.seed}/{self._model}/{turn}")
        rows = order.sample(list(self._rows), len(self._rows))
        for row in rows:
            names = [name for name in targets if name in row.targets]
            found: dict[str, Figures] = {}
            for place, name in enumerate(order.sample(names, len(names))):
                if monotonic() > self._plan.deadline:
                    self._say(f"{row.name}, round {turn}: no time for {name}")
                    continue
                figures = self._measure(row, turn, targets[name])
                if figures is not None:
                    found[name] = figures
                    self._note(row.name, (turn, place), name, figures)
            if turn != WARM_UP:
                self._taken[row.name].append(found)
        if turn != WARM_UP:
            self._weigh(turn, targets)

    def _measure(self, row: Row, turn: int, target: Target) -> Figures | None:
        draw = random.Random(f"{self._plan.seed}/{row.name}/{turn}")
        work = Work(draw, self._plan.quick, turn == WARM_UP, turn == PROFILED)
        try:
            return row.measure(target, work)
        except HarnessError as error:
            self._say(f"{row.name}, round {turn}: {error}")
            return None

    def _weigh(self, turn: int, targets: dict[str, Target]) -> None:
        sleep(REST_SECONDS)  # the last target would be measured with the work that it leaves behind
        found: dict[str, Figures] = {}
        for name, target in targets.items():
            now = target.memory_bytes()
            first = self._memory.setdefault(name, now)
            found[name] = {"bytes": now, "growth": now / first}
            self._note(MEMORY, (turn, 0), name, found[name])
        self._taken[MEMORY].append(found)

    def _note(self, row: str, place: tuple[int, int], name: str, figures: Figures) -> None:
        self._ledger.note(row, self._model, place, name, figures)
        shown = "  ".join(f"{figure} {number(value)}" for figure, value in figures.items())
        print(f"[{self._model}] round {place[0]}/{self._plan.rounds}  {row:<12} {name:<14} {shown}", flush=True)

    def _say(self, text: str) -> None:
        self._plan.notes.append(text)
        print(text, flush=True)
