"""The yardstick: the same work on mlx-lm's BatchGenerator, called directly.

`python -m loadtests.bench.raw --model FOLDER --rows N` reads one `Order` a line and answers each with one line of
`Stream`s, as `loadtests.bench.client` does. Its main thread is the only one and does nothing but call `next()`: no
HTTP, no text, prompts tokenised before the clock starts. End tokens are ignored, as the servers are asked to.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import trim_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load

from loadtests.bench.workload import LoadRequest, Order, Stream, to_line, to_order


class Direct:
    """A model and a way to run requests on it. Samplers are kept by their parameters, so that what was seen before is
    not compiled again."""

    def __init__(self, folder: Path, rows: int) -> None:
        """`rows`: most that are decoded together."""
        self._model, self._tokenizer = load(str(folder))
        self._rows = rows
        self._samplers: dict[tuple[tuple[str, int | float], ...], Any] = {}

    def obey(self, order: Order) -> list[Stream]:
        return self.converse(order.requests) if order.reuse else self.run(order.requests)

    # ------------------------------------------------------------ requests together
    def run(self, requests: list[LoadRequest]) -> list[Stream]:
        return Run(
            self._generator(), requests, [self.tokens(ask) for ask in requests], [self._sampler(a) for a in requests]
        ).go()

    def _generator(self) -> BatchGenerator:
        return BatchGenerator(self._model, completion_batch_size=self._rows)

    def tokens(self, ask: LoadRequest) -> list[int]:
        """The prompt as the servers read it."""
        if ask.messages:
            return list(self._tokenizer.apply_chat_template(ask.messages, add_generation_prompt=True, tokenize=True))
        return list(self._tokenizer.encode(ask.prompt))

    def _sampler(self, ask: LoadRequest) -> Any:
        wanted = {name: value for name, value in ask.sampling.items() if name != "seed"}
        key = tuple(sorted(wanted.items()))
        if key not in self._samplers:
            temperature = wanted.pop("temperature", 0.0)
            self._samplers[key] = make_sampler(temperature, **wanted)
        return self._samplers[key]

    # ------------------------------------------------------------ an ideal prefix cache
    def converse(self, requests: list[LoadRequest]) -> list[Stream]:
        """Each ask in turn, on the caches of the one before: kept by reference, cut back to what both share."""
        streams: list[Stream] = []
        known: list[int] = []
        caches: list[Any] | None = None
        for ask in requests:
            prompt = self.tokens(ask)
            shared = min(_common(known, prompt), len(prompt) - 1)
            if caches is not None and shared < len(known):
                trim_prompt_cache(caches, len(known) - shared)
            run = Run(self._generator(), [ask], [prompt[shared:]], [self._sampler(ask)], caches, shared)
            streams += run.go()
            caches, known = run.caches, prompt[:shared] + run.held
        return streams


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Run:
    """One load on one generator, which it closes at the end."""

    def __init__(
        self,
        generator: BatchGenerator,
        requests: list[LoadRequest],
        prompts: list[list[int]],
        samplers: list[Any],
        caches: list[Any] | None = None,
        cached: int = 0,
    ) -> None:
        """`caches`: of the only ask's first `cached` tokens, which `prompts` leaves out."""
        self._generator, self._requests, self._prompts, self._samplers = generator, requests, prompts, samplers
        self.caches, self._cached = caches, cached
        self.held: list[int] = []  # tokens that this run added to the caches
        self._started = [0.0] * len(requests)
        self._times: list[list[float]] = [[] for _ in requests]
        self._places: dict[int, int] = {}  # uid of a running ask → its index
        self._waiting = {i: ask.after for i, ask in enumerate(requests) if ask.after}
        self._start = 0.0

    def go(self) -> list[Stream]:
        self._start = perf_counter()
        self._insert([i for i in range(len(self._requests)) if i not in self._waiting])
        while self._places:
            self._take(self._generator.next()[1])
            if self._waiting:
                self._release()
        self._generator.close()
        return [self._stream(i) for i in range(len(self._requests))]

    def _insert(self, indices: list[int]) -> None:
        now = perf_counter() - self._start
        uids = self._generator.insert(
            [self._prompts[i] for i in indices],
            [self._requests[i].max_tokens for i in indices],
            caches=None if self.caches is None else [self.caches],
            samplers=[self._samplers[i] for i in indices],
        )
        for uid, i in zip(uids, indices, strict=True):
            self._places[uid], self._started[i] = i, now

    def _take(self, responses: list[Any]) -> None:
        now = perf_counter() - self._start
        for response in responses:
            i = self._places[response.uid]
            self._times[i].append(now)
            if response.finish_reason is not None:
                del self._places[response.uid]
                self.caches, self.held = response.prompt_cache, response.all_tokens

    def _release(self) -> None:
        for i, (stream, tokens) in list(self._waiting.items()):
            if len(self._times[stream]) >= tokens:
                del self._waiting[i]
                self._insert([i])

    def _stream(self, i: int) -> Stream:
        times = self._times[i]
        length = self._cached + len(self._prompts[i])
        return Stream(self._started[i], times, [1] * len(times), len(times), length, self._cached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="an MLX model folder")
    parser.add_argument("--rows", type=int, default=32, help="sequences decoded together")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up between the answers
    direct = Direct(arguments.model, arguments.rows)
    mx.random.seed(0)
    for line in sys.stdin.buffer:
        answers.write(to_line(direct.obey(to_order(line))))
        answers.flush()


if __name__ == "__main__":
    main()
