"""What an engine has learned about its model by trying it out: what rows and chunks cost, and what may be batched.

The server plans admission with it, and hands it to each later engine. Runs in both processes; does no I/O.
"""

from __future__ import annotations

from typing import Literal

import msgspec

GROWTH = 256  # positions by which mlx-lm's caches grow
LARGEST_CHUNK = 2048  # tokens of a prompt that are read at once
PLANNED_CHUNK = 256  # those that room is kept free for; with more of it larger chunks are read


class LayerCost(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of one cache array for one row: `constant + per_position * positions`, positions rounded up to `step`
    and capped at `cap` (0: no cap)."""

    constant: int
    per_position: int
    step: int = GROWTH
    cap: int = 0

    def bytes(self, length: int) -> int:
        """Bytes at `length` positions."""
        positions = -(-length // self.step) * self.step
        if self.cap:
            positions = min(positions, self.cap)
        return self.constant + self.per_position * positions


ReadsTogether = Literal["padded", "even", "alone"]


class Probe(msgspec.Struct, frozen=True):
    """What trying the loaded model out has shown. The same in every engine of a server, so a later engine takes it
    from the first."""

    vocab_size: int  # width of the logits
    batching: str  # "batched", or why rows run alone
    row_cost: list[LayerCost]
    chunk_peak_bytes: int  # peak of the largest chunk at a prompt's beginning, above the caches
    group_bytes: int  # what a step costs before any KV, in bytes of memory traffic
    reads: ReadsTogether = "alone"  # how prompts may share a forward pass
    pair_bytes: float = 0.0  # what a chunk takes for each pair of tokens that attend; 0 where attention is fused

    @property
    def token_bytes(self) -> float:
        """Bytes that a chunk takes for each of its tokens, pairs apart."""
        return max(0.0, self.chunk_peak_bytes / LARGEST_CHUNK - self.pair_bytes * LARGEST_CHUNK)

    def chunk_peak(self, size: int, held: int = 0) -> int:
        """Bytes that a chunk of `size` tokens needs for a while when the caches hold `held` before it."""
        return int(size * (self.token_bytes + self.pair_bytes * (held + size)))
