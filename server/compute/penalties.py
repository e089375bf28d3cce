"""Changes to a row's logits before the draw: bias, penalties, ids that aren't allowed, or not before `min_tokens`.

Owns the device arrays for the rows that ask, and nothing for the others. Runs in the engine process's main thread;
builds graph nodes only.

The definitions are OpenAI's for presence and frequency (over the output) and Keskar et al. 2019 (CTRL, section 4.1)
for repetition (over prompt and output).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from server.ipc.sequence import TokenSequence

_BLOCKED = -1e30  # finite stand-in for -inf: a row whose every token is held back must still draw something


def _penalises(sequence: TokenSequence) -> bool:
    sampling = sequence.sampling
    return bool(
        sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty not in (0.0, 1.0)
    )


def _asks(sequence: TokenSequence) -> bool:
    sampling = sequence.sampling
    return bool(_penalises(sequence) or sampling.logit_bias or sampling.allowed or sequence.min_tokens)


def _histogram(tokens: list[int], vocab: int) -> mx.array:
    return mx.array(np.bincount(np.array(tokens, dtype=np.int64), minlength=vocab)[:vocab].astype(np.float32))


class LogitAdjustments:
    """Adjustments of one batch. `state` lists its device arrays, for the cache guard."""

    def __init__(self, rows: Sequence[tuple[TokenSequence, list[int], mx.array | None]]) -> None:
        """`rows`: (sequence, tokens so far, what `extract` gave when the row left its last batch or None)."""
        self._sequences = [sequence for sequence, _, _ in rows]
        self._outputs = [tokens[len(s.prompt) :] if _penalises(s) else [] for s, tokens, _ in rows]
        self._kept: list[mx.array | None] = [kept for _, _, kept in rows]
        self._held: tuple[bool, ...] = ()
        self._counts: mx.array | None = None  # [P, V] float32, how often each id stands in the output
        self._ready = False
        self._index()

    def _index(self) -> None:
        self._asking = [i for i, s in enumerate(self._sequences) if _asks(s)]
        self._penalised = [i for i, s in enumerate(self._sequences) if _penalises(s)]
        self._delayed = [i for i, s in enumerate(self._sequences) if s.min_tokens]
        self._all = len(self._asking) == len(self._sequences)

    @property
    def state(self) -> list[mx.array]:
        if self._counts is None:
            return []
        return [self._counts]

    # ------------------------------------------------------------ membership
    def join(self, other: LogitAdjustments) -> LogitAdjustments:
        """The adjustments of both batches' rows, mine first."""
        joined = LogitAdjustments([])
        joined._sequences = self._sequences + other._sequences
        joined._outputs = self._outputs + other._outputs
        joined._kept = [self.extract(i) for i in range(len(self._sequences))] + other._kept
        joined._index()
        return joined

    def filter(self, keep: list[int]) -> LogitAdjustments:
        """Only the rows `keep`, in that order."""
        kept = LogitAdjustments([])
        kept._sequences = [self._sequences[i] for i in keep]
        kept._outputs = [self._outputs[i] for i in keep]
        kept._kept = [self.extract(i) for i in keep]
        kept._index()
        return kept

    def extract(self, i: int) -> mx.array | None:
        """Row i's counts [V], evaluated, or None when it has none."""
        if not self._ready or i not in self._penalised or self._counts is None:
            return self._kept[i]
        counts = mx.contiguous(self._counts[self._penalised.index(i)])
        mx.eval(counts)
        return counts

    # ------------------------------------------------------------ the step
    def apply(self, logits: mx.array, positions: np.ndarray[Any, Any]) -> mx.array:
        """Adjusted logits [B, V], float32 where a row asks; `positions` [B] as in `Sampler`."""
        if not self._asking:
            return logits
        if not self._ready:
            self._build(logits.shape[-1])
        self._hold_back(positions, logits.shape[-1])
        rows = logits
        if not self._all:
            rows = logits[self._rows]
        rows = rows.astype(mx.float32)
        if self._bias is not None:
            rows = rows + self._bias
        if self._penalised:
            rows = self._penalise(rows)
        if self._blocked is not None:
            rows = rows + self._blocked
        if self._all:
            return rows
        logits = logits.astype(mx.float32)
        logits[self._rows] = rows
        return logits

    def count(self, drawn: mx.array) -> None:
        """Take the ids [B] just drawn into the counts."""
        if self._counts is not None:
            mine = drawn[self._penalised_rows].astype(mx.int32)
            self._counts = self._counts.at[mx.arange(len(self._penalised)), mine].add(1.0)

    def _build(self, vocab: int) -> None:
        self._rows = mx.array(self._asking)
        self._bias = self._build_bias(vocab)
        self._blocked: mx.array | None = None
        self._held = ()
        self._ready = True
        if self._penalised:
            self._build_counts(vocab)

    def _build_bias(self, vocab: int) -> mx.array | None:
        samplings = [self._sequences[i].sampling for i in self._asking]
        if not any(sampling.logit_bias or sampling.allowed for sampling in samplings):
            return None
        dense = np.zeros((len(samplings), vocab), dtype=np.float32)
        for row, sampling in enumerate(samplings):
            dense[row, list(sampling.logit_bias)] = list(sampling.logit_bias.values())
            if sampling.allowed:
                biased = dense[row, sampling.allowed]
                dense[row] = _BLOCKED
                dense[row, sampling.allowed] = biased
        return mx.array(dense)

    def _build_counts(self, vocab: int) -> None:
        sequences = [self._sequences[i] for i in self._penalised]
        self._penalised_rows = mx.array(self._penalised)
        self._places = mx.array([self._asking.index(i) for i in self._penalised])
        counts = []
        for i in self._penalised:
            kept = self._kept[i]
            counts.append(_histogram(self._outputs[i], vocab) if kept is None else kept)
        self._counts = mx.stack(counts)
        repeats = [s.sampling.repetition_penalty or 1.0 for s in sequences]
        self._prompts: mx.array | None = None  # [P, V] which ids stand in the prompt, if anybody asks
        if any(repeat != 1.0 for repeat in repeats):
            prompts = np.zeros((len(sequences), vocab), dtype=np.bool_)
            for row, sequence in enumerate(sequences):
                if repeats[row] != 1.0:
                    prompts[row, sequence.prompt] = True
            self._prompts = mx.array(prompts)

        def column(values: list[float]) -> mx.array:
            return mx.array(np.array(values, dtype=np.float32)[:, None])

        self._presence = column([s.sampling.presence_penalty for s in sequences])
        self._frequency = column([s.sampling.frequency_penalty for s in sequences])
        self._repetition = column(repeats)

    def _penalise(self, rows: mx.array) -> mx.array:
        assert self._counts is not None
        every = len(self._penalised) == len(self._asking)
        mine = rows
        if not every:
            mine = rows[self._places]
        used = self._counts > 0
        if self._prompts is not None:
            scaled = mx.where(mine > 0, mine / self._repetition, mine * self._repetition)
            mine = mx.where(used | self._prompts, scaled, mine)
        mine = mine - self._frequency * self._counts - self._presence * used
        if every:
            return mine
        rows[self._places] = mine
        return rows

    def _hold_back(self, positions: np.ndarray[Any, Any], vocab: int) -> None:
        """Block the stop ids of rows below their `min_tokens`; anew only when a row passes its mark."""
        if not self._delayed:
            return
        held = tuple(bool(positions[i] < self._sequences[i].min_tokens) for i in self._delayed)
        if held == self._held:
            return
        self._held = held
        self._blocked = None
        if any(held):
            blocked = np.zeros((len(self._asking), vocab), dtype=np.float32)
            for i, holds in zip(self._delayed, held, strict=True):
                if holds:
                    blocked[self._asking.index(i), self._sequences[i].stop_ids] = _BLOCKED
            self._blocked = mx.array(blocked)
