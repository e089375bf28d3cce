"""The log of newest positions: what rows have read since their last pieces, appended as it is decoded, and the states
of recurrent layers behind it.

Owns the form of its records and the names of its files, its segments. Runs in the thread that appends and, at the next
start, in the one that turns what is left into pieces. A record has the same positions of all rows of a batch, counted
from their ends, so that they are copied and written at once. What a killed engine left half written at the end is left
out, and so is all behind a damaged record.

    length of the record, 4 | record, as `record.pack` has it | …
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from server.kv_store.files import record
from server.kv_store.files.folder import TAIL, open_file
from server.kv_store.files.record import VERSION, Buffer, DamagedFile, PartHead, Tensor

LARGEST = 1 << 30  # bytes; a segment ends at some megabytes and the record that it has last
_LENGTH_BYTES = 4


class RowBase(msgspec.Struct, frozen=True, array_like=True):
    """What a row's first record builds upon: the key at the last border of a block, and the ids since then."""

    border: bytes
    ids: tuple[int, ...]


class RowSpan(msgspec.Struct, frozen=True, array_like=True):
    """Which of its positions a row has in a record: as many as ids, from `start` on, the last ones there.

    Attributes:
        seq: the row's number in its engine.
        place: its place in the arrays.
        base: of its first record, and of the first one behind a piece.
    """

    seq: int
    place: int
    start: int
    ids: tuple[int, ...]
    base: RowBase | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class TailHead(msgspec.Struct, frozen=True):
    """What a record stands for. Its arrays have all rows of the batch on their first axis.

    Attributes:
        parts: the caches of which it has positions, and then those of which it has all that there is behind these.
    """

    version: int
    root: bytes
    rows: tuple[RowSpan, ...]
    parts: tuple[PartHead, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """The form of each array in the record, in order."""
        return [tensor for part in self.parts for tensor in part.tensors]


def head(root: bytes, rows: Sequence[RowSpan], parts: Sequence[PartHead]) -> TailHead:
    """Describe a record of this version."""
    return TailHead(VERSION, root, tuple(rows), tuple(parts))


def segment(folder: Path, number: int) -> Path:
    """The path of a segment; a larger number is newer."""
    return folder / TAIL.replace("*", str(number))


def segments(folder: Path) -> list[Path]:
    """The segments that are there, oldest first."""
    found = [(int(number), path) for path in folder.glob(TAIL) if (number := path.name.split(".")[1]).isdecimal()]
    return [path for _, path in sorted(found)]


def packed(described: TailHead, data: Sequence[Buffer]) -> list[Buffer]:
    """Encode a record; returns what is to be appended, in order."""
    written = record.pack(described, data)
    size = sum(memoryview(buffer).nbytes for buffer in written)
    return [size.to_bytes(_LENGTH_BYTES, "little"), *written]


def read(path: Path) -> bytes:
    """The bytes of a segment; none of what isn't a file, or larger than any. Raises OSError."""
    stream, size = open_file(path)
    with stream:
        if 0 <= size <= LARGEST:
            return stream.readall()
    return b""


def unpacked(raw: Buffer) -> Iterator[tuple[TailHead, list[memoryview]]]:
    """Decode a segment's records up to its end or the first one that can't be used; each with its arrays' bytes."""
    rest = memoryview(raw)
    with contextlib.suppress(DamagedFile):
        while len(rest) > _LENGTH_BYTES:
            size = int.from_bytes(rest[:_LENGTH_BYTES], "little")
            yield record.unpack_as(TailHead, rest[_LENGTH_BYTES : _LENGTH_BYTES + size])
            rest = rest[_LENGTH_BYTES + size :]
