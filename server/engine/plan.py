"""The operations that an iteration of the engine is made of, as plain values.

Owns their names and what each one needs: ids of rows and batches, lengths, never an array. Used in the engine process's
main thread. `Prefill` and `Groups` plan them one after the other, since the time that one takes decides whether
another one fits; the executor carries them out. An iteration's plan can be printed, compared and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

Seqs = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """Give a row caches: those of the longest kept prefix of its tokens, or empty ones. The outcome is how many tokens
    they hold."""

    seq: int


@dataclass(frozen=True, slots=True)
class Read:
    """Read the next tokens of prompts in one forward pass; `parts` has (row, tokens to read)."""

    parts: tuple[tuple[int, int], ...]

    @property
    def seqs(self) -> Seqs:
        return tuple(seq for seq, _ in self.parts)


@dataclass(frozen=True, slots=True)
class KeepPrompt:
    """Keep a copy of the caches of a row that is being read, which hold its first `length` tokens."""

    seq: int
    length: int


@dataclass(frozen=True, slots=True)
class KeepRead:
    """Keep the caches of a row that ends while its prompt is read, which hold its first `length` tokens."""

    seq: int
    length: int


@dataclass(frozen=True, slots=True)
class Detach:
    """Give rows caches of their own that still share those of a forward pass."""

    seqs: Seqs


@dataclass(frozen=True, slots=True)
class Join:
    """Put rows into a batch, which is made if there is none of this number."""

    batch: int
    seqs: Seqs


@dataclass(frozen=True, slots=True)
class Split:
    """Take rows out of a batch with all that they need to join another one."""

    batch: int
    seqs: Seqs


@dataclass(frozen=True, slots=True)
class Leave:
    """Drop rows of a batch."""

    batch: int
    seqs: Seqs


@dataclass(frozen=True, slots=True)
class KeepRow:
    """Keep what a row of a batch has read, before it leaves."""

    batch: int
    seq: int


@dataclass(frozen=True, slots=True)
class Step:
    """Draw the next token of each row of a batch and read the one before; `newest` positions of each row are copied
    besides. The outcome is a `StepOutput`."""

    batch: int
    newest: int = 0


@dataclass(frozen=True, slots=True)
class FetchTokens:
    """Fetch each row's newest token without waiting for the next step of the batch. The outcome is a `StepOutput`."""

    batch: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Give up a batch whose caches are in no known state; its rows stay, without caches."""

    batch: int


@dataclass(frozen=True, slots=True)
class Flush:
    """Evaluate all that is pending behind the caches."""


@dataclass(frozen=True, slots=True)
class EvictPrefixes:
    """Let go of kept prefixes, the least used first, until they have given so much back. The outcome is how many."""

    bytes: int
    buffers: int


@dataclass(frozen=True, slots=True)
class Census:
    """Look for arrays behind the caches that are still pending."""


@dataclass(frozen=True, slots=True)
class ClearPool:
    """Drop the buffers that nothing uses."""


Operation = (
    Begin
    | Read
    | KeepPrompt
    | KeepRead
    | Detach
    | Join
    | Split
    | Leave
    | KeepRow
    | Step
    | FetchTokens
    | Abandon
    | Flush
    | EvictPrefixes
    | Census
    | ClearPool
)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of an operation: its outcome, its time, and the bytes that rows may still take after it, but for a
    step, after which nothing asks for them."""

    outcome: Any = None
    seconds: float = 0.0
    room: int = 0


T = TypeVar("T")
Plan = Generator[Operation, Result, T]  # yields operations, is sent what came of each, returns what was planned for


def follow(plan: Plan[T], run: Callable[[Operation], Result]) -> T:
    """Have `run` carry out what is planned, and give back to the plan what came of each operation."""
    try:
        operation = next(plan)
        while True:
            operation = plan.send(run(operation))
    except StopIteration as end:
        result: T = end.value
        return result


class OperationFailure(Exception):
    """An operation failed; the cause says why, `seqs` names the rows whose caches are in no known state now."""

    def __init__(self, operation: Operation, seqs: Seqs) -> None:
        super().__init__(f"{operation} failed")
        self.operation = operation
        self.seqs = seqs
