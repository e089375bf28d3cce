"""How much the engine's rows hold: positions and bytes, and what the next step will add.

Owns nothing; it reads the caches of batches and of prompts being read. Runs in the engine process's main thread, a few
times a second.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from server.cache_guard import Caches, cache_arrays, parts
from server.engine.executor import Executor
from server.engine.groups import Groups
from server.engine.model import LoadedModel
from server.engine.prefill import Prefill
from server.ipc.snapshot import GroupState, PromptProgress, Snapshot


class EngineState:
    """What is in the engine. Owned by the loop."""

    def __init__(
        self, executor: Executor, groups: Groups, prefill: Prefill, loaded: LoadedModel, snapshot: Snapshot
    ) -> None:
        self._executor = executor
        self._groups = groups
        self._prefill = prefill
        self._loaded = loaded
        self._snapshot = snapshot

    @property
    def batches(self) -> list[list[int]]:
        """The rows of each batch, shortest batch first."""
        return [[row.seq for row in self._executor.batches[number].rows] for number in self._groups.order()]

    @property
    def prefilling(self) -> list[int]:
        """The rows whose prompt is being read or waits for that."""
        return [reading.row.seq for reading in self._prefill.readings]

    @property
    def is_empty(self) -> bool:
        return not self._executor.batches and not self._prefill.readings

    def caches(self) -> Caches:
        """Every layer of every row, decoding or still reading its prompt."""
        return self._executor.caches() + [reading.row.caches for reading in self._prefill.readings]

    def growth(self) -> int:
        """Bytes that the caches will take with the next step beyond what they hold."""
        return sum(growth(part) for part in parts(self._executor.caches()))

    def count(self) -> None:
        """Note how many rows there are, and how far those are that are being read."""
        self._snapshot.rows = self._groups.rows
        self._snapshot.prefilling = len(self._prefill)
        self._snapshot.prompts = [
            PromptProgress(reading.row.seq, reading.done, len(reading.row.tokens)) for reading in self._prefill.readings
        ]

    def kv_bytes(self) -> int:
        """Take stock of the KV in use, its buffers included; its bytes."""
        snapshot = self._snapshot
        batches = self._executor.batches
        readings = self._prefill.readings
        snapshot.groups = self._states()
        snapshot.waiting = sum(not reading.begun for reading in readings)
        snapshot.kv_tokens = sum(batch.length(row) for batch in batches.values() for row in batch.rows)
        snapshot.kv_tokens += sum(reading.done for reading in readings)
        snapshot.kv_capacity_tokens = sum(len(batch) * positions(batch.caches) for batch in batches.values())
        snapshot.kv_capacity_tokens += sum(positions(reading.row.caches) for reading in readings)
        arrays = cache_arrays(self.caches())
        snapshot.kv_buffers = len(arrays)
        return sum(array.nbytes for array in arrays)

    def _states(self) -> list[GroupState]:
        """For /debug/batches and the metrics."""
        states = []
        for number in self._groups.order():
            batch = self._executor.batches[number]
            states.append(
                GroupState(
                    rows=len(batch),
                    length=batch.longest,
                    kv_bytes=sum(getattr(layer, "nbytes", 0) for layer in batch.caches),
                    real_bytes=sum(self._loaded.row_bytes(batch.length(row)) for row in batch.rows),
                    every=self._groups.every(number),
                )
            )
        return states


def positions(caches: Caches) -> int:
    """Positions a row that the largest of these caches has buffers for; 0 where none holds positions."""
    keys = (getattr(part, "keys", None) for part in parts(caches))
    return max((array.shape[2] for array in keys if isinstance(array, mx.array)), default=0)


def growth(part: Any) -> int:
    """Bytes that one of mlx-lm's caches takes with the next position. It holds room for more positions than it uses,
    and grows by `step` once that is used up; 0 for caches of another kind."""
    keys = getattr(part, "keys", None)
    step = getattr(part, "step", 0)
    most = getattr(part, "max_size", None)
    if not isinstance(keys, mx.array) or not step or (most and keys.shape[2] >= most):
        return 0
    used = getattr(part, "_idx", None)  # of a batch, whose `offset` is an array
    if used is None:
        used = part.offset - getattr(part, "start_position", 0)
    if used < keys.shape[2]:
        return 0
    bytes_held: int = keys.nbytes + part.values.nbytes
    return bytes_held * step // keys.shape[2]
