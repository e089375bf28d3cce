"""From a request that is kept to its HTTP answer.

Owns who waits for a stored answer: its own client, whose leaving ends an answer in the foreground, and other readers.
Runs on the event loop. What isn't kept goes the way that every answer goes (`api/output/respond`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.api.context import AppContext
from server.api.middleware.access import CallRecord, record_of
from server.api.middleware.security import owner_of
from server.api.output.respond import CLIENT_LEFT, PreparedRequest, asked_for, respond, unless_left
from server.api.output.responses import ResponsesForm
from server.api.output.sse import EventStream, encode
from server.api.stored.answers import StoredAnswers
from server.api.stored.run import CANCELLED, AnswerRun
from server.errors import AnotherModel, Cancellation, InvalidValue, JournalUnavailable, NotReady
from server.journal.record import Kind, Record

JSON = "application/json"


async def respond_kept(
    served: AppContext, answers: StoredAnswers, http: Request, kind: Kind, prepared: PreparedRequest, body: bytes
) -> Response:
    """The HTTP answer to a request, which is kept where it asks for that and the journal can be written. Raises
    RequestError before the first byte."""
    endpoint = record_of(http.scope).endpoint
    store = prepared.store
    if store is not None and (store.explicit or answers.journal.is_on):
        try:
            return await _kept(served, answers, http, kind, prepared, body)
        except JournalUnavailable:
            if store.explicit:
                raise
    if store is not None and isinstance(prepared.form, ResponsesForm):
        prepared.form.unstored()
    return await respond(served, http, endpoint, prepared)


async def _kept(
    served: AppContext, answers: StoredAnswers, http: Request, kind: Kind, prepared: PreparedRequest, body: bytes
) -> Response:
    call = record_of(http.scope)
    assert prepared.store is not None
    record = Record(
        id=prepared.store.identity.id,
        kind=kind,
        owner=owner_of(http.scope),
        model=served.name,
        fingerprint="",
        created=float(prepared.store.identity.created),
        background=prepared.store.background,
        stream=bool(prepared.request.stream),
        endpoint=call.endpoint,
        body=body,
        own_input=prepared.store.own_input,
        metadata=prepared.store.metadata,
    )
    run = await answers.create(prepared, record)
    served.note_unknown(call.endpoint, prepared.unknown)
    call.facts |= asked_for(prepared) | {"stored": record.id}
    if record.stream:
        frames = _noted(run, call, follow(served, run, -1))
        return EventStream(frames, run, served.settings.send_timeout_seconds)
    if kind == "response" and record.background:
        return Response(encode(run.snapshot()), media_type=JSON)
    return await _whole(http, run, call)


async def _whole(http: Request, run: AnswerRun, call: CallRecord) -> Response:
    """The answer once it has ended."""

    async def finished() -> None:
        await run.ended.wait()

    if not await unless_left(http, finished()):
        run.leave()
        call.facts["finish"] = "client left"
        return Response(status_code=CLIENT_LEFT)
    call.facts |= run.facts
    if run.error is not None:
        raise run.error
    if run.status == "cancelled":
        raise Cancellation(CANCELLED)
    if run.answer is None:
        raise NotReady("The server ends; the answer goes on with the next one.")
    return Response(run.answer, media_type=JSON)


async def follow(served: AppContext, run: AnswerRun, after: int) -> AsyncGenerator[bytes, None]:
    """Events of an answer that is being made, with larger numbers than `after`. The journal counts it as a reader."""
    with served.journal.hold(run.record.id):
        async with aclosing(run.log.follow(after, served.settings.keepalive_seconds, run.alive)) as events:
            async for data in events:
                yield data


async def _noted(run: AnswerRun, call: CallRecord, frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same events; the access log says how the answer ended."""
    try:
        async for data in frames:
            yield data
    finally:
        await frames.aclose()
        call.facts |= run.facts
        call.error = run.error


# ---------------------------------------------------------------- other readers
async def streamed(served: AppContext, answers: StoredAnswers, id: str, owner: str, after: int) -> Response:
    """The events of a stored response. Raises AnswerNotFound, and InvalidValue for one that wasn't streamed at
    first."""
    patience = served.settings.send_timeout_seconds
    run = answers.run(id, owner)
    if run is not None and run.record.kind == "response":
        check_streams(run.record)
        return EventStream(follow(served, run, after), None, patience)
    record = await answers.find(id, owner, "response")
    check_streams(record)
    if not record.is_final:
        raise NotReady("The response goes on once the server has started again.", retry_after=2)
    return EventStream(await answers.events(record, after), None, patience)


def check_streams(record: Record) -> None:
    if not record.stream:
        message = "This response can't be streamed: it wasn't created with `stream: true`."
        raise InvalidValue(message, param="stream")


async def shown(answers: StoredAnswers, id: str, owner: str) -> dict[str, Any] | bytes:
    """A response as it is now. Raises AnswerNotFound."""
    run = answers.run(id, owner)
    if run is not None and run.record.kind == "response" and (made := run.snapshot()) is not None:
        return made
    record = await answers.find(id, owner, "response")
    try:
        return await answers.answer(record)
    except AnotherModel as error:
        return bare(record, error)


def bare(record: Record, error: AnotherModel) -> dict[str, Any]:
    """What can be said of a response of another model that didn't come to its end."""
    return {
        "id": record.id,
        "object": "response",
        "created_at": int(record.created),
        "completed_at": None,
        "status": record.status,
        "background": record.background,
        "error": {"code": "server_error", "message": error.message},
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": record.metadata,
        "model": record.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "temperature": record.sequences[0].sampling.temperature,
        "top_p": record.sequences[0].sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }
