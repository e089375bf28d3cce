"""A tokenizer whose tokens are what a test says, and the text that a client reads of them."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from server.text.detokenizer import Answer, Piece, TextState
from server.text.tokenizer import ToolFormat
from server.text.tokens.control import Tags

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "get_time", "parameters": {}}}]
THINK = ("<think>", "</think>")
REPLACED = "\ufffd"


class Spelled:
    """A tokenizer whose tokens are what a test says: any bytes, special or not."""

    vocab_size = 0

    def __init__(self, think: tuple[str, str] | None = THINK, tool_format: ToolFormat | None = None) -> None:
        self.think = think
        self.tool_format = tool_format
        self.transitions: dict[str, tuple[tuple[str, str], ...]] = {}
        self.first_state: str | None = None
        self.silent: tuple[str, ...] = ()
        self.speaks_harmony = False
        self.lookups = 0
        self._tokens: list[tuple[bytes, bool]] = []

    def tokens(self, parts: Iterable[str | bytes], *, special: bool = False) -> list[int]:
        first = len(self._tokens)
        self._tokens += [(part.encode() if isinstance(part, str) else part, special) for part in parts]
        return list(range(first, len(self._tokens)))

    def token_bytes(self, token: int) -> bytes:
        self.lookups += 1
        return self._tokens[token][0]

    def is_special(self, token: int) -> bool:
        return self._tokens[token][1]

    def tags(self, rows: int | None = None) -> Tags:
        form = self.tool_format
        texts = [*(self.think or ()), *((form.start, form.end) if form else ())]
        return Tags(texts, {text.decode(): token for token, (text, special) in enumerate(self._tokens) if special})


def tool_format(name: str = "json_tools", start: str = "<tool_call>", end: str = "</tool_call>") -> ToolFormat:
    parse = importlib.import_module(f"mlx_lm.tool_parsers.{name}").parse_tool_call
    return ToolFormat(name, start, end, name == "json_tools", parse)


def state(tokenizer: Any, **wishes: Any) -> TextState:
    numbers = itertools.count()
    return TextState(tokenizer, new_id=lambda: f"call_{next(numbers)}", **wishes)


def stream(text: TextState, tokens: Iterable[int]) -> list[list[Piece]]:
    """The pieces of each token, then those of the end."""
    return [*(text.feed([token]) for token in tokens), text.finish()]


def answer(pieces: Iterable[Piece]) -> Answer:
    collected = Answer()
    collected.add(pieces)
    return collected


def read_answer(parts: Sequence[str | bytes], tokenizer: Spelled | None = None, **wishes: Any) -> Answer:
    tokenizer = tokenizer or Spelled()
    return answer(itertools.chain(*stream(state(tokenizer, **wishes), tokenizer.tokens(parts))))


def cuts(data: bytes, sizes: Iterator[int]) -> Iterator[bytes]:
    while data:
        size = next(sizes)
        yield data[:size]
        data = data[size:]
