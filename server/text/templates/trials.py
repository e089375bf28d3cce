"""What a chat template can take, found out by having it render small conversations.

Owns the trials: each conversation holds words that must all be shown, once and in order. Runs once, while a tokenizer
is loaded. Never sees what a client said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from server.text.templates.abilities import Abilities
from server.text.templates.conversation import fit
from server.text.templates.turn import Message
from server.text.tokens.encode_cache import common_prefix
from server.text.tokens.encoding import Shield

Render = Callable[[list[Message], list[dict[str, Any]] | None], str]  # messages, tools → text; raises what it likes

_ROLES = {"S": "system", "U": "user", "T": "tool"}  # every other letter is a turn of the assistant's
_CALLS = {"C": 1, "B": 1, "D": 2}
_NOTHING_TYPED = Shield([])
_NAME = "lookup"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Looks it up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def learn(render: Render) -> Abilities:
    """The abilities of the template behind `render`."""
    trial = _Trial(render)
    trial.settle("U", parts=True)
    trial.settle("U", listed=True)
    if not trial.takes("U"):
        return trial.able  # there is nothing to be learnt from a template that doesn't show what a user says
    trial.settle("UU", users=False)
    trial.settle("UAAU", answers=False)
    trial.settle("UNU", blanks=False)
    trial.settle("AU", openings=False)
    trial.settle("A", openings=False)
    trial.learn_calls()
    trial.learn_systems()
    return trial.able


class _Trial:
    """What has been learnt so far."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.able = Abilities(later=True)

    def takes(self, turns: str, **changes: bool) -> bool:
        """Whether a conversation is shown as it should be, given the abilities known so far and some changes."""
        messages, words = _conversation(turns)
        try:
            text = self._text(messages, replace(self.able, **changes))
        except Exception:  # a template can raise whatever Python can
            return False
        places = [text.find(word) for word in words]
        return min(places) >= 0 and places == sorted(places) and all(text.count(word) == 1 for word in words)

    def settle(self, turns: str, *more: str, **changes: bool) -> None:
        """Takes the changes over if these conversations are shown only with them."""
        every = (turns, *more)
        if not all(map(self.takes, every)) and all(self.takes(one, **changes) for one in every):
            self.able = replace(self.able, **changes)

    def learn_calls(self) -> None:
        # Some templates show calls, or what is said beside them, only until the answer is complete.
        self.settle("UCT", "UCTAU", short_ids=True)
        if not (self.takes("UCT") and self.takes("UCTAU")):
            self.able = replace(self.able, calls=False, results=self.takes("UAT"))
            return
        self.settle("CT", openings=False)
        self.settle("UBT", "UBTAU", spoken=False)
        self.settle("UDTT", several=False)
        self.settle("UDTT", rows=False)
        self.settle("UDTT", several=False, rows=False)
        self.settle("UCTU", "UCTUAU", after=False)

    def learn_systems(self) -> None:
        fronts = ("SU", "SUAU", *(("SUCT",) if self.able.calls else ()))
        self.settle(*fronts, system=False)
        self.settle("S", openings=False)
        self.settle("SA", openings=False)
        places = [("U", ""), ("U", "AU"), ("UA", "U"), ("SU", "")]
        if self.able.calls:
            places += [("UCT", ""), ("UCT", "AU")]
        self.able = replace(self.able, later=all(self.stays(*place) for place in places))

    def stays(self, before: str, after: str) -> bool:
        """Whether a system message between these turns is a segment of its own and changes nothing else."""
        with_it, words = _conversation(f"{before}S{after}")
        word = with_it[len(before)]["content"]
        try:
            text = self._text(with_it)
            answered = self._text([m | {"role": "assistant"} if m["content"] == word else m for m in with_it])
            without = self._text([m for m in with_it if m["content"] != word])
        except Exception:
            return False
        start = common_prefix(text, without)
        segment = text[start : len(text) - len(without) + start]
        own = word in segment and text == without[:start] + segment + without[start:]
        places = [text.find(one) for one in words]
        return own and places == sorted(places) and segment.strip() != word and text != answered

    def _text(self, messages: list[Message], able: Abilities | None = None) -> str:
        able = able or self.able
        none: list[Any] | None = None
        if able.listed:
            none = []
        tools = none
        if any(message["role"] == "tool" for message in messages):
            tools = [_TOOL]
        return self._render(fit(messages, able, _NOTHING_TYPED), tools)


def _conversation(turns: str) -> tuple[list[Message], list[str]]:
    """A conversation by the letters of its turns, and the words that a template must show: C is a call, B one beside
    text, D two of them, T the result of the next, N an answer without a word."""
    messages: list[Message] = []
    words: list[str] = []
    waiting: list[str] = []

    def word() -> str:
        words.append(f"word{len(words):02}q")
        return words[-1]

    for n, turn in enumerate(turns):
        message: Message = {"role": _ROLES.get(turn, "assistant"), "content": "" if turn in "CDN" else word()}
        if turn in _CALLS:
            ids = [f"call_{n}_{k}" for k in range(_CALLS[turn])]
            message["tool_calls"] = [_call(one, word()) for one in ids]
            waiting += ids
        if turn == "T":
            message |= {"tool_call_id": waiting.pop(0) if waiting else "call", "name": _NAME}
        messages.append(message)
    return messages, words


def _call(name: str, word: str) -> Message:
    return {"id": name, "type": "function", "function": {"name": _NAME, "arguments": {"key": word}}}
