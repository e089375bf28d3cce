"""The engine's end of the socket: commands come in order, and other threads may end the wait for one."""

from __future__ import annotations

import socket
import threading
from time import monotonic

from server.engine.channel import Channel
from server.ipc import framing
from server.ipc.messages import Cancel


def test_another_thread_ends_the_wait_for_a_command():
    here, there = socket.socketpair()
    with here, there:
        channel = Channel(here)
        timer = threading.Timer(0.1, channel.wake)
        timer.start()
        began = monotonic()
        assert channel.receive(30.0) is None
        assert monotonic() - began < 10
        timer.join()


def test_a_wake_is_no_command():
    here, there = socket.socketpair()
    with here, there:
        channel = Channel(here)
        for command in (Cancel(1, 1), Cancel(1, 2)):
            channel.wake()
            channel._take(framing.unpack_command(framing.pack(command)[framing.FRAME_HEADER :]))
        channel.wake()
        assert [command.seq for command in channel.received()] == [1, 2]
