"""What a load is made of and what came of it: the words that every load test shares.

Owns the values `LoadRequest` and `Stream` and their way through a pipe. Imported by the client process, by the process
that calls mlx-lm directly and by the programs that start them, so it must stay light: no MLX, no HTTP.

Times are seconds since the start of the load that the ask belongs to.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()


class LoadRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. `prompt` for a plain completion, `messages` for a chat.

    `after` (i, n): starts once stream i of the load has delivered n tokens (as chunks, where only those can be
    counted); without it, at the load's start.
    """

    max_tokens: int
    prompt: str = ""
    messages: list[dict[str, str]] = []
    sampling: dict[str, int | float] = {}  # temperature, top_p, top_k, min_p, seed as on the wire; empty: greedy
    after: tuple[int, int] | None = None


class Stream(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one ask brought: `counts[i]` tokens or chunks came at `times[i]`."""

    started: float
    times: list[float] = []
    counts: list[int] = []
    tokens: int = 0  # by usage, or counted where there is none
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def first(self) -> float:
        """Time to the first token."""
        return self.times[0] - self.started

    @property
    def ended(self) -> float:
        return self.times[-1]

    @property
    def chunks(self) -> int:
        return sum(self.counts)

    def longest_gap(self, since: float = 0.0, until: float = float("inf")) -> float:
        """Longest silence between two arrivals, of those that lie at least partly between `since` and `until`."""
        return max((b - a for a, b in pairwise(self.times) if b > since and a < until), default=0.0)


def first_p50(streams: list[Stream]) -> float:
    return median(stream.first for stream in streams)


def tokens_a_second(streams: list[Stream]) -> float:
    """Output tokens a second, from the load's start to its last token."""
    return sum(stream.tokens for stream in streams) / max(stream.ended for stream in streams)


def chunks_a_token(streams: list[Stream]) -> float:
    """1 where every token came in a chunk of its own."""
    return sum(stream.chunks for stream in streams) / sum(stream.tokens for stream in streams)


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line to a worker process: run these requests together, or one after another.

    `reuse`: mlx-lm only: each ask is a turn of one conversation; the caches of the turn before are kept by reference.
    """

    requests: list[LoadRequest]
    port: int = 0
    fields: dict[str, Any] = {}  # further fields of each body: model, ignore_eos
    reuse: bool = False


def to_line(value: Order | list[Stream]) -> bytes:
    return _encoder.encode(value) + b"\n"


def to_order(line: bytes) -> Order:
    return msgspec.json.decode(line, type=Order)


def to_streams(line: bytes) -> list[Stream]:
    return msgspec.json.decode(line, type=list[Stream])
