"""What is taken out of a request's head, and that nothing else is."""

from __future__ import annotations

import itertools

import pytest

from server.serving.http_connection import UpgradeFilter

HEAD = b"POST / HTTP/1.1\r\nConnection: Upgrade\r\n%bX-Up: Upgrade: h2c\r\n\r\n"
WISHES = [b"Upgrade: h2c\r\n", b"UPGRADE : h2c\r\n", b"upgrade:h2c\r\nUpgrade:\r\n"]
BODY = b'{"x":\r\nUpgrade: 1}\r\n\r\nupgrade: 2'


def passed(pieces: list[bytes]) -> bytes:
    """As the connection has it: the filter sees bytes until the head is whole."""
    upgrades, made = UpgradeFilter(), b""
    for piece in pieces:
        made += upgrades.more(piece) if made else upgrades.begun(piece)
    return made


@pytest.mark.parametrize("wish", WISHES)
def test_the_wish_for_another_protocol_goes_wherever_the_bytes_are_cut(wish: bytes) -> None:
    head = HEAD % wish
    hidden = wish.replace(b"Upgrade", b"X-Upgrade").replace(b"UPGRADE", b"X-Upgrade").replace(b"upgrade", b"X-Upgrade")
    right = HEAD % hidden + BODY
    assert passed([head + BODY]) == right
    for cut in range(1, len(head)):
        assert passed([head[:cut], head[cut:] + BODY]) == right, cut
    for first, second in itertools.combinations(range(1, len(head)), 2):
        assert passed([head[:first], head[first:second], head[second:] + BODY]) == right, (first, second)
    assert passed([*(head[n : n + 1] for n in range(len(head) - 1)), head[-1:] + BODY]) == right


@pytest.mark.parametrize("head", [HEAD % b"", HEAD % b"Upgrades: 1\r\nX: up\r\nUp: grade\r\n"])
def test_a_head_without_that_wish_stays_as_it_is(head: bytes) -> None:
    for cut in range(1, len(head)):
        assert passed([head[:cut], head[cut:] + BODY]) == head + BODY
