"""The engine's side of /metrics: families read from one snapshot at scrape time.

Owns the totals of engines that are gone: counters in a snapshot begin at 0 with each engine, those in /metrics never
go down. Runs on the server's event loop only and reads what the supervisor already holds; a scrape never asks the
engine. What isn't known is left out, never zero: without a live-buffer source there is no live-buffer series, without
an engine no memory gauge. Half of the module is the table of families; it is kept in one place to be read as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, Protocol, TypeVar

from prometheus_client.core import Metric

from server.ipc.messages import Ready
from server.ipc.snapshot import Snapshot
from server.kv_store.files.record import DAMAGES
from server.telemetry.engine_status import EngineStatus
from server.telemetry.series import Family, Histogram, LabelValues, metric

PRESSURES = ("calm", "reclaim", "hold", "rotate")
ACTIONS = ("flush", "clear_pool", "evict_prefix", "hold", "preempt", "rotate", "quarantine", "kill_stalled")
SERVER_ACTIONS = ("rotate", "quarantine", "kill_stalled")  # the supervisor's acts, counted where they are done
PARTS = ("forward", "sample", "guard", "read", "publish", "prefill")
SOURCES = ("metal", "native")
TIERS = ("memory", "disk", "none")
TRANSFERS = ("read", "write")
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)

Value = float | Mapping[str, float] | None  # alone, by the value of the only label, or unknown
T = TypeVar("T")
K = TypeVar("K")


class EngineView(Protocol):
    """The supervisor, as a scrape reads it."""

    @property
    def engine(self) -> EngineStatus:
        """The state of the engines at this moment."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...

    queue_limit: int
    batch_limit: int
    on_engine_gone: list[Callable[[Snapshot], None]]  # each is called once with the last snapshot of an ended engine


@dataclass(frozen=True, slots=True)
class Totals:
    """The snapshot's counters that /metrics shows, added up."""

    batch_sizes: Mapping[int, float] = field(default_factory=dict)
    lookups: Mapping[str, float] = field(default_factory=dict)
    evictions: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    leaks: Mapping[str, float] = field(default_factory=dict)
    actions: Mapping[str, float] = field(default_factory=dict)
    kv_lookups: Mapping[str, float] = field(default_factory=dict)
    kv_tokens: Mapping[str, float] = field(default_factory=dict)
    disk_bytes: Mapping[str, float] = field(default_factory=dict)
    disk_seconds: Mapping[str, float] = field(default_factory=dict)
    disk_dropped: Mapping[str, float] = field(default_factory=dict)
    disk_skipped: Mapping[str, float] = field(default_factory=dict)
    disk_evicted: float = 0.0

    def plus(self, s: Snapshot) -> Totals:
        acts = {name: count for name, count in s.action_counts.items() if name not in SERVER_ACTIONS}
        return Totals(
            _sum(self.batch_sizes, s.batch_sizes),
            _sum(self.lookups, s.prefix_lookups),
            _sum(self.evictions, s.prefix_evictions),
            _sum(self.seconds, s.step_seconds),
            _sum(self.leaks, s.leaks),
            _sum(self.actions, acts),
            _sum(self.kv_lookups, s.kv_lookups),
            _sum(self.kv_tokens, s.kv_lookup_tokens),
            _sum(self.disk_bytes, {"read": s.kv_disk_read_bytes, "write": s.kv_disk_written_bytes}),
            _sum(self.disk_seconds, s.kv_disk_seconds),
            _sum(self.disk_dropped, s.kv_disk_dropped),
            _sum(self.disk_skipped, s.kv_disk_skipped),
            self.disk_evicted + s.kv_disk_evicted,
        )


def _sum(a: Mapping[K, float], b: Mapping[K, float]) -> dict[K, float]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}


@dataclass(frozen=True, slots=True)
class Series(Generic[T]):
    """A family and how it is read from a `T`; the label's `values` exist from the start."""

    name: str
    help: str
    read: Callable[[T], Value]
    label: str | None = None
    values: tuple[str, ...] = ()

    @property
    def family(self) -> Family:
        kind: Literal["counter", "gauge"] = "gauge"
        if self.name.endswith("_total"):
            kind = "counter"
        return Family(self.name, self.help, kind, (self.label,) if self.label else ())

    def samples(self, source: T) -> dict[LabelValues, float]:
        value = self.read(source)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            return {(): value}
        return {(key,): number for key, number in {**dict.fromkeys(self.values, 0.0), **value}.items()}


def _live(s: Snapshot) -> Value:
    return {k: v for k, v in (("settled", s.live_settled), ("raw", s.live_raw)) if v is not None}


def _headroom(s: Snapshot, limit: int | None) -> Value:
    if s.live_settled is None or not limit:
        return None
    return (limit - s.live_settled) / limit


def _disk_bytes(s: Snapshot) -> Value:
    if s.kv_disk_files is None:
        return None
    return s.kv_disk_bytes


def _group_bytes(s: Snapshot) -> Value:
    rows = sum(group.real_bytes for group in s.groups)
    return {"rows": rows, "padding": max(sum(group.kv_bytes for group in s.groups) - rows, 0)}


FROM_STATUS: tuple[Series[EngineStatus], ...] = (
    Series(
        "marathon_engine_up", "1 while an engine has its model loaded and gives its signs of life.", lambda e: e.is_up
    ),
    Series(
        "marathon_engine_last_step_timestamp_seconds",
        "When the engine last finished a step or a chunk of a prompt, in seconds since the epoch.",
        lambda e: e.last_step_time,
    ),
)

FROM_SUPERVISOR: tuple[Series[EngineView], ...] = (
    Series("marathon_requests_running", "Sequences that are in the engine.", lambda v: v.running),
    Series("marathon_requests_waiting", "Sequences that wait for the engine.", lambda v: v.waiting),
    Series("marathon_queue_limit", "Sequences that may wait.", lambda v: v.queue_limit),
    Series("marathon_batch_limit", "Sequences that may run together.", lambda v: v.batch_limit),
)

FROM_READY: tuple[Series[Ready], ...] = (
    Series("marathon_device_memory_bytes", "Memory of the device.", lambda r: r.device_memory or None),
)

FROM_SNAPSHOT: tuple[Series[Snapshot], ...] = (
    Series(
        "marathon_kv_tokens",
        "Positions held in caches, of running rows (active) and of earlier prompts (cached).",
        lambda s: {"active": s.kv_tokens, "cached": s.kv_cached_tokens},
        "state",
    ),
    Series("marathon_kv_capacity_tokens", "Positions that the caches have room for.", lambda s: s.kv_capacity_tokens),
    Series(
        "marathon_kv_bytes",
        "Bytes allocated for caches, of running rows (active) and of earlier prompts (cached).",
        lambda s: {"active": s.kv_bytes, "cached": s.kv_cached_bytes},
        "state",
    ),
    Series("marathon_decode_groups", "Batches that rows of similar length decode in.", lambda s: len(s.groups)),
    Series(
        "marathon_decode_group_kv_bytes",
        "Cache bytes of all decode groups: those of the rows themselves, and the padding to the longest of a group.",
        _group_bytes,
        "part",
    ),
    Series("marathon_prompt_cache_entries", "Earlier prompts kept for reuse.", lambda s: s.prefix_entries),
    Series("marathon_kv_disk_files", "Files of KV on disk, of all models.", lambda s: s.kv_disk_files),
    Series("marathon_kv_disk_bytes", "Bytes of KV on disk, of all models.", _disk_bytes),
    Series(
        "marathon_kv_disk_checkpoint_age_seconds",
        "Age of the newest checkpoint of the live row that was saved longest ago; absent while no row is worth one.",
        lambda s: s.kv_disk_checkpoint_age,
    ),
    Series("marathon_mlx_active_memory_bytes", "Bytes that MLX has in use.", lambda s: s.active_bytes),
    Series("marathon_mlx_cache_memory_bytes", "Bytes that MLX's buffer pool keeps for reuse.", lambda s: s.pool_bytes),
    Series(
        "marathon_mlx_peak_memory_bytes",
        "Most bytes that MLX had in use since the engine loaded its model; never reset while it serves.",
        lambda s: s.peak_bytes,
    ),
    Series(
        "marathon_mlx_memory_limit_bytes",
        "MLX's memory limit, from which it waits for work to finish before it allocates.",
        lambda s: s.memory_limit_bytes or None,
    ),
    Series("marathon_mlx_cache_limit_bytes", "Most that MLX's buffer pool may keep.", lambda s: s.pool_limit_bytes),
    Series(
        "marathon_engine_footprint_bytes",
        "Memory of the engine process as the system counts it, device memory included where it is shared.",
        lambda s: s.footprint_bytes or None,
    ),
    Series(
        "marathon_pending_cache_arrays",
        "Arrays still unevaluated behind the caches at the last census; 0 is health.",
        lambda s: s.pending,
    ),
    Series(
        "marathon_buffers_per_token",
        "Slope of the settled live-buffer count over the tokens of the window, beyond what the arrays of caches "
        "explain; 0 is health.",
        lambda s: s.buffers_per_token,
    ),
    Series(
        "marathon_unexplained_bytes_per_token",
        "Slope of the active bytes over the tokens of the window, beyond what the growth of caches explains.",
        lambda s: s.unexplained_bytes_per_token,
    ),
    Series(
        "marathon_tokens_to_exhaustion",
        "Tokens until the resource runs out at the present slope; +Inf while that is flat.",
        lambda s: s.tokens_to_exhaustion,
        "resource",
    ),
    Series(
        "marathon_seconds_to_exhaustion",
        "Seconds until the resource runs out at the present slope; +Inf while that is flat.",
        lambda s: s.seconds_to_exhaustion,
        "resource",
    ),
    Series(
        "marathon_pressure",
        "1 for the level that residency is at, 0 for the others.",
        lambda s: {level: float(level == s.pressure) for level in PRESSURES},
        "state",
    ),
)

# Only while the count has a source: a zero would look like health.
FROM_SOURCE: tuple[Series[tuple[Snapshot, Ready]], ...] = (
    Series(
        "marathon_live_buffers",
        "Buffers that live in MLX: settled, right after its pool was dropped; raw, pooled ones included.",
        lambda e: _live(e[0]),
        "reading",
    ),
    Series("marathon_buffer_limit", "Live buffers at which MLX throws.", lambda e: e[1].buffer_limit),
    Series(
        "marathon_buffer_headroom_ratio",
        "Share of the buffer limit that the settled reading leaves free.",
        lambda e: _headroom(e[0], e[1].buffer_limit),
    ),
    Series(
        "marathon_live_buffer_source_info",
        "Where the live-buffer count comes from.",
        lambda e: {e[1].live_source: 1.0},
        "source",
    ),
)


FROM_TOTALS: tuple[Series[Totals], ...] = (
    Series(
        "marathon_prompt_cache_lookups_total",
        "Prompts looked up among earlier ones, by how much was found.",
        lambda t: t.lookups,
        "result",
        ("hit", "partial", "miss"),
    ),
    Series(
        "marathon_prompt_cache_evictions_total",
        "Earlier prompts given up, by why.",
        lambda t: t.evictions,
        "reason",
        ("size", "bytes", "guard"),
    ),
    Series(
        "marathon_kv_lookups_total",
        "Sequences by where the KV came from that they began with; none: all of it was computed.",
        lambda t: t.kv_lookups,
        "tier",
        TIERS,
    ),
    Series(
        "marathon_kv_lookup_tokens_total",
        "Tokens that sequences began with, by where their KV came from; none: it was computed.",
        lambda t: t.kv_tokens,
        "tier",
        TIERS,
    ),
    Series(
        "marathon_kv_disk_transfer_bytes_total",
        "Bytes of KV read from and written to disk.",
        lambda t: t.disk_bytes,
        "operation",
        TRANSFERS,
    ),
    Series(
        "marathon_kv_disk_transfer_seconds_total",
        "Time that threads took to read and write KV; rows go on meanwhile.",
        lambda t: t.disk_seconds,
        "operation",
        TRANSFERS,
    ),
    Series(
        "marathon_kv_disk_dropped_files_total",
        "Files of KV that couldn't be used, by what was wrong with them.",
        lambda t: t.disk_dropped,
        "reason",
        DAMAGES,
    ),
    Series(
        "marathon_kv_disk_evicted_files_total",
        "Files of KV given up for newer ones.",
        lambda t: t.disk_evicted,
    ),
    Series(
        "marathon_kv_disk_skipped_checkpoints_total",
        "Checkpoints that weren't made: the writer was behind, the hour's bytes were spent, or the disk refused.",
        lambda t: t.disk_skipped,
        "reason",
        ("queue", "hour", "disk"),
    ),
    Series(
        "marathon_step_seconds_total",
        "The engine loop's own time, by part.",
        lambda t: t.seconds,
        "part",
        PARTS,
    ),
    Series(
        "marathon_guard_step_seconds_total",
        "The part of the engine loop's time that the cache guard takes.",
        lambda t: t.seconds.get("guard", 0.0),
    ),
    Series(
        "marathon_guard_actions_total",
        "Automatic acts against exhaustion and stalls, each once.",
        lambda t: t.actions,
        "action",
        ACTIONS,
    ),
)

CACHE_LEAKS = Family(
    "marathon_cache_leaks_total",
    "Censuses that found the attribute of a cache class pending.",
    "counter",
    ("model_type", "cache", "field"),
)
BATCH_SIZE = ("marathon_batch_size", "Rows of a decode step, once a step.", BATCH_SIZES)


class EngineMetrics:
    """All families that come from the engine, summed over the engines of the server's life."""

    def __init__(self) -> None:
        self.view: EngineView | None = None
        self._past = Totals()

    def acted(self, name: str) -> None:
        """One automatic act of the server's own."""
        self._past = replace(self._past, actions=_sum(self._past.actions, {name: 1}))

    def epoch_ended(self, snapshot: Snapshot) -> None:
        """The last snapshot of an engine that is gone; from now on the view shows another or none."""
        self._past = self._past.plus(snapshot)

    def collect(self, engine: EngineStatus | None) -> Iterator[Metric]:
        """All families with samples. `engine`: None before there is a supervisor to read from."""
        totals = self._past
        if engine and engine.snapshot:
            totals = totals.plus(engine.snapshot)
        yield from _counters(totals)
        if self.view:
            yield from _read(FROM_SUPERVISOR, self.view)
        if engine:
            yield from _read(FROM_STATUS, engine)
            yield from _gauges(engine.snapshot, engine.ready)
            yield from _leaks(totals, engine.known)


def families() -> list[Family]:
    """Every family of this module, known before there is an engine."""
    groups = (FROM_STATUS, FROM_SUPERVISOR, FROM_READY, FROM_SNAPSHOT, FROM_SOURCE, FROM_TOTALS)
    return [*(series.family for group in groups for series in group), CACHE_LEAKS, Histogram(*BATCH_SIZE).family]


def _read(group: tuple[Series[T], ...], source: T) -> Iterator[Metric]:
    for series in group:
        if samples := series.samples(source):
            yield metric(series.family, samples)


def _gauges(snapshot: Snapshot | None, ready: Ready | None) -> Iterator[Metric]:
    if ready:
        yield from _read(FROM_READY, ready)
    if snapshot:
        yield from _read(FROM_SNAPSHOT, snapshot)
    if snapshot and ready and ready.live_source in SOURCES:
        yield from _read(FROM_SOURCE, (snapshot, ready))


def _counters(totals: Totals) -> Iterator[Metric]:
    yield from _read(FROM_TOTALS, totals)
    histogram = Histogram(*BATCH_SIZE)
    for rows, steps in totals.batch_sizes.items():
        histogram.observe(rows, count=int(steps))
    yield histogram.collect()


def _leaks(totals: Totals, known: Ready | None) -> Iterator[Metric]:
    if known and totals.leaks:
        yield metric(CACHE_LEAKS, {_place(known, name): count for name, count in totals.leaks.items()})


def _place(known: Ready, name: str) -> LabelValues:
    """`"ArraysCache.left_padding"` → its labels; class names have no dot."""
    cache, _, attribute = name.partition(".")
    return known.model_type, cache, attribute
