"""How a model lays out an answer that has a form: what it reasons before, what opens the text, how calls are written.

Owns the translation of a model's format into the parts of a grammar. Runs in the server's worker thread; pure.
"""

from __future__ import annotations

from server.grammar.build import CallStyle, FreeCalls, ReasoningRule, Tag
from server.text.tokenizer import BARE, ChatPrompt, Tokenizer, ToolFormat
from server.text.tokens import harmony
from server.text.tokens.control import NORMAL, Tags


def reasoning(
    tokenizer: Tokenizer, tags: Tags, prompt: ChatPrompt, *, wanted: bool, is_text: bool
) -> ReasoningRule | None:
    """What may be reasoned before the answer. `wanted`: the request lets the model think. `is_text`: the answer is no
    JSON and no call, so that it may begin with whatever a tag is spelled with."""
    if tokenizer.speaks_harmony:
        start = _joined(tags, harmony.CHANNEL, "analysis", harmony.MESSAGE)
        behind = _joined(tags, harmony.START, "assistant")
        return ReasoningRule(start, tags.tag(harmony.END), False, wanted and not prompt.settled, behind)
    if tokenizer.think is None:
        return None
    start, end = (tags.tag(text) for text in tokenizer.think)
    spelled = is_text and isinstance(start[0], str)
    return ReasoningRule(start, end, prompt.reasoning, wanted and (prompt.reasoning or not (prompt.settled or spelled)))


def lead(tokenizer: Tokenizer, tags: Tags) -> Tag:
    """What stands before the text of an answer where an answer is made of messages."""
    if tokenizer.speaks_harmony:
        return _joined(tags, harmony.CHANNEL, "final", harmony.MESSAGE)
    edges = tokenizer.transitions.get(tokenizer.first_state or NORMAL, ())
    opening = next((tag for tag, state in edges if state == NORMAL), "")
    if tokenizer.first_state is not None:
        return tags.tag(opening)
    return ()


def call_style(form: ToolFormat, tags: Tags) -> CallStyle | None:
    """None for a format whose arguments are no JSON."""
    if form.name == "harmony":
        before = _joined(tags, harmony.CHANNEL, "commentary" + harmony.TO)
        after = (" ", *_joined(tags, harmony.CONSTRAIN, "json", harmony.MESSAGE))
        return CallStyle(before, after, tags.tag(harmony.CALL), joint=None)
    if form.name == BARE:
        return CallStyle(('{"name": ',), (', "parameters": ',), ("}",), joint=("; ",), quotes=True)
    if not form.is_json:
        return None
    start = tags.tag(form.start)
    end = tags.tag(form.end)
    before = (*start, '\n{"name": ')
    after = (', "arguments": ',)
    return CallStyle(before, after, ("}\n", *end), joint=("\n",), quotes=True)


def free_calls(form: ToolFormat, tags: Tags) -> FreeCalls:
    """For formats without a style."""
    return FreeCalls(tags.tag(form.start), tags.tag(form.end))


def _joined(tags: Tags, *texts: str) -> Tag:
    return tuple(part for text in texts for part in tags.tag(text))
