"""Log probabilities of drawn tokens, for the rows that ask.

Owns those that are computed and not read yet. Used in the engine process's main thread. It never keeps an array
beyond the step that reads it: a kept row would pin the whole [B, V] buffer behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from server.compute.rows import Row, on_host
from server.compute.sampling import top_candidates
from server.ipc.sequence import TokenLogprobs


@dataclass(frozen=True, slots=True)
class DrawScores:
    """Log probabilities of one draw, on the device, of S rows."""

    rows: list[Row]
    own: mx.array  # [S] of the drawn id
    best: mx.array  # [S, N] descending
    ids: mx.array  # [S, N]
    named: mx.array | None  # [S, W] of the ids that rows name, in their order

    def read(self) -> dict[int, TokenLogprobs]:
        """Return host values by seq; waits for them."""
        own: list[float] = on_host(self.own)
        best: list[list[float]] = on_host(self.best)
        ids: list[list[int]] = on_host(self.ids)
        named: list[list[float]] = []
        if self.named is not None:
            named = on_host(self.named)
        found = {}
        for i, row in enumerate(self.rows):
            wanted = row.sequence.scored
            if wanted:
                top = sorted(zip(wanted, named[i], strict=False), key=lambda pair: -pair[1])
            else:
                count = row.sequence.logprobs
                top = list(zip(ids[i][:count], best[i][:count], strict=True))
            found[row.seq] = TokenLogprobs(own[i], top)
        return found


@dataclass(slots=True)
class PendingScores:
    """The log probabilities of the newest tokens: some on the host already, the others on the device."""

    on_host: dict[int, TokenLogprobs] = field(default_factory=dict)  # by seq
    drawn: DrawScores | None = None

    def read(self) -> dict[int, TokenLogprobs]:
        """Return all by seq; waits for those on the device."""
        if self.drawn is not None:
            self.on_host |= self.drawn.read()
            self.drawn = None
        return self.on_host


class LogprobColumn:
    """Which rows of a batch ask for log probabilities, and those of their newest tokens."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._asking: list[int] = []
        self._pending = PendingScores()

    def join(self, rows: Sequence[Row]) -> None:
        self._pending.on_host |= {row.seq: row.score for row in rows if row.score is not None}
        self._hold([*self._rows, *rows])

    def keep(self, indices: list[int]) -> None:
        self._hold([self._rows[i] for i in indices])

    def _hold(self, rows: list[Row]) -> None:
        self._rows = rows
        self._asking = [i for i, row in enumerate(rows) if row.sequence.logprobs >= 0]

    def extract(self, i: int, row: Row) -> None:
        row.score = self._pending.read().get(row.seq)

    def take(self) -> PendingScores:
        """Return those of the newest tokens and forget them."""
        pending = self._pending
        self._pending = PendingScores()
        return pending

    def score(self, logits: mx.array, drawn: mx.array) -> list[mx.array]:
        """Compute those of `drawn` [B] under `logits` [B, V], the model's own distribution before temperature, bias
        and penalties. Returns the arrays to be evaluated with the draw."""
        if not self._asking:
            return []
        rows = [self._rows[i] for i in self._asking]
        index = mx.array(self._asking)
        mine = logits[index].astype(mx.float32)
        total = mx.logsumexp(mine, axis=-1, keepdims=True)
        own = mx.take_along_axis(mine, drawn[index][:, None], axis=-1) - total
        wanted = max(1, *(row.sequence.logprobs for row in rows), 1)
        best, ids = top_candidates(mine, min(1 << (wanted - 1).bit_length(), mine.shape[-1]))
        named = None
        if (names := _named([row.sequence.scored for row in rows])) is not None:
            named = mx.take_along_axis(mine, names, axis=-1) - total
        scores = DrawScores(rows, own[:, 0], best - total, ids, named)
        self._pending.drawn = scores
        return [scores.own, scores.best, scores.ids]


def _named(wanted: list[list[int]]) -> mx.array | None:
    """The ids [S, W] that rows want scored, filled up with any id; None where no row names one."""
    width = max(map(len, wanted))
    if not width:
        return None
    return mx.array([[*ids, *[0] * (width - len(ids))] for ids in wanted])
