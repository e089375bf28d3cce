"""What a client sent in one request, as it is listed later.

Owns the listed form of input items and messages: each has an id and a type, and its content is parts. Runs in the
server's worker thread; pure. Never looks at what earlier requests of the conversation sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from server.api.input.identity import input_item_id
from server.api.input.responses_schema import ResponsesRequest
from server.api.input.schema import ChatRequest
from server.errors import InvalidValue

MAX_PAIRS = 16  # of metadata, as OpenAI has it
MAX_KEY = 64
MAX_VALUE = 512
Item = dict[str, Any]


def of_response(request: ResponsesRequest, answer: str, earlier: int) -> list[Item]:
    """The items of a request, without the first `earlier` ones, which an earlier response brought in."""
    if isinstance(request.input, str):
        return [listed({"role": "user", "content": request.input}, answer, 0)]
    own = request.input[earlier:]
    return [listed(_sent(item), answer, place) for place, item in enumerate(own)]


def of_chat(request: ChatRequest, answer: str) -> list[Item]:
    """The messages of a chat request."""
    sent = [_sent(message) for message in request.messages]
    return [message | {"id": f"{answer}-{place}"} for place, message in enumerate(sent)]


def _sent(item: BaseModel) -> Item:
    try:
        return item.model_dump(mode="json", by_alias=True, exclude_none=True)
    except ValueError:  # pydantic writes no more than 255 levels
        raise InvalidValue("The body is nested too deeply to be stored") from None


def listed(item: Item, answer: str, place: int) -> Item:
    """An item with its id and type; a message's text is a part."""
    made: Item = {"id": input_item_id(answer, place), "type": "message"} | item
    content = made.get("content")
    if made["type"] == "message" and isinstance(content, str):
        kind = "input_text"
        if made.get("role") == "assistant":
            kind = "output_text"
        made["content"] = [{"type": kind, "text": content}]
    return made


def metadata(given: Any) -> dict[str, str]:
    """Metadata as it is stored. Raises for any that isn't a few short texts."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or len(given) > MAX_PAIRS:
        raise InvalidValue(f"metadata: an object of at most {MAX_PAIRS} texts", param="metadata")
    for key, value in given.items():
        if len(key) > MAX_KEY or not isinstance(value, str) or len(value) > MAX_VALUE:
            message = f"metadata: keys have at most {MAX_KEY} characters, values are texts of at most {MAX_VALUE}"
            raise InvalidValue(message, param="metadata")
    return dict(given)


def encoded(items: list[Item]) -> bytes:
    return json.dumps(items, ensure_ascii=False, separators=(",", ":")).encode()
