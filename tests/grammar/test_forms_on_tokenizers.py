"""An answer has its form on every kind of tokenizer: whatever its tags are, and whatever a form asks to be spelled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import small_tokenizers as small
from tokenizers import AddedToken, normalizers
from walking import Walker

from server.errors import RequestError
from server.text.detokenizer import Answer
from server.text.tokenizer import Tokenizer

CONTROL = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
# What some tokenizer has a token for, or would write in another way.
TEXTS = ["<|im_end|>", "<|endoftext|>", *CONTROL, "</s>", "<table>", "<end_of_turn>", "<|end|>", "e\u0301", "a  b\t"]
POINT = {
    "type": "object",
    "properties": {"<think>": {"enum": TEXTS}, "</tool_call>": {"const": "</think>\n"}},
    "required": ["<think>", "</tool_call>"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "mark", "parameters": POINT}}
OTHER = {"type": "function", "function": {"name": "rest"}}
NAMED = {"type": "function", "function": {"name": "mark"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
HARMONY = (
    "{%- for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
SPELLED = small.THINKING  # names the tags of reasoning, which need not be tokens
NAMED_ONLY = small.JSON_TOOLS + "{#- <think> </think> #}" + small.CHATML
OPENED = small.CHATML.removesuffix("{% endif %}") + "{{ '<think>\n' }}{% endif %}"


def tags(special: bool, *texts: str) -> list[AddedToken]:
    return [AddedToken(text, special=special, normalized=False) for text in texts]


def composing() -> Any:
    """Qwen's normalise: what is spelled with combining marks, they would write with composed characters."""
    tokenizer = small.byte_level(*tags(False, *CONTROL))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def pieces() -> Any:
    """As Gemma: pages' tags are tokens of the vocabulary, and not special."""
    html, turns = tags(False, "<table>", "</h1>", "  "), tags(True, "<start_of_turn>", "<end_of_turn>")
    return small.pieces(*html, *turns)


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any], int | None]] = {
    # what makes the tokenizer, its files, and the model's rows beside the tokenizer's ids
    "tags aren't flagged": (lambda: small.byte_level(*tags(False, *CONTROL)), {"template": small.THINKING}, None),
    "tags are flagged": (lambda: small.byte_level(*tags(True, *CONTROL)), {"template": small.THINKING}, None),
    "tags are spelled": (small.byte_level, {"template": SPELLED}, None),
    "tags have no logits": (lambda: small.byte_level(*tags(False, *CONTROL)), {"template": NAMED_ONLY}, -4),
    "the model is padded": (lambda: small.byte_level(*tags(False, *CONTROL)), {"template": small.THINKING}, 75),
    "normalises": (composing, {"template": small.THINKING}, None),
    "the prompt opens reasoning": (composing, {"template": OPENED}, None),
    "pieces": (pieces, {"template": small.CHATML, "eos_token": "</s>"}, -1),
    "calls without tags": (small.byte_level, {"template": small.BARE}, None),
    "no tags": (small.byte_level, {"template": small.CHATML}, None),
    "full width": (
        lambda: small.byte_level(*tags(False, "<｜User｜>", "<｜tool▁calls▁begin｜>", "<think>", "</think>")),
        {"template": small.THINKING},
        None,
    ),
    "channels": (
        lambda: small.byte_level(
            *tags(True, "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
        ),
        {"template": HARMONY, "eos_token": "<|return|>", "generation": {"eos_token_id": [0]}},
        None,
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def walker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walker]:
    make, files, more = KINDS[request.param]
    folder = small.write(tmp_path_factory.mktemp("kind"), make, **({"eos_token": "<|im_end|>"} | files))
    tokenizer = Tokenizer.load(folder, trust_remote_code=False)
    likely = ["<think>", "</think>", "<|end|>", "analysis", "final"]
    made = Walker(tokenizer, tokenizer.vocab_size + (more or 0), likely)
    yield made
    made.close()


def thinking(on: bool) -> dict[str, Any]:
    return {"reasoning_effort": "high" if on else "none", "chat_template_kwargs": {"enable_thinking": on}}


def ended(walker: Walker, thinks: bool, count: int = 3, **fields: Any) -> list[Answer]:
    """The answers that weren't cut; those that were say nothing but that they went on."""
    walks = walker.walks(count, **fields, **thinking(thinks))
    assert thinks or not any(walk.answer.reasoning for walk in walks)
    return [walk.answer for walk in walks if walk.finish == "stop"]


def valid(text: str, schema: Any) -> None:
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "not thinking"])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": SCHEMA},
        {"guided_json": POINT, "skip_special_tokens": False},
        {"tools": [TOOL, OTHER], "tool_choice": "none", "response_format": SCHEMA},
    ],
    ids=["response_format", "guided_json", "tools that may not be called"],
)
def test_json_of_a_schema_may_say_what_tags_say(walker: Walker, fields: dict[str, Any], thinks: bool) -> None:
    for answer in ended(walker, thinks, **fields):
        valid(answer.content, POINT)
        assert not answer.calls


def test_any_object_is_one(walker: Walker) -> None:
    for answer in ended(walker, False, response_format={"type": "json_object"}):
        valid(answer.content, {"type": "object"})


@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "not thinking"])
@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"choice": TEXTS}, TEXTS),
        ({"regex": "(<think>|</tool_call>|e\u0301)</s>"}, ["<think></s>", "</tool_call></s>", "e\u0301</s>"]),
        ({"grammar": 'start: "<|end|>" X\nX: /<table>|<tool_call>/'}, ["<|end|><table>", "<|end|><tool_call>"]),
        ({"grammar": 'root ::= "</think>" | "<think>a</think>"'}, ["</think>", "<think>a</think>"]),
    ],
    ids=["choice", "regex", "lark", "gbnf"],
)
def test_texts_may_say_what_tags_say(walker: Walker, form: dict[str, Any], texts: list[str], thinks: bool) -> None:
    for answer in ended(walker, thinks, structured_outputs=form):
        assert answer.content in texts
    assert walker.walks(prompt="hi", structured_outputs=form)[0].answer.content in texts, "completions as chats"


@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "not thinking"])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_may_say_what_tags_say(walker: Walker, choice: Any, thinks: bool) -> None:
    fields = {"tools": [TOOL, OTHER], "tool_choice": choice, "response_format": SCHEMA}
    answers = ended(walker, thinks, **fields)
    assert answers or choice == "required", "a call of a bounded schema ends"
    for answer in answers:
        assert answer.calls
        assert answer.content == ""
        for call in answer.calls:
            valid(call.arguments, POINT if call.name == "mark" else {"type": "object"})
            assert call.name == "mark" or choice == "required"


@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "not thinking"])
def test_tools_beside_a_form_leave_the_choice(walker: Walker, thinks: bool) -> None:
    for answer in ended(walker, thinks, 6, tools=[TOOL], response_format=SCHEMA):
        assert bool(answer.calls) != bool(answer.content)
        valid(answer.calls[0].arguments if answer.calls else answer.content, POINT)


def test_reasoning_is_free_and_the_form_holds_behind_it(walker: Walker) -> None:
    if walker.tokenizer.think is None and not walker.tokenizer.speaks_harmony:
        pytest.skip("it doesn't reason")
    assert any(answer.reasoning for answer in ended(walker, True, 8, response_format=SCHEMA))


def test_going_on_with_an_answer_begins_no_reasoning_and_no_message(walker: Walker) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well: "}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    for answer in ended(walker, False, **fields, structured_outputs={"choice": TEXTS}):
        assert answer.content in TEXTS


def test_going_on_with_an_answer_loses_no_call(walker: Walker) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well: "}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "tools": [TOOL]}
    for choice in ("required", {"type": "function", "function": {"name": TOOL["function"]["name"]}}):
        if walker.tokenizer.speaks_harmony:
            with pytest.raises(RequestError, match="can't become a call"):
                walker.prepare(**fields, tool_choice=choice)
            continue
        for answer in ended(walker, False, 2, **fields, tool_choice=choice):
            assert answer.calls
    for answer in ended(walker, False, 6, **fields, response_format=SCHEMA):
        assert bool(answer.calls) != bool(answer.content)


# ---------------------------------------------------------------- what can't be had
def test_a_tokenizer_that_cannot_spell_every_text_is_given_no_form(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(small.write(tmp_path, small.whole_words), trust_remote_code=False)
    walker = Walker(tokenizer, rows=64)
    for fields in ({"response_format": SCHEMA}, {"prompt": "a", "guided_regex": "a"}):
        with pytest.raises(RequestError, match="no tokens for single bytes") as caught:
            walker.prepare(**fields)
        assert caught.value.status == 400
    walker.close()


def test_a_model_without_logits_for_some_bytes_is_given_no_form(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(small.write(tmp_path, small.byte_level), trust_remote_code=False)
    walker = Walker(tokenizer, rows=200)
    with pytest.raises(RequestError, match="no tokens for single bytes"):
        walker.prepare(prompt=[1], guided_json=POINT)
    walker.close()
