"""A request's body as it was sent → the UTF-8 that it stands for.

Owns `Content-Encoding` and the charset of `Content-Type`. Runs on the event loop while headers are looked at and in a
thread where bytes are decoded. Never makes more bytes than the cap allows, however small they were sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message

from starlette.datastructures import Headers

from server.errors import InvalidValue, RequestTooLarge, UnsupportedMediaType

FORM = "multipart/form-data"
MAX_CODINGS = 4  # one upon another; each is decoded within the cap, but all take their time
MAX_MEMBERS = 64  # of one gzip body; each further one copies what follows it
CHARSETS = {  # by their names on the web; what else Python knows (punycode, utf-7) may be slow or mean something else
    "utf-8": "utf-8", "utf8": "utf-8", "us-ascii": "utf-8", "ascii": "utf-8", "utf-16": "utf-16",
    "utf-16le": "utf-16-le", "utf-16be": "utf-16-be", "utf-32": "utf-32", "iso-8859-1": "latin-1",
    "latin1": "latin-1", "windows-1252": "cp1252",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Coding:
    """How one body was coded.

    Attributes:
        contents: content codings in the order in which the sender applied them.
        charset: Python's name of the text's encoding.
    """

    contents: tuple[str, ...]
    charset: str

    @classmethod
    def of(cls, headers: Headers) -> Coding:
        """Raises InvalidValue for a form, and UnsupportedMediaType that names what this server can't decode."""
        kind = headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() == FORM:
            raise InvalidValue(f"Content-Type {FORM} isn't taken; send application/json")
        return cls(_contents(headers), _charset(kind))

    @property
    def is_plain(self) -> bool:
        """Whether the bytes are the text as they come."""
        return not self.contents and self.charset == "utf-8"

    def decode(self, body: bytes, cap: int) -> bytes:
        """Raises RequestTooLarge as soon as the text is known to be beyond the cap, InvalidValue for broken bytes."""
        for name in reversed(self.contents):
            body = DECODERS[name](body, name, cap)
        if self.charset == "utf-8":
            return body
        try:
            text = body.decode(self.charset).encode()
        except UnicodeError:
            raise InvalidValue(f"The body isn't valid {self.charset}, which its Content-Type names") from None
        if len(text) > cap:
            raise too_large(cap)
        return text


def too_large(cap: int) -> RequestTooLarge:
    return RequestTooLarge(f"The body is larger than {cap} bytes, which is the most that this server takes")


def _contents(headers: Headers) -> tuple[str, ...]:
    named = (name.strip().lower() for line in headers.getlist("content-encoding") for name in line.split(","))
    contents = tuple(name for name in named if name not in ("", "identity"))
    for name in contents:
        if name not in DECODERS:
            raise UnsupportedMediaType(f"Content-Encoding {name[:100]!r} isn't taken; send gzip, deflate or none")
    if len(contents) > MAX_CODINGS:
        raise UnsupportedMediaType(f"{len(contents)} content codings upon each other aren't taken; send one or none")
    return contents


def _charset(kind: str) -> str:
    """The one that a Content-Type names."""
    if ";" not in kind:
        return "utf-8"
    parsed = Message()
    parsed["content-type"] = kind
    name = parsed.get_content_charset("utf-8") or "utf-8"
    try:
        return CHARSETS[name.lower()]
    except KeyError:
        raise UnsupportedMediaType(f"The charset {name[:100]!r} isn't taken; send UTF-8") from None


# ---------------------------------------------------------------- content codings
def _gunzip(body: bytes, name: str, cap: int) -> bytes:
    made, rest = _inflate(body, name, cap, 16 + zlib.MAX_WBITS)
    for _ in range(MAX_MEMBERS - 1):
        if not rest.strip(b"\0"):  # some writers fill up a block with zeros
            return made
        more, rest = _inflate(rest, name, cap, 16 + zlib.MAX_WBITS, before=len(made))
        made += more
    if rest.strip(b"\0"):
        raise InvalidValue(f"The body's gzip consists of more than {MAX_MEMBERS} parts")
    return made


def _undeflate(body: bytes, name: str, cap: int) -> bytes:
    """In zlib's wrapping, as the standard has it, or bare, as some clients send it."""
    wrapped = len(body) > 1 and body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0
    made, rest = _inflate(body, name, cap, zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
    if rest:
        raise InvalidValue(f"The body goes on after the end of its {name} data")
    return made


def _inflate(body: bytes, name: str, cap: int, wbits: int, *, before: int = 0) -> tuple[bytes, bytes]:
    """One stream's bytes, and what follows it. `before`: bytes that the cap has already been spent on."""
    stream = zlib.decompressobj(wbits)
    try:
        made = stream.decompress(body, cap - before + 1)
    except zlib.error:
        raise InvalidValue(f"The body isn't valid {name} data, which its Content-Encoding names") from None
    if before + len(made) > cap:
        raise too_large(cap)
    if not stream.eof:
        raise InvalidValue(f"The body ends before its {name} data does")
    return made, stream.unused_data


DECODERS: dict[str, Callable[[bytes, str, int], bytes]] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _undeflate,
}
