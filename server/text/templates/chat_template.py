"""Messages → prompt text.

Owns what a chat template gets to see besides the turns, and what is read off its output: arguments of calls in the form
that it wants, the switches for reasoning, the places worth a prefix snapshot. Runs in the server's worker thread. Never
tokenises, never touches MLX.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from server.errors import InvalidValue, UnsupportedParameter, one_line
from server.text.templates.abilities import Abilities
from server.text.templates.conversation import fit
from server.text.templates.numbers import NumberTexts
from server.text.templates.tools import completed
from server.text.templates.trials import learn
from server.text.templates.turn import Message
from server.text.tokens.encode_cache import common_prefix
from server.text.tokens.encoding import PROBE, Shield, clean

Form = Callable[[Any], Any]  # what becomes of a call's arguments
Way = tuple[Form, list[dict[str, Any]] | None]  # and the tools as they are offered
One = TypeVar("One")
Renderer = Callable[..., str]  # (messages, tools=…, add_generation_prompt=…, continue_final_message=…, **variables)

SWITCHES = ("enable_thinking", "thinking")  # what templates call it
NO_THINKING = ("none", "minimal")  # efforts
_OURS = {"messages", "conversation", "conversations", "tools", "chat_template", "tokenize", "add_generation_prompt"}
_OURS |= {"continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
_OURS |= {"return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"}


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as text, what isn't the template's own still shielded.

    Attributes:
        places: positions in `text` that later prompts are likely to share, ascending.
        reasoning: the prompt ends inside a reasoning block.
        settled: it ends behind one, which it has closed for the model.
    """

    text: str
    places: tuple[int, ...]
    reasoning: bool
    settled: bool = False


class ChatTemplate:
    """One model's chat template. Immutable.

    Attributes:
        able: what it can take.
    """

    def __init__(
        self, render: Renderer | None, names: frozenset[str], shield: Shield, think: tuple[str, str] | None
    ) -> None:
        """`render` is None when the model has no template. `think` are the tags around reasoning, if it reasons."""
        self._render = render
        if render:
            self.able = learn(self._plain)
        else:
            self.able = Abilities()
        self._names = names
        self._shield = shield
        self._think = think

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
        effort: str | None,
        continuing: bool,
        begins: bool,
    ) -> RenderedPrompt:
        """Raises InvalidValue with the template's own words when it refuses."""
        said = fit(messages, self.able, self._shield, self._think)
        offers: list[list[dict[str, Any]] | None] = [None]
        if self.able.listed:
            offers = [[]]
        if tools:
            hidden = self._shield.hide_all(tools)
            offers = [hidden, [completed(tool) for tool in hidden]]
        extra = self._switches(effort) | self._checked(kwargs)
        mode = {"add_generation_prompt": begins, "continue_final_message": continuing}

        numbers = NumberTexts()

        def attempt(way: Way, history: list[Message] = said) -> str:
            if self._render is None:
                raise InvalidValue("the model has no chat template; use /v1/completions", param="messages")
            form, offered = way
            return numbers.shown(self._render([_formed(m, form) for m in history], tools=offered, **mode, **extra))

        forms = _forms(said, self._shield, numbers)
        text, way = _first(attempt, [(form, offered) for offered in offers for form in forms])
        [alone] = fit(messages[-1:], Abilities(), self._shield, self._think)
        other = _probe(attempt, way, said, alone["content"])
        if not other:
            return self._read(text, 0, 0, continuing)
        start = common_prefix(text, other)
        rest = common_prefix(text[start:][::-1], other[start:][::-1])
        return self._read(text, start, len(text) - rest, continuing)

    def fault(self) -> str:
        """Why the template can't even be given a message of the user's; empty if it can."""
        try:
            self.render([{"role": "user", "content": PROBE}], None, {}, None, False, True)
        except Exception as error:  # a template can raise whatever Python can
            return one_line(error)
        return ""

    def _plain(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        """A conversation as it is, up to where an answer begins."""

        def attempt(form: Form) -> str:
            assert self._render is not None
            return self._render([_formed(m, form) for m in messages], tools=tools, add_generation_prompt=True)

        return _first(attempt, _forms(messages, None, NumberTexts()))[0]

    def _read(self, text: str, start: int, end: int, continuing: bool) -> RenderedPrompt:
        """`start` and `end`: where the last message's content lies (0 if it couldn't be found)."""
        opening = text[start if continuing else end :]
        if self._think is None:
            return RenderedPrompt(text, (start,), False)
        opened, closed = (opening.rfind(tag) for tag in self._think)
        # What a template writes about reasoning before the answer, it leaves out of the history.
        places: tuple[int, ...] = (start,)
        if opened >= 0 or closed >= 0:
            places = (start, end)
        return RenderedPrompt(text, places, opened > closed, closed > opened)

    # ---------------------------------------------------------------- what the template sees
    def _switches(self, effort: str | None) -> dict[str, Any]:
        """A request's reasoning effort in the variables that this template has for it."""
        if effort is None:
            return {}
        thinks = effort not in NO_THINKING
        values = {"reasoning_effort": effort} | dict.fromkeys(SWITCHES, thinks)
        return {name: value for name, value in values.items() if name in self._names}

    def _checked(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if taken := sorted(_OURS.intersection(kwargs)):
            raise InvalidValue(f"chat_template_kwargs can't set {taken[0]!r}", param="chat_template_kwargs")
        return {clean(name): self._shield.hide_all(value) for name, value in kwargs.items()}


# ---------------------------------------------------------------- arguments
def _mapping(shield: Shield | None, numbers: NumberTexts, arguments: Any) -> Any:
    """Arguments as an object if they are one, in which the last of several members with one name counts, as in every
    reader of JSON; text that doesn't parse stays text.

    What they say is hidden anew: JSON can spell a control token, or one of our marks, in escapes. Without a shield the
    text isn't a user's.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(Shield.shown(arguments) or "{}", parse_float=numbers.read, parse_int=numbers.whole)
    except ValueError:
        return arguments
    if not isinstance(parsed, dict):
        return arguments
    if shield is None:
        return parsed
    return shield.hide_all(parsed)


def _wrapped(shield: Shield | None, numbers: NumberTexts, arguments: Any) -> Any:
    """An object in any case."""
    mapped = _mapping(shield, numbers, arguments)
    if isinstance(mapped, dict):
        return mapped
    return {"arguments": mapped}


def _text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _formed(message: Message, form: Form) -> Message:
    if not (calls := message.get("tool_calls")):
        return message
    formed = [c | {"function": c["function"] | {"arguments": form(c["function"].get("arguments"))}} for c in calls]
    return message | {"tool_calls": formed}


# ---------------------------------------------------------------- attempts
def _forms(messages: list[Message], shield: Shield | None, numbers: NumberTexts) -> tuple[Form, ...]:
    mapping = partial(_mapping, shield, numbers)
    if any("tool_calls" in message for message in messages):
        return (mapping, _text, partial(_wrapped, shield, numbers))
    return (mapping,)


def _first(attempt: Callable[[One], str], ways: Iterable[One]) -> tuple[str, One]:
    """Templates differ in whether they want a call's arguments as an object or as text, and in which members of a tool
    they can do without; the first way that works."""
    refusal: Exception | None = None
    for way in ways:
        try:
            return attempt(way), way
        except (InvalidValue, UnsupportedParameter):
            raise
        except Exception as error:  # a template can raise whatever Python can
            refusal = refusal or error
    raise InvalidValue(f"the model's chat template refuses these messages: {refusal}", param="messages")


def _probe(attempt: Callable[[Way, list[Message]], str], way: Way, said: list[Message], tail: str) -> str:
    """The same prompt with something else in place of its `tail`, so that what differs is where that stands; "" if it
    can't be recognized so."""
    last = said[-1]
    content = said[-1]["content"]
    text = content
    if isinstance(content, list):
        text = content[0]["text"]
    other = text.removesuffix(tail) + PROBE
    changed = last | {"content": [{"type": "text", "text": other}] if isinstance(content, list) else other}
    try:
        text = attempt(way, [*said[:-1], changed])
    except Exception:  # a template may look into contents; then there is just no mark
        return ""
    if PROBE in text:
        return text
    return ""
