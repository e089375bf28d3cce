"""Requests of the Messages API as the core gets them, and as the model reads them."""

from __future__ import annotations

from typing import Any

import pytest
from serving import settings
from spelling import THINK

from loadtests.zoo import scripted
from server.api.input.messages_input import BILLING
from server.api.input.messages_schema import MessagesPrompt
from server.api.input.schema import GenerationRequest
from server.api.messages import conversation
from server.api.prepare import render
from server.errors import RequestError
from server.text.tokenizer import Tokenizer

TEXT = {"type": "text", "text": "Say hello.", "cache_control": {"type": "ephemeral"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"query": "select:later"}}
TOOLS = [
    {"name": "ToolSearch", "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema"}},
    {"name": "later", "description": "Does it later.", "input_schema": {}, "defer_loading": True},
]


def messages(*turns: Any, **fields: Any) -> list[dict[str, Any]]:
    request = MessagesPrompt.model_validate({"messages": list(turns), "tools": TOOLS} | fields)
    return [*conversation(request, settings(), GenerationRequest.model_construct()).messages]


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content} | fields


def test_blocks_become_what_they_mean() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "anyone's"}
    sealed = {"type": "redacted_thinking", "data": "x"}
    done = result([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    said = messages(
        user(TEXT, TEXT),
        assistant(sealed, thought, TEXT, CALL),
        user(TEXT, done),
        {"role": "system", "content": "Rain."},
    )
    call = {"name": "ToolSearch", "arguments": '{"query": "select:later"}'}
    assert said == [
        {"role": "user", "content": "Say hello.\nSay hello."},
        {
            "role": "assistant",
            "content": "Say hello.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "a\nb"},
        {"role": "user", "content": "Say hello."},
        {"role": "system", "content": "Rain."},
    ]


def test_a_failed_call_is_marked_as_such() -> None:
    said = messages(user(TEXT), assistant(CALL), user(result("no file", is_error=True)))
    assert said[-1]["content"] == "Error: no file"


@pytest.mark.parametrize("system", [f"{BILLING} cc=1;\nBe brief.", [{"type": "text", "text": f"{BILLING} x"}, TEXT]])
def test_the_line_for_billing_is_left_out(system: Any) -> None:
    first, _ = messages(user(TEXT), system=system)
    assert first["role"] == "system"
    assert first["content"] in ("Be brief.", "Say hello.")
    assert messages(user(TEXT), system=[{"type": "text", "text": f"{BILLING} x"}])[0]["role"] == "user"


def test_a_reference_is_the_tools_definition_and_the_list_stays_without_it() -> None:
    reference = {"type": "tool_reference", "tool_name": "later"}
    said = messages(user(TEXT), assistant(CALL), user(result([reference])))
    function = '"function": {"name": "later", "description": "Does it later.", "parameters": {}}'
    assert said[-1]["content"] == '{"type": "function", ' + function + "}"
    unknown = messages(user(TEXT), assistant(CALL), user(result([reference])), tools=[])
    assert unknown[-1]["content"] == '{"name": "later"}'


def test_an_assistants_text_at_the_end_is_continued() -> None:
    def continues(*turns: Any) -> bool:
        request = MessagesPrompt.model_validate({"messages": list(turns)})
        return conversation(request, settings(), GenerationRequest.model_construct()).continues

    assert continues(user(TEXT), assistant(TEXT))
    assert not continues(user(TEXT))
    assert not continues(user(TEXT), assistant())


EFFORTS: list[tuple[dict[str, Any], str | None, bool]] = [
    ({}, None, True),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "medium", True),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": {"effort": "high"}}, "high", True),
    ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none", False),
    ({"chat_template_kwargs": {"enable_thinking": False}}, None, False),
]


@pytest.mark.parametrize(("fields", "effort", "thinks"), EFFORTS)
def test_thinking_is_switched_and_effort_is_named(fields: dict[str, Any], effort: str | None, thinks: bool) -> None:
    request = MessagesPrompt.model_validate({"messages": [user(TEXT)]} | fields)
    made = conversation(request, settings(), GenerationRequest.model_construct())
    assert (made.effort, made.thinks) == (effort, thinks)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [user({"type": "image", "source": {}})]}, "messages[0].content[0]"),
    ({"messages": [user(TEXT), user(result([{"type": "image"}]))]}, "messages[1].content[0].content[0]"),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
    ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [assistant({"type": "tool_use", "id": "x", "name": "y"})]}, "messages[0].content[0].input"),
    ({"messages": [user(TEXT), assistant(CALL)]}, "messages"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [{"name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "x"}, "tools": TOOLS}, "tool_choice.name"),
    ({"output_format": {"type": "json_schema", "schema": {}},
      "output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_format"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"compaction": {"type": "always"}}, "compaction"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_can_not_be_expressed_is_refused_with_its_place(fields: dict[str, Any], param: str) -> None:
    request = MessagesPrompt.model_validate({"messages": [user(TEXT)]} | fields)
    with pytest.raises(RequestError) as refused:
        conversation(request, settings(), GenerationRequest.model_construct())
    assert refused.value.param == param


# ---------------------------------------------------------------- as the model reads it
@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Its template refuses a system message that isn't the first."""
    folder = scripted.write(tmp_path_factory.mktemp("strict") / "model", {"dd": [["Hello", " there."]]})
    return Tokenizer.load(folder, trust_remote_code=False)


def test_a_coding_agents_turn_begins_with_the_turn_before(tokenizer: Tokenizer) -> None:
    """As Claude Code sends them: a system text behind the first turn and later ones, a rolling `cache_control`, a line
    for billing that changes, and a deferred tool that enters the list in the middle once it was looked for."""
    placeholder = {"name": "Placeholder", "input_schema": {}, "defer_loading": True}
    thought = {"type": "thinking", "thinking": "I look for it.", "signature": "x"}
    found = result([{"type": "tool_reference", "tool_name": "later"}])
    called = {**CALL, "id": "toolu_2", "name": "later", "input": {}}
    talk: list[Any] = [user(TEXT, TEXT), {"role": "system", "content": "It rains."}]
    steps: list[list[Any]] = [
        [assistant(thought, CALL), user(found)],
        [assistant(called), user(result("None.", tool_use_id="toolu_2")), {"role": "system", "content": "Still."}],
        [assistant(TEXT), {"role": "user", "content": "Thanks."}],
    ]
    before = ""
    for turn, step in enumerate([[], *steps]):
        talk += step
        listed = [TOOLS[0], *(TOOLS[1:] if turn else []), placeholder, {"name": "Write", "input_schema": {}}]
        system = [{"type": "text", "text": f"{BILLING} nonce={turn}"}, {"type": "text", "text": "Be brief."}]
        asked = {"messages": talk, "system": system, "tools": listed, "thinking": {"type": "adaptive"}}
        request = MessagesPrompt.model_validate(asked)
        made = conversation(request, settings(), GenerationRequest.model_construct())
        text = tokenizer.decode(render(tokenizer, made).ids, special=True)
        assert text.startswith(before)
        assert [text.count(word) for word in ("It rains.", "nonce", "Placeholder")] == [1, 0, 0]
        before = text
    assert before.count("Does it later.") == 1
    assert THINK[0] in before
