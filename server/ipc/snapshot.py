"""The snapshot: what an engine reports of itself each second.

Runs in both processes; does no I/O.

The engine's main thread changes its snapshot while the writer thread packs it. That is safe because msgspec encodes a
message in one call that keeps the interpreter lock and runs no Python code: no field has a type that would need a hook.
Each field is therefore whole, and all are of one moment, though that moment may lie between two assignments.
"""

from __future__ import annotations

import time

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """Something behind the caches was still pending at a census."""

    layer: int
    cache: str  # class
    field: str  # attribute
    count: int


class Action(msgspec.Struct, frozen=True):
    """One automatic act of guard or residency."""

    time: float  # seconds since the epoch
    action: str
    reading: float
    threshold: float


class GroupState(msgspec.Struct, frozen=True):
    """One decode group at the time of the snapshot."""

    rows: int
    length: int  # padded positions
    kv_bytes: int  # held by its caches
    real_bytes: int  # what its rows would hold without padding
    every: int = 1  # stepped each k-th iteration


class PromptProgress(msgspec.Struct, frozen=True):
    """One sequence that is being read before it can be answered, or waits for that."""

    seq: int
    done: int  # tokens that its caches hold
    total: int  # of its prompt, and of what was generated before if it is continued


class Snapshot(msgspec.Struct, omit_defaults=True):
    """What /metrics, /health and /debug serve. One mutable instance lives in the engine's main thread; a copy of it
    travels with each `Progress`. Counters only rise within an epoch; the server adds them up across epochs."""

    # loop
    rows: int = 0
    prefilling: int = 0
    prompts: list[PromptProgress] = []  # of the same, in order of arrival
    waiting: int = 0
    steps: int = 0
    batch_sizes: dict[int, int] = {}  # decode steps by number of rows
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    step_seconds: dict[str, float] = {}  # by part: forward, sample, guard, read, publish, prefill
    typical_step_seconds: float = 0.0  # what a step or chunk like the one under way usually takes
    first_shape: bool = False  # the step under way has a shape never run before
    groups: list[GroupState] = []
    # memory
    active_bytes: int = 0
    pool_bytes: int = 0
    peak_bytes: int = 0
    footprint_bytes: int = 0
    memory_limit_bytes: int = 0
    pool_limit_bytes: int = 0
    kv_bytes: int = 0
    kv_cached_bytes: int = 0
    kv_buffers: int = 0  # arrays of rows' caches, each with a buffer of its own
    kv_cached_buffers: int = 0
    kv_tokens: int = 0
    kv_cached_tokens: int = 0
    kv_capacity_tokens: int = 0
    # prefix cache
    prefix_entries: int = 0
    prefix_lookups: dict[str, int] = {}  # hit, partial, miss
    prefix_evictions: dict[str, int] = {}  # size, bytes, guard
    # KV by where it comes from, and the store on disk
    kv_lookups: dict[str, int] = {}  # memory, disk, none: rows by where most of what they begin with came from
    kv_lookup_tokens: dict[str, int] = {}  # the same in tokens; none: read by prefill
    kv_disk_files: int | None = None  # None: nothing is kept on disk
    kv_disk_bytes: int = 0
    kv_disk_written_bytes: int = 0
    kv_disk_read_bytes: int = 0
    kv_disk_seconds: dict[str, float] = {}  # read, write
    kv_disk_dropped: dict[str, int] = {}  # files that couldn't be used, by why
    kv_disk_evicted: int = 0  # files given up for newer ones
    kv_disk_skipped: dict[str, int] = {}  # checkpoints not made: queue, hour, disk
    kv_disk_checkpoint_age: float | None = None  # seconds, of the live row that was saved longest ago
    # guard and residency
    pending: int = 0
    findings: list[Finding] = []
    leaks: dict[str, int] = {}  # "cache.field": censuses that found it
    actions: list[Action] = []  # the newest 100
    action_counts: dict[str, int] = {}
    pressure: str = "calm"
    live_settled: int | None = None
    live_raw: int | None = None
    buffers_per_token: float | None = None
    unexplained_bytes_per_token: float | None = None
    tokens_to_exhaustion: dict[str, float] = {}  # by resource: buffers, bytes; inf while flat
    seconds_to_exhaustion: dict[str, float] = {}

    def record(self, action: str, reading: float, threshold: float) -> None:
        """Note one automatic act; the engine's main thread only."""
        self.actions = [*self.actions[-99:], Action(time.time(), action, reading, threshold)]
        self.action_counts[action] = self.action_counts.get(action, 0) + 1
