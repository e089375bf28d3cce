"""Grammars at work: which tokens a constrained row may draw next.

Owns the compiled grammars of the rows. A side thread compiles and replays what a resumed row had generated; masks
are computed in the engine process's main thread while the device is busy with the forward pass. Compile and mask
work are bounded by llguidance's limits; a grammar that goes beyond them fails its own row.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from server.messages import Sequence


class Matcher:
    """One row's grammar; implements `batching.Constraint`."""

    def __init__(self, matcher: LLMatcher, words: int, stops: list[int]) -> None:
        self._matcher = matcher
        self._mask = allocate_token_bitmask(1, words * 32)
        self._stops = stops

    def accept(self, token: int) -> None:
        """Raises ValueError when the grammar doesn't allow the token or gives up."""
        if token in self._stops and self._matcher.is_accepting():
            return
        if not self._matcher.consume_token(token):
            raise ValueError(self._matcher.get_error() or f"token {token} isn't allowed here")

    def mask(self) -> np.ndarray[Any, Any]:
        """Packed int32 [words]; once the grammar is complete only stop ids are left."""
        mask = self._mask[0]
        if self._matcher.is_stopped() and not self._matcher.is_error():
            mask[:] = 0
        else:
            fill_next_token_bitmask(self._matcher, self._mask, 0)
        if self._matcher.is_accepting() or self._matcher.is_stopped():
            for stop in self._stops:
                mask[stop // 32] |= np.uint32(1 << (stop % 32)).astype(np.int32)
        return mask


class Grammars:
    """Compiles grammars for one model. Owned by the loop."""

    def __init__(self, model_path: Path, vocab_size: int) -> None:
        self._path = model_path / "tokenizer.json"
        self._vocab = vocab_size
        self._words = -(-vocab_size // 32)
        self._tokenizer: LLTokenizer | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def compile(self, sequence: Sequence, generated: list[int]) -> Future[Matcher]:
        """The row's matcher, with `generated` replayed; its exception says why there is none."""
        return self._threads.submit(self._compile, sequence, generated)

    def _compile(self, sequence: Sequence, generated: list[int]) -> Matcher:
        assert sequence.grammar is not None
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                self._path.read_text(), n_vocab=self._words * 32, eos_token=sequence.stop_ids[:1] or None
            )
        matcher = LLMatcher(self._tokenizer, sequence.grammar.text, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        ready = Matcher(matcher, self._words, sequence.stop_ids)
        for token in generated:
            ready.accept(token)
        return ready

    def close(self) -> None:
        """Forget what isn't compiled yet."""
        self._threads.shutdown(wait=False, cancel_futures=True)
