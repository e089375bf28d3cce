"""What lives on the device, how fast that grows, and when it ends.

Owns the readings (live buffers, bytes, footprint), their slopes and the pressure that follows from them, and writes
them into the snapshot. Runs in the engine's main thread; the loop calls `tick` once an iteration. It drops MLX's pool,
because only a reading taken straight after that says what is really held; all other acts it returns to the loop.

Slopes are of what isn't known to be held: caches of rows and kept prefixes fill up, and that is no leak.

The live-buffer count has one of three sources: Metal's allocator where it can be proved, our own counter where it was
asked for, or none, with the reason. None is never zero.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

from server.config.cache_folder import COUNTERS, cache_folder
from server.errors import StartupError
from server.ipc.snapshot import Snapshot
from server.memory import metal_count, native_count
from server.memory.allocator import CountUnavailable
from server.memory.pressure import BUFFERS, BYTES, RUNGS, Level, Pressure, PressureAction, PressureReading, Slope, Verb
from server.settings import Settings
from server.telemetry.footprint import footprint, give_back, total_memory

log = logging.getLogger(__name__)

PERIOD_SECONDS = 0.25
SETTLE_STEPS = 512  # decode steps between two drops of the pool
HIGH_SECONDS = 1.0  # between two settled readings while the raw one is high
NEAR = 0.5  # share of the bytes that must not wait from which it's worth asking what the next step takes
HARMLESS = ("flush", "evict_prefix", "clear_pool")  # parts of a reclaim, which costs no row anything
CPU_SHARE = 0.8  # of the memory, where the device is the CPU: what MLX takes too, but control groups count


class CountSource(Protocol):
    """Where the live-buffer count comes from."""

    name: str  # metal, native or off
    reason: str  # why there is none
    limit: int | None
    pooled: bool  # whether a raw reading counts pooled buffers too

    def raw(self) -> int | None:
        """The count as it stands: an upper bound."""

    def settled(self) -> int | None:
        """The count straight after the pool was dropped."""


class Holdings(Protocol):
    """What the engine holds on the device, and how it lets go of it."""

    def kv_bytes(self) -> int:
        """Bytes of the KV in use."""

    def growth(self) -> int:
        """Bytes that the next step takes: memory is given back before it is exceeded, not after."""

    def flush(self) -> None:
        """Evaluate whatever is pending."""

    def evict(self, size: int, buffers: int) -> int:
        """Drop idle prefixes, the least used first, until they have given back `size` bytes and so many buffers.

        Returns how many went.
        """


class NoCount:
    """No source."""

    name = "off"
    limit: int | None = None
    pooled = False

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def raw(self) -> None:
        return None

    def settled(self) -> None:
        return None


def open_source(settings: Settings) -> CountSource:
    """The live-buffer count that the settings ask for. Call it before the model loads and before another thread uses
    MLX. Raises StartupError when a source was asked for by name and can't be had."""
    if settings.live_buffers == "off":
        return NoCount("switched off by --live-buffers off")
    try:
        if settings.live_buffers == "native":
            return native_count.open_count(cache_folder(settings.cache_dir) / COUNTERS, settings.buffer_limit)
        return metal_count.open_count(settings.buffer_limit)
    except CountUnavailable as reason:
        if settings.live_buffers == "native":
            raise StartupError(f"--live-buffers native: {reason}") from None
        return NoCount(str(reason))


def memory_limit(asked: int | None) -> int:
    """Bytes that we plan with: what was asked for, else what the device recommends.

    MLX makes an allocation wait beyond a limit of its own, so that is raised where ours is higher, and else left alone.
    """
    own = mx.get_memory_limit()
    if asked:
        limit = asked
    elif mx.metal.is_available():  # MLX's own is 1.5 times this
        limit = int(mx.device_info(mx.Device(mx.gpu))["max_recommended_working_set_size"])
    elif mx.is_available(mx.Device(mx.gpu)):
        limit = own
    else:
        limit = min(own, int(CPU_SHARE * total_memory()))
    if limit > own:
        mx.set_memory_limit(limit)
    return limit


def device_memory() -> int:
    """Bytes of the device's memory, which on a CPU is the machine's."""
    if not mx.is_available(mx.Device(mx.gpu)):
        return total_memory()
    info = mx.device_info(mx.Device(mx.gpu))
    return int(info.get("memory_size", info.get("total_memory", 0)))


def pool_limit() -> int:
    """Return the limit of MLX's pool, which MLX returns only where another one is set."""
    limit = mx.set_cache_limit(0)
    mx.set_cache_limit(limit)
    return limit


class Residency:
    """Readings, slopes and pressure of one engine. Owned by the loop."""

    def __init__(
        self, source: CountSource, settings: Settings, snapshot: Snapshot, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.source = source
        self.memory_limit = memory_limit(settings.memory_limit)
        self.pressure = Pressure(clock())
        self._snapshot = snapshot
        self._clock = clock
        self._buffers = Slope()
        self._bytes = Slope()
        self._due = self._settled_time = -math.inf
        self._settled_steps = self._last_steps = -1
        self._growth = 0  # bytes that the next step takes
        self._floor: dict[str, float] = {}  # by resource: what is held before any row comes
        self._urgent = 0.0  # active bytes from which on nothing waits for a reading's turn
        self._note_urgent()
        snapshot.memory_limit_bytes = self.memory_limit
        snapshot.pool_limit_bytes = pool_limit()

    @classmethod
    def open(cls, settings: Settings, snapshot: Snapshot) -> Residency:
        """With the source that the settings ask for. Raises StartupError."""
        residency = cls(open_source(settings), settings, snapshot)
        source = residency.source
        level = logging.DEBUG if source.name == "off" else logging.INFO  # /health says why there is none
        log.log(level, "live buffers: %s", source.reason or f"{source.name}, limit {source.limit}")
        return residency

    def note_weights(self) -> None:
        """Call once the model is loaded: what is held now is held for as long as this engine lives."""
        self._read_settled()
        self._floor = {BYTES: self._snapshot.active_bytes, BUFFERS: self._snapshot.live_settled or 0}
        self._note_urgent()

    @property
    def room(self) -> int:
        """Bytes that may still be taken before others have to give theirs back."""
        return max(0, int(self._urgent) - mx.get_active_memory())

    def _note_urgent(self) -> None:
        """Judging a reading may change it, nothing else does, and each step asks."""
        self._urgent = self.pressure.urgent_bytes(self.memory_limit, self._floor.get(BYTES, 0))

    def tick(self, holdings: Holdings) -> list[PressureAction]:
        """Take a reading if one is due, and return the actions that follow from it.

        Call it once an iteration, idle ones too: it costs next to nothing until a reading is due. A `reclaim` goes back
        through `reclaim`, the caller does all others.
        """
        now = self._clock()
        active = mx.get_active_memory()
        self._growth = 0
        if active >= NEAR * self._urgent:
            self._growth = holdings.growth()
        if now < self._due and active + self._growth < self._urgent:
            return []
        self._due = now + PERIOD_SECONDS
        self._read(holdings.kv_bytes(), now)
        fresh = self._settle_if_due(now)
        return self._judge(now, fresh=fresh)

    def reclaim(self, holdings: Holdings, act: PressureAction | None = None) -> list[PressureAction]:
        """Free what costs no running row anything, in order, and read again. Returns what is due then, never a reclaim.

        Without an act the server asked for it.
        """
        reading, threshold = float(self._snapshot.active_bytes), 0.0
        if act:
            reading, threshold = act.reading, act.threshold
        holdings.flush()
        self._record("flush", reading, threshold)
        self._read_settled()
        surplus = {one.resource: math.ceil(self.pressure.surplus(one)) for one in self._readings(fresh=True)}
        if any(surplus.values()) and holdings.evict(surplus[BYTES], surplus.get(BUFFERS, 0)):
            self._record("evict_prefix", reading, threshold)
            self._read_settled()
        self._record("clear_pool", reading, threshold)
        return self._judge(self._clock(), fresh=True, reclaimed=True)

    def _read_settled(self) -> None:
        self.settle()
        self.read_memory()

    def settle(self) -> int | None:
        """Drop the pool and take a settled reading."""
        mx.clear_cache()
        give_back()
        snapshot = self._snapshot
        now = self._clock()
        self._settled_time = now
        self._settled_steps = snapshot.steps
        snapshot.live_raw = self.source.settled()
        if snapshot.live_raw is not None:
            self._note_settled(snapshot.live_raw, now)
        return snapshot.live_settled

    def spent_buffers(self) -> int | None:
        """The count, if there are next to none left: why the allocator has just refused one."""
        raw = self.source.raw()
        limit = self.source.limit
        if raw and limit and raw >= RUNGS[BUFFERS].rotate * limit:
            return raw
        return None

    # ------------------------------------------------------------ readings
    def _read(self, kv_bytes: int, now: float) -> None:
        snapshot = self._snapshot
        snapshot.kv_bytes = kv_bytes
        snapshot.live_raw = self.source.raw()
        self.read_memory()
        known = kv_bytes + snapshot.kv_cached_bytes
        self._bytes.add(snapshot.generated_tokens, snapshot.active_bytes - known, now)

    def read_memory(self) -> None:
        """What MLX and the system say now; also for the loop, when it has just given some back."""
        snapshot = self._snapshot
        snapshot.active_bytes = mx.get_active_memory()
        snapshot.pool_bytes = mx.get_cache_memory()
        snapshot.peak_bytes = mx.get_peak_memory()
        snapshot.footprint_bytes = footprint()

    def _settle_if_due(self, now: float) -> bool:
        """Whether there is a settled reading from this turn: by the step count, once when idle, when the raw count
        looks high, and always where nothing pooled is counted."""
        steps = self._snapshot.steps
        raw = self._snapshot.live_raw
        since = steps - self._settled_steps
        idle = steps == self._last_steps
        self._last_steps = steps
        if (
            since >= SETTLE_STEPS
            or (idle and since)
            or (self._looks_high() and now - self._settled_time >= HIGH_SECONDS)
        ):
            self.settle()
        elif raw is not None and not self.source.pooled:
            self._note_settled(raw, now)
        else:
            return False
        return self._snapshot.live_settled is not None

    def _looks_high(self) -> bool:
        raw = self._snapshot.live_raw
        limit = self.source.limit
        if raw is None or limit is None or not self.source.pooled:
            return False
        reading = PressureReading(BUFFERS, raw, limit, floor=self._floor.get(BUFFERS, 0))
        return RUNGS[BUFFERS].level(reading.ratio(), self.pressure.level) > Level.CALM

    def _note_settled(self, count: int, now: float) -> None:
        snapshot = self._snapshot
        snapshot.live_settled = count
        self._buffers.add(snapshot.generated_tokens, count - snapshot.kv_buffers - snapshot.kv_cached_buffers, now)

    # ------------------------------------------------------------ what follows from them
    def _judge(self, now: float, *, fresh: bool, reclaimed: bool = False) -> list[PressureAction]:
        self._publish_slopes()
        acts = self.pressure.judge(self._readings(fresh), now, reclaimed=reclaimed)
        for act in acts:
            if act.name != Verb.RECLAIM:  # its three parts are recorded as they are done
                self._record(act.name, act.reading, act.threshold)
        self._publish_level()
        self._note_urgent()
        return acts

    def _readings(self, fresh: bool) -> list[PressureReading]:
        snapshot = self._snapshot
        readings = []
        if fresh and snapshot.live_settled is not None and self.source.limit is not None:
            rising = self._buffers.fit is not None and self._buffers.fit.rising
            readings.append(
                PressureReading(
                    BUFFERS,
                    snapshot.live_settled,
                    self.source.limit,
                    rising,
                    floor=self._floor.get(BUFFERS, 0),
                    idle=snapshot.kv_cached_buffers,
                )
            )
        readings.append(
            PressureReading(
                BYTES,
                snapshot.active_bytes + self._growth,
                self.memory_limit,
                floor=self._floor.get(BYTES, 0),
                idle=snapshot.kv_cached_bytes,
            )
        )
        return readings

    def _publish_slopes(self) -> None:
        snapshot = self._snapshot
        if (fit := self._buffers.fit) and snapshot.live_settled is not None and self.source.limit is not None:
            snapshot.buffers_per_token = fit.slope
            self._publish_end(BUFFERS, self._buffers, self.source.limit - snapshot.live_settled)
        if fit := self._bytes.fit:
            snapshot.unexplained_bytes_per_token = fit.slope
            self._publish_end(BYTES, self._bytes, self.memory_limit - snapshot.active_bytes)

    def _publish_end(self, resource: str, slope: Slope, room: float) -> None:
        assert slope.fit is not None
        tokens = slope.fit.exhaustion(room)
        rate = slope.tokens_per_second()
        self._snapshot.tokens_to_exhaustion[resource] = tokens
        if rate:
            self._snapshot.seconds_to_exhaustion[resource] = tokens / rate
        else:
            self._snapshot.seconds_to_exhaustion[resource] = math.inf

    def _publish_level(self) -> None:
        level = self.pressure.level
        before = Level[self._snapshot.pressure.upper()]
        self._snapshot.pressure = level.name.lower()
        if level != before:
            log.log(_severity(before, level), "pressure: %s, was %s", level.name.lower(), before.name.lower())

    def _record(self, action: str, reading: float, threshold: float) -> None:
        self._snapshot.record(action, reading, threshold)
        if action in HARMLESS:
            severity = logging.DEBUG
        else:
            severity = logging.WARNING
        log.log(severity, "guard: %s at a reading of %.0f, threshold %.0f", action, reading, threshold)


def _severity(before: Level, level: Level) -> int:
    """Of a change of level. Below hold no request has to wait, and a busy server comes there often."""
    if max(before, level) < Level.HOLD:
        return logging.DEBUG
    if level >= Level.HOLD:
        return logging.WARNING
    return logging.INFO
