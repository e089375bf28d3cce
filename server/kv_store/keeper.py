"""Saves one row's caches: which positions are new, cut into pieces, and the state behind them.

Owns the rule by which a row is cut, and what is known of how far each row is saved. Runs in the engine's main thread;
the bytes go to the writer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from server.kv_store.copies import CacheSource, FileContent, RowCopy
from server.kv_store.files.folder import Name
from server.kv_store.files.keys import BLOCK, KeyChain
from server.kv_store.files.record import Kind
from server.kv_store.layout import Layout
from server.kv_store.store import Store
from server.kv_store.writer import KVWriter, QueuedFile

Span = tuple[int, int]


@dataclass(slots=True)
class RowProgress:
    """How far one row is saved.

    Attributes:
        saved: tokens whose positions are saved or about to be.
        complete: tokens from which the row could go on.
        state: the newest state of this row.
        older: the one before, which the next one makes needless. The newest alone wouldn't do: it holds all tokens that
            were delivered, and a row that goes on has to read the last of them once more.
    """

    chain: KeyChain
    saved: int = 0
    complete: int = 0
    state: Name | None = None
    older: Name | None = None


@dataclass(slots=True)
class SaveResult:
    """What one call saved: bytes, and why something was left out, or ""."""

    size: int = 0
    refusal: str = ""
    position_bytes: int = 0  # a position's, of the caches that hold all of them
    state_bytes: int = 0  # of the others
    records: list[QueuedFile] = field(default_factory=list)


def spans(first: int, last: int) -> list[Span]:
    """Cut positions at the borders of blocks; what is left of a block, or shorter than one, is a piece of its own."""
    cuts = []
    while last - first > BLOCK:
        border = (first // BLOCK + 1) * BLOCK
        cuts.append((first, border))
        first = border
    if first < last:
        cuts.append((first, last))
    return cuts


class Keeper:
    """Owned by the engine's main thread."""

    def __init__(self, store: Store, writer: KVWriter, layout: Layout) -> None:
        self._store = store
        self._writer = writer
        self._layout = layout

    def begin(self, tokens: list[int]) -> RowProgress:
        """A row begins; `tokens` may grow at its end."""
        return RowProgress(KeyChain(self._store.root, tokens))

    def save(self, source: CacheSource, progress: RowProgress, most: int, *, lasting: bool = False) -> SaveResult:
        """Save what isn't saved of a row, but no more than `most` bytes of positions (one piece at the least).

        `lasting`: the state stays when the row's next one is saved, since later prompts may begin there.
        """
        copy = RowCopy(self._layout, source)
        wanted = self._wanted(copy, source, progress)
        chosen = self._affordable(copy, wanted, min(most, self._writer.room))
        state_bytes = 0
        is_last = len(chosen) == len(wanted)
        if is_last:
            state_bytes = copy.state_bytes
        size = copy.position_bytes * sum(last - first for first, last in chosen) + state_bytes
        saved = SaveResult(0, self._writer.refusal(size), copy.position_bytes, state_bytes)
        if saved.refusal or (not chosen and progress.complete == source.held):
            return saved
        saved.records = self._pieces(copy, chosen, progress)
        if is_last:
            saved.records += self._state(copy, source.held, progress, lasting=lasting)
            progress.complete = source.held
        self._writer.offer(saved.records)
        saved.size = sum(record.size for record in saved.records)
        return saved

    def _wanted(self, copy: RowCopy, source: CacheSource, progress: RowProgress) -> list[Span]:
        """The positions that aren't saved."""
        chain = progress.chain
        known = min(progress.saved, source.held)
        if not known or not self._store.has_end(chain.key(known), copy.growing):
            known = self._store.reach(chain, source.held, copy.growing)
        progress.saved = known
        return spans(known, source.held)

    def _affordable(self, copy: RowCopy, wanted: list[Span], most: int) -> list[Span]:
        if not wanted:
            return []
        chosen = wanted[:1]
        left = most - copy.position_bytes * (wanted[0][1] - wanted[0][0])
        for first, last in wanted[1:]:
            left -= copy.position_bytes * (last - first)
            if left < 0:
                break
            chosen.append((first, last))
        return chosen

    def _pieces(self, copy: RowCopy, chosen: list[Span], progress: RowProgress) -> list[QueuedFile]:
        records = []
        for (first, last), copied in zip(chosen, copy.pieces(chosen), strict=True):
            records.append(self._record("piece", first, last, copied, progress.chain))
            progress.saved = last
        return records

    def _state(self, copy: RowCopy, held: int, progress: RowProgress, *, lasting: bool) -> list[QueuedFile]:
        chain = progress.chain
        if copy.growing == self._layout.everything or self._store.has_state(chain.key(held)):
            return []
        if lasting:
            return [self._record("state", held, held, copy.state(), chain)]
        record = self._record("state", held, held, copy.state(), chain, progress.older)
        progress.older = progress.state
        progress.state = record.name
        return [record]

    def _record(
        self, kind: Kind, first: int, last: int, copied: FileContent, chain: KeyChain, replaces: Name | None = None
    ) -> QueuedFile:
        return QueuedFile.of(self._store.root, chain, (kind, first, last), copied, replaces)
