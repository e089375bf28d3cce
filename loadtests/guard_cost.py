"""What the cache guard costs: `python -m loadtests.guard_cost [--model FOLDER …] [--blocks 48] [--rows 1 4]`.

Times the engine's own decode step with the guard and without it, in pairs of blocks from one and the same state, in
random order, and gives the ratio with its 95 % bootstrap interval; beside it the host time of a walk alone and of the
guard in the step. The targets are a random 16-layer hybrid of hidden size 256 and, where it is there, the starter
model, or the folders named. Writes one CSV row a block and a table; its exit code is 0 when every interval's upper end
is within the bar. Runs MLX in its own process, on whatever device MLX takes; needs no network.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from loadtests import zoo
from loadtests.bench.ledger import Ledger, interval
from loadtests.harness import ROOT, device
from server.batching import Batch
from server.cache_guard import Guard, cache_arrays, settle
from server.compute.rows import Row
from server.compute.stopwatch import Laps, Stopwatch
from server.config.cache_folder import cache_folder
from server.ipc.sequence import Sampling, TokenSequence
from server.ipc.snapshot import Snapshot
from server.model_files.starter import NAME, is_whole

HYBRID = ("hybrid-16x256", "qwen3_5", 16, 256)
PROMPT = 64
WARM = 8  # steps of a block before its clock starts
BARS = {"cpu": 1.05, "gpu": 1.02}
WALKS = 300


@dataclass(frozen=True, slots=True)
class Block:
    """One block's figures, a step."""

    seconds: float
    cpu: float
    guard: float  # host seconds of the guard in a step


class Bench:
    """A model and rows whose prompts are read; every block starts from there."""

    def __init__(self, model: Any, rows: int, steps: int) -> None:
        self._model, self._steps = model, steps
        self._rows = [self._read(number) for number in range(rows)]

    def _read(self, number: int) -> Row:
        prompt = [(7 * number + 5 * i * i + 3 * i) % 500 + 8 for i in range(PROMPT)]
        caches = make_prompt_cache(self._model)
        self._model(mx.array([prompt[:-1]]), cache=caches)
        settle(caches)
        asked = TokenSequence(prompt, Sampling(seed=number, temperature=0), 1 << 30)
        return Row(number, asked, prompt, caches)

    def _batch(self, guarded: bool, laps: Laps | None = None) -> Batch:
        """Arrays are shared until they are written to, so that this copies next to nothing."""
        batch = Batch(self._model, Guard(guarded, 1 << 30, Snapshot()), laps)
        rows = [(row, copy.deepcopy(row.caches)) for row in self._rows]
        batch.join([Row(row.seq, row.sequence, list(row.tokens), caches) for row, caches in rows])
        settle(batch.caches)
        return batch

    def block(self, guarded: bool) -> Block:
        watch = Stopwatch()
        batch = self._batch(guarded, watch)
        for _ in range(WARM):
            batch.step()
        mx.synchronize()
        before, wall, cpu = watch.seconds["guard"], perf_counter(), process_time()
        for _ in range(self._steps):
            batch.step()
        mx.synchronize()
        spent = (perf_counter() - wall, process_time() - cpu, watch.seconds["guard"] - before)
        return Block(*(figure / self._steps for figure in spent))

    def walk(self) -> tuple[float, int]:
        """Host seconds of one walk over the batch's caches, and how many arrays it finds."""
        caches = self._batch(True).caches
        times = []
        for _ in range(WALKS):
            started = perf_counter()
            found = cache_arrays(caches)
            times.append(perf_counter() - started)
        return median(times), len(found)


@dataclass(frozen=True, slots=True)
class Cost:
    """What the pairs of one target say."""

    name: str
    rows: int
    on: list[Block]
    off: list[Block]
    walk: float
    arrays: int

    @property
    def ratio(self) -> tuple[float, float, float]:
        """Median and interval of the wall time's ratio."""
        return self._ratio([a.seconds / b.seconds for a, b in zip(self.on, self.off, strict=True)])

    @property
    def cpu_ratio(self) -> tuple[float, float, float]:
        return self._ratio([a.cpu / b.cpu for a, b in zip(self.on, self.off, strict=True)])

    @staticmethod
    def _ratio(values: list[float]) -> tuple[float, float, float]:
        return (median(values), *interval(values))

    def cells(self, bar: float) -> list[str]:
        step, guard = median(b.seconds for b in self.on), median(b.guard for b in self.on)
        return [
            self.name,
            str(self.rows),
            str(len(self.on)),
            f"{step * 1e3:.2f}",
            "{:.3f} ({:.3f} – {:.3f})".format(*self.ratio),
            "{:.3f} ({:.3f} – {:.3f})".format(*self.cpu_ratio),
            str(self.arrays),
            f"{self.walk * 1e6:.0f}",
            f"{guard * 1e6:.0f}",
            f"{guard / step:.2%}",
            "pass" if self.ratio[2] <= bar else "FAIL",
        ]


HEAD = [
    *("model", "rows", "pairs", "step ms", "wall: guard ÷ none", "CPU: guard ÷ none", "arrays"),
    *("walk µs", "guard µs", "share of the step", ""),
]


def measure(name: str, model: Any, rows: int, arguments: argparse.Namespace, ledger: Ledger) -> Cost:
    bench, draw = Bench(model, rows, arguments.steps), random.Random(arguments.seed)
    found: dict[bool, list[Block]] = {True: [], False: []}
    bench.block(True), bench.block(False)
    for pair in range(arguments.blocks):
        for place, guarded in enumerate(draw.sample([True, False], 2)):
            block = bench.block(guarded)
            found[guarded].append(block)
            figures = {"seconds": block.seconds, "cpu_seconds": block.cpu, "guard_seconds": block.guard}
            ledger.note(f"guard_cost {rows} rows", name, (pair, place), "on" if guarded else "off", figures)
        if sys.stderr.isatty() or pair % 10 == 9:
            print(f"{name}, {rows} rows: {pair + 1} of {arguments.blocks} pairs", file=sys.stderr, flush=True)
    return Cost(name, rows, found[True], found[False], *bench.walk())


def targets(folders: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    name, family, layers, hidden = HYBRID
    yield name, zoo.build(family, layers=layers, hidden=hidden)
    starter = cache_folder() / NAME
    for folder in folders or ([starter] if is_whole(starter) else []):
        model, _ = load_model(folder)
        yield folder.name, model


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", type=Path, default=[], help="model folders, besides the random hybrid")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4], help="rows in the batch")
    parser.add_argument("--blocks", type=int, default=48, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=48, help="steps of a block that are timed")
    parser.add_argument("--bar", type=float, help=f"largest upper end of the interval; default: {BARS}")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder of the CSV and the table")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    kind = "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
    bar = arguments.bar or BARS[kind]
    with Ledger(arguments.out, "guard_cost", device()) as ledger:
        costs = [
            measure(name, model, rows, arguments, ledger)
            for name, model in targets(arguments.model)
            for rows in arguments.rows
        ]
        lines = [
            "| " + " | ".join(cells) + " |" for cells in [HEAD, ["---"] * len(HEAD), *(c.cells(bar) for c in costs)]
        ]
        text = "\n".join([f"{ledger.machine.line()}; on the {kind}, bar {bar}", "", *lines]) + "\n"
    (arguments.out / "guard_cost.md").write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(cost.ratio[2] <= bar for cost in costs) else 1


if __name__ == "__main__":
    sys.exit(main())
