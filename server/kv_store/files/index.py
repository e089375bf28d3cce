"""Which files there are, and how far they reach for given token ids.

Owns the entries, their order of use, and the search. Does no I/O and has no lock of its own: the store holds one around
it. A piece leads from one prefix to a longer one, so the files are a tree whose nodes are prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from server.kv_store.files.folder import Name
from server.kv_store.files.keys import KeyChain


@dataclass(eq=False, slots=True)
class Entry:
    """One file, or one that is about to be written."""

    path: Path
    name: Name
    size: int
    used: float
    is_written: bool = True


@dataclass(frozen=True, slots=True)
class Route:
    """The files that bring a row to `length` tokens: pieces in order, and the state there if one is needed."""

    length: int
    pieces: tuple[Entry, ...]
    state: Entry | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        if self.state is None:
            return self.pieces
        return (*self.pieces, self.state)

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(entry.size for entry in self.entries)


@dataclass(slots=True)
class Index:
    """The files of one model by what they stand for, and those of others by their use alone.

    Attributes:
        everything: a bit for each of the model's caches.
    """

    root: bytes
    everything: int
    entries: dict[Path, Entry] = field(default_factory=dict)
    size: int = 0  # bytes, of all models
    _pieces: dict[bytes, list[Entry]] = field(default_factory=dict)  # by where they begin
    _ends: dict[bytes, list[Entry]] = field(default_factory=dict)  # by where they end
    _states: dict[bytes, Entry] = field(default_factory=dict)

    # ------------------------------------------------------------ entries
    def add(self, entry: Entry, *, is_own: bool = True) -> None:
        """Take a file; `is_own` if it is of this model and layout."""
        self.drop(entry.path)
        self.entries[entry.path] = entry
        self.size += entry.size
        if not is_own:
            return
        if entry.name.kind == "state":
            self._states[entry.name.key] = entry
        else:
            self._pieces.setdefault(entry.name.origin, []).append(entry)
            self._ends.setdefault(entry.name.key, []).append(entry)

    def drop(self, path: Path) -> Entry | None:
        """Forget a file; returns its entry if there was one."""
        entry = self.entries.pop(path, None)
        if entry is None:
            return None
        self.size -= entry.size
        if self._states.get(entry.name.key) is entry:
            del self._states[entry.name.key]
        _remove(self._pieces, entry.name.origin, entry)
        _remove(self._ends, entry.name.key, entry)
        return entry

    def resize(self, entry: Entry, size: int) -> None:
        """A file that was about to be written has this size now."""
        if entry.path in self.entries:
            self.size += size - entry.size
            entry.size = size
            entry.is_written = True

    def touch(self, entries: Iterable[Entry], now: float) -> None:
        """Note that files were used."""
        for entry in entries:
            entry.used = max(entry.used, now)

    def victims(self, size: int) -> list[Entry]:
        """The files to give up so that `size` bytes are free: the least recently used, of those the longest prefix
        first, since nothing builds upon it."""
        used = self._used_through_others()
        chosen: list[Entry] = []
        for entry in sorted(self.entries.values(), key=lambda one: (used[one.path], -one.name.end)):
            if size <= 0:
                break
            if entry.is_written:
                chosen.append(entry)
                size -= entry.size
        return chosen

    def _used_through_others(self) -> dict[Path, float]:
        """When each file was last used: a use of a file is one of all that it builds upon."""
        used = {path: entry.used for path, entry in self.entries.items()}
        for entry in sorted(self.entries.values(), key=lambda one: -one.name.end):
            for before in self._ends.get(entry.name.origin, ()):
                used[before.path] = max(used[before.path], used[entry.path])
        return used

    # ------------------------------------------------------------ search
    def has_end(self, key: bytes, parts: int = 0) -> bool:
        """Whether a piece with these caches ends at the prefix named `key`, written or about to be."""
        return key == self.root or any(entry.name.parts & parts == parts for entry in self._ends.get(key, ()))

    def has_state(self, key: bytes) -> bool:
        return key in self._states

    def reach(self, chain: KeyChain, limit: int, parts: int) -> int:
        """How far pieces with these caches reach along the chain, those about to be written included."""
        nodes = self._walk(chain, limit, pending=True)
        return max((node.length for node in nodes if node.cover & parts == parts), default=0)

    def find(self, chain: KeyChain, most: int) -> Route | None:
        """The longest prefix of at most `most` ids that every cache can be brought to; None if there is none. Positions
        beyond are left out where a piece has them; a state is of one length alone."""
        for node in sorted(self._walk(chain, len(chain.tokens)), key=lambda node: -node.length):
            length = min(node.length, most)
            if length and self.everything & ~node.cover == 0:
                return Route(length, node.pieces())
            state = self._states.get(chain.key(node.length))
            if length < node.length or state is None or not state.is_written:
                continue
            if self.everything & ~(node.cover | state.name.parts) == 0:
                return Route(length, node.pieces(), state)
        return None

    def _walk(self, chain: KeyChain, limit: int, *, pending: bool = False) -> list[_Node]:
        """The prefixes of a chain that pieces lead to, each once for each set of caches that all its pieces have."""
        nodes = [_Node(0, self.everything)]
        seen: set[tuple[int, int]] = set()
        for node in nodes:
            for entry in self._pieces.get(chain.key(node.length), ()):
                place = (entry.name.end, node.cover & entry.name.parts)
                if place not in seen and (entry.is_written or pending) and _leads_on(entry, node, chain, limit):
                    seen.add(place)
                    nodes.append(_Node(*place, entry, node))
        return nodes


def _remove(lists: dict[bytes, list[Entry]], key: bytes, entry: Entry) -> None:
    kept = [one for one in lists.get(key, ()) if one is not entry]
    if kept:
        lists[key] = kept
    else:
        lists.pop(key, None)


@dataclass(frozen=True, slots=True)
class _Node:
    """A prefix that pieces lead to, by the last of them, and the caches that all of them have."""

    length: int
    cover: int
    last: Entry | None = None
    before: _Node | None = None

    def pieces(self) -> tuple[Entry, ...]:
        found: list[Entry] = []
        node: _Node | None = self
        while node is not None and node.last is not None:
            found.append(node.last)
            node = node.before
        return tuple(reversed(found))


def _leads_on(entry: Entry, node: _Node, chain: KeyChain, limit: int) -> bool:
    end = entry.name.end
    return entry.name.start == node.length < end <= limit and chain.key(end) == entry.name.key
