"""What a chat template's source says without being rendered.

Owns the reading of its syntax tree: which variables it takes from outside, which texts it writes. Runs once, while a
tokenizer is loaded. Never renders.
"""

from __future__ import annotations

import re

import jinja2
import jinja2.meta
from jinja2 import nodes

_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def variables(source: str | None) -> frozenset[str]:
    """Return what a template reads from outside; nothing when it doesn't parse, which rendering will report."""
    tree = _tree(source or "")
    if tree is None:
        return frozenset()
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(tree))
    except jinja2.TemplateAssertionError:  # a filter or a test that Jinja doesn't have
        return frozenset()


def literals(source: str) -> list[str]:
    """Every text that stands in a template, whether it is written, compared or handed on; all of the source when it
    doesn't parse."""
    if (tree := _tree(source)) is None:
        return [source]
    found = [node.value for node in tree.find_all(nodes.Const)]
    found += [node.data for node in tree.find_all(nodes.TemplateData)]
    return [text for text in found if isinstance(text, str)]


def _tree(source: str) -> nodes.Template | None:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return environment.parse(_GENERATION_TAG.sub("", source))
    except jinja2.TemplateSyntaxError:
        return None
