"""Grammars at work: which tokens a constrained row may draw next.

Owns llguidance's tree of the model's tokens and the compiled grammars of the rows. A side thread builds the tree while
the model loads, compiles grammars, and replays what a resumed row had generated; masks are computed in the engine
process's main thread while the device is busy with the forward pass. Compile and mask work are bounded by llguidance's
limits; a grammar that goes beyond them fails its own row.

What each token says comes from the server (`messages.TokenTable`). llguidance's own reading of a tokenizer.json isn't
used: it takes every added token of the form `<…>` for control, drops none that the model has no logits for, and spells
forced text with whatever the tokenizer makes of it, which may be a control token or another normal form of Unicode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Any, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from server.ipc.sequence import MAX_GRAMMAR_SIZE, MAX_GRAMMAR_WIDTH, TokenSequence, TokenTable

# The size is what the server has checked. A place may be wider than those that it has looked at, and a mask over many
# long tokens takes more items than one over bytes; lexer fuel for a mask stays at the library's own few milliseconds.
LIMITS = LLParserLimits(
    max_grammar_size=MAX_GRAMMAR_SIZE,
    max_items_in_row=2 * MAX_GRAMMAR_WIDTH,
    step_max_items=50 * MAX_GRAMMAR_WIDTH,
    verbose_errors=False,
)


class GrammarTokenizer:
    """The tokenizer as llguidance wants to see it. Its end of a text is an id of its own beyond all others, because
    the ids that end an answer are the row's: see `Matcher`."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable) -> None:
        self.tokens = [*table.texts, b""]
        self.eos_token_id = len(table.texts)
        self.special_token_ids = table.control

    def __call__(self, text: bytes) -> list[int]:
        """No opinion on how forced text is spelled: any tokens that spell it may be drawn."""
        return []


def token_tree(table: TokenTable) -> LLTokenizer:
    """Takes a second or two for large vocabularies, during which no other Python code runs."""
    return LLTokenizer(cast("Any", GrammarTokenizer(table)))


class Matcher:
    """One row's grammar; implements `batching.Constraint`."""

    def __init__(
        self, matcher: LLMatcher, tokens: int, rows: int, *, stops: Sequence[int], ends: Sequence[int]
    ) -> None:
        """`tokens`: ids in llguidance's tree, of which the last is its end. `rows`: of logits. `stops`: the row's own
        stop ids; `ends`: what fills it up if it has none."""
        self._matcher = matcher
        self._end = tokens - 1
        self._tree = allocate_token_bitmask(1, tokens)
        self._mask = np.zeros(-(-rows // 32), dtype=np.int32)
        self._stops = frozenset(stops)
        self._ends = frozenset(ends)

    @property
    def _complete(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _closing(self) -> frozenset[int]:
        """The ids that may end the text here. A row without stop ids fills up with ends once its text is complete."""
        if self._complete:
            return self._stops or self._ends
        if self._matcher.is_accepting():
            return self._stops
        return frozenset()

    def accept(self, token: int) -> None:
        """Raises ValueError when the grammar doesn't allow the token or gives up."""
        if token not in self._closing() and not self._matcher.consume_token(token):
            raise ValueError(_first_line(self._matcher.get_error()) or f"token {token} isn't allowed here")

    def mask(self) -> np.ndarray[Any, Any]:
        """Packed int32 [words]; once the text is complete only what ends it is left. Raises ValueError as `accept`."""
        mask = self._mask
        tree = self._tree[0]
        if self._complete:
            mask[:] = 0
        else:
            fill_next_token_bitmask(self._matcher, self._tree, 0)
            tree[self._end // 32] &= ~_bit(self._end)
            shared = min(len(mask), len(tree))  # the tokenizer's ids and the model's may be more than the other's
            mask[:shared] = tree[:shared]
        if self._matcher.is_error():
            raise ValueError(_first_line(self._matcher.get_error()))
        for token in self._closing():
            mask[token // 32] |= _bit(token)
        return mask


def _bit(token: int) -> np.int32:
    return np.uint32(1 << token % 32).astype(np.int32)


def _first_line(error: str) -> str:
    """llguidance's errors go on with its state and the whole grammar."""
    return error.strip().partition("\n")[0]


class Grammars:
    """Compiles grammars for one model. Owned by the loop.

    Attributes:
        rows: how many ids the model has logits for; set before the first grammar is compiled.
    """

    def __init__(self, tokens: Future[TokenTable]) -> None:
        """`tokens` comes when the server sends it, and before the first grammar."""
        self.rows = 0
        self._ends: list[int] = []
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._tree: Future[LLTokenizer] | None = None
        self._since: float | None = None  # when what is being compiled was begun
        tokens.add_done_callback(self._learn)

    def _learn(self, tokens: Future[TokenTable]) -> None:
        with contextlib.suppress(RuntimeError):  # the engine ends already
            self._ends = tokens.result().ends
            self._tree = self._threads.submit(token_tree, tokens.result())

    def compile(self, sequence: TokenSequence, generated: list[int]) -> Future[Matcher]:
        """The row's matcher, with `generated` replayed; its exception says why there is none."""
        return self._threads.submit(self._compile, sequence, generated)

    def seconds(self) -> float:
        """How long the one that is being compiled has taken; nothing ends it but the end of the process."""
        since = self._since
        if since is None:
            return 0.0
        return monotonic() - since

    def _compile(self, sequence: TokenSequence, generated: list[int]) -> Matcher:
        self._since = monotonic()
        try:
            return self._build(sequence, generated)
        finally:
            self._since = None

    def _build(self, sequence: TokenSequence, generated: list[int]) -> Matcher:
        assert sequence.grammar is not None
        if self._tree is None:
            raise ValueError("the engine doesn't know what the model's tokens say")
        tree = self._tree.result()
        matcher = LLMatcher(tree, sequence.grammar.text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise ValueError(_first_line(matcher.get_error()))
        ends = [token for token in self._ends if token < self.rows]
        ready = Matcher(matcher, tree.vocab_size, self.rows, stops=sequence.stop_ids, ends=ends)
        for token in generated:
            ready.accept(token)
        return ready

    def close(self) -> None:
        """Forget what isn't compiled yet. What is being compiled can't be stopped; `seconds` says whether it is."""
        self._threads.shutdown(wait=False, cancel_futures=True)
