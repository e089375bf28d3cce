"""From sequences to an HTTP answer, streamed or not.

Owns the life of one generation request: open it, follow it, leave it, and say in the access log what it was. Runs on
the event loop. The shape of the answer is the protocol's, given as a `ProtocolFormat`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from server.api.context import AppContext, ServedModel
from server.api.input import body
from server.api.input.identity import StoreOptions
from server.api.input.schema import GenerationRequest, StreamOptions
from server.api.input.sequences import Bounds
from server.api.middleware.access import CallRecord, record_of
from server.api.output.choices import Choice, Reply
from server.api.output.sse import KEEPALIVE, PREFILL, EventStream, encode
from server.errors import InternalError, RequestError
from server.ipc.sequence import TokenSequence
from server.text.detokenizer import Piece, TextState

MOST_NAMES = 1000  # of unknown fields that another process reports
MOST_CHARACTERS = 200  # of such a name
SCORED_AT_ONCE = 100  # tokens whose log probabilities are written on the event loop, in some milliseconds
CLIENT_LEFT = 499  # for the log; no client reads it

log = logging.getLogger("marathon.api")


class ProtocolFormat(Protocol):
    """What the answer looks like on the wire. Of a stream it makes everything, comments alone are given to it."""

    def first(self, choices: list[Choice]) -> bytes:
        """Events before there is any news."""

    def chunks(self, choice: Choice, pieces: list[Piece]) -> bytes:
        """Return events of the new pieces of one choice, and its end where `choice.finish` says so."""

    def alive(self, comment: bytes) -> bytes:
        """A sign of life for a stream on which nothing has been shown for a while: the comment, and what the
        protocol's clients need besides."""

    def last(self, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        """Events behind the last news, to the stream's end."""

    def failed(self, error: RequestError, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        """The same for an answer that can't go on."""

    def keep(self, choice: Choice, pieces: list[Piece]) -> None:
        """Takes note of new pieces of one choice for the plain answer."""

    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The plain answer."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that has been understood; all that is left is to do it.

    Attributes:
        texts: one a sequence.
        unknown: fields that the schema doesn't have.
        store: how the answer is kept, if it is.
    """

    request: GenerationRequest
    sequences: list[TokenSequence]
    texts: list[TextState]
    form: ProtocolFormat
    unknown: list[str]
    store: StoreOptions | None = None

    def lean(self) -> PreparedRequest:
        """The same for another process: without what was sent and has been read."""
        kinds = (bool, int, float, StreamOptions)
        kept: dict[str, Any] = {name: value for name, value in vars(self.request).items() if isinstance(value, kinds)}
        names = [name[:MOST_CHARACTERS] for name in self.unknown[:MOST_NAMES]]
        return replace(self, request=type(self.request).model_construct(**kept), unknown=names)


async def answer(
    served: AppContext, http: Request, endpoint: str, prepare: Callable[[ServedModel, bytes, Bounds], PreparedRequest]
) -> Response:
    """The HTTP answer to a request whose body `prepare` understands, in the worker thread or in another process.
    Raises RequestError before the first byte."""
    content, bounds = await received(served, http, endpoint)
    return await respond(served, http, endpoint, await served.prepare(prepare, content, bounds))


async def received(served: AppContext, http: Request, endpoint: str) -> tuple[bytes, Bounds]:
    """The body of a request for text, and what the model has room for. Raises RequestError."""
    record_of(http.scope).endpoint = endpoint
    content = await body.read(http, served.settings.max_body_bytes)
    return content, Bounds.of(await served.known(), served.settings)


async def respond(served: AppContext, http: Request, endpoint: str, prepared: PreparedRequest) -> Response:
    """The HTTP answer. Raises RequestError before the first byte."""
    record = record_of(http.scope)
    served.note_unknown(endpoint, prepared.unknown)
    record.facts |= asked_for(prepared)
    live = served.supervisor.open(prepared.sequences, endpoint=endpoint)
    keeps_ids = bool(prepared.request.return_token_ids)
    reply = Reply(live, prepared.texts, served.settings.keepalive_seconds, keeps_ids=keeps_ids)
    if prepared.request.stream:
        frames = stream(reply, prepared, record)
        return EventStream(frames, live, served.settings.send_timeout_seconds)
    if await unless_left(http, collect(reply, record, prepared)):
        return Response(await _written(reply, prepared), media_type="application/json")
    record.facts["finish"] = "client left"
    return Response(status_code=CLIENT_LEFT)


async def _written(reply: Reply, prepared: PreparedRequest) -> bytes:
    """The plain answer. One with many log probabilities is written in a thread, for that takes longer than a stream may
    wait."""
    work = partial(_encoded, prepared.form, reply.choices, reply.usage(prepared.request.n or 1))
    scored = sum(len(choice.scored) + len(choice.prompt_logprobs or ()) for choice in reply.choices)
    if scored > SCORED_AT_ONCE:
        return await asyncio.to_thread(work)
    return work()


def _encoded(form: ProtocolFormat, choices: list[Choice], usage: dict[str, Any]) -> bytes:
    return encode(form.whole(choices, usage))


async def collect(reply: Reply, record: CallRecord, prepared: PreparedRequest) -> None:
    async with reply.live:
        try:
            await reply.collect(prepared.form.keep)
        finally:
            record.facts |= outcome(reply, prepared)


async def stream(reply: Reply, prepared: PreparedRequest, record: CallRecord) -> AsyncGenerator[bytes, None]:
    """Events as they form, and a sign of life where nothing was shown for too long. After a failure the stream ends as
    the form says it."""
    form = prepared.form
    async with reply.live:
        try:
            if begin := form.first(reply.choices):
                yield begin
            while reply.is_open:
                data = b"".join([form.chunks(choice, pieces) for choice, pieces in await reply.news()])
                if reply.showed(bool(data)):
                    yield form.alive(sign_of_life(reply))
                elif data:
                    yield data
            yield form.last(reply.choices, reply.usage(prepared.request.n or 1))
        except RequestError as error:
            reply.live.outcome = "error"
            record.error = error
            yield form.failed(error, reply.choices, reply.usage(prepared.request.n or 1))
        except Exception:
            reply.live.outcome = "error"
            log.exception("request %s failed in its stream", record.request_id)
            fault = InternalError("The server made a mistake; its log knows more.")
            yield form.failed(fault, reply.choices, reply.usage(prepared.request.n or 1))
        finally:
            record.facts |= outcome(reply, prepared)


def sign_of_life(reply: Reply) -> bytes:
    """A comment for a stream on which nothing has been shown for a while."""
    progress = reply.live.prefill_progress
    if progress:
        return PREFILL % (progress.done, progress.total)
    return KEEPALIVE


async def unless_left(http: Request, work: Coroutine[Any, Any, None]) -> bool:
    """Does the work unless the client leaves first; False if it did."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            return False
        await doing
        return True
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


# ---------------------------------------------------------------- the access log
def asked_for(prepared: PreparedRequest) -> dict[str, Any]:
    """What was asked for, with the defaults filled in."""
    first = prepared.sequences[0]
    draws = first.sampling
    facts = {
        "stream": bool(prepared.request.stream),
        "choices": len(prepared.sequences),
        "max_tokens": first.max_tokens,
        "temperature": draws.temperature,
        "top_p": draws.top_p,
        "top_k": draws.top_k,
        "min_p": draws.min_p,
        "seed": draws.seed,
    }
    penalties = {name: getattr(draws, name) for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")}
    return facts | {name: value for name, value in penalties.items() if value not in (0.0, 1.0)}


def outcome(reply: Reply, prepared: PreparedRequest) -> dict[str, Any]:
    """What came of it."""
    usage = reply.usage(prepared.request.n or 1)
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "finish": ",".join(choice.finish or "unfinished" for choice in reply.choices[:4]),
    }
