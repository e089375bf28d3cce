"""Makes pieces of the newest positions that an engine before this one has logged.

Owns nothing. Runs once, in the thread that opens the store, before any row asks for its caches. The records of a row
are links from one prefix to the next. Those behind the last piece of a row become one piece more, and the log goes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from server.errors import one_line
from server.kv_store.files import tail_log
from server.kv_store.files.folder import Name
from server.kv_store.files.record import ITEM_BYTES, VERSION, Head, PartHead, Tensor
from server.kv_store.files.tail_log import RowSpan, TailHead
from server.kv_store.layout import Layout
from server.kv_store.store import Store

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
        return [self._cut(_shaped(data, tensor), axis) for tensor, data, axis in pairs]

    def _cut(self, whole: np.ndarray, axis: int) -> np.ndarray:
        last = whole.shape[axis]
        wanted = (slice(None),) * axis + (slice(last - (self.span.end - self.span.start), last),)
        return whole[self.span.place : self.span.place + 1][wanted]


def _shaped(data: memoryview, tensor: Tensor) -> np.ndarray:
    return np.frombuffer(data, np.dtype(f"u{ITEM_BYTES[tensor.dtype]}")).reshape(tensor.shape)


def recover(store: Store, layout: Layout, folder: Path) -> int:
    """Write what the log has beyond the pieces, and remove it; returns the rows that are further now."""
    found = tail_log.segments(folder)
    written = 0
    try:
        written = sum(_write(store, layout, way) for way in _ways(store, layout.everything, found))
    except (OSError, ValueError, IndexError) as error:  # a record may be whole and say anything
        log.warning("the newest positions that were logged are read by prefill instead: %s", one_line(error))
    for path in found:
        path.unlink(missing_ok=True)
    return written


def _ways(store: Store, parts: int, segments: list[Path]) -> Iterator[list[_Link]]:
    """For each row the links that lead from the end of a piece to its newest position."""
    links = {link.span.key: link for link in _links(store.root, segments)}
    inner = {link.span.origin for link in links.values()}
    for key, link in links.items():
        if key in inner or store.has_end(key, parts):
            continue
        way = [link]
        while not store.has_end(way[0].span.origin, parts) and way[0].span.origin in links:
            way.insert(0, links[way[0].span.origin])
        if store.has_end(way[0].span.origin, parts):
            yield way


def _links(root: bytes, segments: list[Path]) -> Iterator[_Link]:
    for path in segments:
        for described, data in tail_log.unpacked(path.read_bytes()):
            if described.root == root:
                yield from (_Link(span, described, data) for span in described.rows)


def _write(store: Store, layout: Layout, way: list[_Link]) -> bool:
    """Write a row's links as one piece; whether it wasn't there."""
    first, last = way[0].span, way[-1].span
    leaves = [leaf for part in layout.parts for leaf in part.leaves]
    axes = [leaf.axis for leaf in leaves]
    arrays = [np.concatenate(own, axis) for *own, axis in zip(*(link.arrays(axes) for link in way), axes, strict=True)]
    piece = Head(
        version=VERSION,
        root=store.root,
        kind="piece",
        start=first.start,
        end=last.end,
        key=last.key,
        ids=tuple(token for link in way for token in link.span.ids),
        parts=_parts(layout, last.end - first.start),
    )
    name = Name("piece", first.start, last.end, first.origin, last.key, layout.everything)
    entry = store.expect(name, sum(array.nbytes for array in arrays))
    if entry is None:
        return False
    store.write(entry, piece, [array.tobytes() for array in arrays])
    return True


def _parts(layout: Layout, positions: int) -> tuple[PartHead, ...]:
    return tuple(
        PartHead(place, None, tuple(leaf.tensor(positions) for leaf in part.leaves))
        for place, part in enumerate(layout.parts)
    )
