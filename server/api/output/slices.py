"""Long JSON arrays, encoded slice by slice.

Owns the way around one long call: while an encoder works no other thread of the process runs. Runs in any thread; pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import msgspec

SLICE = 2_000  # entries; some milliseconds of the largest ones

encode = msgspec.json.Encoder().encode


def array(entries: Iterable[object]) -> msgspec.Raw:
    """The array as JSON, to be put into what is encoded around it. `entries` may be made as they are read."""
    left = iter(entries)
    slices = []
    while part := list(islice(left, SLICE)):
        slices.append(encode(part)[1:-1])
    return msgspec.Raw(b"[" + b",".join(slices) + b"]")
