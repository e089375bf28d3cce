"""What is done when memory or live buffers run short.

Owns the order of the acts: reclaim, read again, then act. Runs in the engine process's main thread. What is due is
`pressure`'s choice; rows are given up by the loop.
"""

from __future__ import annotations

from server.engine.outbox import Outbox
from server.engine.plan import ClearPool, EvictPrefixes, Flush
from server.engine.runner import Runner
from server.engine.state import EngineState
from server.memory.pressure import BUFFERS, PressureAction, Verb
from server.memory.residency import Residency


class PressureResponse:
    """Acts on pressure; it is the `Holdings` that residency asks. Owned by the loop."""

    def __init__(
        self, residency: Residency, runner: Runner, engine_state: EngineState, outbox: Outbox, buffer_limit: int | None
    ) -> None:
        self._residency = residency
        self._runner = runner
        self._engine_state = engine_state
        self._outbox = outbox
        # Metal refuses what is beyond its limit, our own count refuses nothing: given a limit, we act as Metal does.
        self._enforced: int | None = None
        if residency.source.name == "native":
            self._enforced = buffer_limit

    def enforce(self) -> None:
        """Raise what Metal would raise, where a limit was given to a count that refuses nothing."""
        if self._enforced and (self._residency.source.raw() or 0) > self._enforced:
            raise RuntimeError(f"[native] Resource limit ({self._enforced}) exceeded.")

    def due(self) -> list[PressureAction]:
        """Take a reading if one is due, free what can be freed without a loss, and return what else must be done:
        preemptions."""
        self._engine_state.count()
        acts = self._residency.tick(self)
        return [rest for act in acts for rest in self._settle(act)]

    def _settle(self, act: PressureAction) -> list[PressureAction]:
        if act.name == Verb.RECLAIM:
            return [rest for due in self.reclaim(act) for rest in self._settle(due)]
        if act.name == Verb.ROTATE:
            self._outbox.rotate(act.reading, act.threshold, f"live {act.resource}")
            return []
        return [act]

    def reclaim(self, act: PressureAction | None = None) -> list[PressureAction]:
        """Free what can be freed without a loss, then read again; returns what is due then. Without an act the server
        asked for it."""
        return self._residency.reclaim(self, act)

    # ------------------------------------------------------------ holdings
    def kv_bytes(self) -> int:
        return self._engine_state.kv_bytes()

    def growth(self) -> int:
        return self._engine_state.growth()

    def flush(self) -> None:
        self._runner.run(Flush())

    def evict(self, size: int, buffers: int) -> int:
        evicted: int = self._runner.run(EvictPrefixes(size, buffers)).outcome
        return evicted

    # ------------------------------------------------------------ after an act
    def read_again(self) -> None:
        """Read memory after a row has given its share back."""
        self._runner.run(ClearPool())
        self._residency.read_memory()

    def report_spent(self) -> None:
        """Say so if there are next to no live buffers left: that is why the allocator has refused one."""
        if count := self._residency.spent_buffers():
            limit = self._residency.source.limit or 0
            self._outbox.rotate(count, limit, f"live {BUFFERS}", late=True)
