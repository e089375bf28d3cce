"""GET, DELETE and cancel of /v1/responses/{id}, and its input items.

Owns what may be asked of a stored response. Runs on the event loop. Every id is looked up together with the API key
that asks.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from server.api.context import AppContext
from server.api.input.responses_input import seal
from server.api.middleware.access import record_of
from server.api.middleware.security import owner_of
from server.api.openapi import errors, events
from server.api.output.responses_schema import DeletedResponse, InputItemList, ResponseEvent, ResponseObject
from server.api.output.sse import encode
from server.api.responses import ENDPOINT, SEALED_THOUGHTS
from server.api.stored.answers import StoredAnswers
from server.api.stored.paging import MOST, USUAL, Order, page
from server.api.stored.respond import JSON, shown, streamed
from server.errors import InvalidValue

STORED = (400, 404, 409, 503)


def routes(served: AppContext, answers: StoredAnswers, prefix: str) -> APIRouter:
    router = APIRouter(prefix=f"{prefix}/responses", tags=["stored answers"])

    @router.get("/{id}", response_model=ResponseObject, responses={200: events(ResponseEvent), **errors(*STORED)})
    async def get_response(
        http: Request,
        id: str,
        stream: Annotated[bool, Query(description="events instead of the object")] = False,
        starting_after: Annotated[
            int | None, Query(ge=0, description="with `stream`: only events with larger numbers")
        ] = None,
        include_obfuscation: Annotated[bool, Query(description="accepted; nothing is added")] = False,
    ) -> Response:
        """A stored response, whatever its status, or all of its events again and those that are still to come."""
        record_of(http.scope).endpoint = ENDPOINT
        owner = owner_of(http.scope)
        if starting_after is not None and not stream:
            raise InvalidValue("starting_after needs stream=true", param="starting_after")
        if stream:
            after = -1
            if starting_after is not None:
                after = starting_after
            return await streamed(served, answers, id, owner, after)
        return Response(_with(await shown(answers, id, owner), _included(http)), media_type=JSON)

    @router.delete("/{id}", response_model=DeletedResponse, responses=errors(404, 503))
    async def delete_response(http: Request, id: str) -> Response:
        """Removes a response; one that is being made is cancelled first."""
        record_of(http.scope).endpoint = ENDPOINT
        await answers.delete(id, owner_of(http.scope), "response")
        return Response(encode({"id": id, "object": "response", "deleted": True}), media_type=JSON)

    _add_cancel(router, answers)
    _add_input_items(router, answers)
    return router


def _add_cancel(router: APIRouter, answers: StoredAnswers) -> None:
    @router.post("/{id}/cancel", response_model=ResponseObject, responses=errors(*STORED))
    async def cancel_response(http: Request, id: str) -> Response:
        """Ends a background response; the answer is what there is of it. One that has ended stays as it is."""
        record_of(http.scope).endpoint = ENDPOINT
        owner = owner_of(http.scope)
        record = await answers.find(id, owner, "response")
        if not record.background:
            raise InvalidValue("Cannot cancel a synchronous response.", param="id")
        if (run := answers.run(id, owner)) is not None:
            await answers.cancel(run)
        return Response(_with(await shown(answers, id, owner), set()), media_type=JSON)


def _add_input_items(router: APIRouter, answers: StoredAnswers) -> None:
    @router.get("/{id}/input_items", response_model=InputItemList, responses=errors(*STORED))
    async def list_input_items(
        http: Request,
        id: str,
        limit: Annotated[int, Query(ge=1, le=MOST, description="items a page")] = USUAL,
        order: Annotated[Order, Query(description="from the first to the last item, or back")] = "desc",
        after: Annotated[str | None, Query(description="id of the item that the page begins after")] = None,
    ) -> Response:
        """The items that this request itself sent, without those of the responses before it."""
        record_of(http.scope).endpoint = ENDPOINT
        record = await answers.find(id, owner_of(http.scope), "response")
        items = msgspec.json.decode(record.own_input)
        return Response(encode(page(items, limit=limit, order=order, after=after)), media_type=JSON)


def _included(http: Request) -> set[str]:
    """Names of further members of the answer; lists come as `include=` or `include[]=`."""
    return {*http.query_params.getlist("include"), *http.query_params.getlist("include[]")}


def _with(made: dict[str, Any] | bytes, included: set[str]) -> bytes:
    """The response object as JSON; thoughts come sealed where that is asked for."""
    if SEALED_THOUGHTS in included:
        response: dict[str, Any] = msgspec.json.decode(made) if isinstance(made, bytes) else made
        response["output"] = [_sealed(item) for item in response["output"]]
        return encode(response)
    if isinstance(made, bytes):
        return made
    return encode(made)


def _sealed(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] != "reasoning":
        return item
    thought = "".join(part["text"] for part in item["content"])
    return item | {"encrypted_content": seal(thought)}
