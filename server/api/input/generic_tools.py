"""Tools for models whose chat template knows none.

Owns a plain format for them: the functions are described in the system message, a call is JSON between tags, and the
tools and calls of the history are spelled out as text. Runs in the server's worker thread; pure. Models with a format
of their own come here only if their template leaves calls out of the history.
"""

from __future__ import annotations

import json
from typing import Any

from server.text.templates.turn import OWN, Message
from server.text.tokenizer import Tokenizer, ToolFormat

Tools = list[dict[str, Any]] | None

START = "<tool_call>"
END = "</tool_call>"
PARSER = "json_tools"  # mlx-lm's name for calls of this form

_INSTRUCTIONS = """You can call these functions:
{functions}

To call one, answer with its name and a JSON object of arguments, in this form and nothing else:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def with_format(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, with the plain format if its model has none."""
    if tokenizer.tool_format is not None:
        return tokenizer
    return tokenizer.with_tools(ToolFormat(PARSER, START, END, True, _parse))


def is_ours(form: ToolFormat | None) -> bool:
    return form is not None and form.parse is _parse


def _parse(text: str, tools: list[dict[str, Any]] | None) -> Any:
    return json.loads(text)


def rewritten(tokenizer: Tokenizer, messages: list[Message], tools: Tools) -> tuple[list[Message], Tools]:
    """The conversation and the tools for the model's template; text instead of what that would leave out."""
    form = tokenizer.tool_format
    if is_ours(form):
        return spelled_out(messages, tools), None
    if form is not None and not tokenizer.able.calls:
        messages = with_calls_as_text(messages, form.start, form.end, results=tokenizer.able.results)
    return messages, tools


def spelled_out(messages: list[Message], tools: Tools) -> list[Message]:
    """The same conversation in words that any template takes, and what may be called said in its system message."""
    plain = with_calls_as_text(messages, START, END, results=False)
    if not tools:
        return plain
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    words = _INSTRUCTIONS.format(functions=functions)
    if plain[0]["role"] in ("system", "developer"):
        first = plain[0] | {"content": f"{plain[0]['content']}\n\n{words}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": words}, *plain]


def with_calls_as_text(messages: list[Message], start: str, end: str, *, results: bool) -> list[Message]:
    """The same conversation with its calls as text between these tags; the tools' messages stay if the template shows
    `results`."""
    return [_plain(message, start, end, results) for message in messages]


def _plain(message: Message, start: str, end: str, results: bool) -> Message:
    if message["role"] in ("tool", "function") and not results:
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [_call(call["function"]) for call in message.get("tool_calls") or []]
    if not calls:
        return message
    said = []
    if message["content"]:
        said = [_part(message["content"] + "\n")]
    for number, call in enumerate(calls):
        between = ""
        if number:
            between = "\n"
        said += [_tag(f"{between}{start}\n"), _part(call), _tag(f"\n{end}")]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return kept | {"content": said}


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _tag(text: str) -> dict[str, Any]:
    return _part(text) | {OWN: True}


def _call(function: dict[str, Any]) -> str:
    """A call as JSON, its arguments as they were written. Arguments that are no JSON are shown as the text they are."""
    arguments = function["arguments"]
    written = json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, str) and _is_json(arguments or "{}"):
        written = arguments.strip() or "{}"
    return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {written}}}'


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
