"""The items of a response while they form.

Owns what each kind of item looks like, and which events announce its beginning, parts and end. Runs on the event
loop; one item is open at a time, owned by the `ResponsesForm` that numbers its events. Never encodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from server.api.input.identity import item_id
from server.api.input.responses_input import seal
from server.api.input.responses_tools import CUSTOM, ToolIdentity, custom_input

Event = tuple[str, dict[str, Any]]  # type and members, without the sequence number
Members = dict[str, Any]


class OutputItem:
    """An item at a place of the response `answer`, whose id its own follows from; mutable until its end is sent."""

    PREFIX: ClassVar[str] = ""

    def __init__(self, answer: str, place: int) -> None:
        self.id = item_id(self.PREFIX, answer, place)
        self.text = ""
        self._place = place

    def shape(self, status: str, *, begun: bool = False) -> Members:
        """The item as the answer has it; `begun`: as it was when it was added, without its content."""
        raise NotImplementedError

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": self._place, "item": self.shape("in_progress", begun=True)}

    def add(self, text: str, logprobs: list[Members]) -> Iterator[Event]:
        """More of it."""
        raise NotImplementedError

    def end(self, status: str) -> Iterator[Event]:
        yield "response.output_item.done", {"output_index": self._place, "item": self.shape(status)}

    def _where(self) -> Members:
        return {"item_id": self.id, "output_index": self._place}


class TextItem(OutputItem):
    """An item whose content is one part of text."""

    EVENT: ClassVar[str] = ""

    def part(self) -> Members:
        raise NotImplementedError

    def more(self) -> Members:
        """Return further members of the events that carry the text."""
        return {}

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        yield "response.content_part.added", self._where() | {"content_index": 0, "part": self.part()}

    def add(self, text: str, logprobs: list[Members]) -> Iterator[Event]:
        self.text += text
        yield f"response.{self.EVENT}.delta", self._where() | {"content_index": 0, "delta": text}

    def end(self, status: str) -> Iterator[Event]:
        where = self._where() | {"content_index": 0}
        yield f"response.{self.EVENT}.done", where | {"text": self.text} | self.more()
        yield "response.content_part.done", where | {"part": self.part()}
        yield from super().end(status)


class MessageItem(TextItem):
    """Words for the user, with their log probabilities."""

    PREFIX = "msg"
    EVENT = "output_text"

    def __init__(self, answer: str, place: int) -> None:
        super().__init__(answer, place)
        self._logprobs: list[Members] = []

    def part(self) -> Members:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

    def more(self) -> Members:
        return {"logprobs": self._logprobs}

    def shape(self, status: str, *, begun: bool = False) -> Members:
        content = [] if begun else [self.part()]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def add(self, text: str, logprobs: list[Members]) -> Iterator[Event]:
        self._logprobs = self._logprobs + logprobs  # a list that an event has isn't changed
        for name, members in super().add(text, logprobs):
            yield name, members | {"logprobs": logprobs}


class ReasoningItem(TextItem):
    """A thought, sealed for the client to send back where `seals`."""

    PREFIX = "rs"
    EVENT = "reasoning_text"

    def __init__(self, answer: str, place: int, *, seals: bool) -> None:
        super().__init__(answer, place)
        self._seals = seals

    def part(self) -> Members:
        return {"type": "reasoning_text", "text": self.text}

    def shape(self, status: str, *, begun: bool = False) -> Members:
        sealed = None
        if self._seals and not begun:
            sealed = seal(self.text)
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": [] if begun else [self.part()],
            "encrypted_content": sealed,
            "status": status,
        }


class FunctionCallItem(OutputItem):
    """A call of a function, under the name and namespace that the client gave it."""

    PREFIX = "fc"

    def __init__(self, answer: str, place: int, call_id: str, tool: ToolIdentity) -> None:
        super().__init__(answer, place)
        self._call_id = call_id
        self._tool = tool

    def shape(self, status: str, *, begun: bool = False) -> Members:
        made = {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._tool.name,
            "arguments": self.text,
        }
        if self._tool.namespace is not None:
            made["namespace"] = self._tool.namespace
        return made

    def add(self, text: str, logprobs: list[Members]) -> Iterator[Event]:
        self.text += text
        yield "response.function_call_arguments.delta", self._where() | {"delta": text}

    def end(self, status: str) -> Iterator[Event]:
        call = {"arguments": self.text, "name": self._tool.name}
        yield "response.function_call_arguments.done", self._where() | call
        yield from super().end(status)


class CustomCallItem(OutputItem):
    """A call of a custom tool. Its input lies in a JSON string of the model, and is sent once that is whole."""

    PREFIX = "ctc"

    def __init__(self, answer: str, place: int, call_id: str, tool: ToolIdentity) -> None:
        super().__init__(answer, place)
        self._call_id = call_id
        self._tool = tool
        self._arguments = ""

    def shape(self, status: str, *, begun: bool = False) -> Members:
        made = {
            "id": self.id,
            "type": "custom_tool_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._tool.name,
            "input": self.text,
        }
        if self._tool.namespace is not None:
            made["namespace"] = self._tool.namespace
        return made

    def add(self, text: str, logprobs: list[Members]) -> Iterator[Event]:
        self._arguments += text
        return iter(())

    def end(self, status: str) -> Iterator[Event]:
        self.text = custom_input(self._arguments)
        if self.text:
            yield "response.custom_tool_call_input.delta", self._where() | {"delta": self.text}
        yield "response.custom_tool_call_input.done", self._where() | {"input": self.text}
        yield from super().end(status)


def call_item(answer: str, place: int, call_id: str, tool: ToolIdentity) -> OutputItem:
    """A call of the kind that the client declared."""
    if tool.kind == CUSTOM:
        return CustomCallItem(answer, place, call_id, tool)
    return FunctionCallItem(answer, place, call_id, tool)
