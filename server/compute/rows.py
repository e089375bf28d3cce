"""One sequence in the engine, and what a step of a batch gives back.

Owns the values that the loop, the prefill lane and the batches hand to each other. Made and used in the engine
process's main thread. It never runs a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from server.cache_guard import Caches
from server.compute.merged_caches import MergedCaches
from server.ipc.sequence import Finish, TokenLogprobs, TokenSequence


def on_host(array: mx.array) -> Any:
    """Return the array's values as nested lists; waits for them. MLX's own annotation leaves the depth open."""
    return array.tolist()


class Model(Protocol):
    """An mlx-lm model: `inputs` [B, L] int → logits [B, L, V]; caches are updated in place."""

    def __call__(self, inputs: mx.array, cache: Caches | None = None) -> mx.array: ...


class RowConstraint(Protocol):
    """A row's grammar while it runs."""

    def accept(self, token: int) -> None:
        """Take a drawn token. Raises ValueError when the grammar can't go on."""

    def mask(self) -> np.ndarray[Any, Any]:
        """Return packed int32 [ceil(V / 32)]: bit t of word w allows token 32 w + t."""


@dataclass(eq=False, slots=True)
class Row:
    """One sequence in the engine. Owned by the loop; a batch changes it only in `step`, `join` and `leave`."""

    seq: int
    sequence: TokenSequence
    tokens: list[int]  # prompt and output, as delivered
    caches: Caches = field(default_factory=list)  # single; empty while the row sits in a batch or shares its caches
    shared: MergedCaches | None = None  # with the rows that it was read with, on the way into a batch
    pending: mx.array | None = None  # [1] drawn, not yet read; None: the last token is the next input
    constraint: RowConstraint | None = None
    penalty_counts: mx.array | None = None  # penalty counts while the row moves between batches
    score: TokenLogprobs | None = None  # of the pending token, while the row moves between batches
    stops: frozenset[int] = frozenset()
    arrived: float = 0.0
    cached: int = 0  # tokens that came from the prefix cache or from the disk
    is_fetching: bool = False  # its caches are being read from the disk; until then none of its tokens is read
    restored: tuple[Caches, int] | None = None  # caches from the disk, and the tokens that they hold
    is_from_disk: bool = False
    read: int = 0  # tokens that its caches hold while the prompt is read
    rebuilds: int = 0  # times that it was rebuilt from tokens without a token since
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)  # of prompt tokens 1…, if asked for
    solo: bool = False  # must not share a forward pass

    @property
    def produced(self) -> int:
        """Output tokens delivered so far, in this engine and before."""
        return len(self.tokens) - len(self.sequence.prompt)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def is_read(self) -> bool:
        """Whether its caches hold all tokens but the last, which goes through the decode lane."""
        return self.read == len(self.tokens) - 1

    @property
    def is_compiled(self) -> bool:
        """Whether its grammar, if it has one, is there."""
        return self.sequence.grammar is None or self.constraint is not None

    def single(self) -> Caches:
        """Return caches that no other row uses, copied if need be."""
        if self.shared is None:
            return self.caches
        return self.shared.single(self.seq)

    def hand_over(self) -> None:
        """Drop what a batch has taken: caches, pending draw and what goes with them."""
        self.caches = []
        self.shared = None
        self.pending = None
        self.penalty_counts = None
        self.score = None

    def reset(self) -> None:
        """Keep nothing but the tokens, from which the row can be rebuilt."""
        self.hand_over()
        self.constraint = None
        self.prompt_scores = []
        self.restored = None
        self.read = 0


@dataclass(slots=True)
class StepOutput:
    """What one step of one batch read: `tokens[i]` belongs to `seqs[i]`."""

    seqs: list[int]
    tokens: list[int]
    ended: list[tuple[Row, Finish]]
    logprobs: dict[int, TokenLogprobs]  # by seq, of the rows that ask
    failed: list[tuple[Row, str]] = field(default_factory=list)  # rows whose grammar can't go on, and why
