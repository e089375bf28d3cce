"""A request for the next turn of a conversation, in no protocol's words.

Owns the form that every protocol's request becomes: Chat Completions, Responses and Messages differ in how they say
it, never in what it means. Runs in the server's worker thread; immutable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.api.input.response_format import AnswerForm
from server.api.input.schema import GenerationRequest
from server.api.input.tools import ToolOptions
from server.text.templates.turn import Message


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said, and how the answer is to be made.

    Attributes:
        messages: oldest first, in the words of chat templates: role, content (a text), reasoning_content, tool_calls,
            tool_call_id. Each stands where it was said, system messages too; consecutive thoughts, texts and calls of
            the assistant's are one message.
        tools: what may be called.
        form: what the answer must look like.
        sampling: how tokens are drawn, and whether the answer is streamed.
        max_tokens: most tokens of the answer; None: what fits the context.
        logprobs: alternatives a token that are reported, -1: nothing is.
        effort: how much the model should think, for templates that have a word for it.
        variables: further variables for the template.
        thinks: the model may think at all.
        continues: the answer goes on with the last message.
        begins: the prompt ends where an answer begins.
        param: where the messages stand in the request.
    """

    messages: Sequence[Message]
    sampling: GenerationRequest
    tools: ToolOptions = field(default_factory=ToolOptions)
    form: AnswerForm | None = None
    max_tokens: int | None = None
    logprobs: int = -1
    effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    thinks: bool = True
    continues: bool = False
    begins: bool = True
    param: str = "messages"

    def call_ids(self) -> Iterator[str]:
        """The ids that calls and results have."""
        for message in self.messages:
            yield from (call["id"] for call in message.get("tool_calls") or () if call.get("id"))
            if message.get("tool_call_id"):
                yield message["tool_call_id"]
