"""llama.cpp's grammars as Lark.

Owns what llguidance's converter has to be spared: names that it would make one, a number of times without a lower
bound, and long escapes, of which it drops zeros. Runs in the server's worker thread; pure.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

_PARTS = re.compile(
    r'(?P<text>"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*)|(?P<often>\{[\d,\s]*\})|(?P<name>[\w-]+)', re.DOTALL
)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_ROOT = {"root": "root", "start": "root"}  # the converter's own name for it


def as_lark(gbnf: str) -> str:
    """The grammar in Lark. Raises whatever the converter raises, which has no error of its own for everything."""
    names = dict(_ROOT)

    def readable(part: re.Match[str]) -> str:
        if part["name"]:
            return _named(part["name"], names)
        if part["often"]:
            return part["often"].replace("{,", "{0,")
        return part[0]

    return gbnf_to_lark(_ESCAPE.sub(_plain, _PARTS.sub(readable, gbnf)))


def _named(name: str, names: dict[str, str]) -> str:
    """A name that differs from all others in more than its case and its dashes. `names`: who has which."""
    base = name if _NAME.fullmatch(name) else "rule"
    written = base
    number = 1
    while names.setdefault(_key(written), name) != name:
        number += 1
        written = f"{base}-{number}"
    return written


def _key(name: str) -> str:
    return name.lower().replace("-", "_")


def _plain(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2]
    if not digits or not _is_character(code := int(digits, 16)):
        return escape[0]
    if code < 0x100:
        return f"\\x{code:02x}"
    return chr(code)


def _is_character(code: int) -> bool:
    return code < 0xD800 or 0xE000 <= code <= 0x10FFFF
