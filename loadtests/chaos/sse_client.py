"""One request and all that its client sees of the answer, token by token.

Owns the connection while the answer comes. Runs on the event loop of a load test; the answer is parsed as it arrives,
so this is for tests that read the text, not for those that measure throughput (`loadtests.bench.client`). It judges
nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

_LINE_LIMIT = 1 << 24  # bytes; a plain answer with log probabilities is one line
ALTERNATIVES = 5  # log probabilities asked for with each token


@dataclass(eq=False, slots=True)
class Account:
    """What a client saw. Written by `ask` while the answer comes; anybody may look meanwhile.

    Attributes:
        arrivals: when each piece of text came, and how many tokens there were after it.
        error: the error object, of the status or of an event.
    """

    body: dict[str, Any]
    status: int = 0
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    comments: int = 0
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    done: bool = False  # streamed: [DONE] came; plain: the whole answer did
    headers: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=monotonic)
    ended: float = 0.0

    @property
    def ok(self) -> bool:
        """It ended as an answer should."""
        return self.done and self.error is None and self.finish in ("stop", "length")

    def moved_since(self, time: float) -> bool:
        """Some text came after `time`, or it is over."""
        return bool(self.ended) or bool(self.arrivals and self.arrivals[-1][0] > time)

    def gap_at(self, time: float) -> float | None:
        """The silence around `time`; None unless there was text before and after it."""
        before = [at for at, _ in self.arrivals if at <= time]
        after = [at for at, _ in self.arrivals if at > time]
        return after[0] - before[-1] if before and after else None

    def trouble(self) -> str:
        """In words, how it ended."""
        if self.error is not None:
            return f"error {self.error.get('code')}: {self.error.get('message')}"
        return f"status {self.status}, finish {self.finish}, {'whole' if self.done else 'cut off'}"


def completion(prompt: str | list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A body that is answered to its last token and tells enough to compare it with another answer."""
    stream = {"stream": True, "stream_options": {"include_usage": True}} if fields.get("stream", True) else {}
    known = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": ALTERNATIVES}
    return known | stream | fields


async def ask(port: int, body: Mapping[str, Any], account: Account | None = None) -> Account:
    """The answer to one completion request. Cancelling closes the connection."""
    account = account or Account(dict(body))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LINE_LIMIT)
    try:
        account.started = monotonic()
        writer.write(_request(port, body))
        await _read_head(reader, account)
        await (_read_events if body.get("stream") and account.status == 200 else _read_whole)(reader, account)
    except (OSError, asyncio.IncompleteReadError):
        pass  # `done` says that it was cut off
    finally:
        account.ended = monotonic()
        writer.close()
    return account


def _request(port: int, body: Mapping[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


async def _read_head(reader: asyncio.StreamReader, account: Account) -> None:
    status = await reader.readline()
    account.status = int(status.split()[1]) if status else 0
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode().partition(":")
        account.headers[name.lower()] = value.strip()


async def _read_whole(reader: asyncio.StreamReader, account: Account) -> None:
    content = json.loads(await reader.readexactly(int(account.headers.get("content-length", "0"))))
    account.error = content.get("error")
    if account.status == 200:
        _take(content, account)
        account.done = True


async def _read_events(reader: asyncio.StreamReader, account: Account) -> None:
    """Lines of the chunks' framing are passed over: an event never begins with a digit."""
    while line := await reader.readline():
        if line.startswith(b": "):
            account.comments += 1
        elif line.startswith(b"data: [DONE]"):
            account.done = True
            return
        elif line.startswith(b"data: "):
            _take(json.loads(line[6:]), account)
            if account.error is not None:
                return


def _take(event: dict[str, Any], account: Account) -> None:
    account.error = event.get("error")
    account.usage = event.get("usage") or account.usage
    for choice in event.get("choices", ()):
        account.text += choice["text"]
        account.finish = choice["finish_reason"] or account.finish
        if scores := choice.get("logprobs"):
            account.tokens += scores["tokens"]
            account.logprobs += scores["token_logprobs"]
            account.top += scores["top_logprobs"]
        account.arrivals.append((monotonic(), len(account.tokens)))
