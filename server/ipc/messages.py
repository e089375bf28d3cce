"""What crosses the seam between server process and engine process.

Owns the message types and their framing: a 4-byte big-endian length, then one msgpack message. Runs in both
processes; does no I/O of its own. Each message carries the *epoch* of the engine it belongs to, so that nothing of
a dead engine is taken for news of the living one.

A `Submit` says everything that is needed to start a sequence *or to continue it elsewhere*: prompt ids and generated
ids apart, limits counted from the start of the output, and a seed drawn by the server. A fresh start is a
continuation with no generated ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal

import msgspec

FRAME_HEADER = 4
MAX_FRAME = 1 << 28  # 256 MiB: no honest message comes near; garbage on the seam usually does

Finish = Literal["stop", "length"]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a token is drawn. Neutral values are the defaults; the order is the field's: bias and penalties on the
    logits, then temperature, top-k, top-p, min-p."""

    seed: int  # 64-bit, unsigned
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    logit_bias: dict[int, float] = {}
    allowed: list[int] = []  # no other id is drawn; empty: any may be


# In llguidance's symbols: about 2,000 properties. Building more takes the engine longer than a second.
MAX_GRAMMAR_SIZE = 20_000


class Grammar(msgspec.Struct, frozen=True):
    """A constraint on the output, already validated by the server."""

    text: str  # llguidance grammar, as its own JSON or Lark text


class Sequence(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence to generate; all counts are of output tokens from the start of the output."""

    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    min_tokens: int = 0  # stop_ids can't be drawn before
    stop_ids: list[int] = []  # a drawn stop id ends the row with "stop" and is delivered as its last token
    choice: int = 0  # index within the request; part of the random stream
    logprobs: int = -1  # -1: none; else the number of alternatives to report with each token
    scored: list[int] = []  # ids whose logprobs are reported instead of the likeliest ones
    prompt_logprobs: bool = False  # report the prompt's own logprobs with the first step
    grammar: Grammar | None = None
    marks: list[int] = []  # prompt positions worth a prefix snapshot, ascending


# ---------------------------------------------------------------- about the model
GROWTH = 256  # positions by which mlx-lm's caches grow
LARGEST_CHUNK = 2048  # tokens of a prompt that are read at once
PLANNED_CHUNK = 256  # those that room is kept free for; with more of it larger chunks are read


class LayerCost(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of one cache array for one row: `constant + per_position * positions`, positions rounded up to `step`
    and capped at `cap` (0: no cap)."""

    constant: int
    per_position: int
    step: int = GROWTH
    cap: int = 0

    def bytes(self, length: int) -> int:
        """Bytes at `length` positions."""
        positions = -(-length // self.step) * self.step
        if self.cap:
            positions = min(positions, self.cap)
        return self.constant + self.per_position * positions


ReadsTogether = Literal["padded", "even", "alone"]


class Probe(msgspec.Struct, frozen=True):
    """What trying the loaded model out has shown. The same in every engine of a server, so a later engine takes it
    from the first."""

    vocab_size: int  # width of the logits
    batching: str  # "batched", or why rows run alone
    row_cost: list[LayerCost]
    chunk_peak_bytes: int  # peak of the largest chunk at a prompt's beginning, above the caches
    group_bytes: int  # what a step costs before any KV, in bytes of memory traffic
    reads: ReadsTogether = "alone"  # how prompts may share a forward pass
    pair_bytes: float = 0.0  # what a chunk takes for each pair of tokens that attend; 0 where attention is fused

    @property
    def token_bytes(self) -> float:
        """Bytes that a chunk takes for each of its tokens, pairs apart."""
        return max(0.0, self.chunk_peak_bytes / LARGEST_CHUNK - self.pair_bytes * LARGEST_CHUNK)

    def chunk_peak(self, size: int, held: int = 0) -> int:
        """Bytes that a chunk of `size` tokens needs for a while when the caches hold `held` before it."""
        return int(size * (self.token_bytes + self.pair_bytes * (held + size)))


class TokenTable(msgspec.Struct, frozen=True):
    """What each id of the tokenizer says, as the client reads it; grammars are followed in these bytes.

    The ids may be more or fewer than the model has logits.
    """

    texts: list[bytes]  # by id; empty for an id that says nothing
    control: list[int]  # ids that structure an answer: no text is written with them
    ends: list[int]  # control ids that end an answer


# ---------------------------------------------------------------- server → engine
class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first command of an engine's life. Settings travel here and not in argv, where `ps` shows them."""

    epoch: int
    model_path: str
    settings: str  # Settings as JSON
    probe: Probe | None = None  # of an earlier engine


class Learn(msgspec.Struct, frozen=True, tag="learn"):
    """What the tokens say; comes while the model loads, or before the first grammar at the latest."""

    epoch: int
    tokens: TokenTable


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    epoch: int
    seq: int  # unique in the server's life
    sequence: Sequence
    generated: list[int] = []  # delivered before; positions go on after them


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    epoch: int
    seq: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Leave in good order: end the loop, free everything, exit with 0. What still runs is dropped; the server
    resumes it elsewhere."""

    epoch: int


class Reclaim(msgspec.Struct, frozen=True, tag="reclaim"):
    """Free what can be freed (pool, idle prefixes) and send a settled reading."""

    epoch: int


Command = Start | Learn | Submit | Cancel | Drain | Reclaim


# ---------------------------------------------------------------- engine → server
class LoadFailure(msgspec.Struct, frozen=True, tag="load_failed"):
    """The model can't be loaded; another try would end the same way. One sentence."""

    epoch: int
    message: str


class Ready(msgspec.Struct, frozen=True, tag="ready", omit_defaults=True):
    """The engine has loaded and probed its model."""

    epoch: int
    pid: int
    probe: Probe
    context: int  # positions
    weights_bytes: int
    model_type: str
    quantization: str
    device: str
    mlx: str
    mlx_lm: str
    load_seconds: float
    live_source: str = "off"  # metal | native | off
    live_reason: str = ""  # why there is no source
    buffer_limit: int | None = None
    memory_limit: int = 0  # bytes that admission plans with; 0: unknown
    device_memory: int = 0

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.probe.vocab_size

    @property
    def batching(self) -> str:
        """ "batched", or why rows run alone."""
        return self.probe.batching


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprob of the drawn token and its alternatives, best first, from the untempered distribution."""

    logprob: float
    top: list[tuple[int, float]] = []


class End(msgspec.Struct, frozen=True, array_like=True):
    """A row left its batch."""

    seq: int
    finish: Finish


class RowStart(msgspec.Struct, frozen=True, array_like=True):
    """A row left the engine's own waiting list and its first prefill chunk is done or was not needed."""

    seq: int
    cached: int  # prompt tokens taken from the prefix cache
    prompt_logprobs: list[TokenLogprobs] | None = None


class Steps(msgspec.Struct, frozen=True, tag="steps", omit_defaults=True):
    """One loop iteration of all rows: `tokens[i]` was drawn for `seqs[i]`. Ends follow the tokens of the same
    message."""

    epoch: int
    seqs: list[int]
    tokens: list[int]
    ends: list[End] = []
    started: list[RowStart] = []
    logprobs: dict[int, TokenLogprobs] = {}  # by seq, only rows that ask


class RowFailure(msgspec.Struct, frozen=True, tag="failed"):
    """One row can't go on; the others don't notice. `kind` is "row" (its own fault), "memory" or "leak"."""

    epoch: int
    seq: int
    kind: str
    message: str


class Preemption(msgspec.Struct, frozen=True, tag="preempted"):
    """The row gave its memory back and wants to be submitted again when there is room."""

    epoch: int
    seq: int


class RowIntake(msgspec.Struct, frozen=True, tag="taken"):
    """The engine begins to work on this sequence. Should it die before it says so, the sequence had no part in it."""

    epoch: int
    seq: int


class Rotate(msgspec.Struct, frozen=True, tag="rotate", omit_defaults=True):
    """The engine asks to be replaced before MLX throws."""

    epoch: int
    reading: float
    threshold: float
    reason: str
    late: bool = False  # MLX has thrown: the process ends by itself
    is_leak: bool = True  # coming too often it shows that replacing the engine doesn't help


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


PROGRESS_SECONDS = 1.0


class Progress(msgspec.Struct, frozen=True, tag="progress", omit_defaults=True):
    """Sent each PROGRESS_SECONDS by the writer thread, and at each load stage. `count` rises at each chunk, step and
    stage; while it stands still the engine may be stuck."""

    epoch: int
    count: int
    stage: str  # in words, such as `loading the weights`
    snapshot: Snapshot | None = None
    still: float = 0.0  # seconds since the count last rose


Event = LoadFailure | Ready | RowIntake | Steps | RowFailure | Preemption | Rotate | Progress

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


class TornFrame(ValueError):
    """Bytes on the seam are no message: garbage, or a length that no message has."""


def pack(message: Command | Event) -> bytes:
    """One frame, ready to be written."""
    body = _encoder.encode(message)
    return len(body).to_bytes(FRAME_HEADER, "big") + body


class Frames:
    """Cuts a byte stream into frames. A torn last frame is simply never returned.

    Raises `TornFrame` from `feed` for a length beyond `MAX_FRAME`.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while len(self._buffer) >= FRAME_HEADER:
            size = int.from_bytes(self._buffer[:FRAME_HEADER], "big")
            if size > MAX_FRAME:
                raise TornFrame(f"a frame of {size} bytes")
            if len(self._buffer) < FRAME_HEADER + size:
                return
            frame = bytes(self._buffer[FRAME_HEADER : FRAME_HEADER + size])
            del self._buffer[: FRAME_HEADER + size]
            yield frame


def unpack_command(frame: bytes) -> Command:
    """Raises TornFrame when the frame is no command."""
    try:
        return _commands.decode(frame)
    except msgspec.DecodeError as error:
        raise TornFrame(str(error)) from error


def unpack_event(frame: bytes) -> Event:
    """Raises TornFrame when the frame is no event."""
    try:
        return _events.decode(frame)
    except msgspec.DecodeError as error:
        raise TornFrame(str(error)) from error
