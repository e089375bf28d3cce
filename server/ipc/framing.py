"""Frames on the socket between server and engine: a 4-byte big-endian length, then one msgpack message.

Runs in both processes; does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from server.ipc.messages import Command, Event

FRAME_HEADER = 4
MAX_FRAME = 1 << 28  # 256 MiB: no honest message comes near; garbage on the socket usually does

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


class TornFrame(ValueError):
    """Bytes on the socket are no message: garbage, or a length that no message has."""


def pack(message: Command | Event) -> bytes:
    """One frame, ready to be written."""
    body = _encoder.encode(message)
    return len(body).to_bytes(FRAME_HEADER, "big") + body


class Frames:
    """Cuts a byte stream into frames. A torn last frame is simply never returned.

    Raises `TornFrame` from `feed` for a length beyond `MAX_FRAME`.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while len(self._buffer) >= FRAME_HEADER:
            size = int.from_bytes(self._buffer[:FRAME_HEADER], "big")
            if size > MAX_FRAME:
                raise TornFrame(f"a frame of {size} bytes")
            if len(self._buffer) < FRAME_HEADER + size:
                return
            frame = bytes(self._buffer[FRAME_HEADER : FRAME_HEADER + size])
            del self._buffer[: FRAME_HEADER + size]
            yield frame


def unpack_command(frame: bytes) -> Command:
    """Raises TornFrame when the frame is no command."""
    try:
        return _commands.decode(frame)
    except msgspec.DecodeError as error:
        raise TornFrame(str(error)) from error


def unpack_event(frame: bytes) -> Event:
    """Raises TornFrame when the frame is no event."""
    try:
        return _events.decode(frame)
    except msgspec.DecodeError as error:
        raise TornFrame(str(error)) from error
