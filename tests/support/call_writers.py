"""Calls as the models' templates write them, in every format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

Call = tuple[str, dict[str, Any]]


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gemma(quote: str) -> Callable[[Any], str]:
    def literal(value: Any) -> str:
        if isinstance(value, str):
            return quote + value + quote
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{literal(one)}" for key, one in value.items()) + "}"
        return "[" + ",".join(map(literal, value)) + "]" if isinstance(value, list) else json.dumps(value)

    return literal


def elements(call: str, argument: str, around: str) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        inner = ""
        for name, arguments in calls:
            values = (f'<{argument} name="{k}">{as_text(v)}</{argument}>\n' for k, v in arguments.items())
            inner += f'<{call} name="{name}">\n{"".join(values)}</{call}>\n'
        return f"<{around}>\n{inner}</{around}>" if around else inner.rstrip("\n")

    return write


def pairs(prefix: str) -> Callable[[list[Call]], str]:
    def one(call: Call) -> str:
        inner = "".join(
            f"<{prefix}arg_key>{key}</{prefix}arg_key>\n<{prefix}arg_value>{as_text(value)}</{prefix}arg_value>\n"
            for key, value in call[1].items()
        )
        return f"<{prefix}tool_call>{call[0]}\n{inner}</{prefix}tool_call>"

    return lambda calls: "\n".join(map(one, calls))


def braces(start: str, end: str, quote: str) -> Callable[[list[Call]], str]:
    literal = gemma(quote)
    return lambda calls: "".join(f"{start}call:{name}{literal(arguments)}{end}" for name, arguments in calls)


def qwen(calls: list[Call]) -> str:
    inner = ""
    for name, arguments in calls:
        values = (f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items())
        inner += f"<function={name}>\n{''.join(values)}</function>\n"
    return f"<tool_call>\n{inner}</tool_call>"


def python(calls: list[Call]) -> str:
    inner = (f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls)
    return f"<|tool_call_start|>[{', '.join(inner)}]<|tool_call_end|>"


def xtml(calls: list[Call]) -> str:
    inner = ""
    for name, arguments in calls:
        values = (
            f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "any"}"<|sep|>'
            f"{as_text(value)}<|close|>argument<|sep|>"
            for key, value in arguments.items()
        )
        inner += f'<|open|>call tool="{name}" index="1"<|sep|>{"".join(values)}<|close|>call<|sep|>'
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"


def kimi(calls: list[Call]) -> str:
    inner = (
        f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for n, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(inner)}<|tool_calls_section_end|>"


def json_tools(calls: list[Call]) -> str:
    lines = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{line}\n</tool_call>" for line in lines)


def mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a, "id": f"abcdefgh{len(n)}"} for n, a in calls])


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "json_tools": json_tools,
    "mistral": mistral,
    "kimi_k2": kimi,
    "qwen3_coder": qwen,
    "minimax_m2": elements("invoke", "parameter", "minimax:tool_call"),
    "muse_spark": elements("atem:invoke", "atem:parameter", "atem:function_calls"),
    "minicpm5": elements("function", "param", ""),
    "glm47": pairs(""),
    "laguna": pairs(""),
    "longcat": pairs("longcat_"),
    "kimi_k3": xtml,
    "gemma4": braces("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": braces("<start_function_call>", "<end_function_call>", "<escape>"),
    "pythonic": python,
}


# What a format can't say at all, or says in the same way as something else.
AMBIGUOUS: dict[str, Callable[[str], bool]] = {
    "gemma4": lambda text: '<|"|>' in text,
    "function_gemma": lambda text: "<escape>" in text,
    "minicpm5": lambda text: text.startswith("\n") and text.endswith("\n"),
    **{
        name: lambda text: text.startswith("\n") and text.endswith("\n")
        for name in ("minimax_m2", "muse_spark", "glm47", "laguna", "longcat")
    },
}


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(one)
