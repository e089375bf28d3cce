"""One long row beside eight short ones, in process: what an iteration costs, and what its caches hold.

`python -m loadtests.groups --model FOLDER` measures the engine's own batches (`server.engine.groups`,
`server.batching`) without HTTP and prints its rounds as JSON; `loadtests.speed` holds them to their bars. Blocks of
steps of the four arrangements follow each other in random order; an iteration's time is the median of its block.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from server.batching import Batch
from server.cache_guard import Caches, Guard, cache_arrays
from server.compute.rows import Row
from server.engine.executor import Executor
from server.engine.groups import Groups
from server.engine.model import LoadedModel, load
from server.engine.plan import Operation, Result, Step, follow
from server.engine.prefix_cache import PrefixCache
from server.ipc.sequence import Sampling, TokenSequence
from server.ipc.snapshot import Snapshot

LONG, SHORT, SHORTS = 20_000, 64, 8
STEPS = 24  # iterations a block


@dataclass(frozen=True, slots=True)
class RowArrangement:
    """Rows in batches, and what chose them."""

    executor: Executor
    groups: Groups

    def run(self, operation: Operation) -> Result:
        return Result(self.executor.run(operation))


class Arrangements:
    """Freshly arranged rows on one model. What their caches hold is random: reading 20,000 tokens takes minutes, and
    neither time nor bytes of a step depend on it."""

    def __init__(self, loaded: LoadedModel, long: int) -> None:
        self._loaded = loaded
        self._guard = Guard(True, 256, Snapshot())
        self._read = {length: self._filled(length - 1) for length in (long, SHORT)}
        self._long = long

    def _filled(self, length: int) -> Caches:
        """Caches that hold `length` positions, as the engine's prefill leaves them."""
        caches: Caches = make_prompt_cache(self._loaded.model)
        self._loaded.model(mx.array([[1]]), cache=caches)
        for layer in caches:
            _, heads, _, size = layer.keys.shape
            layer.update_and_fetch(*mx.random.normal((2, 1, heads, length - 1, size)))
        mx.eval(cache_arrays(caches))
        return caches

    def _prompt(self, length: int) -> list[int]:
        return random.Random(length).choices(range(10, 1000), k=length)

    def rows(self, *, long: bool, short: bool) -> list[Row]:
        lengths = [self._long] * long + [SHORT] * (SHORTS * short)
        return [self._row(seq, length) for seq, length in enumerate(lengths)]

    def _row(self, seq: int, length: int) -> Row:
        sequence = TokenSequence(self._prompt(length), Sampling(seed=seq, temperature=0), 1 << 20)
        return Row(seq, sequence, list(sequence.prompt), copy.deepcopy(self._read[length]))

    def new_batch(self) -> Batch:
        return Batch(self._loaded.model, self._guard)

    def grouped(self, rows: list[Row]) -> RowArrangement:
        """Group the rows as the engine does. Every group is stepped in every iteration, so that iterations compare."""
        known = {row.seq: row for row in rows}
        executor = Executor(self._loaded.model, self._guard, PrefixCache(0, Snapshot()), known)
        grouped = RowArrangement(executor, Groups(executor.batches, self._loaded, 1))
        follow(grouped.groups.join(rows), grouped.run)
        return grouped

    def held(self, caches: Caches) -> int:
        """Bytes of the KV of some caches."""
        return sum(array.nbytes for array in cache_arrays(caches))

    def own(self, rows: list[Row]) -> int:
        """Bytes that the rows would hold each alone."""
        return sum(self._loaded.row_bytes(row.length) for row in rows)


def iteration(grouped: RowArrangement) -> None:
    for batch in follow(grouped.groups.due(), grouped.run):
        started = perf_counter()
        grouped.run(Step(batch))
        grouped.groups.note(batch, perf_counter() - started)


def block(step: Callable[[], object], steps: int) -> float:
    """Median seconds of a step; the first two settle."""
    times = []
    for _ in range(steps + 2):
        started = perf_counter()
        step()
        times.append(perf_counter() - started)
    return median(times[2:])


def measure(arranged: Arrangements, order: random.Random, steps: int) -> dict[str, float]:
    """One round."""
    found: dict[str, float] = {}
    for name in order.sample(["together", "short", "long", "padded"], 4):
        rows = arranged.rows(long=name != "short", short=name != "long")
        if name == "padded":
            batch = arranged.new_batch()
            batch.join(rows)
            found[name] = block(batch.step, steps)
            found["held_padded"] = arranged.held(batch.caches)
            continue
        grouped = arranged.grouped(rows)
        found[name] = block(partial(iteration, grouped), steps)
        if name == "together":
            found["held"] = arranged.held(grouped.executor.caches())
            found["own"] = arranged.own(rows)
            found["groups"] = len(grouped.executor.batches)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="an MLX model folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long", type=int, default=LONG, help="tokens of the long row")
    parser.add_argument("--steps", type=int, default=STEPS, help="iterations a block")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    loaded = load(
        arguments.model, trust_remote_code=False, probe=None, on_stage=lambda stage: print(stage, file=sys.stderr)
    )
    arranged = Arrangements(loaded, arguments.long)
    order = random.Random(arguments.seed)
    measure(arranged, order, arguments.steps)  # warms up
    print(json.dumps([measure(arranged, order, arguments.steps) for _ in range(arguments.rounds)]))


if __name__ == "__main__":
    main()
