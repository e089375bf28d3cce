"""Bytes of a request → a validated request object.

Owns the body cap, JSON and the conversion of every fault into one of our errors. `read` runs on the event loop;
`parse` and `validate` run in the server's worker thread. Never answers a request.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from server.api.input.content_coding import Coding, too_large
from server.api.input.schema import refusal
from server.errors import InvalidValue

Model = TypeVar("Model", bound=BaseModel)
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read(request: Request, cap: int) -> bytes:
    """The whole body, decoded. Raises RequestTooLarge as soon as it is known to be beyond the cap.

    The type that `curl -d` names when no other is given is taken; pages of other sites, which can send it too,
    are held off by their Origin.
    """
    coding = Coding.of(request.headers)
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > cap:
        raise too_large(cap)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > cap:
            raise too_large(cap)
    if coding.is_plain or not body:
        return bytes(body)
    return await asyncio.to_thread(coding.decode, bytes(body), cap)


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object in the body, a byte order mark before it or not. Halves of surrogate pairs become U+FFFD: no
    tokenizer could take them."""
    if not body.strip():
        raise InvalidValue("The body is empty; it must be a JSON object")
    try:
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_no_constant)
        if _ESCAPED_SURROGATE.search(body):
            value = _mend(value)
    except UnicodeDecodeError:
        raise InvalidValue("The body isn't valid UTF-8") from None
    except RecursionError:
        raise InvalidValue("The body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise InvalidValue(f"The body isn't valid JSON: {error}") from None
    except ValueError:
        raise InvalidValue(f"The body has {too_long_integer()}") from None
    if not isinstance(value, dict):
        raise InvalidValue("The body must be a JSON object")
    return value


def validate(model: type[Model], body: bytes) -> Model:
    """The request object. Raises InvalidValue that names the field at fault."""
    try:
        return model.model_validate(parse(body))
    except ValidationError as error:
        raise refusal(error) from None
    except RecursionError:
        raise InvalidValue("The body is nested too deeply") from None


def too_long_integer() -> str:
    """What JSON has that Python reads nonetheless not, since that takes the square of the number's length."""
    return f"an integer of more than {sys.get_int_max_str_digits()} digits"


def _no_constant(name: str) -> NoReturn:
    raise InvalidValue(f"The body isn't valid JSON: {name} is no JSON number")


def _mend(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_mend(item) for item in value]
    if isinstance(value, dict):
        return {_mend(key): _mend(item) for key, item in value.items()}
    return value
