"""Which tools a chat request offers, and which calls it forces.

Owns the reading of `tools` and `tool_choice` into what the template sees, what the text is searched for, and, with the
form that was read before, the grammar. Runs in the server's worker thread; pure.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from server.api.input.members import declared
from server.api.input.response_format import Form
from server.api.input.schema import ChatRequest, Function, NamedChoice
from server.errors import InvalidValue, UnsupportedParameter
from server.grammar import build
from server.grammar.build import Calls, Reasoning, Tag
from server.grammar.checker import Prove, fault
from server.ipc.messages import Grammar
from server.text.tokenizer import ChatPrompt, Tokenizer

log = logging.getLogger("marathon.api")

Offer = list[tuple[int, Function]]  # each with its place in `tools`


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request wants of tools: those that may be called, and whether one must be."""

    offered: Offer
    forced: bool
    several: bool

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        functions = [declared(function) for _, function in self.offered]
        return [{"type": "function", "function": function} for function in functions] or None


def read(request: ChatRequest) -> Wish:
    """Raises for a choice that the tools don't allow."""
    tools: Offer = [(i, tool.function) for i, tool in enumerate(request.tools or []) if tool.function is not None]
    choice, several = request.tool_choice, request.parallel_tool_calls is not False
    if not tools and choice not in (None, "none", "auto"):
        raise InvalidValue("tool_choice needs `tools`", param="tool_choice")
    if not several and tools:
        log.info("parallel_tool_calls: false holds for forced calls only")
    if choice is None or isinstance(choice, str):
        return Wish([] if choice == "none" else tools, choice == "required", several)
    return _named(choice, tools, several)


def _named(choice: NamedChoice, tools: Offer, several: bool) -> Wish:
    if choice.type == "function" and choice.function is not None:
        return Wish(_only({choice.function.name}, tools, "tool_choice.function.name"), True, False)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        names = {reference.function.name for reference in choice.allowed_tools.tools}
        offered = _only(names, tools, "tool_choice.allowed_tools.tools")
        return Wish(offered, choice.allowed_tools.mode == "required", several)
    if choice.type in {"function", "allowed_tools"}:
        raise InvalidValue(f"tool_choice: type {choice.type} needs {choice.type}", param=f"tool_choice.{choice.type}")
    raise UnsupportedParameter(f"tool_choice: type {choice.type[:50]!r} isn't offered", param="tool_choice.type")


def _only(names: set[str], tools: Offer, param: str) -> Offer:
    if missing := names - {function.name for _, function in tools}:
        raise InvalidValue(f"{param}: there is no tool {min(missing)!r}", param=param)
    return [(i, function) for i, function in tools if function.name in names]


# ---------------------------------------------------------------- grammar
def constraint(
    form: Form | None, wish: Wish, prompt: ChatPrompt, tokenizer: Tokenizer, prove: Prove = fault
) -> Grammar | None:
    """The grammar that the answer must follow, if the request asks for a form."""
    if wish.forced:
        # `response_format` is about text, and agents send it with every request; the other forms are about this answer.
        if form is not None and not form.param.startswith("response_format"):
            raise InvalidValue(f"{form.param}: a forced call leaves no text to give a form to", param=form.param)
        form = Form("tool_choice")
    if form is None:
        return None
    calls = _calls(wish, tokenizer, form.param) if wish.offered else None
    return build.answer(
        form.schema,
        rule=form.rule,
        param=form.param,
        calls=calls,
        reasoning=_reasoning(prompt, tokenizer),
        prove=prove,
    )


def _calls(wish: Wish, tokenizer: Tokenizer, param: str) -> Calls:
    form = tokenizer.tool_format
    if form is None or not form.is_json:
        raise build.unsupported(form.name if form else "none", param)
    functions = [
        (function.name, function.parameters, f"tools[{i}].function.parameters") for i, function in wish.offered
    ]
    start, end = _tag(form.start, form.start_ids, tokenizer), _tag(form.end, form.end_ids, tokenizer)
    return Calls(start, end, functions, wish.several)


def _reasoning(prompt: ChatPrompt, tokenizer: Tokenizer) -> Reasoning | None:
    if tokenizer.think is None:
        return None
    start, end = (_tag(tag, tokenizer.encode(tag, special=True, bos=False), tokenizer) for tag in tokenizer.think)
    return Reasoning(start, end, prompt.reasoning)


def _tag(text: str, ids: Sequence[int], tokenizer: Tokenizer) -> Tag:
    return Tag(text, ids[0] if len(ids) == 1 and tokenizer.is_special(ids[0]) else None)
