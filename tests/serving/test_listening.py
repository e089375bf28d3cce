"""Who may listen where, decided before anything is loaded."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from server.errors import StartupError
from server.serving import listening
from server.serving.listening import is_answered, listen


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False


@contextlib.contextmanager
def listener(host: str) -> Iterator[int]:
    """Its port, while it listens."""
    sockets = listen(host, 0)
    try:
        yield sockets[0].getsockname()[1]
    finally:
        for sock in sockets:
            sock.close()


def named(monkeypatch: pytest.MonkeyPatch, addresses: dict[str, list[str]]) -> None:
    """Makes these the addresses of these host names."""
    real = socket.getaddrinfo

    def found(host: Any, port: Any, *more: Any, **named: Any) -> Any:
        return [info for one in addresses.get(host, [host]) for info in real(one, port, *more, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", found)


OVERLAPPING = [
    ("127.0.0.1", "127.0.0.1"),
    ("127.0.0.1", "localhost"),
    ("localhost", "127.0.0.1"),
    ("0.0.0.0", "127.0.0.1"),
    ("127.0.0.1", "0.0.0.0"),
    ("0.0.0.0", "localhost"),
]
OVERLAPPING_IPV6 = [("localhost", "::1"), ("::1", "localhost"), ("::", "127.0.0.1"), ("127.0.0.1", "::"), ("::1", "::")]


@pytest.mark.parametrize(("first", "second"), OVERLAPPING + OVERLAPPING_IPV6)
def test_the_second_on_a_port_is_refused_wherever_the_first_would_answer(monkeypatch, first, second):
    if (first, second) in OVERLAPPING_IPV6:
        if not has_ipv6():
            pytest.skip("no IPv6 here")
        named(monkeypatch, {"localhost": ["::1", "127.0.0.1"]})
    with listener(first) as port, pytest.raises(StartupError, match=f"port {port} .* in use"):
        listen(second, port)


def test_a_port_that_is_bound_without_listening_does_not_hide_the_second_server():
    """SO_REUSEADDR lets both bind; listening is what tells them apart."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        (first,) = listen("127.0.0.1", port)
        with first, pytest.raises(StartupError, match="in use"):
            listen("127.0.0.1", port)


def test_a_name_is_listened_to_on_all_its_addresses_with_one_port(monkeypatch):
    if not has_ipv6():
        pytest.skip("no IPv6 here")
    named(monkeypatch, {"localhost": ["::1", "127.0.0.1"]})
    sockets = listen("localhost", 0)
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    for sock in sockets:
        with socket.create_connection(sock.getsockname()[:2], 5):
            pass
        sock.close()


def test_an_address_that_the_machine_lacks_is_left_out_where_the_name_has_another(monkeypatch):
    named(monkeypatch, {"mine": ["192.0.2.1", "127.0.0.1"]})
    (sock,) = listen("mine", 0)
    assert sock.getsockname()[0] == "127.0.0.1"
    sock.close()


@pytest.mark.parametrize(
    ("host", "words"),
    [("192.0.2.1", "doesn't have that address"), ("no.such.host.invalid", "--host no.such"), ("a" * 80, "--host aaa")],
)
def test_a_host_that_cannot_be_listened_on_is_named_in_one_line(host, words):
    with pytest.raises(StartupError, match=words) as caught:
        listen(host, 0)
    assert len(str(caught.value).splitlines()) == 1


def test_a_port_of_the_system_is_refused_with_what_may_be_had(monkeypatch):
    class Forbidden(socket.socket):
        def bind(self, address: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(listening.socket, "socket", Forbidden)
    with pytest.raises(StartupError, match="port 80 is kept for the system; choose one from 1024 up"):
        listen("127.0.0.1", 80)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_listener_is_found_out_by_asking_where_the_kernel_lets_two_listen(host):
    with listener("0.0.0.0") as port:
        assert is_answered(socket.AF_INET, (host, port))
    assert not is_answered(socket.AF_INET, (host, port))
    assert not is_answered(socket.AF_INET, (host, 0))
