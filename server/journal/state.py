"""What people and metrics are shown of a journal.

Owns that value. Runs on the event loop; does no I/O.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Condition = Literal["on", "off", "unavailable"]


class JournalState(msgspec.Struct, frozen=True):
    """A journal at one moment.

    Attributes:
        reason: why it is unavailable.
        bytes, limit: what stored answers take, and what they may take.
        stored: answers by status.
        readers: streams of stored answers that are being read.
    """

    condition: Condition
    reason: str | None
    path: str | None
    bytes: int
    limit: int
    stored: dict[str, int]
    readers: int
