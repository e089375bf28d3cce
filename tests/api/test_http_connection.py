"""HTTP down at the socket: what is a request, what isn't, and how a connection ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from serving import HELLO, Site, engine, run_server
from wire import CHAT, TEXT, asks, chunked, connected, head, post, shown

CAP = 5000
BODY = json.dumps(asks(TEXT)).encode()
COUNTED = f"Content-Length: {len(BODY)}"
CHUNKED = "Transfer-Encoding: chunked"
ROUTES = [("GET", "/live"), ("GET", "/v1/models"), ("POST", CHAT), ("GET", "/no-such-thing"), ("OPTIONS", CHAT)]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def site() -> AsyncIterator[Site]:
    async with run_server(max_body_bytes=CAP) as site:
        yield site


# ---------------------------------------------------------------- Host
@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_request_has_one_host(site: Site, method: str, path: str) -> None:
    for lines in ([], ["Host: localhost", "Host: localhost"], ["Host: localhost", "Host: evil.example"]):
        async with connected(site, head(method, path, *lines, host=False)) as wire:
            answer = await wire.answer()
            assert (answer.status, answer.error.code) == (400, "invalid_value"), lines
            assert "Host" in answer.error.message
            assert answer.headers["x-request-id"]


async def test_an_old_client_may_leave_the_host_out_but_not_name_two(site: Site) -> None:
    for lines, status in (([], 200), (["Host: localhost"], 200), (["Host: localhost", "host: localhost"], 400)):
        async with connected(site, head("GET", "/live", *lines, version="1.0", host=False)) as wire:
            assert (await wire.answer()).status == status
            assert await wire.end() == b""
    async with connected(site, head("GET", "/live", "Host: evil.example", version="1.0", host=False)) as wire:
        assert (await wire.answer()).status == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("", 200), ("localhost:", 200), ("[::1]:80", 200), ("LOCALHOST:1", 200), ("a b", 400), ("u@localhost", 400),
        ("localhost, localhost", 400), ("localhost/x", 400), ("localhost:80x", 400), ("[::1", 400), ("h\xe9", 400),
        ("http://localhost", 400), ("evil.example", 403), ("localhost:80:80", 400),
        ("localhost.", 200), ("LocalHost.:80", 200), ("127.0.0.1.", 200), ("localhost..", 403), (".", 403),
        ("evil.example.", 403),
    ],
)  # fmt: skip
async def test_a_host_that_is_none_is_400_and_a_foreign_one_403(site: Site, host: str, status: int) -> None:
    async with connected(site, head("GET", "/live", f"Host: {host}", host=False)) as wire:
        answer = await wire.answer()
        assert answer.status == status
        assert status == 200 or answer.error.message


async def test_blanks_around_a_header_are_no_part_of_it(site: Site) -> None:
    for blank in (" ", "\t", " \t "):
        lines = [f"{name}:{blank}{value}{blank}" for name, value in (("Host", "localhost"), ("X-Request-Id", "abc"))]
        async with connected(site, head("GET", "/live", *lines, host=False)) as wire:
            answer = await wire.answer()
            assert (answer.status, answer.headers["x-request-id"]) == (200, "abc")
        async with connected(site, head("POST", TEXT, COUNTED, f"Expect:{blank}100-continue{blank}")) as wire:
            assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"


async def test_a_target_in_absolute_form_names_the_host(site: Site) -> None:
    for target, lines, status in (
        ("http://localhost:8080/v1/models?x=1", ["Host: evil.example"], 200),
        ("HTTP://127.0.0.1/live", ["Host: localhost"], 200),
        ("http://localhost", ["Host: localhost"], 200),
        ("http://localhost?x", ["Host: localhost"], 200),
        ("http://evil.example/live", ["Host: localhost"], 403),
        ("http://evil.example", ["Host: localhost"], 403),
        ("http://localhost/live", [], 400),
        ("http://localhost/live", ["Host: a", "Host: b"], 400),
        ("http://localhost/nothing", ["Host: localhost"], 404),
        ("*", ["Host: localhost"], 404),
        ("//live", ["Host: localhost"], 404),
    ):
        async with connected(site, head("GET", target, *lines, host=False)) as wire:
            assert (await wire.answer()).status == status, target
    async with connected(site, head("GET", "http://evil.example/live", version="1.0", host=False)) as wire:
        assert (await wire.answer()).status == 403


# ---------------------------------------------------------------- what is no request
@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.2\r\nHost: localhost\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/0.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"get /live HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"BREW /live HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
        b"GET /l\xc3\xafve HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET  HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        head("POST", TEXT, COUNTED, COUNTED) + BODY,
        head("POST", TEXT, COUNTED, "Content-Length: 3") + BODY,
        head("POST", TEXT, "Content-Length: 3, 3") + BODY,
        head("POST", TEXT, "Content-Length: -3") + BODY,
        head("POST", TEXT, "Content-Length: +3") + BODY,
        head("POST", TEXT, "Content-Length: 3.0") + BODY,
        head("POST", TEXT, "Content-Length:") + BODY,
        head("POST", TEXT, "Content-Length: 99999999999999999999999") + BODY,
        head("POST", TEXT, COUNTED, CHUNKED) + chunked(BODY),
        head("POST", TEXT, CHUNKED, COUNTED) + chunked(BODY),
        head("POST", TEXT, CHUNKED, CHUNKED) + chunked(BODY),
        head("POST", TEXT, "Transfer-Encoding: gzip") + chunked(BODY),
        head("POST", TEXT, "Transfer-Encoding: gzip, chunked") + chunked(BODY),
        head("POST", TEXT, "Transfer-Encoding: chunked, gzip") + chunked(BODY),
        head("POST", TEXT, "Transfer-Encoding: identity") + BODY,
        head("POST", TEXT, CHUNKED) + b"zz\r\n" + BODY,
        head("POST", TEXT, CHUNKED) + b"-5\r\n" + BODY,
        head("POST", TEXT, CHUNKED) + b"3\r\nabcdef\r\n",
        head("POST", TEXT, CHUNKED) + b"fffffffffffffffff\r\n" + BODY,
        head("POST", "/live", CHUNKED) + b"zz\r\n",
    ],
)
async def test_what_is_no_request_is_refused_in_the_form_of_every_error_and_ends_the_connection(
    site: Site, request_: bytes
) -> None:
    for pieces in ([request_], [request_[:30], request_[30:]]):
        async with connected(site, *pieces) as wire:
            answer = await wire.answer()
            assert answer.status in (400, 405, 501)
            assert answer.error.code in ("invalid_value", "method_not_allowed", "unknown_method")
            assert answer.headers["x-request-id"].startswith("req_")
            assert await wire.end() == b""


@pytest.mark.parametrize(
    ("method", "status", "code"),
    [
        ("BREW", 501, "unknown_method"), ("get", 501, "unknown_method"), ("X-Y", 501, "unknown_method"),
        ("GETX", 501, "unknown_method"), ("PUT", 405, "method_not_allowed"), ("PATCH", 405, "method_not_allowed"),
        ("PROPFIND", 405, "method_not_allowed"), ("G(T", 400, "invalid_value"),
    ],
)  # fmt: skip
async def test_a_method_is_unknown_or_not_allowed_on_every_path(
    site: Site, method: str, status: int, code: str
) -> None:
    for path in ("/live", CHAT, "/v1/models"):
        first = head("GET", "/live")
        for before in ([], [first]):
            async with connected(site, *before, head(method, path)) as wire:
                for _ in before:
                    assert (await wire.answer()).status == 200
                answer = await wire.answer()
                assert (answer.status, answer.error.code) == (status, code)
                assert answer.headers["x-request-id"]


async def test_a_request_that_breaks_in_its_head_keeps_its_own_id_and_no_earlier_one(site: Site) -> None:
    id = "X-Request-Id: mine"
    async with connected(site, head("GET", "/live", id, "Transfer-Encoding: gzip")) as wire:
        assert (await wire.answer()).headers["x-request-id"] == "mine"
    async with connected(site, head("GET", "/live", id)) as wire:
        assert (await wire.answer()).headers["x-request-id"] == "mine"
        wire.writer.write(b"\x16\x03\x01")
        assert (await wire.answer()).headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "first",
    [lambda body: head("POST", TEXT, CHUNKED) + chunked(body), lambda body: post(TEXT, body)],
    ids=["chunked", "counted"],
)
@pytest.mark.parametrize("garbage", [b"garbage\r\n\r\n", b"}", b"0\r\n\r\n", b"\x00" * 5000, b"GET / HTTP/1.1\r\nHost"])
async def test_garbage_behind_a_request_leaves_its_answer_whole(first, stream: bool, garbage: bytes) -> None:  # type: ignore[no-untyped-def]
    async with run_server(engine(step_seconds=0.01)) as site:
        request_ = first(json.dumps(asks(TEXT, stream=stream)).encode())
        before = post(CHAT, asks(CHAT))
        for count, *pieces in ((1, request_ + garbage), (1, request_, garbage), (2, before + request_, garbage)):
            async with connected(site, *pieces, eof=garbage.endswith(b"Host")) as wire:
                for _ in range(count):
                    assert shown(await wire.answer()) == HELLO
                end = await wire.end()
                assert not end or end.startswith(b"HTTP/1.1 400 ")


async def test_heads_are_limited_whole_or_not(site: Site) -> None:
    large = b"x" * 70_000
    for pieces in (
        [head("GET", "/live", "X: " + large.decode())],
        [head("GET", "/" + large.decode())],
        [head("GET", "/live", *[f"X-{number}: y" for number in range(9000)])],
        [b"GET /live HTTP/1.1\r\nHost: localhost\r\nX: ", *[large[:30_000]] * 4],
        [b"GET /", *[large[:30_000]] * 4],
        [b"GET /live HTTP/1.1\r\n", *[b"X: y\r\n" * 4000] * 4],
    ):
        async with connected(site, *pieces) as wire:
            answer = await wire.answer()
            assert (answer.status, answer.error.code) == (431, "head_too_large")
            assert await wire.end() == b""
    async with connected(site, head("GET", "/live", "X: " + "x" * 60_000)) as wire:
        assert (await wire.answer()).status == 200
    async with connected(
        site, *[b"GET /live HTTP/1.1\r\nHost: localhost\r\nX: ", b"y" * 60_000, b"\r\n\r\n"] * 2
    ) as wire:
        assert [(await wire.answer()).status for _ in range(2)] == [200, 200]


# ---------------------------------------------------------------- bodies
async def test_trailers_say_nothing(site: Site) -> None:
    for trailer in (
        b"X-Checksum: 1\r\n",
        b"Host: evil.example\r\n",
        b"Authorization: Bearer x\r\n",
        b"Host: a\r\n" * 5,
    ):
        async with connected(site, head("POST", TEXT, CHUNKED) + chunked(BODY, trailer=trailer)) as wire:
            assert (await wire.answer()).status == 200
            wire.writer.write(head("GET", "/live"))
            assert (await wire.answer()).status == 200, "the connection goes on"


@pytest.mark.parametrize("begin", [b"0\r\nX: ", b"0\r\n", b"2;x=", b"0000"], ids=["value", "name", "extension", "size"])
async def test_what_stands_around_a_body_is_limited(site: Site, begin: bytes) -> None:
    """A trailer, of which nothing is read, was collected whole, each piece of it copied with all before it."""
    body = b"%x\r\n%b\r\n" % (len(BODY), BODY)
    letter = b"0" if begin == b"0000" else b"x"
    pieces = [head("POST", TEXT, CHUNKED), body, begin, *[letter * 30_000] * 6]
    async with connected(site, *pieces) as wire:
        answer = await wire.answer()
        assert (answer.status, answer.error.code) in ((431, "head_too_large"), (400, "invalid_value")), answer
        assert await wire.end() == b""
    async with connected(site, head("POST", TEXT, CHUNKED), body + b"0\r\nX: ", b"x" * 60_000, b"\r\n\r\n") as wire:
        assert (await wire.answer()).status == 200


async def test_chunks_of_any_size_make_one_body(site: Site) -> None:
    for parts in ([BODY], [bytes([byte]) for byte in BODY], [BODY[:5], BODY[5:]]):
        for version in ("1.0", "1.1"):
            request_ = head("POST", TEXT, "transfer-encoding: Chunked", version=version) + chunked(*parts)
            for pieces in ([request_], [request_[:-7], request_[-7:-2], request_[-2:]]):
                async with connected(site, *pieces) as wire:
                    assert shown(await wire.answer()) == HELLO


@pytest.mark.parametrize(
    ("method", "path", "lines", "status"),
    [
        ("POST", TEXT, [f"Content-Length: {CAP + 1}"], 413),
        ("POST", CHAT, ["Content-Length: 99999999999"], 413),
        ("POST", TEXT, [COUNTED, "Content-Encoding: br"], 415),
        ("POST", TEXT, [COUNTED, "Content-Type: multipart/form-data"], 400),
        ("POST", "/no-such-thing", [COUNTED], 404),
        ("PUT", TEXT, [COUNTED], 405),
        ("POST", TEXT, [COUNTED, "Origin: http://evil.example"], 403),
        ("GET", "/live", [COUNTED], 200),
    ],
)
async def test_a_body_that_is_announced_and_not_wanted_ends_the_connection(
    site: Site, method: str, path: str, lines: list[str], status: int
) -> None:
    request_ = head(method, path, "Expect: 100-continue", *lines)
    async with connected(site, request_) as wire:
        answer = await wire.answer()
        assert answer.status == status
        assert answer.headers["connection"] == "close"
        assert status == 200 or answer.error.message
        assert await wire.end() == b""
    async with connected(site, request_, *[b"x" * 100_000] * 3) as wire:  # it doesn't wait to be asked
        assert (await wire.answer()).status == status
        assert await wire.end() == b""


async def test_a_body_that_is_announced_and_wanted_is_asked_for_once(site: Site) -> None:
    for framing, body in ((COUNTED, BODY), (CHUNKED, chunked(BODY))):
        async with connected(site, head("POST", TEXT, framing, "Expect: 100-Continue")) as wire:
            assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            wire.writer.write(body)
            raw = await wire.reader.readuntil(b"\r\n\r\n")
            assert raw.startswith(b"HTTP/1.1 200 OK")
            assert b"connection: close" not in raw
        request_ = head("POST", TEXT, COUNTED, "Expect: 100-continue", version="1.0") + BODY
        async with connected(site, request_[:-1], request_[-1:]) as wire:
            assert (await wire.end()).startswith(b"HTTP/1.1 200 OK"), "HTTP/1.0 knows no interim answers"


async def test_a_body_that_is_too_large_is_refused_and_the_next_request_is_read(site: Site) -> None:
    for large in (post(TEXT, b"x" * (CAP + 1)), head("POST", TEXT, CHUNKED) + chunked(b"x" * CAP, b"x" * CAP)):
        async with connected(site, large[: len(large) // 2], large[len(large) // 2 :] + post(TEXT, BODY)) as wire:
            answer = await wire.answer()
            assert (answer.status, answer.error.code) == (413, "request_too_large")
            assert shown(await wire.answer()) == HELLO


async def test_a_body_that_was_refused_may_break_off_without_a_second_answer(site: Site) -> None:
    for rest, eof in ((b"", True), (b"zz\r\n", False)):
        async with connected(site, head("POST", TEXT, CHUNKED) + b"1770\r\n" + b"x" * 6000, rest, eof=eof) as wire:
            assert (await wire.answer()).status == 413
            assert await wire.end() == b""


# ---------------------------------------------------------------- targets
async def test_a_query_is_no_part_of_the_route(site: Site) -> None:
    for target in (TEXT + "?api-version=2024-10-21", TEXT + "?", TEXT + "?a=%ff&b=x#y", "/v1/%63ompletions"):
        async with connected(site, post(target, asks(TEXT))) as wire:
            assert shown(await wire.answer()) == HELLO


@pytest.mark.parametrize(
    "target", [TEXT + "/", CHAT + "/", "/live/", "/v1//completions", "/v1/%00", "/v1/%ff", "/%", "/..", "/v1/models/"]
)
async def test_a_target_that_leads_nowhere_is_404_in_the_form_of_every_error(site: Site, target: str) -> None:
    for request_ in (post(target, asks(TEXT)), head("GET", target)):
        async with connected(site, request_) as wire:
            answer = await wire.answer()
            assert answer.status in (404, 405)
            assert answer.error.code in ("unknown_url", "model_not_found", "method_not_allowed")


async def test_a_head_is_answered_without_a_body_whatever_the_answer(site: Site) -> None:
    for target, lines, status in (("/live", [], 200), ("/x", [], 404), (TEXT, [], 405), ("/live", ["Host: b"], 400)):
        async with connected(site, head("HEAD", target, *lines), head("GET", "/live")) as wire:
            answer = await wire.answer(method="HEAD")
            assert answer.status == status
            assert answer.headers["content-type"] == "application/json"
            assert (await wire.answer()).json == {"status": "live"}


async def test_broken_requests_leave_no_traceback_and_no_connection(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    for request_ in (b"GET / HTTP/9.9\r\n\r\n", head("POST", TEXT, CHUNKED) + b"zz\r\n", b"G" * 100_000):
        async with connected(site, request_):
            pass
    await site.until(lambda: not site.server.server_state.connections)
    await asyncio.sleep(0)
    assert not [record for record in caplog.records if record.exc_info]
