"""Which of a tokenizer's added tokens are control in a chat, whatever their flags say.

Owns that choice: what the chat template writes, and the tags that structure an answer. The flag `special` isn't
enough: some models' role markers lack it. Other added tokens, such as names of HTML elements, are text. Runs once,
while a tokenizer is loaded. Never encodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_WORD = "x"
_CALL = {"id": "callabcde", "type": "function", "function": {"name": _WORD, "arguments": {_WORD: _WORD}}}
_TOOL = {"type": "function", "function": {"name": _WORD, "description": _WORD, "parameters": {"type": "object"}}}
_USER = {"role": "user", "content": _WORD}
_ANSWER = {"role": "assistant", "content": _WORD}
_RESULT = {"role": "tool", "content": _WORD, "name": _WORD, "tool_call_id": _CALL["id"]}
_SAMPLES: list[list[dict[str, Any]]] = [
    [_USER, _ANSWER, _USER],
    [{"role": "system", "content": _WORD}, _USER],
    [_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, _RESULT],
    [_USER, {"role": "assistant", "content": _WORD, "reasoning_content": _WORD}],
]


def markers(added: Mapping[int, str], texts: Iterable[str]) -> frozenset[int]:
    """Ids of the added tokens in some texts. `added`: each one's text. Blanks are never control."""
    whole = "\0".join(texts)
    words = {text: token for token, text in added.items() if text.strip() and text in whole}
    longest_first = sorted(words, key=len, reverse=True)
    found = []
    if words:
        found = re.findall("|".join(map(re.escape, longest_first)), whole)
    return frozenset(words[word] for word in found)


def samples(render: Callable[..., str]) -> Iterator[str]:
    """What a template makes of small conversations: markers may be put together of pieces. Those that it refuses are
    left out."""
    for messages in _SAMPLES:
        for tools in (None, [_TOOL]):
            try:
                yield render(messages, tools=tools, add_generation_prompt=messages[-1]["role"] != "assistant")
            except Exception:  # a template can raise whatever Python can
                continue
