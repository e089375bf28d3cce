"""Drives the engine's parts in process: tiny models, rows, batches, and the rule of when two texts are the same."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from concurrent.futures import Future

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from loadtests import zoo
from server.batching import Batch
from server.cache_guard import Guard, cache_arrays
from server.compute.rows import Row
from server.compute.sampling import Sampler
from server.engine.constraints import Grammars
from server.ipc.sequence import Sampling, TokenSequence, TokenTable
from server.ipc.snapshot import Snapshot

# Those that must stay flat, cost what was predicted and, all but the one that mlx-lm can't batch, say the same alone.
FAMILIES = [
    "llama",
    "gemma3_text",
    "gpt_oss",
    "qwen3_5",
    "qwen3_next",
    "falcon_h1",
    "nemotron_h",
    "mamba2",
    "lfm2",
    "smollm3",
    "cohere2",
    "kimi_linear",
    "minimax_m3_vl",
    "rwkv7",
    "recurrent_gemma",
    "deepseek_v32",
]

CLOSE = 2e-3  # how far logits of two paths may be apart, in standard deviations of the logits


@functools.cache
def model(name):
    return zoo.build(name)


def prompt(length, seed=0):
    rng = random.Random(1000 * length + seed)
    return [rng.randrange(zoo.SPECIALS, zoo.VOCABULARY) for _ in range(length)]


def row(seq, tokens, *, max_tokens=16, generated=(), seed=0, temperature=0.0, **options):
    """A row that has read nothing; `options` go to Sampling or Sequence, whichever knows the name."""
    draws = {name: options.pop(name) for name in list(options) if name in Sampling.__struct_fields__}
    sequence = TokenSequence(
        prompt=list(tokens),
        sampling=Sampling(seed=seed, temperature=temperature, **draws),
        max_tokens=max_tokens,
        **options,
    )
    return Row(seq, sequence, [*tokens, *generated], stops=frozenset(sequence.stop_ids))


class Recorder:
    """The model; keeps the logits of each step by row while `rows` says whose they are."""

    def __init__(self, inner):
        self.inner = inner
        self.rows = None
        self.firsts = []  # rows of one token, whose first pass a join runs
        self.logits = defaultdict(list)

    def __call__(self, inputs, cache=None):
        logits = self.inner(inputs, cache=cache)
        rows = self.firsts[:1] if self.rows is None and inputs.shape == (1, 1) else self.rows or []
        self.firsts = self.firsts[1:] if self.rows is None else self.firsts
        for i, seq in enumerate(rows):
            self.logits[seq].append(logits[i, -1].astype(mx.float32))
        return logits


class Rig:
    """One model, any number of batches, and everything that was read from them."""

    def __init__(self, name, *, guard=True, early=False):
        """`early`: fetch the newest tokens before the next step, now and then, as the loop does after joins."""
        self.early = random.Random(7) if early else None
        self.raw = model(name)
        self.model = Recorder(self.raw)
        self.snapshot = Snapshot()
        self.guard = Guard(guard, 8, self.snapshot)
        self.tokens = defaultdict(list)
        self.logprobs = defaultdict(list)
        self.finish = {}
        self.failed = {}

    def batch(self):
        return Batch(self.model, self.guard)

    def read(self, *rows):
        """Prefill all but the last token of each."""
        for one in rows:
            one.caches = make_prompt_cache(self.raw)
            if len(one.tokens) > 1:
                self.raw(mx.array([one.tokens[:-1]]), cache=one.caches)
                mx.eval(cache_arrays(one.caches))
        return list(rows)

    def join(self, batch, *rows):
        if len(batch) + len(rows) > 1:
            self.model.firsts = [one.seq for one in rows if one.pending is None and one.length == 1]
        batch.join(list(rows))

    def step(self, batch, times=1):
        for _ in range(times):
            if not len(batch):
                return
            self.model.rows = list(batch.seqs)
            news = batch.step()
            self.model.rows = None
            self.guard.census(batch.caches)
            self._settle(batch, news)
            if self.early and len(batch) and self.early.random() < 0.5:
                self._settle(batch, batch.fetch())

    def _settle(self, batch, news):
        self.take(news)
        batch.leave([gone for gone, _ in [*news.ended, *news.failed]])

    def take(self, news):
        assert len(news.seqs) == len(news.tokens)
        assert set(news.logprobs) <= set(news.seqs)
        for seq, token in zip(news.seqs, news.tokens, strict=True):
            assert seq not in self.finish, "a token after the end"
            self.tokens[seq].append(token)
            if seq in news.logprobs:
                self.logprobs[seq].append(news.logprobs[seq])
        for one, finish in news.ended:
            self.finish[one.seq] = finish
        for one, why in news.failed:
            self.failed[one.seq] = why

    def run(self, *batches):
        """Until all have ended."""
        while any(map(len, batches)):
            for batch in batches:
                self.step(batch)

    def alone(self, one, adjust=lambda logits, tokens: logits):
        """(tokens, logits) of a row by the plainest loop: mlx-lm's model, one row, one token a call.

        `adjust(logits [V], tokens so far)` in numpy, before the draw.
        """
        sequence, tokens = one.sequence, list(one.tokens)
        caches = make_prompt_cache(self.raw)
        if len(tokens) > 1:
            self.raw(mx.array([tokens[:-1]]), cache=caches)
            mx.eval([c.state for c in caches])
        sampler, found = Sampler([(sequence.sampling, sequence.choice)]), []
        while len(tokens) - len(sequence.prompt) < sequence.max_tokens:
            logits = self.raw(mx.array([tokens[-1:]]), cache=caches)[:, -1].astype(mx.float32)
            mx.eval(logits, cache_arrays(caches))
            found.append(np.array(logits[0]))
            adjusted = mx.array(adjust(found[-1].copy(), tokens)[None])
            tokens.append(sampler(adjusted, np.array([len(tokens) - len(sequence.prompt)])).item())
            if tokens[-1] in sequence.stop_ids:
                break
        return tokens[len(one.tokens) :], found

    def assert_as_alone(self, one, alone=None):
        """The rule of the design: the same text, or a first difference where the logits explain it.

        The logits of both ways must be close as long as the texts agree, so nothing but rounding explains it.
        """
        tokens, logits = alone or self.alone(one)
        mine, mine_logits = self.tokens[one.seq], self.model.logits[one.seq]
        agreed = next((i for i, (a, b) in enumerate(zip(tokens, mine, strict=False)) if a != b), None)
        apart = 0.0
        for a, b in zip(logits[: agreed + 1 if agreed is not None else None], mine_logits, strict=False):
            apart = max(apart, float(np.abs(a - np.array(b)).max() / a.std()))
        assert apart < CLOSE, f"row {one.seq}: logits differ by {apart} standard deviations"
        if agreed is None:
            assert mine == tokens
            return
        assert not one.sequence.sampling.temperature, "a draw hardly ever falls on a border"
        best = np.sort(logits[agreed])[-2:]
        assert best[1] - best[0] < 2 * apart * logits[agreed].std(), f"row {one.seq} differs at {agreed}"


def knowing(tokens: TokenTable) -> Grammars:
    """Grammars of an engine that has its token table."""
    arrived: Future[TokenTable] = Future()
    arrived.set_result(tokens)
    return Grammars(arrived)
