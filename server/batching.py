"""The batched decode loop: rows that are stepped together.

Owns a `Batch`, rows sharing one forward pass: join, leave, step. Runs in the engine process's main thread. It knows
token ids and caches; it never sees text, HTTP or another process.

A step runs one ahead: it submits the forward pass of the newest tokens and the draw after it, and only then waits
for the newest tokens themselves, which the step before submitted. The host's work hides behind the device's.

A lone row runs in its own un-merged caches: no padding, no masks, no batch metadata. Caches are mlx-lm's
(`mlx_lm.models.cache`): `merge` makes a batch of single caches, `extend` adds a batch to a batch, `filter` keeps
rows, `extract` gives a single cache back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from server.cache_guard import Caches, Guard
from server.compute.columns import KV, Column, Inputs, Penalties, in_cache_order
from server.compute.logprobs import LogprobColumn, PendingScores
from server.compute.masks import Failures, MaskColumn, Masks
from server.compute.rows import Model, Row, StepOutput, on_host
from server.compute.sampling import Sampler
from server.compute.stopwatch import Laps
from server.ipc.sequence import Finish, TokenLogprobs

FLUSH_STEPS = 256  # steps whose tokens may wait to be moved into the rows: bounds what a join has to do


def _nothing(caches: Caches) -> list[mx.array]:
    return []


class Batch:
    """Rows that share one forward pass. Owned by the loop."""

    def __init__(self, model: Model, guard: Guard, laps: Laps | None = None) -> None:
        """`laps` takes the host's time by part: forward, guard, sample, read."""
        self._model = model
        self._guard = guard
        self._laps = laps or Laps()
        self._empty()

    def _empty(self) -> None:
        self.rows: list[Row] = []
        self._kv = KV(self._guard)
        self._inputs = Inputs()
        self._penalties = Penalties()
        self._logprobs = LogprobColumn()
        self._masks = MaskColumn()
        self._columns: tuple[Column, ...] = (self._kv, self._inputs, self._penalties, self._logprobs, self._masks)
        self._history: list[list[int]] = []  # tokens read since the rows last changed, not yet in Row.tokens
        self._last_not_held = False  # the newest tokens are read, but no forward pass took them in
        self._refresh()

    def _refresh(self) -> None:
        """Derive what a step asks for from the rows."""
        rows = self.rows
        self.seqs = [row.seq for row in rows]
        self._sampler = Sampler([(row.sequence.sampling, row.sequence.choice) for row in rows])
        self._stops: frozenset[int] = frozenset().union(*(row.stops for row in rows))
        self._until = min((row.sequence.max_tokens - row.produced for row in rows), default=0)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def caches(self) -> Caches:
        """Every layer's cache: of the lone row, or of all rows merged."""
        return self._kv.layers

    def length(self, row: Row) -> int:
        """Return the tokens of one of my rows, those read since the rows last changed included."""
        return row.length + len(self._history)

    def produced(self, row: Row) -> int:
        """Return the output tokens of one of my rows that were delivered."""
        return row.produced + len(self._history)

    def place(self, row: Row) -> int | None:
        """Return where in merged caches one of my rows is; None if the caches are its own."""
        if len(self.rows) > 1:
            return self.rows.index(row)
        return None

    def held_tokens(self, row: Row) -> list[int]:
        """Return the tokens that one of my rows' caches hold: all but the last if no forward pass has taken that in."""
        self.flush()
        held = self.held(row)
        if held == row.length:
            return row.tokens
        return row.tokens[:held]

    def held(self, row: Row) -> int:
        """Return how many tokens one of my rows' caches hold."""
        if self._last_not_held or (self._inputs.known and self.is_fetched(row)):
            return self.length(row) - 1
        return self.length(row)

    @property
    def longest(self) -> int:
        """Tokens of my longest row: what every row is padded to."""
        return max(map(self.length, self.rows), default=0)

    # ------------------------------------------------------------ membership
    def join(self, rows: Sequence[Row]) -> None:
        """Take rows, with single caches or those of their pass. Evaluated at once, layer by layer, so that no chain of
        joins is kept."""
        if not rows:
            return
        if len(self.rows) + len(rows) > 1:
            self._begin(rows)
        self.flush()
        rows = in_cache_order(rows)
        for column in self._columns:
            column.join(rows)
        for row in rows:
            row.hand_over()
        self.rows += rows
        self._refresh()

    def _begin(self, rows: Sequence[Row]) -> None:
        """Rows of one token have read nothing yet. Their first pass is their own: beside others it would meet zeros
        where a model may recognize the first position by the absence of a state, and a batch can't extract what isn't
        there."""
        if self._inputs.known and len(self.rows) == 1 and self.rows[0].length == 1:
            self.step()
        for row in rows:
            if row.pending is None and row.length == 1:
                alone = Batch(self._model, self._guard)
                alone.join([row])
                alone.step()
                alone.leave([row], keep_caches=True)

    def leave(self, rows: Sequence[Row], *, keep_caches: bool = False) -> None:
        """Drop rows. With `keep_caches` each gets compacted single caches and what else it needs to join again."""
        self.flush()
        gone = {id(row) for row in rows}
        if keep_caches:
            for i, row in enumerate(self.rows):
                if id(row) in gone:
                    self._extract(i, row)
        self._keep([i for i, row in enumerate(self.rows) if id(row) not in gone])

    def _extract(self, i: int, row: Row) -> None:
        for column in self._columns:
            column.extract(i, row)

    def single_caches(self, i: int) -> Caches:
        """Return row i's own caches, compacted: what outlives its batch must not pin the batch's buffers."""
        return self._kv.single(i)

    def _keep(self, indices: list[int]) -> None:
        if len(indices) == len(self.rows):
            return
        for column in self._columns:
            column.keep(indices)
        self.rows = [self.rows[i] for i in indices]
        self._refresh()

    def abandon(self) -> list[Row]:
        """Give up all rows after a failed forward pass; the caches are in no known state and are dropped."""
        self.flush()
        rows = self.rows
        self._empty()
        return rows

    def flush(self) -> None:
        """Move what was read since the last change into the rows."""
        for i, row in enumerate(self.rows):
            row.tokens += [tokens[i] for tokens in self._history]
        self._history = []

    # ------------------------------------------------------------ the step
    def step(self, copied: Callable[[Caches], list[mx.array]] = _nothing) -> StepOutput:
        """Submit the next step of all rows and read the one before it; `copied` gives what is to be submitted besides,
        from the caches as the step leaves them.

        Faults of single rows come back in `StepOutput.failed`; an exception is a fault of the forward pass, and the
        caches are then in no known state.
        """
        inputs = self._inputs.ids
        scores = self._logprobs.take()
        failed: Failures = []
        assert inputs is not None
        self._last_not_held = self._all_end()
        if self._last_not_held:
            return self._read(inputs, scores, failed)
        self._laps.start()
        logits = self._model(inputs[:, None], cache=self.caches)[:, -1, :]
        self._laps.lap("forward")
        held = self._guard.reach(self.caches) + copied(self.caches)
        self._laps.lap("guard")
        masks: Masks | None = None
        if self._masks.constrained:
            mx.async_eval(logits, held)
            masks = self._masks.advance(on_host(inputs), self._inputs.known, failed)
            self._laps.lap("read")
        drawn = self._draw(logits, masks, held)
        self._laps.lap("sample")
        news = self._read(inputs, scores, failed)
        self._inputs.advance(drawn)
        self._laps.lap("read")
        return news

    def fetch(self) -> StepOutput:
        """Fetch the newest tokens now and not with the next step, which then has nothing to report.

        For first tokens: a chunk of another row's prompt may stand before the next step.
        """
        self._laps.start()
        inputs = self._inputs.ids
        failed: Failures = []
        assert inputs is not None
        if self._masks.constrained:
            self._masks.accept(on_host(inputs), self._inputs.known, failed)
        news = self._read(inputs, self._logprobs.take(), failed)
        self._inputs.known = list(range(len(self.rows)))
        self._laps.lap("read")
        return news

    def is_fetched(self, row: Row) -> bool:
        """Return whether the input of one of my rows has been reported already."""
        return self.rows.index(row) in self._inputs.known

    def _all_end(self) -> bool:
        """Whether the tokens to be read are the last of every row: then no forward pass is needed."""
        if self._until != 1 or self._inputs.known:
            return False
        return all(row.sequence.max_tokens - self.produced(row) == 1 for row in self.rows)

    def _draw(self, logits: mx.array, masks: Masks | None, held: list[mx.array]) -> mx.array:
        """Submit the draw of the next ids, and with it what the caches hold that no logit reads."""
        positions = self._inputs.positions
        adjusted = self._penalties.apply(logits, positions)
        if masks is not None:
            adjusted = self._masks.apply(adjusted, masks)
        drawn = self._sampler(adjusted, positions).astype(mx.uint32)
        mx.async_eval(drawn, self._penalties.count(drawn), self._logprobs.score(logits, drawn), held)
        return drawn

    # ------------------------------------------------------------ reading
    def _read(self, inputs: mx.array, scores: PendingScores, failed: Failures) -> StepOutput:
        tokens: list[int] = on_host(inputs)
        found = scores.read()
        logprobs = {seq: found[seq] for seq in self.seqs if seq in found}  # other rows' went with them
        if self._inputs.known:
            news = self._read_unknown(tokens, logprobs)
        else:
            news = self._read_all(tokens, logprobs)
        ended = {row.seq for row, _ in news.ended}
        news.failed += [(row, why) for row, why in failed if row.seq not in ended]
        return news

    def _read_all(self, tokens: list[int], logprobs: dict[int, TokenLogprobs]) -> StepOutput:
        self._history.append(tokens)
        if len(self._history) >= FLUSH_STEPS:
            self.flush()
        self._until -= 1
        ended: list[tuple[Row, Finish]] = []
        if self._until <= 0 or not self._stops.isdisjoint(tokens):
            ended = self._ends(range(len(tokens)), tokens)
        return StepOutput(self.seqs, tokens, ended, logprobs)

    def _read_unknown(self, tokens: list[int], logprobs: dict[int, TokenLogprobs]) -> StepOutput:
        """As `_read_all`, while some inputs are tokens that were read before."""
        read = self._inputs.unknown()
        self._inputs.known = []
        self.flush()
        for i in read:
            self.rows[i].tokens.append(tokens[i])
        self._until = min(row.sequence.max_tokens - row.produced for row in self.rows)
        ended = self._ends(read, tokens)
        return StepOutput([self.seqs[i] for i in read], [tokens[i] for i in read], ended, logprobs)

    def _ends(self, read: Sequence[int], tokens: list[int]) -> list[tuple[Row, Finish]]:
        ended: list[tuple[Row, Finish]] = []
        for i in read:
            row = self.rows[i]
            if tokens[i] in row.stops:
                ended.append((row, "stop"))
            elif self.produced(row) >= row.sequence.max_tokens:
                ended.append((row, "length"))
        return ended
