"""How long a chunk of a prompt will take.

Owns the chunk lengths and what was measured of each. Runs in the engine process's main thread. Pure: no clock, no MLX.

An estimate is a guess from the nearest length that is known, in proportion: that holds where tokens take the time.
Where a pass takes about as long however many tokens it has, as on a fast device, proportion is far off, so the next
longer length is tried now and then.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from server.ipc.probe import LARGEST_CHUNK

CHUNKS = (8 * LARGEST_CHUNK, 4 * LARGEST_CHUNK, 2 * LARGEST_CHUNK, LARGEST_CHUNK, 1024, 512, 256, 128, 64)
MEMORY = 0.5  # weight of the newest measurement
FORGOTTEN = 16  # shorter chunks after which a length may be tried again; doubles each time
READ_ALL = 32  # fewer tokens hardly take less time: the weights are read all the same


def _kind(size: int) -> int:
    """The chunk length that is the nearest, by its ratio to the size."""
    return min(CHUNKS, key=lambda length: max(length, size) / min(length, size))


@dataclass(slots=True)
class _Measurement:
    """Seconds a token of one chunk length."""

    rate: float
    times: int = 0
    passed_over: int = 0  # shorter chunks since
    patience: int = FORGOTTEN

    @property
    def sure(self) -> bool:
        """The first time may have had to compile something."""
        return self.times > 1


class ChunkTiming:
    """Seconds a token by chunk length, learned online."""

    def __init__(self, tried: int = LARGEST_CHUNK, growth: int = 2) -> None:
        """`tried`: what counts as the longest length tried while none is known for sure. `growth`: how many times the
        longest one measured an estimate may be of."""
        self._tried = tried
        self._growth = growth
        self._kinds: dict[int, _Measurement] = {}
        self._guess: float | None = None  # from a chunk too small to say much

    def learn(self, size: int, seconds: float) -> None:
        rate = seconds / size
        if size < READ_ALL:
            self._guess = rate
            return
        kind = _kind(size)
        own = self._kinds.setdefault(kind, _Measurement(rate))
        if own.sure:
            own.rate = own.rate + MEMORY * (rate - own.rate)
        else:
            own.rate = min(own.rate, rate)
        own.times = own.times + 1
        own.passed_over = 0
        for longer in [other for length, other in self._kinds.items() if length > kind]:
            longer.passed_over += 1
            if longer.passed_over == longer.patience:  # it may have been unlucky: once more decides
                longer.rate = inf
                longer.times = 1
                longer.patience = 2 * longer.patience

    def seconds(self, size: int) -> float | None:
        """Expected time of a chunk, from the nearest length measured; None before the first."""
        known = [kind for kind in self._kinds if self._kinds[kind].sure] or list(self._kinds)
        rate = self._guess
        if known:
            rate = self._kinds[min(known, key=lambda kind: abs(kind.bit_length() - _kind(size).bit_length()))].rate
        if rate is None:
            return None
        return rate * max(size, READ_ALL)

    @property
    def next(self) -> int:
        """The length after those that are known for sure, or 0. Where a pass takes about the same time however long it
        is, as on a fast device, only trying shows it."""
        longest = max((kind for kind, own in self._kinds.items() if own.sure), default=self._tried)
        return min((kind for kind in CHUNKS if kind > longest), default=0)

    @property
    def reach(self) -> int:
        """The longest chunk that an estimate is good for: tokens attend to each other, so that longer ones take more
        than their share."""
        return self._growth * max(self._kinds, default=CHUNKS[-1])
