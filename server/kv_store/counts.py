"""What the store has done, in figures.

Owns the counts. The engine's main thread and the store's own threads add to them, each to fields of its own or with one
assignment; the main thread copies them into the snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """All counters begin at 0 with the engine."""

    written_bytes: int = 0
    read_bytes: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0
    evicted: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # files, by what was wrong with them
    skipped: dict[str, int] = field(default_factory=dict)  # checkpoints, by why

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
