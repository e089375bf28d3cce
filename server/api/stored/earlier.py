"""A response's input with what came before it put in: earlier items, and items that are named by their ids.

Owns the reading of `previous_response_id` and of item references. Works on JSON as it came, so that what is stored can
be understood again without the earlier response. Runs on the event loop, in a thread for large bodies.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from server.api.context import within_depth
from server.api.input.body import parse
from server.api.input.identity import ItemPlace
from server.api.input.large_requests import LARGE_BYTES
from server.api.stored.answers import StoredAnswers
from server.errors import AnswerNotFound, InvalidValue, PreviousNotFound, RequestError
from server.journal.record import Record

BOM = b"\xef\xbb\xbf"
MARKS = (b"previous_response_id", b"item_reference", b"\\u")  # either may be spelled with escapes
CALLS = frozenset({"function_call", "custom_tool_call"})
_PLACE = re.compile(r"\binput\[(\d+)\]")

Items = list[msgspec.Raw]
Result = TypeVar("Result")


class _Reference(msgspec.Struct):
    """What a reference to an item has; of any other item this is read and nothing else."""

    type: str
    id: str


_decode_members = partial(within_depth, msgspec.json.Decoder(dict[str, msgspec.Raw]).decode)
_decode_items = partial(within_depth, msgspec.json.Decoder(Items).decode)
_decode_reference = partial(within_depth, msgspec.json.Decoder(_Reference).decode)
encode = msgspec.json.Encoder().encode


async def resolved(answers: StoredAnswers, content: bytes, owner: str) -> tuple[bytes, int]:
    """The body with all its items, and how many of them are those of the previous response.

    Raises PreviousNotFound, and InvalidValue for one that is still being made and for a body that isn't JSON. A body
    with members of other types is returned as it is: it's refused where it is read.
    """
    if not any(mark in content for mark in MARKS):
        return content, 0
    members = await _members(content)
    try:
        previous = msgspec.json.decode(members.get("previous_response_id", b"null"), type=str | None)
        own = items_of(members.get("input", b"null"))
    except msgspec.MsgspecError:
        return content, 0
    named = [await _named(answers, item, owner) for item in own]
    earlier: Items = []
    if previous is not None:
        earlier = await _before(answers, previous, owner)
    if named == own and previous is None:
        return content, 0
    whole = members | {"input": msgspec.Raw(encode([*earlier, *named]))}
    return await _somewhere(content, lambda: encode(whole)), len(earlier)


async def _members(content: bytes) -> dict[str, msgspec.Raw]:
    """A body's members as they were sent. Raises InvalidValue."""
    try:
        return await _somewhere(content, lambda: _decode_members(content.removeprefix(BOM)))
    except msgspec.MsgspecError:
        return await _somewhere(content, lambda: within_depth(_mended, content))


def _mended(content: bytes) -> dict[str, msgspec.Raw]:
    """The members of a body in which halves of surrogate pairs stand, which msgspec doesn't read."""
    try:
        return _decode_members(json.dumps(parse(content), ensure_ascii=False).encode())
    except msgspec.MsgspecError as error:
        raise InvalidValue(f"The body isn't valid JSON: {error}") from None


async def _somewhere(content: bytes, work: Callable[[], Result]) -> Result:
    if len(content) > LARGE_BYTES:
        return await asyncio.to_thread(work)
    return work()


def items_of(given: msgspec.Raw | bytes) -> Items:
    """The items of a request's `input`. Raises MsgspecError."""
    if bytes(given).lstrip().startswith(b'"'):
        return [msgspec.Raw(b'{"role":"user","content":' + bytes(given) + b"}")]
    return _decode_items(given)


async def _before(answers: StoredAnswers, id: str, owner: str) -> Items:
    """The input and the output of a stored response."""
    try:
        record = await answers.find(id, owner, "response")
    except AnswerNotFound:
        message = f"Previous response with id {id[:100]!r} not found."
        raise PreviousNotFound(message, param="previous_response_id") from None
    if not record.is_final:
        message = f"Response {id} is {record.status.replace('_', ' ')}: nothing can go on from it until it has ended."
        raise InvalidValue(message, param="previous_response_id")
    members = await _members(record.body)
    output = await _output(answers, record)
    return [*items_of(members["input"]), *(msgspec.Raw(encode(item)) for item in output if not _is_stump(item))]


async def _output(answers: StoredAnswers, record: Record) -> Sequence[dict[str, Any]]:
    made: dict[str, Any] = msgspec.json.decode(await answers.answer(record))
    output: list[dict[str, Any]] = made["output"]
    return output


def _is_stump(item: dict[str, Any]) -> bool:
    """A call that was cut off was never made."""
    return item["type"] in CALLS and item["status"] != "completed"


async def _named(answers: StoredAnswers, item: msgspec.Raw, owner: str) -> msgspec.Raw:
    """The item that a reference names; any other item, and a reference to nothing, as it is."""
    if b"item_reference" not in bytes(item):
        return item
    try:
        given = _decode_reference(item)
    except msgspec.MsgspecError:
        return item
    if given.type != "item_reference":
        return item
    found = await _lying(answers, given.id, owner)
    if found is None:
        return item
    return msgspec.Raw(encode(found))


async def _lying(answers: StoredAnswers, id: str, owner: str) -> dict[str, Any] | None:
    """The stored item of this id."""
    place = ItemPlace.of(id)
    if place is None:
        return None
    try:
        record = await answers.find(place.answer, owner, "response")
    except AnswerNotFound:
        return None
    items: Sequence[dict[str, Any]] = msgspec.json.decode(record.own_input)
    if not place.is_input:
        items = await _output(answers, record)
    return next((item for item in items if item.get("id") == id), None)


async def shifted(preparing: Awaitable[Result], earlier: int) -> Result:
    """Return what `preparing` gives. Its error counts the client's own items alone, without the `earlier` ones."""
    try:
        return await preparing
    except RequestError as error:
        if earlier:
            error.message = _PLACE.sub(lambda found: _own(found, earlier), error.message)
            error.param = error.param and _PLACE.sub(lambda found: _own(found, earlier), error.param)
        raise


def _own(found: re.Match[str], earlier: int) -> str:
    place = int(found[1]) - earlier
    if place < 0:
        return found[0]
    return f"input[{place}]"
