"""The running server that a command speaks with.

Owns its address and key, the HTTP client, the reading of its event streams, and the sentence for each way in which it
may fail to answer. Runs in the main thread of a short-lived process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from server.api.middleware.security import read_keys
from server.errors import StartupError, joined_lines, one_line
from server.settings import load_from, read_sources

CONNECT_SECONDS = 5.0
_HOST = re.compile(r"[\w.:-]+")


@dataclass(frozen=True, slots=True)
class Remote:
    """A server's address without a final slash, and its key. `is_default`: no address was given."""

    url: str
    key: str | None = None
    is_default: bool = False

    def client(self, seconds: float | None) -> httpx.Client:
        """Make a client that waits `seconds` for each piece of an answer. It asks no proxy."""
        headers = {}
        if self.key:
            headers[b"authorization"] = f"Bearer {self.key}".encode()  # as text it would have to be ASCII
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)

    def unreachable(self, error: Exception) -> StartupError:
        """Say in one line that the server doesn't answer."""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return StartupError(f"no server answers at {self.url}; `marathon serve` starts one")
        return StartupError(f"the server at {self.url} doesn't answer: {one_line(error)}")


def _host(url: str) -> str:
    """Give the host of an address; empty where it has none or isn't one."""
    try:
        return httpx.URL(url).host
    except httpx.InvalidURL:
        return ""


def find(url: str | None, key: str | None) -> Remote:
    """Name the server that is meant: the given one, else the one that `marathon serve` would start with the same
    environment. Raises StartupError for settings that are wrong and for what is no address."""
    settings = load_from(read_sources({}, None))
    key = key or next(iter(read_keys(settings)), None)
    if url is None:
        return Remote(settings.base_url, key, is_default=True)
    if not url.startswith(("http://", "https://")):
        raise StartupError(f"--url {url}: an address begins with http:// or https://")
    if not _HOST.fullmatch(_host(url)):
        raise StartupError(f"--url {url}: that names no host")
    return Remote(url.rstrip("/").removesuffix("/v1"), key)


def check(response: httpx.Response) -> None:
    """Raise StartupError with the server's own sentence unless it answered well."""
    if response.is_success:
        return
    raise StartupError(f"{response.url} answers {response.status_code}: {sentence(response)}")


def sentence(response: httpx.Response) -> str:
    """Give the server's own words of why it refuses."""
    body = response.read()
    try:
        return joined_lines(str(json.loads(body)["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return joined_lines(body.decode("utf-8", "replace"))[:200] or "nothing"


def events(response: httpx.Response) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the data of each server-sent event; comments are skipped.

    Lines end at a line feed alone: httpx's own lines end at U+2028 too, which stands unescaped in JSON.
    """
    name = "message"
    rest = b""
    for piece in response.iter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            field, _, value = line.rstrip(b"\r").partition(b": ")
            if field == b"event":
                name = value.decode("utf-8", "replace")
            elif field == b"data":
                yield name, value
            elif not field:
                name = "message"


def words_of(error: Any) -> str:
    """Return the sentence of an error in a stream."""
    if isinstance(error, dict):
        error = error.get("message", error)
    return joined_lines(str(error))
