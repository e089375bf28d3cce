"""Makes pieces and states of what an engine before this one has logged.

Owns nothing. Runs once, in the thread that opens the store, before any row asks for its caches. What a row's
records have behind its last piece becomes pieces, with a state behind each where the model has any, and the log goes.
The newest records may be of tokens that were never delivered, and no row finds what ends with those: each of them
becomes a piece of its own.
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from server.errors import one_line
from server.kv_store.copies import FileContent
from server.kv_store.files import tail_log
from server.kv_store.files.keys import KeyChain
from server.kv_store.files.record import DamagedFile, PartHead
from server.kv_store.files.tail_log import RowBase, RowSpan, TailHead
from server.kv_store.image import shaped
from server.kv_store.layout import Layout
from server.kv_store.store import Store
from server.kv_store.writer import QueuedFile

UNDELIVERED = 4  # tokens that a step may be ahead of what clients have

log = logging.getLogger("marathon.engine")


@dataclass(frozen=True, slots=True)
class _Link:
    """A row's part of a record."""

    span: RowSpan
    head: TailHead
    data: list[memoryview]

    def positions(self, axes: list[int]) -> list[np.ndarray]:
        """Its own positions of each array, whose positions are on `axes`."""
        whole = self._rows()[: len(axes)]
        return [self._cut(array, axis) for array, axis in zip(whole, axes, strict=True)]

    def states(self, axes: list[int]) -> list[np.ndarray]:
        """The arrays of its states, which come behind those of positions."""
        return self._rows()[len(axes) :]

    def _rows(self) -> list[np.ndarray]:
        place = self.span.place
        pairs = zip(self.head.tensors, self.data, strict=True)
        return [shaped(data, tensor)[place : place + 1] for tensor, data in pairs]

    def _cut(self, row: np.ndarray, axis: int) -> np.ndarray:
        last = row.shape[axis]
        return row[(slice(None),) * axis + (slice(last - len(self.span.ids), last),)]


@dataclass(frozen=True, slots=True)
class _Way:
    """What one row has read behind a piece, record by record."""

    start: int
    base: RowBase
    links: list[_Link]

    @property
    def chain(self) -> KeyChain:
        """The names of all prefixes of the row from its start on."""
        ids = [token for link in self.links for token in link.span.ids]
        return KeyChain(self.base.border, [*self.base.ids, *ids], self.start - len(self.base.ids))

    @property
    def end(self) -> int:
        return self.links[-1].span.end

    def stretches(self) -> Iterator[list[_Link]]:
        """The links, one by one those that end with tokens which may not have been delivered, all before together."""
        first = bisect_left([link.span.end for link in self.links], self.end - UNDELIVERED + 1)
        if first:
            yield self.links[:first]
        yield from ([link] for link in self.links[first:])


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
        if store.has_end(way.chain.key(way.start), layout.growing):
            files = _files(store, layout, way)
            written = [_write(store, file) for file in files]
            return any(written)
    return False


def _files(store: Store, layout: Layout, way: _Way) -> Iterator[QueuedFile]:
    """What a row's links have, as files in their order."""
    axes = [leaf.axis for part in layout.parts for leaf in part.leaves]
    states = layout.states()
    chain = way.chain
    for links in way.stretches():
        start, end = links[0].span.start, links[-1].span.end
        columns = zip(*(link.positions(axes) for link in links), strict=True)
        arrays = [np.concatenate(column, axis) for column, axis in zip(columns, axes, strict=True)]
        yield QueuedFile.of(store.root, chain, ("piece", start, end), _content(layout.piece(end - start), arrays))
        if states:
            content = _content(states, links[-1].states(axes))
            yield QueuedFile.of(store.root, chain, ("state", end, end), content)


def _content(parts: tuple[PartHead, ...], arrays: list[np.ndarray]) -> FileContent:
    return FileContent(parts, tuple(array.tobytes() for array in arrays))


def _write(store: Store, file: QueuedFile) -> bool:
    """Write a file; whether it wasn't there."""
    entry = store.expect(file.name, file.size)
    if entry is None:
        return False
    try:
        store.write(entry, file.head, file.data)
    except OSError:
        store.forget(entry)
        raise
    return True
