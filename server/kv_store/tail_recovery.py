"""Makes pieces of the newest positions that an engine before this one has logged.

Owns nothing. Runs once, in the thread that opens the store, before any row asks for its caches. What a row's
records have behind its last piece becomes one piece more, and the log goes.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from server.errors import one_line
from server.kv_store.files import tail_log
from server.kv_store.files.keys import KeyChain
from server.kv_store.files.record import VERSION, DamagedFile, Head
from server.kv_store.files.tail_log import RowBase, RowSpan, TailHead
from server.kv_store.image import shaped
from server.kv_store.layout import Layout
from server.kv_store.store import Store
from server.kv_store.writer import QueuedFile

log = logging.getLogger("marathon.engine")


@dataclass(frozen=True, slots=True)
class _Link:
    """A row's part of a record."""

    span: RowSpan
    head: TailHead
    data: list[memoryview]

    def arrays(self, axes: list[int]) -> list[np.ndarray]:
        """Its own positions of each array, whose positions are on `axes`."""
        pairs = zip(self.head.tensors, self.data, axes, strict=True)
        return [self._cut(shaped(data, tensor), axis) for tensor, data, axis in pairs]

    def _cut(self, whole: np.ndarray, axis: int) -> np.ndarray:
        last = whole.shape[axis]
        wanted = (slice(None),) * axis + (slice(last - len(self.span.ids), last),)
        return whole[self.span.place : self.span.place + 1][wanted]


@dataclass(frozen=True, slots=True)
class _Way:
    """What one row has read behind a piece, record by record."""

    start: int
    base: RowBase
    links: list[_Link]

    @property
    def ids(self) -> list[int]:
        return [token for link in self.links for token in link.span.ids]

    def key(self, length: int) -> bytes:
        """Name the first `length` of the row's ids, of those from its start on."""
        chain = KeyChain(self.base.border, [*self.base.ids, *self.ids])
        return chain.key(length - self.start + len(self.base.ids))

    @property
    def end(self) -> int:
        return self.links[-1].span.end


def recover(store: Store, layout: Layout, folder: Path) -> int:
    """Write what the log has beyond the pieces, and remove it; returns the rows that are further now."""
    found = tail_log.segments(folder)
    written = 0
    for ways in _ways(store.root, found).values():
        try:
            written += _write_first(store, layout, ways)
        except (OSError, ValueError, TypeError, IndexError, DamagedFile) as error:  # whole, and yet it may say anything
            log.warning("what was logged of a row is read by prefill instead: %s", one_line(error))
    for path in found:
        with contextlib.suppress(OSError):
            path.unlink()
    return written


def _ways(root: bytes, segments: list[Path]) -> dict[int, list[_Way]]:
    """What was logged of each row, the newest first: one behind each piece that was written meanwhile."""
    ways: dict[int, list[_Way]] = {}
    for path in segments:
        with contextlib.suppress(OSError):
            for described, data in tail_log.unpacked(tail_log.read(path)):
                if described.root == root:
                    for span in described.rows:
                        _add(ways.setdefault(span.seq, []), _Link(span, described, data))
    return ways


def _add(ways: list[_Way], link: _Link) -> None:
    """A record that was left out breaks a row's way, which ends there."""
    if link.span.base is not None:
        ways.insert(0, _Way(link.span.start, link.span.base, [link]))
    elif ways and ways[0].end == link.span.start:
        ways[0].links.append(link)


def _write_first(store: Store, layout: Layout, ways: list[_Way]) -> bool:
    """Write the newest of a row's ways that begins where a piece ends, or where the row does; whether it is new."""
    for way in ways:
        if store.has_end(way.key(way.start), layout.everything):
            return _write(store, layout, way)
    return False


def _write(store: Store, layout: Layout, way: _Way) -> bool:
    """Write a row's links as one piece; whether it wasn't there."""
    leaves = [leaf for part in layout.parts for leaf in part.leaves]
    axes = [leaf.axis for leaf in leaves]
    columns = zip(*(link.arrays(axes) for link in way.links), strict=True)
    arrays = [np.concatenate(column, axis) for column, axis in zip(columns, axes, strict=True)]
    head = Head(
        version=VERSION,
        root=store.root,
        kind="piece",
        start=way.start,
        end=way.end,
        key=way.key(way.end),
        ids=tuple(way.ids),
        parts=layout.piece(way.end - way.start),
    )
    file = QueuedFile(head, way.key(way.start), tuple(array.tobytes() for array in arrays))
    entry = store.expect(file.name, file.size)
    if entry is None:
        return False
    try:
        store.write(entry, file.head, file.data)
    except OSError:
        store.forget(entry)
        raise
    return True
