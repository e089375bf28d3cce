"""Grammars at work: which tokens a constrained row may draw next.

Owns the compiled grammars of the rows. A side thread compiles and replays what a resumed row had generated; masks
are computed in the engine process's main thread while the device is busy with the forward pass. Compile and mask
work are bounded by llguidance's limits; a grammar that goes beyond them fails its own row.
"""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from server.ipc.messages import MAX_GRAMMAR_SIZE, Sequence

# The size is what the server has checked; fuel for a mask stays at the library's own few milliseconds.
LIMITS = LLParserLimits(max_grammar_size=MAX_GRAMMAR_SIZE, verbose_errors=False)
_EOS_FILES = ("generation_config.json", "config.json")


class Matcher:
    """One row's grammar; implements `batching.Constraint`."""

    def __init__(self, matcher: LLMatcher, words: int, *, stops: list[int], ends: list[int]) -> None:
        """`stops`: the row's own stop ids; `ends`: what the grammar's library takes for the end of a text."""
        self._matcher = matcher
        self._mask = allocate_token_bitmask(1, words * 32)
        self._stops, self._ends = frozenset(stops), frozenset(ends)

    @property
    def _complete(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _closing(self) -> frozenset[int]:
        """The ids that may end the text here. A row without stop ids fills up with ends once its text is complete."""
        if self._complete:
            return self._stops or self._ends
        return self._stops if self._matcher.is_accepting() else frozenset()

    def accept(self, token: int) -> None:
        """Raises ValueError when the grammar doesn't allow the token or gives up."""
        if token not in self._closing() and not self._matcher.consume_token(token):
            raise ValueError(_first_line(self._matcher.get_error()) or f"token {token} isn't allowed here")

    def mask(self) -> np.ndarray[Any, Any]:
        """Packed int32 [words]; once the text is complete only what ends it is left. Raises ValueError as `accept`."""
        mask = self._mask[0]
        if self._complete:
            mask[:] = 0
        else:
            fill_next_token_bitmask(self._matcher, self._mask, 0)
        if self._matcher.is_error():
            raise ValueError(_first_line(self._matcher.get_error()))
        for token in self._ends:
            mask[token // 32] &= ~_bit(token)
        for token in self._closing():
            mask[token // 32] |= _bit(token)
        return np.asarray(mask)


def _bit(token: int) -> np.int32:
    return np.uint32(1 << token % 32).astype(np.int32)


def _first_line(error: str) -> str:
    """llguidance's errors go on with its state and the whole grammar."""
    return error.strip().partition("\n")[0]


class Grammars:
    """Compiles grammars for one model. Owned by the loop."""

    def __init__(self, model_path: Path, vocab_size: int) -> None:
        self._path = model_path
        self._words = -(-vocab_size // 32)
        self._tokenizer: LLTokenizer | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._since: float | None = None  # when what is being compiled was begun

    def compile(self, sequence: Sequence, generated: list[int]) -> Future[Matcher]:
        """The row's matcher, with `generated` replayed; its exception says why there is none."""
        return self._threads.submit(self._compile, sequence, generated)

    def seconds(self) -> float:
        """How long the one that is being compiled has taken; nothing ends it but the end of the process."""
        since = self._since
        return 0.0 if since is None else monotonic() - since

    def _compile(self, sequence: Sequence, generated: list[int]) -> Matcher:
        self._since = monotonic()
        try:
            return self._build(sequence, generated)
        finally:
            self._since = None

    def _build(self, sequence: Sequence, generated: list[int]) -> Matcher:
        assert sequence.grammar is not None
        if self._tokenizer is None:
            self._tokenizer = self._load()
        matcher = LLMatcher(self._tokenizer, sequence.grammar.text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ValueError(_first_line(matcher.get_error()))
        ready = Matcher(matcher, self._words, stops=sequence.stop_ids, ends=self._tokenizer.eos_tokens)
        for token in generated:
            ready.accept(token)
        return ready

    def _load(self) -> LLTokenizer:
        """The ids that end a text are the model's own, whatever a first request's stop ids are."""
        text = (self._path / "tokenizer.json").read_text(encoding="utf-8")
        return LLTokenizer(text, n_vocab=self._words * 32, eos_token=_eos_ids(self._path))

    def close(self) -> None:
        """Forget what isn't compiled yet. What is being compiled can't be stopped; `seconds` says whether it is."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _eos_ids(folder: Path) -> list[int] | None:
    for name in _EOS_FILES:
        if (file := folder / name).is_file():
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return found if isinstance(found, list) else [found]
    return None
