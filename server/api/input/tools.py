"""Which tools a request offers, and which calls it forces.

Owns what every protocol says of tools, in one form: what the template sees, what the text is searched for, and, with
the answer's form, the grammar. `read` is chat's way into that form; other protocols have theirs beside their routes.
Runs in the server's worker thread; pure.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server.api.input import response_format
from server.api.input.members import declared
from server.api.input.response_format import AnswerForm
from server.api.input.schema import ChatRequest, NamedChoice
from server.errors import InvalidValue, UnsupportedParameter
from server.grammar import build
from server.grammar.build import Calls, FreeCalls, FunctionRule
from server.grammar.checker import Prove, fault
from server.ipc.sequence import Grammar
from server.text import layout
from server.text.templates import chat_template
from server.text.tokenizer import ChatPrompt, Tokenizer
from server.text.tokens.control import Tags

log = logging.getLogger("marathon.api")


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that the model may call.

    Attributes:
        function: its name, description and parameters, as templates take them.
        param: where the schema of its parameters stands in the request.
        deferred: the template doesn't list it, for the conversation defines it where the model asked for it.
        strict: where calls follow a grammar, the schema is refused unless the arguments can follow all of it.
    """

    function: dict[str, Any]
    param: str
    deferred: bool = False
    strict: bool = False

    @property
    def name(self) -> str:
        return str(self.function["name"])

    @property
    def declaration(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function}


@dataclass(frozen=True, slots=True)
class CallChoice:
    """What a request says of calls.

    Attributes:
        mode: whether there may, or must, be one.
        names: the only tools that may be called; None: all of them.
        several: whether a forced call may be more than one.
        param: where the names stand in the request.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: Collection[str] | None = None
    several: bool = True
    param: str = "tool_choice"


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """What becomes of both: the tools that may be called, and whether one must be."""

    offered: Sequence[OfferedTool] = ()
    forced: bool = False
    several: bool = True

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        """Those that the template lists."""
        return [tool.declaration for tool in self.offered if not tool.deferred] or None

    @property
    def for_parsing(self) -> list[dict[str, Any]] | None:
        """Those whose calls are found in the answer's text."""
        return [tool.declaration for tool in self.offered] or None


@dataclass(frozen=True, slots=True)
class FormConstraint:
    """What an answer follows.

    Attributes:
        reasons: the grammar lets it open a block of reasoning first.
    """

    grammar: Grammar
    reasons: bool


def options(tools: Sequence[OfferedTool], choice: CallChoice) -> ToolOptions:
    """Raises for a choice that the tools don't allow."""
    if not tools and (choice.mode == "required" or choice.names is not None):
        raise InvalidValue("tool_choice needs `tools`", param="tool_choice")
    if not choice.several and tools:
        log.info("one call at a time is kept for forced calls only")
    if choice.mode == "none":
        return ToolOptions((), False, choice.several)
    return ToolOptions(_only(choice, tools), choice.mode == "required", choice.several)


def _only(choice: CallChoice, tools: Sequence[OfferedTool]) -> Sequence[OfferedTool]:
    names = choice.names
    if names is None:
        return tools
    if missing := set(names) - {tool.name for tool in tools}:
        raise InvalidValue(f"{choice.param}: there is no tool {min(missing)!r}", param=choice.param)
    return [tool for tool in tools if tool.name in names]


# ---------------------------------------------------------------- chat
def read(request: ChatRequest) -> ToolOptions:
    """Raises for a choice that the tools don't allow."""
    tools = [
        OfferedTool(declared(tool.function), f"tools[{i}].function.parameters", strict=tool.function.strict is True)
        for i, tool in enumerate(request.tools or [])
        if tool.function is not None
    ]
    several = request.parallel_tool_calls is not False
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return options(tools, CallChoice(choice or "auto", several=several))
    return options(tools, _named(choice, several))


def _named(choice: NamedChoice, several: bool) -> CallChoice:
    if choice.type == "function" and choice.function is not None:
        return CallChoice("required", {choice.function.name}, False, "tool_choice.function.name")
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        names = {reference.function.name for reference in choice.allowed_tools.tools}
        return CallChoice(choice.allowed_tools.mode, names, several, "tool_choice.allowed_tools.tools")
    if choice.type in {"function", "allowed_tools"}:
        raise InvalidValue(f"tool_choice: type {choice.type} needs {choice.type}", param=f"tool_choice.{choice.type}")
    raise UnsupportedParameter(f"tool_choice: type {choice.type[:50]!r} isn't offered", param="tool_choice.type")


# ---------------------------------------------------------------- grammar
def constraint(
    form: AnswerForm | None,
    offer: ToolOptions,
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
    if offer.forced:
        # A form of text says nothing of calls, and agents send it with every request.
        if form is not None and not form.of_text:
            raise InvalidValue(f"{form.param}: a forced call leaves no text to give a form to", param=form.param)
        form = AnswerForm("tool_choice")
    if form is None:
        return None
    form = response_format.checked(form, tokenizer, rows, prove)
    tags = tokenizer.tags(rows)
    calls = None
    if continues and tokenizer.speaks_harmony:  # whose calls are messages of their own
        if offer.forced:
            raise InvalidValue("an answer of this model that is gone on with can't become a call", param="tool_choice")
    elif offer.offered:
        calls = _calls(offer, tokenizer, tags, form.param)
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


def _calls(offer: ToolOptions, tokenizer: Tokenizer, tags: Tags, param: str) -> Calls | FreeCalls:
    form = tokenizer.tool_format
    style = None
    if form is not None:
        style = layout.call_style(form, tags)
    if style is None:
        if form is None or offer.forced:
            raise build.unsupported(form.name if form else "none", param)
        return layout.free_calls(form, tags)
    functions = [
        FunctionRule(tool.name, tool.function.get("parameters"), tool.param, tool.strict) for tool in offer.offered
    ]
    return Calls(style, functions, offer.several)


def thinks(effort: str | None, switches: Mapping[str, Any]) -> bool:
    """Whether a request lets the model reason, in any of the ways of saying so. `switches`: variables of the
    template."""
    return effort not in chat_template.NO_THINKING and all(
        switches.get(name) is not False for name in chat_template.SWITCHES
    )
