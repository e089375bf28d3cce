"""Whether rows say the same together as alone.

Owns one experiment: rows of uneven length, each run alone and then all together, joining one after the other, greedily,
with the logits of every draw kept on the host. MLX promises no equal logits for other shapes, so a text may part from
the other where the two best tokens were nearer to each other than the paths are; and the paths may differ by rounding
only, as reading a text at once differs from reading it token by token. Runs in the main thread of `marathon certify`
and of load tests, never in a serving engine.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from server.batching import Batch
from server.cache_guard import Caches, Guard
from server.certify.certificate import Agreement
from server.compute.rows import Row
from server.engine import model
from server.engine.executor import Executor
from server.engine.model import LoadedModel
from server.engine.plan import Begin, Read
from server.engine.prefix_cache import PrefixCache
from server.ipc.sequence import Sampling, TokenSequence
from server.ipc.snapshot import Snapshot

LENGTHS = (5, 19, 40)  # prompts of the rows
APART = 6  # steps between two joins
TOKENS = 40
ROUNDS = 2
STEPS = (
    ROUNDS * 2 * len(LENGTHS) * TOKENS / 2
)  # what it costs, in steps of a few rows: alone, together and read at once

Logits = np.ndarray[Any, Any]  # [tokens, V]


class _LogitsRecorder:
    """The model, keeping the newest logits of a decode step."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.heard: mx.array | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, inputs: mx.array, cache: Caches | None = None) -> mx.array:
        logits: mx.array = self._model(inputs, cache=cache)
        self.heard = logits[:, -1, :]
        return logits

    def take(self) -> Logits:
        """[B, V] in float32."""
        assert self.heard is not None
        taken = np.array(self.heard.astype(mx.float32))
        self.heard = None
        return taken


def compare(loaded: LoadedModel, rounds: int = ROUNDS) -> Agreement:
    """`rounds` times three rows."""
    streams = parted = unexplained = 0
    distance = rounding = 0.0
    for number in range(rounds):
        rows = [_prompt(loaded, length, 3 * number + i) for i, length in enumerate(LENGTHS)]
        together = _run(loaded, dict(enumerate(rows)))
        for i, prompt in enumerate(rows):
            text, logits = _run(loaded, {i: prompt})[i]
            other_text, other_logits = together[i]
            first = _first_difference(text, other_text)
            apart = _distance(logits[: first + 1], other_logits[: first + 1])
            rounded = _rounding(loaded, prompt, text, logits)
            distance = max(distance, apart)
            rounding = max(rounding, rounded)
            streams += 1
            if first < len(text):
                parted += 1
                unexplained += _margin(logits[first]) > min(apart, rounded)
    return Agreement(streams, parted, unexplained, distance, rounding)


def _prompt(loaded: LoadedModel, length: int, number: int) -> list[int]:
    ids = min(loaded.probe.vocab_size, 5000) - 8
    return [(11 * number + 7 * i * i + 3 * i) % ids + 8 for i in range(length)]


def _run(loaded: LoadedModel, prompts: dict[int, list[int]]) -> dict[int, tuple[list[int], Logits]]:
    """Text and logits of each row by its number; the rows join a few steps apart."""
    ear = _LogitsRecorder(loaded.model)
    guard = Guard(True, 256, Snapshot())
    batch = Batch(ear, guard)
    waiting = [_read(loaded, ear, guard, number, prompt) for number, prompt in prompts.items()]
    texts: dict[int, list[int]] = {}
    heard: dict[int, list[Logits]] = defaultdict(list)
    step = 0
    while waiting or len(batch):
        if waiting and step % APART == 0:
            batch.join([waiting.pop(0)])
        rows = list(batch.rows)
        news = batch.step()
        if ear.heard is not None:
            for row, logits in zip(rows, ear.take(), strict=True):
                heard[row.seq].append(logits)
        gone = [row for row, _ in news.ended]
        batch.leave(gone)
        texts |= {row.seq: row.tokens[len(row.sequence.prompt) :] for row in gone}
        step += 1
    return {number: (text, np.stack(heard[number])[: len(text)]) for number, text in texts.items()}


def _read(loaded: LoadedModel, ear: _LogitsRecorder, guard: Guard, number: int, prompt: list[int]) -> Row:
    """A row whose prompt is read."""
    row = Row(number, TokenSequence(prompt, Sampling(seed=number, temperature=0), TOKENS), list(prompt))
    executor = Executor(ear, guard, PrefixCache(0, Snapshot()), {number: row})
    executor.run(Begin(number))
    executor.run(Read(((number, len(prompt) - 1),)))
    ear.heard = None
    return row


def _first_difference(text: list[int], other: list[int]) -> int:
    """Where they part, or their length."""
    return next((i for i, (a, b) in enumerate(zip(text, other, strict=True)) if a != b), len(text))


def _distance(logits: Logits, other: Logits) -> float:
    return float(np.abs(logits - other).max())


def _margin(logits: Logits) -> float:
    """By how much the best token leads."""
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)


def _rounding(loaded: LoadedModel, prompt: list[int], text: list[int], logits: Logits) -> float:
    """What two ways of reading the same tokens differ by without any batch."""
    tokens = mx.array([prompt + text[:-1]])
    whole = loaded.model(tokens, cache=make_prompt_cache(loaded.model))[0, len(prompt) - 1 :]
    noise = _distance(logits, np.array(whole.astype(mx.float32)))
    return model.rounding(noise, float(logits.std(axis=-1).max()))
