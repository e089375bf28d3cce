"""Stored chat completions: their list, each one, its messages, its metadata.

Owns what may be asked of a chat completion that was made with `store: true`. Runs on the event loop. Every id is looked
up together with the API key that asks.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from server.api.chat import ENDPOINT
from server.api.context import AppContext
from server.api.input import body, own_input
from server.api.input.schema import MetadataRequest
from server.api.middleware.access import record_of
from server.api.middleware.security import owner_of
from server.api.openapi import body as documented
from server.api.openapi import errors
from server.api.output.schema import ChatList, DeletedChat, MessageList, StoredChat
from server.api.output.sse import encode
from server.api.stored.answers import StoredAnswers
from server.api.stored.paging import MOST, USUAL, Order, listing, page
from server.api.stored.respond import JSON
from server.errors import AnotherModel, AnswerNotFound
from server.journal.record import Record

STORED = (400, 404, 409, 503)
_METADATA = re.compile(r"metadata\[(.+)\]")


def routes(served: AppContext, answers: StoredAnswers, prefix: str) -> APIRouter:
    router = APIRouter(prefix=f"{prefix}/chat/completions", tags=["stored answers"])

    @router.get("", response_model=ChatList, responses=errors(400, 404, 503))
    async def list_chats(
        http: Request,
        model: Annotated[str | None, Query(description="only those of this model")] = None,
        limit: Annotated[int, Query(ge=1, le=MOST, description="completions a page")] = USUAL,
        order: Annotated[Order, Query(description="from the oldest to the newest, or back")] = "asc",
        after: Annotated[str | None, Query(description="id of the completion that the page begins after")] = None,
    ) -> Response:
        """Stored chat completions that have ended. `metadata[key]=value` lists only those that have this metadata. 404
        where none was ever stored: most who ask for this path then meant to POST."""
        record_of(http.scope).endpoint = ENDPOINT
        records: list[Record] = []
        has_more = False
        if answers.journal.path is not None:
            records, has_more = await answers.journal.page(
                "chat",
                owner_of(http.scope),
                model=model,
                metadata=_asked_metadata(http),
                after=after,
                limit=limit,
                descending=order == "desc",
                finished=True,
            )
        if not (records or http.query_params) and not await _has_chats(answers, owner_of(http.scope)):
            raise AnswerNotFound('No chat completion is stored. POST makes one, and keeps it with "store": true.')
        return _json(listing([await _shown(answers, record) for record in records], has_more))

    _add_reads(router, answers)
    _add_changes(router, answers, served.settings.max_body_bytes)
    return router


async def _has_chats(answers: StoredAnswers, owner: str) -> bool:
    """Whether chats are or were stored, those under way included."""
    if answers.has_kept_chats or answers.journal.path is None:
        return answers.has_kept_chats
    records, _ = await answers.journal.page("chat", owner, limit=1)
    return bool(records)


def _add_reads(router: APIRouter, answers: StoredAnswers) -> None:
    @router.get("/{id}", response_model=StoredChat, responses=errors(*STORED))
    async def get_chat(http: Request, id: str) -> Response:
        """A stored chat completion. As long as it is being made its choices have no `finish_reason`."""
        return _json(await _shown(answers, await _found(answers, http, id)))

    @router.get("/{id}/messages", response_model=MessageList, responses=errors(*STORED))
    async def list_messages(
        http: Request,
        id: str,
        limit: Annotated[int, Query(ge=1, le=MOST, description="messages a page")] = USUAL,
        order: Annotated[Order, Query(description="from the first to the last, or back")] = "asc",
        after: Annotated[str | None, Query(description="id of the message that the page begins after")] = None,
    ) -> Response:
        """The messages that the request sent."""
        record = await _found(answers, http, id)
        return _json(page(msgspec.json.decode(record.own_input), limit=limit, order=order, after=after))


def _add_changes(router: APIRouter, answers: StoredAnswers, cap: int) -> None:
    @router.post(
        "/{id}", response_model=StoredChat, responses=errors(*STORED), openapi_extra=documented(MetadataRequest)
    )
    async def update_chat(http: Request, id: str) -> Response:
        """Gives a stored chat completion other metadata."""
        record = await _found(answers, http, id)
        asked = body.validate(MetadataRequest, await body.read(http, cap))
        metadata = own_input.metadata(asked.metadata)
        await answers.journal.set_metadata(id, owner_of(http.scope), metadata)
        return _json(await _shown(answers, record) | {"metadata": metadata})

    @router.delete("/{id}", response_model=DeletedChat, responses=errors(404, 503))
    async def delete_chat(http: Request, id: str) -> Response:
        """Removes a stored chat completion; one that is being made ends."""
        record_of(http.scope).endpoint = ENDPOINT
        await answers.delete(id, owner_of(http.scope), "chat")
        return _json({"object": "chat.completion.deleted", "id": id, "deleted": True})


async def _found(answers: StoredAnswers, http: Request, id: str) -> Record:
    record_of(http.scope).endpoint = ENDPOINT
    return await answers.find(id, owner_of(http.scope), "chat")


def _json(made: dict[str, Any]) -> Response:
    return Response(encode(made), media_type=JSON)


def _asked_metadata(http: Request) -> dict[str, str]:
    pairs = [(_METADATA.fullmatch(name), value) for name, value in http.query_params.items()]
    return {match[1]: value for match, value in pairs if match}


async def _shown(answers: StoredAnswers, record: Record) -> dict[str, Any]:
    """The completion with its metadata, and with its error if it has failed."""
    try:
        made: dict[str, Any] = msgspec.json.decode(await answers.answer(record))
    except AnotherModel:
        made = {"id": record.id, "object": "chat.completion", "created": int(record.created), "model": record.model}
        made |= {"choices": []}
    made["metadata"] = record.metadata
    if record.error is not None:
        made["error"] = msgspec.json.decode(record.error)
    return made
