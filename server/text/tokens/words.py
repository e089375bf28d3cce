"""One pattern for many words.

Owns how such a pattern is written. Pure functions; runs where a tokenizer is loaded. Never searches a text.

An alternation of a thousand words is tried word by word at each place where one of them might begin: a page of `<` took
seconds. Written as a tree of their beginnings, each character of a text is looked at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_Tree = dict[str, "_Tree"]
_END = ""  # the key that says that a word ends here


def any_of(words: Iterable[str]) -> str:
    """A pattern that matches the longest of `words` at a place, or a shorter one if what follows forbids the longest.
    Matches nothing if there are none."""
    tree: _Tree = {}
    for word in filter(None, words):
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        node[_END] = {}
    return _written(tree) or "(?!)"


def _written(node: _Tree) -> str:
    branches = [re.escape(char) + _written(rest) for char, rest in sorted(node.items()) if char != _END]
    if not branches:
        return ""
    if len(branches) == 1 and _END not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)})" + ("?" if _END in node else "")
