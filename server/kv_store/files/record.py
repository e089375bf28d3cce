"""The form of one file: a head that says what it stands for, the arrays' bytes, and a checksum over all of it.

Owns the encoding and every check that needs nothing but the file itself. Runs in the engine's writer and reader threads
and in tests; it never sees an array of MLX, only bytes with a dtype's name and a shape.

A file is either a *piece*, the positions `start` to `end` of those caches that grow by a position a token, or a
*state*, the caches of constant size as they are after `end` tokens.

    magic, 8 bytes | length of the head, 4 | head, msgpack | the arrays' bytes, one after the other | CRC-32, 4
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import msgspec

MAGIC = b"MarathKV"
VERSION = 1
LONGEST_HEAD = 1 << 26
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
}

Kind = Literal["piece", "state"]
Buffer = bytes | memoryview


class DamagedFile(Exception):
    """A file can't be used; `reason` is one of `DAMAGES`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


DAMAGES = ("missing", "unreadable", "checksum", "format", "version", "other_tokens", "layout")


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """One array's form: its dtype as MLX names it, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes. Raises DamagedFile for a dtype that doesn't exist."""
        if self.dtype not in ITEM_BYTES or any(size < 0 for size in self.shape):
            raise DamagedFile("format", f"{self.dtype} {self.shape}")
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class PartHead(msgspec.Struct, frozen=True, array_like=True):
    """One cache: its place among the model's, its attributes around the arrays, and the form of each array."""

    part: int
    tree: Any
    tensors: tuple[Tensor, ...]


class Head(msgspec.Struct, frozen=True):
    """What a file stands for."""

    version: int
    root: bytes  # model and layout
    kind: Kind
    start: int
    end: int
    key: bytes  # of the first `end` ids
    ids: tuple[int, ...]  # from `start` to `end`; of a state the last ones before `end`
    parts: tuple[PartHead, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """The form of each array in the file, in order."""
        return [tensor for part in self.parts for tensor in part.tensors]


class HeadForm(Protocol):
    """A head: it names the form of each array behind it."""

    @property
    def tensors(self) -> list[Tensor]: ...


H = TypeVar("H", bound=HeadForm)


def pack(head: HeadForm, data: Iterable[Buffer]) -> list[Buffer]:
    """Encode a file; returns what is to be written, in order."""
    encoded = msgspec.msgpack.encode(head)
    written: list[Buffer] = [MAGIC + len(encoded).to_bytes(4, "little") + encoded, *data]
    checksum = 0
    for buffer in written:
        checksum = zlib.crc32(buffer, checksum)
    written.append(checksum.to_bytes(4, "little"))
    return written


def unpack(raw: Buffer) -> tuple[Head, list[memoryview]]:
    """Decode a whole file; returns its head and each array's bytes. Raises DamagedFile."""
    return unpack_as(Head, raw)


def unpack_as(kind: type[H], raw: Buffer) -> tuple[H, list[memoryview]]:
    """The same of one with another head."""
    view = memoryview(raw)
    if len(view) < len(MAGIC) + 8:
        raise DamagedFile("format", "cut off")
    if zlib.crc32(view[:-4]) != int.from_bytes(view[-4:], "little"):
        raise DamagedFile("checksum")
    first = len(MAGIC) + 4
    length = int.from_bytes(view[len(MAGIC) : first], "little")
    if view[: len(MAGIC)] != MAGIC or first + length > min(len(view) - 4, LONGEST_HEAD):
        raise DamagedFile("format", "no file of this kind")
    return _decoded(view[first : first + length], view[first + length : -4], kind)


def _decoded(encoded: memoryview, payload: memoryview, kind: type[H]) -> tuple[H, list[memoryview]]:
    try:
        version = msgspec.msgpack.decode(encoded)["version"]
        if version != VERSION:
            raise DamagedFile("version", str(version))
        head = msgspec.msgpack.decode(encoded, type=kind)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise DamagedFile("format", str(error)) from None
    return head, _cut(payload, [tensor.nbytes for tensor in head.tensors])


def _cut(payload: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    if sum(sizes) != len(payload):
        raise DamagedFile("format", "its arrays are not as long as its head says")
    cut: list[memoryview] = []
    place = 0
    for size in sizes:
        cut.append(payload[place : place + size])
        place += size
    return cut
