"""The batched decode loop: rows that are stepped together.

Owns a `Row` (one sequence in the engine) and a `Batch` (rows sharing one forward pass): join, leave, step. Runs in
the engine process's main thread. It knows token ids and caches; it never sees text, HTTP or another process.

A step runs one ahead: it submits the forward pass of the newest tokens and the draw after it, and only then waits
for the newest tokens themselves, which the step before submitted. The host's work hides behind the device's.

A lone row runs in its own un-merged caches: no padding, no masks, no batch metadata. Caches are mlx-lm's
(`mlx_lm.models.cache`): `merge` makes a batch of single caches, `extend` adds a batch to a batch, `filter` keeps
rows, `extract` gives a single cache back.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from server.adjust import Adjust
from server.cache_guard import Caches, Guard, compact
from server.messages import Finish, Sequence, TokenLogprobs
from server.sampling import Sampler, top_candidates
from server.together import Shared, kept, merged

FLUSH_STEPS = 256  # steps whose tokens may wait to be moved into the rows: bounds what a join has to do


def on_host(array: mx.array) -> Any:
    """The array's values as nested lists; waits for them. MLX's own annotation leaves the depth open."""
    return array.tolist()


class Model(Protocol):
    """An mlx-lm model: `inputs` [B, L] int → logits [B, L, V]; caches are updated in place."""

    def __call__(self, inputs: mx.array, cache: Caches | None = None) -> mx.array: ...


class Constraint(Protocol):
    """A row's grammar while it runs."""

    def accept(self, token: int) -> None:
        """Take a drawn token. Raises ValueError when the grammar can't go on."""

    def mask(self) -> np.ndarray[Any, Any]:
        """Packed int32 [ceil(V / 32)]: bit t of word w allows token 32 w + t."""


@dataclass(eq=False, slots=True)
class Row:
    """One sequence in the engine. Owned by the loop; a batch changes it only in `step`, `join` and `leave`."""

    seq: int
    sequence: Sequence
    tokens: list[int]  # prompt and output, as delivered
    caches: Caches = field(default_factory=list)  # single; empty while the row sits in a batch or shares its caches
    shared: Shared | None = None  # with the rows that it was read with, on the way into a batch
    pending: mx.array | None = None  # [1] drawn, not yet read; None: the last token is the next input
    constraint: Constraint | None = None
    adjust: mx.array | None = None  # penalty counts while the row moves between batches
    score: TokenLogprobs | None = None  # of the pending token, while the row moves between batches
    stops: frozenset[int] = frozenset()
    arrived: float = 0.0
    cached: int = 0  # prompt tokens that came from the prefix cache
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

    def single(self) -> Caches:
        """Caches of nobody else, copied if need be."""
        return self.caches if self.shared is None else self.shared.single(self.seq)


@dataclass(slots=True)
class Drawn:
    """What one step of one batch read: `tokens[i]` belongs to `seqs[i]`."""

    seqs: list[int]
    tokens: list[int]
    ended: list[tuple[Row, Finish]]
    logprobs: dict[int, TokenLogprobs]  # by seq, of the rows that ask
    failed: list[tuple[Row, str]] = field(default_factory=list)  # rows that can't go on, and why


@dataclass(frozen=True, slots=True)
class _Scores:
    """Logprobs of one draw, on the device, for the rows that ask."""

    rows: list[Row]
    own: mx.array  # [S] of the drawn id
    best: mx.array  # [S, N] descending
    ids: mx.array  # [S, N]
    named: mx.array | None  # [S, W] of the ids that rows name, in their order

    def read(self) -> dict[int, TokenLogprobs]:
        """Host values by seq, at once: a kept array would pin the whole [B, V] buffer behind it."""
        own: list[float] = on_host(self.own)
        best: list[list[float]] = on_host(self.best)
        ids: list[list[int]] = on_host(self.ids)
        named: list[list[float]] = [] if self.named is None else on_host(self.named)
        found = {}
        for i, row in enumerate(self.rows):
            count, wanted = row.sequence.logprobs, row.sequence.scored
            top = list(zip(ids[i][:count], best[i][:count], strict=True))
            if wanted:
                top = sorted(zip(wanted, named[i], strict=False), key=lambda pair: -pair[1])
            found[row.seq] = TokenLogprobs(own[i], top)
        return found


class Batch:
    """Rows that share one forward pass. Owned by the loop."""

    def __init__(self, model: Model, guard: Guard, seconds: dict[str, float]) -> None:
        """`seconds`: host time by part (forward, sample, guard, read), added to in each step."""
        self._model = model
        self._guard = guard
        self._seconds = seconds
        self.rows: list[Row] = []
        self.seqs: list[int] = []
        self.caches: Caches = []
        self._inputs: mx.array | None = None  # [B] next inputs
        self._known: list[int] = []  # rows whose input is their last token: of the prompt, or told before its pass
        self._history: list[list[int]] = []  # tokens read since the rows last changed, not yet in Row.tokens
        self._until = 0  # steps before some row reaches its limit
        self._stops: frozenset[int] = frozenset()
        self._last_not_held = False  # the newest tokens are read, but no forward pass took them in
        self._positions = np.zeros(0, dtype=np.int64)  # [B] output position of the next draw
        self._sampler = Sampler([])
        self._adjust = Adjust([])
        self._scored: list[int] = []  # rows that ask for logprobs
        self._scores: _Scores | None = None
        self._moved_scores: dict[int, TokenLogprobs] = {}  # by seq, of rows that came with a pending token
        self._constrained: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def length(self, row: Row) -> int:
        """Tokens of one of my rows, those read since the rows last changed included."""
        return row.length + len(self._history)

    def produced(self, row: Row) -> int:
        """Output tokens of one of my rows that were delivered."""
        return row.produced + len(self._history)

    def held_tokens(self, row: Row) -> list[int]:
        """The tokens that one of my rows' caches hold: all but the last if no forward pass has taken that in."""
        self._flush()
        missing = self._last_not_held or self.rows.index(row) in self._known
        return row.tokens[:-1] if missing else row.tokens

    @property
    def longest(self) -> int:
        """Tokens of my longest row: what every row is padded to."""
        return max(map(self.length, self.rows), default=0)

    # ------------------------------------------------------------ membership
    def join(self, rows: Many[Row]) -> None:
        """Take rows, with single caches or those of their pass. Evaluated at once, layer by layer, so that no chain of
        joins is kept."""
        if not rows:
            return
        if len(self.rows) + len(rows) > 1:
            self._begin(rows)
        self._flush()
        rows = self._merge(rows)
        inputs = [row.pending if row.pending is not None else mx.array([row.tokens[-1]]) for row in rows]
        mine = [] if self._inputs is None else [self._inputs]
        self._inputs = mx.concatenate([x.astype(mx.uint32) for x in [*mine, *inputs]])
        self._known += [len(self.rows) + i for i, row in enumerate(rows) if row.pending is None]
        drawn = [row.produced + (row.pending is not None) for row in rows]
        self._positions = np.concatenate([self._positions, np.array(drawn, dtype=np.int64)])
        self._adjust = self._adjust.join(Adjust([(row.sequence, row.tokens, row.adjust) for row in rows]))
        for row in rows:
            if row.score is not None:
                self._moved_scores[row.seq] = row.score
            row.caches, row.shared, row.pending, row.adjust, row.score = [], None, None, None, None
        self.rows += rows
        self._refresh()

    def _begin(self, rows: Many[Row]) -> None:
        """Rows of one token have read nothing yet. Their first pass is their own: beside others it would meet zeros
        where a model may tell the first position by the absence of a state, and a batch can't extract what isn't
        there."""
        if self._known and len(self.rows) == 1 and self.rows[0].length == 1:
            self.step()
        for row in rows:
            if row.pending is None and row.length == 1:
                alone = Batch(self._model, self._guard, self._seconds)
                alone.join([row])
                alone.step()
                alone.leave([row], keep_caches=True)

    def _merge(self, rows: Many[Row]) -> list[Row]:
        """Take the rows' caches behind mine; the rows in the order of their caches."""
        if not self.rows and len(rows) == 1:
            self.caches = rows[0].single()
            return list(rows)
        passes = _whole_passes(rows)
        ordered = [row for _, own in passes for row in own]
        rest = [row for row in rows if not any(row is one for one in ordered)]
        blocks = [shared.caches for shared, _ in passes]
        if rest:
            blocks.append(merged([row.single() for row in rest]))
        if len(self.rows) == 1:
            self.caches = merged([self.caches])
        if not self.rows:
            self.caches, *blocks = blocks
            self._guard.settle(self.caches)
        for block in blocks:
            for mine, other in zip(self.caches, block, strict=True):
                mine.extend(other)
                self._guard.settle([mine])
        return ordered + rest

    def leave(self, rows: Many[Row], *, keep_caches: bool = False) -> None:
        """Drop rows. With `keep_caches` each gets compacted single caches and what else it needs to join again."""
        self._flush()
        gone = {id(row) for row in rows}
        if keep_caches:
            scores = self._moved_scores | (self._scores.read() if self._scores is not None else {})
            for i, row in enumerate(self.rows):
                if id(row) in gone:
                    self._take_out(i, row, scores)
        self._keep([i for i, row in enumerate(self.rows) if id(row) not in gone])

    def _take_out(self, i: int, row: Row, scores: dict[int, TokenLogprobs]) -> None:
        assert self._inputs is not None
        row.caches = self.single_caches(i)
        if i not in self._known:
            row.pending = self._inputs[i : i + 1]
            mx.eval(row.pending)
            row.score = scores.get(row.seq)
        row.adjust = self._adjust.extract(i)

    def single_caches(self, i: int) -> Caches:
        """Row i's own caches, compacted: whatever outlives its batch must not pin the batch's buffers."""
        caches = self.caches if len(self.rows) == 1 else [layer.extract(i) for layer in self.caches]
        compact(caches)
        return caches

    def _keep(self, keep: list[int]) -> None:
        if len(keep) == len(self.rows):
            return
        assert self._inputs is not None
        if not keep:
            self.caches, self._inputs = [], None
        elif len(keep) == 1:
            self.caches, self._inputs = self.single_caches(keep[0]), self._inputs[keep[0] : keep[0] + 1]
        else:
            self.caches = kept(self.caches, keep, compacting=self._guard.enabled)
            self._inputs = self._inputs[mx.array(keep)]
        place = {old: new for new, old in enumerate(keep)}
        self._known = [place[i] for i in self._known if i in place]
        self._positions = self._positions[keep]
        self._adjust = self._adjust.filter(keep)
        self.rows = [self.rows[i] for i in keep]
        self._refresh()

    def abandon(self) -> list[Row]:
        """Give up all rows after a failed forward pass; the caches are in no known state and are dropped."""
        self._flush()
        rows, self.rows, self.caches, self._inputs = self.rows, [], [], None
        return rows

    def _flush(self) -> None:
        """Move what was read since the last change into the rows."""
        for i, row in enumerate(self.rows):
            row.tokens += [tokens[i] for tokens in self._history]
        self._history = []

    def _refresh(self) -> None:
        rows = self.rows
        self.seqs = [row.seq for row in rows]
        self._sampler = Sampler([(row.sequence.sampling, row.sequence.choice) for row in rows])
        self._stops = frozenset().union(*(row.stops for row in rows))
        self._until = min((row.sequence.max_tokens - row.produced for row in rows), default=0)
        self._scored = [i for i, row in enumerate(rows) if row.sequence.logprobs >= 0]
        self._constrained = [i for i, row in enumerate(rows) if row.constraint is not None]

    # ------------------------------------------------------------ the step
    def step(self) -> Drawn:
        """Submit the next step of all rows and read the one before it.

        Faults of single rows come back in `Drawn.failed`; an exception is a fault of the forward pass, and the
        caches are then in no known state.
        """
        inputs, scores = self._inputs, self._scores
        assert inputs is not None
        self._last_not_held = self._all_end()
        if self._last_not_held:
            return self._read(inputs, scores, [])
        started = perf_counter()
        logits = self._model(inputs[:, None], cache=self.caches)[:, -1, :]
        forward = perf_counter()
        held = self._guard.reach(self.caches)
        walked = perf_counter()
        failed: list[tuple[Row, str]] = []
        masks = None
        if self._constrained:
            mx.async_eval(logits, held)
            masks = self._advance_constraints(on_host(inputs), failed)
        waited = perf_counter()
        drawn = self._draw(logits, masks, held)
        submitted = perf_counter()
        news = self._read(inputs, scores, failed)
        self._inputs = drawn
        self._positions += 1
        seconds = self._seconds
        seconds["forward"] += forward - started
        seconds["guard"] += walked - forward
        seconds["sample"] += submitted - waited
        seconds["read"] += perf_counter() - submitted + waited - walked
        return news

    def tell(self) -> Drawn:
        """Read the newest tokens now and not with the next step, which then has nothing to tell.

        For first tokens: a chunk of somebody's prompt may stand before the next step.
        """
        started = perf_counter()
        inputs, scores, self._scores = self._inputs, self._scores, None
        assert inputs is not None
        failed: list[tuple[Row, str]] = []
        if self._constrained:
            self._accept(on_host(inputs), failed)
        news = self._read(inputs, scores, failed)
        self._known = list(range(len(self.rows)))
        self._seconds["read"] += perf_counter() - started
        return news

    def has_told(self, row: Row) -> bool:
        """Whether the input of one of my rows is known outside."""
        return self.rows.index(row) in self._known

    def _all_end(self) -> bool:
        """Whether the tokens to be read are the last of every row: then no forward pass is needed."""
        if self._until != 1 or self._known:
            return False
        return all(row.sequence.max_tokens - self.produced(row) == 1 for row in self.rows)

    def _draw(self, logits: mx.array, masks: np.ndarray[Any, Any] | None, held: list[mx.array]) -> mx.array:
        """Submit the draw of the next ids, and with it whatever the caches hold that no logit reads."""
        adjusted = self._adjust.apply(logits, self._positions)
        if masks is not None:
            adjusted = self._mask(adjusted, masks)
        drawn = self._sampler(adjusted, self._positions).astype(mx.uint32)
        self._adjust.count(drawn)
        self._scores = self._score(logits, drawn) if self._scored else None
        # The counts go along: a chain of updates that no logit has read yet would be a leak of our own.
        scores = () if self._scores is None else (self._scores.own, self._scores.best, self._scores.ids)
        mx.async_eval(drawn, scores, self._adjust.state, held)
        return drawn

    def _advance_constraints(self, tokens: list[int], failed: list[tuple[Row, str]]) -> np.ndarray[Any, Any]:
        """Tell each grammar the newest token and ask what may follow: packed masks [C, W].

        A row whose grammar can't go on is added to `failed`; what it draws meanwhile is nobody's concern.
        """
        self._accept(tokens, failed)
        masks: list[np.ndarray[Any, Any] | None] = []
        for row in (self.rows[i] for i in self._constrained):
            try:
                assert row.constraint is not None
                masks.append(None if any(row is lost for lost, _ in failed) else row.constraint.mask())
            except Exception as error:  # whatever the grammar's library raises
                failed.append((row, f"the grammar can't go on: {error}"))
                masks.append(None)
        width = max((len(mask) for mask in masks if mask is not None), default=0)
        return np.stack([np.full(width, -1, dtype=np.int32) if mask is None else mask for mask in masks])

    def _accept(self, tokens: list[int], failed: list[tuple[Row, str]]) -> None:
        for i in self._constrained:
            row = self.rows[i]
            assert row.constraint is not None
            try:
                if i not in self._known:
                    row.constraint.accept(tokens[i])
            except Exception as error:
                failed.append((row, f"the grammar can't go on: {error}"))

    def _mask(self, logits: mx.array, masks: np.ndarray[Any, Any]) -> mx.array:
        if not masks.shape[1]:  # every grammar has failed
            return logits
        bits = (mx.array(masks)[:, :, None] >> mx.arange(32, dtype=mx.int32)) & 1
        allowed = bits.reshape(len(masks), -1)[:, : logits.shape[-1]].astype(mx.bool_)
        if len(self._constrained) == len(self.rows):
            return mx.where(allowed, logits, -mx.inf)
        index = mx.array(self._constrained)
        logits = mx.array(logits)  # the caller's own is still to be scored
        logits[index] = mx.where(allowed, logits[index], -mx.inf)
        return logits

    def _score(self, logits: mx.array, drawn: mx.array) -> _Scores:
        """Logprobs of the model's own distribution, before temperature, bias and penalties."""
        rows = [self.rows[i] for i in self._scored]
        index = mx.array(self._scored)
        mine = logits[index].astype(mx.float32)
        total = mx.logsumexp(mine, axis=-1, keepdims=True)
        own = mx.take_along_axis(mine, drawn[index][:, None], axis=-1) - total
        wanted = max(1, *(row.sequence.logprobs for row in rows), 1)
        best, ids = top_candidates(mine, min(1 << (wanted - 1).bit_length(), mine.shape[-1]))
        names = _named([row.sequence.scored for row in rows])
        named = None if names is None else mx.take_along_axis(mine, names, axis=-1) - total
        return _Scores(rows, own[:, 0], best - total, ids, named)

    # ------------------------------------------------------------ reading
    def _read(self, inputs: mx.array, scores: _Scores | None, failed: list[tuple[Row, str]]) -> Drawn:
        tokens: list[int] = on_host(inputs)
        logprobs = self._logprobs(scores)
        news = self._read_unknown(tokens, logprobs) if self._known else self._read_all(tokens, logprobs)
        news.failed += [(row, why) for row, why in failed if not any(row is ended for ended, _ in news.ended)]
        return news

    def _read_all(self, tokens: list[int], logprobs: dict[int, TokenLogprobs]) -> Drawn:
        self._history.append(tokens)
        if len(self._history) >= FLUSH_STEPS:
            self._flush()
        self._until -= 1
        ended: list[tuple[Row, Finish]] = []
        if self._until <= 0 or not self._stops.isdisjoint(tokens):
            ended = self._ends(range(len(tokens)), tokens)
        return Drawn(self.seqs, tokens, ended, logprobs)

    def _read_unknown(self, tokens: list[int], logprobs: dict[int, TokenLogprobs]) -> Drawn:
        """As `_read_all`, while some inputs are tokens that everybody knows."""
        known = set(self._known)
        read = [i for i in range(len(self.rows)) if i not in known]
        self._known = []
        self._flush()
        for i in read:
            self.rows[i].tokens.append(tokens[i])
        self._until = min(row.sequence.max_tokens - row.produced for row in self.rows)
        ended = self._ends(read, tokens)
        return Drawn([self.seqs[i] for i in read], [tokens[i] for i in read], ended, logprobs)

    def _ends(self, read: Many[int], tokens: list[int]) -> list[tuple[Row, Finish]]:
        ended: list[tuple[Row, Finish]] = []
        for i in read:
            row = self.rows[i]
            if tokens[i] in row.stops:
                ended.append((row, "stop"))
            elif self.produced(row) >= row.sequence.max_tokens:
                ended.append((row, "length"))
        return ended

    def _logprobs(self, scores: _Scores | None) -> dict[int, TokenLogprobs]:
        if scores is None and not self._moved_scores:
            return {}
        found = self._moved_scores | (scores.read() if scores is not None else {})
        self._moved_scores = {}
        return {seq: found[seq] for seq in self.seqs if seq in found}  # rows that left since are others' business


def _named(wishes: list[list[int]]) -> mx.array | None:
    """The ids [S, W] that rows want scored, filled up with any; None: nobody wants one."""
    width = max(map(len, wishes))
    return mx.array([[*ids, *[0] * (width - len(ids))] for ids in wishes]) if width else None


def _whole_passes(rows: Many[Row]) -> list[tuple[Shared, list[Row]]]:
    """The passes all of whose rows are here, and these in the order of its caches."""
    here = {row.seq: row for row in rows}
    passes = {id(row.shared): row.shared for row in rows if row.shared is not None}
    return [(one, [here[seq] for seq in one.seqs]) for one in passes.values() if here.keys() >= set(one.seqs)]
