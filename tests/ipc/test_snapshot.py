"""The writer thread packs the snapshot while the main thread goes on changing it."""

import sys
import threading
import time
from dataclasses import dataclass

import pytest

from server.ipc.framing import FRAME_HEADER, pack, unpack_event
from server.ipc.messages import Progress
from server.ipc.snapshot import PromptProgress, Snapshot

SECONDS = 0.5


@dataclass
class Changes:
    """A thread that does to a snapshot what the engine's main thread does, as fast as it can."""

    snapshot: Snapshot
    on = True

    def __enter__(self):
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        return self

    def __exit__(self, *exit_):
        self.on = False
        self.thread.join()

    def run(self):
        number = 0
        while self.on:
            number += 1
            self.snapshot.steps = number
            self.snapshot.batch_sizes[number % 500] = number  # grows and shrinks: a walk over it would notice
            if number % 500 == 0:
                self.snapshot.batch_sizes.clear()
            self.snapshot.prompts = [PromptProgress(i, number, number) for i in range(number % 20)]
            self.snapshot.record("flush", number, number)


@pytest.fixture
def often():
    """Threads change places far more often than they would by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_snapshot_is_packed_whole_while_it_changes(often):
    snapshot = Snapshot()
    end = time.monotonic() + SECONDS
    seen = set()
    with Changes(snapshot):
        while time.monotonic() < end:
            event = unpack_event(pack(Progress(1, 1, "serving", snapshot))[FRAME_HEADER:])
            packed = event.snapshot
            seen.add(packed.steps)
            assert len({prompt.done for prompt in packed.prompts}) <= 1, "of one moment"
            assert [action.reading for action in packed.actions] == sorted(action.reading for action in packed.actions)
            assert len(packed.actions) <= 100
    assert len(seen) > 10, "or nothing has changed meanwhile"


def test_the_lock_that_makes_packing_safe_is_there():
    """An interpreter without it needs a copy of the snapshot under a lock of our own."""
    assert getattr(sys, "_is_gil_enabled", lambda: True)()
