"""Commands to the engine process, and events from it.

Each message carries the *epoch* of the engine that it belongs to, so that nothing of a dead engine is taken for news of
the living one. A `Submit` says everything that is needed to start a sequence *or to continue it elsewhere*. Runs in
both processes; does no I/O.
"""

from __future__ import annotations

import msgspec

from server.ipc.probe import Probe
from server.ipc.sequence import Finish, TokenLogprobs, TokenSequence, TokenTable
from server.ipc.snapshot import Snapshot

NO_EPOCH = 0  # of a spare engine, which is none yet


# ---------------------------------------------------------------- server → engine
class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """To a spare engine, before `Start`: import everything, load nothing, answer `Preparation`. Sent once more it asks
    whether the process still answers."""

    model_path: str


FileStates = dict[str, tuple[str, str]]  # by a file's name: what `stat` says of it, and a digest of samples of it


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first command of an engine's life. Settings travel here and not in argv, where `ps` shows them."""

    epoch: int
    model_path: str
    settings: str  # Settings as JSON
    probe: Probe | None = None  # of an earlier engine
    files: FileStates | None = None  # that an earlier engine loaded; with others this one ends


class Learn(msgspec.Struct, frozen=True, tag="learn"):
    """What the tokens say; comes while the model loads, or before the first grammar at the latest."""

    epoch: int
    tokens: TokenTable


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    epoch: int
    seq: int  # unique in the server's life
    sequence: TokenSequence
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


Command = Prepare | Start | Learn | Submit | Cancel | Drain | Reclaim


# ---------------------------------------------------------------- engine → server
class Preparation(msgspec.Struct, frozen=True, tag="preparation"):
    """A spare engine has imported everything and waits for `Start`."""

    epoch: int = NO_EPOCH


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
    files: FileStates = {}  # that make the model, as they were read

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.probe.vocab_size

    @property
    def batching(self) -> str:
        """ "batched", or why rows run alone."""
        return self.probe.batching


class End(msgspec.Struct, frozen=True, array_like=True):
    """A row left its batch."""

    seq: int
    finish: Finish


class RowStart(msgspec.Struct, frozen=True, array_like=True):
    """A row left the engine's own waiting list and its first prefill chunk is done or was not needed."""

    seq: int
    cached: int  # prompt tokens that were not read, from the prefix cache or the disk
    prompt_logprobs: list[TokenLogprobs] | None = None
    reused: int = 0  # the same of all its tokens, those generated before included


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
    """One row can't go on; the others don't notice. `kind` is "row" (its own fault), "grammar" (its form's),
    "memory" or "leak"."""

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


PROGRESS_SECONDS = 1.0
LOADING = "loading the weights"  # the first stage after Python's imports


class WeightsRead(msgspec.Struct, frozen=True, array_like=True):
    """How far the weights are read, in bytes."""

    done: int
    total: int


class Progress(msgspec.Struct, frozen=True, tag="progress", omit_defaults=True):
    """Sent each PROGRESS_SECONDS by the writer thread, and at each load stage. `count` rises at each chunk, step and
    stage; while it stands still the engine may be stuck."""

    epoch: int
    count: int
    stage: str  # in words, such as `loading the weights`
    snapshot: Snapshot | None = None
    still: float = 0.0  # seconds since the count last rose
    weights: WeightsRead | None = None  # while they are read


Event = Preparation | LoadFailure | Ready | RowIntake | Steps | RowFailure | Preemption | Rotate | Progress
