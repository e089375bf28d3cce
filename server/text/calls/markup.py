"""How the formats look in which a call is marked up: a tag a call, a tag an argument, and text between them.

Owns the patterns of each format's tags. Runs on the event loop; constants. Never reads a call with them: that is
`text/calls/marked_calls.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MISTRAL_NAME = r"[^\s\[\]{}\",:]+"  # of a function, between Mistral's tags


@dataclass(frozen=True, slots=True)
class Markup:
    """How a format writes calls.

    Attributes:
        call: what opens a call; `name` is in it.
        key: what opens a value; `key` is in it, and `type` where the format has types.
        close: what closes a value.
        end: what closes a call; None: it ends where no further key follows.
        body: all arguments as one JSON object `body`, where the format knows that.
        lines: around a value, "framed": a line break on each side is the format's; "inline": only where there are
            both; "exact": none is.
        cdata: a value may be in CDATA sections.
        opening: the beginning of a call that is the tag around it at the same time.
    """

    call: re.Pattern[str]
    key: re.Pattern[str]
    close: re.Pattern[str]
    end: re.Pattern[str] | None
    body: re.Pattern[str] | None = None
    lines: str = "inline"
    opening: str = ""
    cdata: bool = False


def _markup(call: str, key: str, close: str, end: str, body: str = "", **more: Any) -> Markup:
    patterns = [re.compile(text, re.DOTALL) if text else None for text in (call, key, close, end, body)]
    return Markup(*patterns, **more)  # type: ignore[arg-type]


def _named(group: str) -> str:
    return rf"(?P<{group}>\"[^\"<>]*\"|'[^'<>]*'|[^\s\"'<>]++)"


def _elements(call: str, argument: str, **more: Any) -> Markup:
    """Elements with an attribute `name`."""
    opening = r"<{}\b[^>]*?\bname\s*=\s*{}[^>]*+>"
    call_and_key = opening.format(call, _named("name")), opening.format(argument, _named("key"))
    return _markup(*call_and_key, f"</{argument}>", f"</{call}>", **more)


def _pairs(prefix: str) -> Markup:
    """A name, then keys and values in turns."""
    key = rf"<{prefix}arg_key>(?P<key>[^<]*)</{prefix}arg_key>(?:\\n|\s)*<{prefix}arg_value>"
    name = rf"(?<![^\s<>])(?P<name>[^\s<>]++)\s*(?=<{prefix}arg_key>)"
    return _markup(name, key, rf"</{prefix}arg_value>", "")


def _attribute(name: str, group: str) -> str:
    return rf'(?=(?:(?!<\|sep\|>).)*\b{name}="(?P<{group}>[^"]*)")'


_HEAD = r"(?:(?!<\|sep\|>).)*<\|sep\|>"  # the rest of an opening tag of Kimi K3's

MARKUPS: Mapping[str, Markup] = {
    "qwen3_coder": _markup(
        rf"<function\s*=\s*{_named('name')}\s*(?:>|(?<=\n))",
        rf"<parameter\s*=\s*{_named('key')}\s*(?:>|(?<=\n))",
        "</parameter>",
        "</function>",
        lines="framed",
    ),
    "minimax_m2": _elements("invoke", "parameter"),
    "muse_spark": _elements("atem:invoke", "atem:parameter"),
    "minicpm5": _elements("function", "param", opening="<function name=", cdata=True),
    "kimi_k3": _markup(
        rf"<\|open\|>call\b{_attribute('tool', 'name')}{_HEAD}",
        rf"<\|open\|>argument\b{_attribute('key', 'key')}(?:{_attribute('type', 'type')})?{_HEAD}",
        r"<\|close\|>argument<\|sep\|>",
        r"<\|close\|>call<\|sep\|>",
        rf"<\|open\|>json\b{_HEAD}(?P<body>.*?)<\|close\|>json<\|sep\|>",
        lines="exact",
    ),
    "glm47": _pairs(""),
    "laguna": _pairs(""),
    "longcat": _pairs("longcat_"),
}
