"""One client's connection: uvicorn's HTTP protocol, put right where it departs from HTTP/1.1.

Owns what reaches the application as a request and how a connection ends. Runs on the event loop. Never chooses an
answer, except to bytes that are no request, and never looks into a body.

What uvicorn 0.54's httptools protocol does otherwise, and what is done here instead; each may go once uvicorn does it:

- A client that shuts down its sending side is taken for one that left (https://github.com/Kludex/uvicorn/issues/1264).
  Here it gets its answer, unless `Presence` finds that it has left. Where that can't be found out (HTTP/1.0 from
  another machine, before the answer has begun) it is still taken for one that left.
- Bytes that are no HTTP are answered 400 in the middle of an earlier request's answer. Here that answer is finished.
- A refusal of a body that was announced with `Expect: 100-continue` leaves the connection open, and the client's next
  request would be read as that body.
- A client that stops in the middle of a head or a body keeps its connection for ever (https://github.com/Kludex/uvicorn/issues/157).
  Here it is answered 408.
- Heads and trailers of any size are collected; blanks behind a header's value stay in it; trailers become headers; a
  target in absolute form leaves the Host header in force; a request for another protocol loses its body; HTTP/1.0
  clients get chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import re
from typing import Any, cast

from starlette.datastructures import Headers
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.api.middleware.access import ABORT, FAULT, FILLER, UNSENT, request_id
from server.api.middleware.presence import OUT_OF_BAND, Presence
from server.errors import HeadTooLarge, InvalidValue, RequestError, RequestTimeout, UnknownMethod

MAX_HEAD_BYTES = 64 * 1024  # of a request's first line and headers
HEAD_SECONDS = 60.0  # from the first byte of a request to the end of its headers
BODY_SECONDS = 60.0  # without a byte of a body that isn't whole yet; one that comes slowly may take any time
LINGER_SECONDS = 2.0  # for what a client still sends after an answer that ends its connection
KNOWN_METHODS = frozenset(method.encode() for method in http.HTTPMethod)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_HEAD = re.compile(rb"[A-Z]+ [^\r\n]+ HTTP/1\.1\r\n")
_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) [^ \r\n]+ HTTP/1\.[01]\r?\n")
_UPGRADE = re.compile(rb"(?<=\r\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
_UPGRADE_BEGUN = re.compile(rb"(?<=\r\n)u(p(g(r(a(d(e[ \t]*)?)?)?)?)?)?\Z", re.IGNORECASE)
_KEPT = 3  # bytes of a head, of whose end all but the last may have been passed on
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)


class Exchange(RequestResponseCycle):
    """A request and its answer.

    Attributes:
        lingers: the answer ends the connection although the client may still send the body that was refused.
    """

    lingers = False

    async def receive(self) -> Any:
        """What comes next; of a request that can't become whole, that its client left."""
        if self._is_broken:
            return {"type": "http.disconnect"}
        message = await super().receive()
        return {"type": "http.disconnect"} if self._is_broken else message

    @property
    def _is_broken(self) -> bool:
        return FAULT in self.scope and self.more_body

    def between(self) -> bytes:
        """Bytes that may be sent now and mean nothing to the client; none where there are none."""
        filler: bytes = cast("dict[str, Any]", self.scope).get(FILLER, b"")
        if self.response_complete or not filler:
            return b""
        if self.chunked_encoding:
            return b"%x\r\n%b\r\n" % (len(filler), filler)
        return filler


class WithAnnouncement(Exchange):
    """The client waits for an interim answer before it sends the body, which may be refused."""

    async def send(self, message: Any) -> None:
        refuses = message["type"] == "http.response.start" and self.waiting_for_100_continue and self.more_body
        if refuses:
            message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
        await super().send(message)
        if refuses:
            self.lingers = self.keep_alive = True  # the connection ends behind the answer, and not at once


class WithoutChunks(Exchange):
    """An answer to an HTTP/1.0 client, which knows no chunks and no interim answers: its body ends with the connection.

    uvicorn 0.54 sends both to every client (https://github.com/Kludex/uvicorn/pull/1360); this may go once it doesn't.
    """

    async def receive(self) -> Any:
        self.waiting_for_100_continue = False
        return await super().receive()

    async def send(self, message: Any) -> None:
        self.waiting_for_100_continue = self.chunked_encoding = False
        self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class UpgradeFilter:
    """Takes the wish for another protocol out of a request's head, however its bytes are cut: Java's client asks for
    HTTP/2 with each request in the clear, and uvicorn 0.54 drops the body of a request that asks
    (https://github.com/Kludex/uvicorn/issues/2722). This may go once it doesn't."""

    def __init__(self) -> None:
        self._before = b""  # the newest bytes of the head that were passed on: a line or the head may end with them
        self._held = b""  # what may become the header's name

    def begun(self, data: bytes) -> bytes:
        """The first bytes of a request, or what else there may be."""
        self._before = self._held = b""
        if _HEAD.match(data):
            return self.more(data)
        self._before = data[-_KEPT:]
        return data

    def more(self, data: bytes) -> bytes:
        """Further bytes, while the head isn't whole."""
        head, end, body = (self._before + self._held + data).partition(b"\r\n\r\n")
        self._held = b""
        head = _UPGRADE.sub(b"X-Upgrade", head)
        if not end and (begun := _UPGRADE_BEGUN.search(head)):
            self._held = begun[0]
            head = head[: begun.start()]
        passed = head + end
        new = passed[len(self._before) :] + body
        self._before = passed[-_KEPT:]
        return new


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection, as the module says."""

    _newest = b""  # that was received
    _in_head = False
    _in_body = False
    _head_bytes = 0
    _around_body = 0  # bytes of a chunked body's frames and trailers since the last byte of itself
    _refusal: RequestError | None = None
    _serving: RequestResponseCycle | None = None
    _has_answered = False
    _deaf = False  # what else the client sends is ignored
    _presence: Presence
    _upgrades: UpgradeFilter
    _linger_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None  # until the client must have gone on with what it sends

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._presence = Presence(transport, self._filler)
        self._upgrades = UpgradeFilter()
        self._expect_more()

    # ---------------------------------------------------------------- what comes in
    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._newest = data
        if self._in_head:
            data = self._upgrades.more(data)
        elif not self._in_body:
            data = self._upgrades.begun(data)
        self._around_body += len(data)
        super().data_received(data)
        if self._in_head:
            self._head_bytes = self._head_bytes + len(data)
        else:
            self._head_bytes = 0
        if not self._in_body:
            self._around_body = 0
        if max(self._head_bytes, self._around_body) > MAX_HEAD_BYTES and not self._deaf:
            self._refusal = _head_too_large() if self._in_head else _trailers_too_large()
            self.send_400_response(str(self._refusal))
        if not self._in_head:
            self._expect_more()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._set_read_timer(HEAD_SECONDS)
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._around_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, and nothing here reads those
            super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._in_body = True
        self._refusal = self._fault_of_head()
        if self._refusal is not None:
            raise self._refusal  # the parser ends the request
        if absolute := _ABSOLUTE.fullmatch(self.url):
            self._take_target(*absolute.groups())
        super().on_headers_complete()

    def _fault_of_head(self) -> RequestError | None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return InvalidValue(f"HTTP/{version} isn't spoken here; HTTP/1.1 is")
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            return _head_too_large()
        for name, value in self.headers:
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                return InvalidValue(f"Transfer-Encoding {value[:100].decode('latin-1')!r} isn't taken; chunked is")
        return None

    def _take_target(self, authority: bytes, rest: bytes) -> None:
        """Of a target in absolute form the server's name goes before the Host header."""
        if rest.startswith(b"/"):
            self.url = rest
        else:
            self.url = b"/" + rest
        hosts = [place for place, (name, _) in enumerate(self.headers) if name == b"host"]
        if len(hosts) == 1:
            self.headers[hosts[0]] = (b"host", authority)
        elif not hosts and self.parser.get_http_version() == "1.0":
            self.headers.append((b"host", authority))

    # ---------------------------------------------------------------- clients that stop sending
    def _expect_more(self) -> None:
        """Gives the client its time anew, where it is the client's turn."""
        self._forget_read_timer()
        if self._in_body and not self._deaf:
            self._set_read_timer(BODY_SECONDS)
        elif self._is_idle and not self._deaf:
            self._set_read_timer(self.timeout_keep_alive)

    def _set_read_timer(self, seconds: float) -> None:
        self._forget_read_timer()
        self._read_timer = self.loop.call_later(seconds, self._stop_waiting)

    def _forget_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()

    def _stop_waiting(self) -> None:
        if self._deaf:
            return
        if self.flow.read_paused or self._has_to_be_asked:
            self._set_read_timer(BODY_SECONDS)  # it would go on if it could
        elif self._in_head or self._in_body:
            self._refusal = _too_slow(self._in_head)
            self.send_400_response(str(self._refusal))
        else:
            self.transport.close()

    @property
    def _has_to_be_asked(self) -> bool:
        """The client sends its body once it gets an interim answer, which it hasn't got."""
        return self._in_body and self.cycle.waiting_for_100_continue and not self.cycle.response_complete

    # ---------------------------------------------------------------- requests and their answers
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            cycle.__class__ = WithoutChunks
        elif cycle.waiting_for_100_continue:
            cycle.__class__ = WithAnnouncement
        else:
            cycle.__class__ = Exchange
        self._serving = cycle
        cast("dict[str, Any]", cycle.scope).update({ABORT: self.transport.abort, UNSENT: self._presence.unsent})
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._has_answered = True
        if isinstance(self._serving, Exchange) and self._serving.lingers:
            self._linger()
        else:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """What follows is no HTTP request, or no more of one. It is answered where nothing else is."""
        self._deaf = True  # where the next request would begin can't be known
        why = self._refusal or self._unknown_method() or InvalidValue(msg)
        within = self.cycle is not None and self.cycle.more_body and self.cycle.scope is self.scope
        if within and not self._is_idle:
            self._break_off(why)
            return
        if not self._is_idle:
            self.cycle.keep_alive = False
            return
        if not within:  # else that request has been refused already
            self.transport.write(_as_bytes(why, request_id(self._headers_so_far)))
        self._linger()

    @property
    def _headers_so_far(self) -> Headers:
        """Those of a request whose head has begun, and of no earlier one."""
        if self._in_head or self._refusal is not None:
            return Headers(raw=self.headers)
        return Headers()

    def _unknown_method(self) -> RequestError | None:
        """The fault of a head that came at once and is well-formed, but for a method that the parser doesn't know."""
        line = _LINE.match(self._newest)
        if line is None or not self._in_head or self._head_bytes or line[1] in KNOWN_METHODS:
            return None
        return UnknownMethod(f"There is no method {line[1][:50].decode()!r} here")

    def _break_off(self, why: RequestError) -> None:
        """Signal the reader of the newest request's body that there will be no more of it. Its client may still send,
        so that the connection ends behind the answer, and not at once."""
        cast(Exchange, self.cycle).lingers = self.cycle.keep_alive = True
        cast("dict[str, Any]", self.cycle.scope)[FAULT] = why
        self.cycle.message_event.set()

    @property
    def _is_idle(self) -> bool:
        """No request is being answered or waits to be."""
        return self.cycle is None or self.cycle.response_complete

    # ---------------------------------------------------------------- the end
    def _linger(self) -> None:
        """Ends the connection from this side, and takes what the client still sends: were it closed at once, the
        client's machine could throw the answer away unread."""
        self._deaf = True
        self._unset_keepalive_if_required()
        with contextlib.suppress(OSError, RuntimeError):  # the client is gone already
            self.transport.write_eof()
        self._linger_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more: it has left, or waits for its answer. None closes the connection."""
        unfinished = self._in_head or (not self._is_idle and self.cycle.more_body)
        if unfinished and not self._deaf:
            self.send_400_response("The request ended before it was whole")
        if self._is_idle or self._left_for_all_that_can_be_known:
            return None
        self._deaf = True
        self.cycle.keep_alive = False
        self._presence.watch()
        return True

    @property
    def _left_for_all_that_can_be_known(self) -> bool:
        serving = self._serving
        if serving is None or serving.response_started or FAULT in serving.scope:
            return False
        return serving.scope["http_version"] == "1.0" and not self._presence.is_local

    def _filler(self) -> bytes:
        """For the client that waits."""
        serving = cast(Exchange, self._serving)
        if serving.response_started:
            return serving.between()
        if self._presence.is_local and not self._has_answered:
            return OUT_OF_BAND
        if serving.scope["http_version"] == "1.1":
            return CONTINUE
        return b""

    def connection_lost(self, exc: Exception | None) -> None:
        self._presence.forget()
        self._forget_read_timer()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)


def _as_bytes(error: RequestError, id: str) -> bytes:
    """The whole answer, after which the connection ends."""
    status = http.HTTPStatus(error.status)
    body = json.dumps(error.body()).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {id}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(f"The request's first line and headers are larger than {MAX_HEAD_BYTES} bytes")


def _trailers_too_large() -> HeadTooLarge:
    return HeadTooLarge(f"What stands around the body's chunks or behind them is larger than {MAX_HEAD_BYTES} bytes")


def _too_slow(in_head: bool) -> RequestTimeout:
    if in_head:
        return RequestTimeout(f"The request's headers weren't whole {HEAD_SECONDS:g} s after its first byte")
    return RequestTimeout(f"Nothing of the request's body came for {BODY_SECONDS:g} s, and it isn't whole")
