"""The state of a server in one value, made once a second.

Owns the reading of supervisor and metrics into `Status`. Runs on the server's event loop; reads what the
server process has already and never asks the engine, so that it works while the engine is busy, stuck or gone. Holds
no text of a client.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping

import msgspec

import server
from server.ipc.messages import Ready
from server.ipc.snapshot import PromptProgress, Snapshot
from server.journal.state import JournalState
from server.metrics import Metrics
from server.supervision.generation import Generation
from server.supervision.supervisor import Supervisor
from server.telemetry.log_place import log_place

MOST_ROWS = 100


class EngineFacts(msgspec.Struct, frozen=True):
    """The process that owns MLX. `restarts`: engines replaced so far, by cause; `spare`: whether a process that has
    imported everything waits to be the next one; `weights_read` and `weights_total`: bytes, while it reads them."""

    up: bool
    epoch: int
    pid: int | None
    stage: str
    down_reason: str | None
    hopeless: bool
    last_step_age_seconds: float | None
    restarts: dict[str, int]
    resumed: dict[str, int]
    spare: bool = False
    weights_read: int | None = None
    weights_total: int | None = None


class BufferState(msgspec.Struct, frozen=True):
    """Counts of MLX's live buffers, and their limit; `pending`: cache arrays that no step has evaluated."""

    source: str
    count: int | None
    limit: int | None
    per_token: float | None
    pending: int | None


class MemoryState(msgspec.Struct, frozen=True):
    """Bytes by the engine's last report; None before the first one."""

    active: int | None
    limit: int | None
    caches: int | None
    prefixes: int | None
    footprint: int | None
    device: int | None


class QueueState(msgspec.Struct, frozen=True):
    """Counts of sequences that run, wait and read prompts, and both limits."""

    running: int
    waiting: int
    reading: int
    batch_limit: int
    queue_limit: int


class RowState(msgspec.Struct, frozen=True):
    """One generation that hasn't ended. `state`: waiting, reading, decoding or resuming; `read_per_second`: tokens of
    its prompt, once that is known, and `read_seconds_left` what is left of them at that pace."""

    seq: int
    endpoint: str
    state: str
    age_seconds: float
    prompt_tokens: int
    tokens: int
    max_tokens: int
    tokens_per_second: float | None
    read: int | None
    to_read: int | None
    survived: int
    read_per_second: float | None = None
    read_seconds_left: float | None = None


class Status(msgspec.Struct, frozen=True):
    """The whole state. Times are seconds; `time` counts from 1970. `log`: where the server's log can be read."""

    time: float
    model: str
    version: str
    uptime_seconds: float
    draining: bool
    ready: bool
    tokens_per_second: float
    first_token_seconds: float | None
    pressure: str | None
    seconds_to_exhaustion: dict[str, float | None]
    engine: EngineFacts
    buffers: BufferState
    memory: MemoryState
    queue: QueueState
    rows: list[RowState]
    more_rows: int
    journal: JournalState | None = None
    log: str = ""


def read(supervisor: Supervisor, metrics: Metrics, model: str, uptime: float, first_token: float | None) -> Status:
    """Read the state of this moment. `first_token`: seconds to the first token of the newest requests, if any."""
    snapshot = supervisor.engine.snapshot
    known = supervisor.engine.known
    rows = list(supervisor.generations())
    paces = supervisor.engine.paces
    shown = [_row(generation, supervisor, snapshot, paces) for generation in rows[:MOST_ROWS]]
    return Status(
        time=time.time(),
        model=model,
        version=server.__version__,
        uptime_seconds=uptime,
        draining=supervisor.draining,
        ready=supervisor.is_ready,
        tokens_per_second=metrics.tokens_per_second,
        first_token_seconds=first_token,
        pressure=snapshot.pressure if snapshot else None,
        seconds_to_exhaustion=_finite(snapshot.seconds_to_exhaustion) if snapshot else {},
        engine=_engine(supervisor, metrics),
        buffers=_buffers(known, snapshot),
        memory=_memory(known, snapshot),
        queue=_queue(supervisor, snapshot),
        rows=shown,
        more_rows=len(rows) - len(shown),
        journal=metrics.journal.state,
        log=log_place(),
    )


def _finite(seconds: dict[str, float]) -> dict[str, float | None]:
    """Return None for infinity, which is no JSON number."""
    return {name: value if math.isfinite(value) else None for name, value in seconds.items()}


def _engine(supervisor: Supervisor, metrics: Metrics) -> EngineFacts:
    engine = supervisor.engine
    return EngineFacts(
        up=engine.is_up,
        epoch=engine.epoch,
        pid=engine.pid,
        stage=engine.stage,
        down_reason=supervisor.down_reason,
        hopeless=supervisor.hopeless,
        last_step_age_seconds=engine.last_step_age_seconds,
        restarts=metrics.restarts,
        resumed=metrics.resumes,
        spare=engine.spare,
        weights_read=engine.weights.done if engine.weights else None,
        weights_total=engine.weights.total if engine.weights else None,
    )


def _buffers(known: Ready | None, snapshot: Snapshot | None) -> BufferState:
    if known is None:
        return BufferState("off", None, None, None, None)
    if snapshot is None:
        return BufferState(known.live_source, None, known.buffer_limit, None, None)
    return BufferState(
        known.live_source, snapshot.live_settled, known.buffer_limit, snapshot.buffers_per_token, snapshot.pending
    )


def _memory(known: Ready | None, snapshot: Snapshot | None) -> MemoryState:
    device = known.device_memory or None if known else None
    if snapshot is None or known is None:
        return MemoryState(None, None, None, None, None, device)
    return MemoryState(
        active=snapshot.active_bytes,
        limit=snapshot.memory_limit_bytes or None,
        caches=snapshot.kv_bytes,
        prefixes=snapshot.kv_cached_bytes,
        footprint=snapshot.footprint_bytes or None,
        device=device,
    )


def _queue(supervisor: Supervisor, snapshot: Snapshot | None) -> QueueState:
    return QueueState(
        running=supervisor.running,
        waiting=supervisor.waiting,
        reading=snapshot.prefilling if snapshot else 0,
        batch_limit=supervisor.batch_limit,
        queue_limit=supervisor.queue_limit,
    )


def _row(
    generation: Generation, supervisor: Supervisor, snapshot: Snapshot | None, paces: Mapping[int, float]
) -> RowState:
    progress = next(_progress(generation, snapshot), None)
    pace = paces.get(generation.seq) if progress else None
    return RowState(
        seq=generation.seq,
        endpoint=generation.live.endpoint,
        state=_state(generation, progress),
        age_seconds=supervisor.clock() - generation.live.arrived,
        prompt_tokens=len(generation.sequence.prompt),
        tokens=len(generation.generated),
        max_tokens=generation.sequence.max_tokens,
        tokens_per_second=_rate(generation),
        read=progress.done if progress else None,
        to_read=progress.total if progress else None,
        survived=generation.survived,
        read_per_second=pace,
        read_seconds_left=(progress.total - progress.done) / pace if progress and pace else None,
    )


def _progress(generation: Generation, snapshot: Snapshot | None) -> Iterator[PromptProgress]:
    if snapshot is not None and generation.phase != "queued" and (not generation.generated or generation.cause):
        yield from (prompt for prompt in snapshot.prompts if prompt.seq == generation.seq)


def _state(generation: Generation, progress: PromptProgress | None) -> str:
    if generation.cause is not None:
        return "resuming"
    if generation.phase == "queued":
        return "waiting"
    if progress is not None or not generation.generated:
        return "reading"
    return "decoding"


def _rate(generation: Generation) -> float | None:
    """Return tokens a second over a generation's life, from the first token on."""
    seconds = generation.last - generation.first
    if len(generation.generated) < 2 or seconds <= 0:
        return None
    return (len(generation.generated) - 1) / seconds
