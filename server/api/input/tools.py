"""Which tools a chat request offers, and which calls it forces.

Owns the reading of `tools` and `tool_choice` into what the template sees, what the text is searched for, and, with the
form that was read before, the grammar. Runs in the server's worker thread; pure.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from server.api.input import response_format
from server.api.input.members import declared
from server.api.input.response_format import AnswerForm
from server.api.input.schema import ChatRequest, Function, NamedChoice
from server.errors import InvalidValue, UnsupportedParameter
from server.grammar import build
from server.grammar.build import Calls, FreeCalls
from server.grammar.checker import Prove, fault
from server.ipc.messages import Grammar
from server.text import layout
from server.text.templates import chat_template
from server.text.tokenizer import ChatPrompt, Tokenizer
from server.text.tokens.control import Tags

log = logging.getLogger("marathon.api")

Offer = list[tuple[int, Function]]  # each with its place in `tools`


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """What a request wants of tools: those that may be called, and whether one must be."""

    offered: Offer
    forced: bool
    several: bool

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        functions = [declared(function) for _, function in self.offered]
        return [{"type": "function", "function": function} for function in functions] or None


@dataclass(frozen=True, slots=True)
class FormConstraint:
    """What an answer follows.

    Attributes:
        reasons: the grammar lets it open a block of reasoning first.
    """

    grammar: Grammar
    reasons: bool


def read(request: ChatRequest) -> ToolOptions:
    """Raises for a choice that the tools don't allow."""
    tools: Offer = [(i, tool.function) for i, tool in enumerate(request.tools or []) if tool.function is not None]
    choice = request.tool_choice
    several = request.parallel_tool_calls is not False
    if not tools and choice not in (None, "none", "auto"):
        raise InvalidValue("tool_choice needs `tools`", param="tool_choice")
    if not several and tools:
        log.info("parallel_tool_calls: false holds for forced calls only")
    if choice is None or isinstance(choice, str):
        return ToolOptions([] if choice == "none" else tools, choice == "required", several)
    return _named(choice, tools, several)


def _named(choice: NamedChoice, tools: Offer, several: bool) -> ToolOptions:
    if choice.type == "function" and choice.function is not None:
        return ToolOptions(_only({choice.function.name}, tools, "tool_choice.function.name"), True, False)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        names = {reference.function.name for reference in choice.allowed_tools.tools}
        offered = _only(names, tools, "tool_choice.allowed_tools.tools")
        return ToolOptions(offered, choice.allowed_tools.mode == "required", several)
    if choice.type in {"function", "allowed_tools"}:
        raise InvalidValue(f"tool_choice: type {choice.type} needs {choice.type}", param=f"tool_choice.{choice.type}")
    raise UnsupportedParameter(f"tool_choice: type {choice.type[:50]!r} isn't offered", param="tool_choice.type")


def _only(names: set[str], tools: Offer, param: str) -> Offer:
    if missing := names - {function.name for _, function in tools}:
        raise InvalidValue(f"{param}: there is no tool {min(missing)!r}", param=param)
    return [(i, function) for i, function in tools if function.name in names]


# ---------------------------------------------------------------- grammar
def constraint(
    form: AnswerForm | None,
    wish: ToolOptions,
    prompt: ChatPrompt,
    tokenizer: Tokenizer,
    *,
    rows: int | None = None,
    thinks: bool = True,
    continues: bool = False,
    prove: Prove = fault,
) -> FormConstraint | None:
    """What the answer must follow, if the request asks for a form.

    The model has `rows` logits, as many as the tokenizer has ids unless given. `thinks`: it may reason before;
    `continues`: the prompt ends inside the answer's text. Raises what refuses a request that can't be fulfilled.
    """
    if wish.forced:
        # `response_format` is about text, and agents send it with every request; the other forms are about this answer.
        if form is not None and not form.param.startswith("response_format"):
            raise InvalidValue(f"{form.param}: a forced call leaves no text to give a form to", param=form.param)
        form = AnswerForm("tool_choice")
    if form is None:
        return None
    response_format.check_spelling(form, tokenizer, rows)
    tags = tokenizer.tags(rows)
    calls = None
    if wish.offered:
        calls = _calls(wish, tokenizer, tags, form.param)
    reasons = not continues or prompt.reasoning
    thought = None
    if reasons:
        thought = layout.reasoning(tokenizer, tags, prompt, wanted=thinks, is_text=bool(form.rule))
    made = build.answer(
        form.schema,
        rule=form.rule,
        param=form.param,
        lead=() if continues else layout.lead(tokenizer, tags),
        calls=calls,
        reasoning=thought,
        prove=prove,
    )
    return FormConstraint(made, thought is not None and thought.wanted and not thought.opened)


def _calls(wish: ToolOptions, tokenizer: Tokenizer, tags: Tags, param: str) -> Calls | FreeCalls:
    form = tokenizer.tool_format
    style = None
    if form is not None:
        style = layout.call_style(form, tags)
    if style is None:
        if form is None or wish.forced:
            raise build.unsupported(form.name if form else "none", param)
        return layout.free_calls(form, tags)
    functions = [
        (function.name, function.parameters, f"tools[{i}].function.parameters") for i, function in wish.offered
    ]
    return Calls(style, functions, wish.several)


def thinks(request: ChatRequest) -> bool:
    """Whether the request lets the model reason, in any of the ways of saying so."""
    effort = request.reasoning_effort or (request.reasoning.effort if request.reasoning else None)
    switches = request.chat_template_kwargs or {}
    return effort not in chat_template.NO_THINKING and all(
        switches.get(name) is not False for name in chat_template.SWITCHES
    )
