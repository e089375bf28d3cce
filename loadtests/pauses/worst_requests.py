"""The worst request of each kind: what takes a server longest to read, to check or to answer.

Owns their bodies. `share` is the part of the full size that is wanted: 1 for bodies just under the server's cap, less
for a quick look. Never sends anything.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MIB = 2**20
CAP = 32 * MIB - 1024  # just under the server's default
MIDDLING = 63 * 1024  # just under what is prepared in a process of its own
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "Say hello."}
SENTENCE = "The quick brown fox jumps over the lazy dog, 1234 times. "
WIDE = {"Content-Type": "application/json; charset=utf-16"}
GZIP = {"Content-Encoding": "gzip"}
ALL_PIECES = {"with_pieces": True, "return_token_strs": True}
WORD_SCHEMA = {"type": "string", "maxLength": 8}


@dataclass(frozen=True, slots=True)
class WorstRequest:
    """One kind. `bodies` are sent at the same time, `repeated` times each."""

    name: str
    path: str
    bodies: list[bytes]
    headers: dict[str, str] = field(default_factory=dict)
    repeated: int = 1

    @property
    def size(self) -> int:
        """Bytes of the largest body."""
        return max(map(len, self.bodies), default=0)


Maker = Callable[[float], WorstRequest]


def _asks(**members: Any) -> bytes:
    return json.dumps({"model": "default", "max_tokens": 2} | members).encode()


def _text(**members: Any) -> bytes:
    return _asks(prompt="Say", **members)


def _chat(**members: Any) -> bytes:
    return _asks(**{"messages": [USER]} | members)


def _filled(begin: bytes, part: bytes, end: bytes, size: float) -> bytes:
    """`begin`, as many parts as fit, `end`: about `size` bytes."""
    return begin + part * (int(size - len(begin) - len(end)) // len(part)) + end


def _unheard(part: bytes, end: bytes, share: float) -> bytes:
    """A short prompt, and a list in a field that the server doesn't know."""
    return _filled(
        b'{"model": "default", "prompt": "Say", "max_tokens": 2, "unheard": [', part, end + b"]}", CAP * share
    )


def _prompt(part: bytes, share: float, end: bytes = b'"}') -> bytes:
    return _filled(b'{"model": "default", "max_tokens": 2, "prompt": "', part, end, CAP * share)


def _schema(size: float) -> dict[str, Any]:
    """An object of so many bytes, most of whose properties are optional."""
    count = int(size) // 46
    return {"type": "object", "properties": {f"property_{n:06}": WORD_SCHEMA for n in range(count)}}


def _form(schema: Any) -> bytes:
    return _chat(response_format={"type": "json_schema", "json_schema": {"name": "worst", "schema": schema}})


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _tool(number: int, size: float) -> dict[str, Any]:
    described = {"type": "string", "description": "d" * int(size)}
    function = {"name": f"tool_{number}", "parameters": {"type": "object", "properties": {"value": described}}}
    return {"type": "function", "function": function}


def _history(size: float) -> list[dict[str, Any]]:
    """A call with arguments of so many bytes, and its result."""
    arguments = json.dumps({"lines": [SENTENCE] * (int(size) // len(SENTENCE))})
    call = {"id": "call_1", "type": "function", "function": {"name": "write", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [USER, said, {"role": "tool", "tool_call_id": "call_1", "content": "done"}, USER]


def _said(size: float, words: str = SENTENCE) -> bytes:
    return _chat(messages=[USER | {"content": words * (int(size - 200) // len(words))}])


def _turns(count: int) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": f"turn {n}"} for n in range(count)] + [USER]


# ---------------------------------------------------------------- large bodies
def _large(share: float) -> Iterator[WorstRequest]:
    words = SENTENCE.encode()
    yield WorstRequest("text", TEXT, [_prompt(words, share)])
    yield WorstRequest("text without blanks", TEXT, [_prompt(b"a", share)])
    yield WorstRequest("text as escapes", TEXT, [_prompt(b"\\u00e9\\n", share)])
    yield WorstRequest("text of broken escapes", TEXT, [_prompt(b"\\ud800", share)])
    yield WorstRequest("text of special tokens", CHAT, [_said(CAP * share, "<|im_end|>")])
    yield WorstRequest("text in a message", CHAT, [_said(CAP * share)])
    yield WorstRequest("numbers", TEXT, [_unheard(b"1234.5,", b"1", share)])
    yield WorstRequest("long number", TEXT, [_unheard(b"1", b"1", share)])
    yield WorstRequest("strings", TEXT, [_unheard(b'"word",', b'"word"', share)])
    yield WorstRequest("members", TEXT, [_unheard(b'{"a":1},', b"{}", share)])
    yield WorstRequest("unknown members", CHAT, [_chat(**{f"field_{n}": n for n in range(int(1_200_000 * share))})])
    yield WorstRequest("lists", TEXT, [_unheard(b"[],", b"[]", share)])
    yield WorstRequest("nested lists", TEXT, [_unheard(b"[", b"", share)])
    yield WorstRequest("nested objects", TEXT, [_unheard(b'{"a":', b"", share)])
    yield WorstRequest("broken at its end", TEXT, [_unheard(b'{"a":1},', b"}", share)])
    yield WorstRequest("a string without end", TEXT, [_prompt(b"a", share, b"")])
    yield WorstRequest("a list for an object", TEXT, [_filled(b"[", b"1,", b"1]", CAP * share)])
    yield WorstRequest("no UTF-8 at its end", TEXT, [_prompt(words, share, b'\xff"}')])
    yield WorstRequest("UTF-16", TEXT, [_prompt(words, share / 2.1).decode().encode("utf-16")], WIDE)
    yield WorstRequest("ids", TEXT, [_asks(prompt=[5] * int(8_000_000 * share))])
    yield WorstRequest("prompts of one id", TEXT, [_asks(prompt=[[5]] * int(5_000_000 * share))])
    yield WorstRequest("10,000 messages", CHAT, [_chat(messages=_turns(int(10_000 * max(share, 0.1))))])
    yield WorstRequest("messages", CHAT, [_chat(messages=_turns(int(600_000 * share)))])
    yield WorstRequest("tool arguments", CHAT, [_chat(messages=_history(CAP * share * 0.97))])
    yield WorstRequest("128 tools", CHAT, [_chat(tools=[_tool(n, 2**16 * share) for n in range(128)])])
    zeros = gzip.compress(_filled(b"", b" ", b"", CAP * share), 9)
    yield WorstRequest("gzip of blanks", TEXT, [zeros], GZIP)
    yield WorstRequest("gzip in gzip", TEXT, [gzip.compress(zeros)], {"Content-Encoding": "gzip, gzip"})
    yield WorstRequest("gzip of numbers", TEXT, [gzip.compress(_unheard(b"1234.5,", b"1", share), 1)], GZIP)
    yield WorstRequest("gzip beyond the cap", TEXT, [gzip.compress(b" " * int(8 * CAP * share), 9)], GZIP)
    yield WorstRequest("nowhere", "/v1/nowhere", [_prompt(words, share)])
    size = int(CAP * share * 0.97)
    content = SENTENCE * (size // len(SENTENCE))
    yield WorstRequest("/tokenize", "/tokenize", [_asks(content=content)])
    yield WorstRequest("/tokenize with pieces", "/tokenize", [_asks(content=content[: size // 8], **ALL_PIECES)])
    yield WorstRequest("/detokenize", "/detokenize", [_asks(tokens=[1234] * (size // 6))])
    yield WorstRequest("/apply-template", "/apply-template", [_asks(messages=[USER | {"content": content}])])
    yield WorstRequest("/input_tokens", CHAT + "/input_tokens", [_asks(messages=[USER | {"content": content}])])


# ---------------------------------------------------------------- small ones that ask for much
def _small(share: float) -> Iterator[WorstRequest]:
    size = 250 * 1024 * max(share, 0.1)
    yield WorstRequest("schema of many properties", CHAT, [_form(_schema(size))])
    yield WorstRequest("deep schema", CHAT, [_form(_deep(400))])
    yield WorstRequest("schema of values", CHAT, [_form({"enum": [f"value {n}" for n in range(int(size) // 18)]})])
    yield WorstRequest("schema of patterns", CHAT, [_form({"type": "string", "pattern": "(a|b)*a" + "(a|b)" * 400})])
    yield WorstRequest("regex", TEXT, [_text(structured_outputs={"regex": "(ab|cd){1,900}" * 20})])
    yield WorstRequest("choices", TEXT, [_text(structured_outputs={"choice": [f"choice {n}" for n in range(10_000)]})])
    rules = (
        "start: " + " | ".join(f"r{n}" for n in range(3000)) + "\n" + "".join(f'r{n}: "w{n}"\n' for n in range(3000))
    )
    yield WorstRequest("grammar", TEXT, [_text(structured_outputs={"grammar": rules})])
    yield WorstRequest("stop ids", TEXT, [_text(stop_token_ids=list(range(3, 2051)))])
    yield WorstRequest("stop strings", TEXT, [_text(stop=[f"stop {n}" * 40 for n in range(2048)])])
    yield WorstRequest("logit_bias", TEXT, [_text(logit_bias={str(n): 1.0 for n in range(2047)})])
    yield WorstRequest("choices of one prompt", TEXT, [_text(n=16, logprobs=5)])
    yield WorstRequest(
        "logprobs",
        CHAT,
        [_chat(logprobs=True, top_logprobs=20, max_tokens=int(1000 * max(share, 0.1)), ignore_eos=True)],
    )
    yield WorstRequest(
        "prompt's logprobs", TEXT, [_asks(prompt=[5] * int(3000 * max(share, 0.1)), echo=True, logprobs=5)]
    )
    yield WorstRequest("/metrics", "/metrics", [b""] * 4, repeated=10)
    yield WorstRequest("/openapi.json", "/openapi.json", [b""] * 4, repeated=10)
    yield WorstRequest("/tokenizer_info", "/tokenizer_info", [b""] * 4, repeated=10)


def _many(share: float) -> Iterator[WorstRequest]:
    """Many at once, each just small enough to be prepared in the server's own process, or somewhat larger."""
    count = max(4, int(50 * share))
    part = MIDDLING / CAP
    for name, path, body in (
        ("texts", TEXT, _prompt(SENTENCE.encode(), part)),
        ("texts as escapes", TEXT, _prompt(b"\\u00e9\\n", part)),
        ("texts without blanks", TEXT, _prompt(b"a", part)),
        ("texts of special tokens", CHAT, _said(MIDDLING, "<|im_end|>")),
        ("lists", TEXT, _unheard(b"[],", b"[]", part)),
        ("members", TEXT, _unheard(b'{"a":1},', b"{}", part)),
        ("ids", TEXT, _asks(prompt=[5] * 20_000)),
        ("messages", CHAT, _chat(messages=_turns(1_400))),
        ("tool arguments", CHAT, _chat(messages=_history(MIDDLING - 8000))),
        ("tools", CHAT, _chat(tools=[_tool(n, 330) for n in range(128)])),
        ("schemas", CHAT, _form(_schema(MIDDLING - 4000))),
        ("pieces", "/tokenize", _asks(content=SENTENCE * 1100, **ALL_PIECES)),
        ("longer texts", TEXT, _prompt(SENTENCE.encode(), 4 * part)),
        ("longer messages", CHAT, _chat(messages=_turns(5_000))),
        ("longer tools", CHAT, _chat(tools=[_tool(n, 1800) for n in range(128)])),
        ("gzips", TEXT, gzip.compress(_filled(b"", b" ", b"", 16 * CAP * part))),
    ):
        headers = GZIP if name == "gzips" else {}
        yield WorstRequest(f"{count} × {name}", path, [body] * count, headers)


def worst(share: float) -> Iterator[WorstRequest]:
    """Each kind, made when it is its turn: together they would take gigabytes."""
    yield from _large(share)
    yield from _small(share)
    yield from _many(share)
