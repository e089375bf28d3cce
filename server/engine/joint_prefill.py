"""Who reads a chunk together with whom.

Owns the choice; runs in the engine process's main thread. Where the host's time a pass is what counts, as on a GPU, a
burst of short prompts is read in the time of one. Of the two ways the model's trial at loading says which holds for
it: *padded*, rows of about the same length; *even*, the same number of tokens of each, for recurrent layers, many of
which take padding for text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from server.compute.cudnn_shapes import most_read, rows_read
from server.compute.rows import Row
from server.ipc.probe import ReadsTogether

MOST_ROWS = 32  # of a pass
LONGEST = 1024  # positions of a row that reads together: for longer ones the host's time is no matter
POSITIONS = 4096  # of all rows, those held included: merging copies them
ROOMY = 4  # times the room that a chunk of as many tokens takes alone: caches exist twice, and grow in steps
FULL = 0.8  # share of a padded pass that must be tokens


class JointPrompt(Protocol):
    """What is asked of a sequence whose prompt is being read (`prefill.Reading`)."""

    row: Row
    begun: bool
    done: int

    @property
    def left(self) -> int: ...
    def next_stop(self) -> int: ...


M = TypeVar("M", bound=JointPrompt)


def eligible(reading: JointPrompt) -> bool:
    """Whether a sequence may share its pass. One that failed before goes alone, so that it takes no other along."""
    row = reading.row
    return not (row.rebuilds or row.sequence.prompt_logprobs) and len(row.tokens) <= LONGEST


class JointPrefill:
    """Chooses who reads together. Owned by the prefill lane."""

    def __init__(self, way: ReadsTogether, waits: Callable[[Row, list[Row]], bool] = lambda row, mates: False) -> None:
        """`waits(row, mates)`: whether a row had better wait for the prefix of one of these to be kept."""
        self.way = way
        self._waits = waits

    def candidates(self, first: M, others: Iterable[M], limit: int) -> Iterator[M]:
        """Yield the others that may share a pass of `limit` tokens with `first`, which has begun and has tokens left.

        The caller begins each that hasn't before it asks for the next: what is left of it decides how many more fit.
        """
        if self.way == "alone" or limit < 2 or not eligible(first):
            return
        mates = [first]
        tokens = first.left
        for other in sorted((other for other in others if eligible(other)), key=lambda r: r.left):
            if len(mates) == MOST_ROWS or tokens > limit:  # the rest may still find a prefix of these
                break
            if not other.begun and self._waits(other.row, [mate.row for mate in mates]):
                continue
            yield other
            if other.left:
                mates.append(other)
                tokens += other.left

    def choose(self, mates: list[M], limit: int) -> list[tuple[M, int]]:
        """Choose who of these reads the next pass: (sequence, tokens), within `limit` tokens; none if the first had
        better read alone."""
        if len(mates) < 2:
            return []
        choice = self._even
        if self.way == "padded":
            choice = self._padded
        chosen = choice(mates, limit)
        if len(chosen) < 2:
            return []
        return chosen

    @staticmethod
    def _padded(mates: list[M], limit: int) -> list[tuple[M, int]]:
        """Rows of about the length of the first."""
        first, *others = mates
        chosen = [(first, first.next_stop())]
        for other in sorted(others, key=lambda r: abs(r.next_stop() - chosen[0][1])):
            lengths = [size for _, size in chosen] + [other.next_stop()]
            held = max(other.done, *(mate.done for mate, _ in chosen))
            width = max(lengths)
            count = len(lengths)
            rows = rows_read(count)
            if rows * width > limit or rows * (held + width) > POSITIONS or sum(lengths) < FULL * count * width:
                continue
            chosen.append((other, lengths[-1]))
        return chosen

    @staticmethod
    def _even(mates: list[M], limit: int) -> list[tuple[M, int]]:
        """The number of tokens, and all who have so many, that get the most tokens read in one pass."""
        first = mates[0]
        alike = [mate for mate in mates if bool(mate.done) == bool(first.done)]  # a fresh state is no state yet
        best: tuple[int, list[M]] = (0, [])
        for size in {min(mate.next_stop(), limit // 2) for mate in alike}:
            able = [mate for mate in alike if mate.next_stop() >= size]
            rows = min(limit // size, POSITIONS // max(mate.done + size for mate in able))
            best = max(best, (size, able[: most_read(rows)]), key=lambda found: found[0] * len(found[1]))
        size, able = best
        return [(mate, size) for mate in able]
