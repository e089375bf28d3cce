"""A stored answer as one value, and how ids and logprobs are packed.

Owns the shapes that cross between the journal and its users. Runs in any thread; does no I/O.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from server.ipc.sequence import Finish, TokenLogprobs, TokenSequence

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Kind = Literal["response", "chat"]
UNFINISHED: tuple[Status, ...] = ("queued", "in_progress")
FINAL: tuple[Status, ...] = ("completed", "incomplete", "failed", "cancelled")
STATUSES: tuple[Status, ...] = (*UNFINISHED, *FINAL)

Struct = TypeVar("Struct", bound=msgspec.Struct)

_pack = msgspec.msgpack.Encoder().encode
_sequences = msgspec.msgpack.Decoder(list[TokenSequence])
_logprobs = msgspec.msgpack.Decoder(list[TokenLogprobs])


class Record(msgspec.Struct, kw_only=True):
    """One stored answer.

    Attributes:
        id: `resp_…` or `chatcmpl-…`.
        owner: digest of the API key that made it; empty where no keys are set.
        fingerprint: of the model's and the tokenizer's files.
        created, ended: seconds since 1970.
        background: goes on without its client, and over restarts of the server.
        body: JSON that the protocol's `prepare` understands again.
        own_input: JSON list of the request's own input items or messages.
        sequences: one a choice, all that a Submit needs.
        cached: prompt tokens from the prefix cache, by choice; None until known.
        finishes: by choice: the engine's reason, "stopped" by a stop string, or None.
        answer: the final object as JSON.
        error: JSON object with `code` and `message`.
    """

    id: str
    kind: Kind
    owner: str
    model: str
    fingerprint: str
    created: float
    background: bool
    stream: bool
    endpoint: str
    body: bytes = b""
    own_input: bytes = b""
    metadata: dict[str, str] = {}
    sequences: list[TokenSequence] = []
    status: Status = "queued"
    cached: list[int | None] = []
    finishes: list[str | None] = []
    ended: float | None = None
    answer: bytes | None = None
    error: bytes | None = None

    @property
    def is_final(self) -> bool:
        return self.status in FINAL


@dataclass(frozen=True, slots=True)
class NewTokens:
    """News of one choice on its way into the journal: ids that follow those before, and what else is known now."""

    choice: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # empty or aligned with `tokens`
    finish: Finish | None = None
    cached: int | None = None


class StoredTokens(msgspec.Struct):
    """The saved part of one choice. `logprobs` is empty or aligned with `tokens`."""

    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer ended: what `Journal.finish` writes."""

    status: Status
    ended: float
    answer: bytes | None = None
    error: bytes | None = None
    finishes: list[str | None] = []
    cached: list[int | None] = []


class Damage(Exception):
    """The file holds something else than was written."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids at 4 bytes each, in this machine's byte order: the file stays on its machine."""
    return array("I", ids).tobytes()


def unpack_ids(blob: bytes) -> list[int]:
    return array("I", blob).tolist()


def pack_logprobs(logprobs: list[TokenLogprobs]) -> bytes:
    if not logprobs:
        return b""
    return _pack(logprobs)


def unpack_logprobs(blob: bytes) -> list[TokenLogprobs]:
    """Raises Damage."""
    if not blob:
        return []
    return _decoded(_logprobs, blob)


def pack_sequences(sequences: list[TokenSequence]) -> bytes:
    return _pack(sequences)


def unpack_sequences(blob: bytes) -> list[TokenSequence]:
    """Raises Damage."""
    return _decoded(_sequences, blob)


def _decoded(decoder: msgspec.msgpack.Decoder[list[Struct]], blob: bytes) -> list[Struct]:
    try:
        return decoder.decode(blob)
    except msgspec.DecodeError as error:
        raise Damage(str(error)) from None


def checksum(*parts: bytes | None) -> int:
    """Return the CRC-32 of the parts, which SQLite doesn't keep: a changed byte would be a changed answer."""
    total = 0
    for part in parts:
        total = zlib.crc32(part or b"", total)
    return total
