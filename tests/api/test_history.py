"""What clients bring along of earlier turns: every member is honoured, refused by its place, or counted as unknown."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from serving import USER, Site, engine, run_server, tokenizer

from server.api.input import body, generic_tools, refusals
from server.api.input.schema import ChatRequest

CALL = {"name": "get_time", "arguments": '{"city": "Oslo"}'}
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
NEXT = {"role": "user", "content": "And now?"}


def answered(**fields: Any) -> list[dict[str, Any]]:
    """A conversation in which the assistant's turn has these members."""
    return [*USER, {"role": "assistant", **fields}, NEXT]


async def prompt(site: Site, **body: Any) -> str:
    answer = await site.chat(**body)
    assert answer.status_code == 200, answer.text
    return tokenizer().decode(site.fake.submits[-1].sequence.prompt, special=True)


# ---------------------------------------------------------------- results of calls
def call(name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": f"result of {name}"}


def in_three_protocols(names: str, results: str) -> dict[str, dict[str, Any]]:
    """One assistant's turn with calls, and their results."""
    spoken = [*USER, {"role": "assistant", "content": None, "tool_calls": [call(name) for name in names]}]
    items = [{"type": "function_call", "call_id": name, "name": name, "arguments": "{}"} for name in names]
    outputs = [{"type": "function_call_output", "call_id": name, "output": f"result of {name}"} for name in results]
    uses = [{"type": "tool_use", "id": name, "name": name, "input": {}} for name in names]
    reported = [{"type": "tool_result", "tool_use_id": name, "content": f"result of {name}"} for name in results]
    turns = [*USER, {"role": "assistant", "content": uses}, {"role": "user", "content": reported}]
    return {
        "/v1/chat/completions": {"messages": [*spoken, *map(result, results)]},
        "/v1/responses": {"input": [*USER, *items, *outputs]},
        "/v1/messages": {"messages": turns, "max_tokens": 5},
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("order", ["ba", "acb", "cab"])
async def test_results_stand_in_the_order_of_their_calls(path: str, order: str) -> None:
    prompts = []
    async with run_server(engine()) as site:
        for results in (order, sorted(order)):
            body = in_three_protocols("".join(sorted(order)), "".join(results))[path]
            answer = await site.client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            prompts.append(tokenizer().decode(site.fake.submits[-1].sequence.prompt, special=True))
    assert prompts[0] == prompts[1]
    places = [prompts[0].index(f"result of {name}") for name in sorted(order)]
    assert places == sorted(places)


async def test_results_follow_the_calls_that_they_stand_behind() -> None:
    """Ids may come again, be missing, or belong to calls that were made one by one."""
    first = {"role": "assistant", "tool_calls": [call("a"), call("b")]}
    alone = [{"role": "assistant", "tool_calls": [call(name)]} for name in ("d", "c")]
    said = [*USER, first, result("x"), result("b"), result("a"), *alone, result("c"), result("d")]
    again = [{"role": "assistant", "tool_calls": [call("b"), call("a")]}, result("a"), result("b"), NEXT]
    async with run_server(engine()) as site:
        reported = await prompt(site, messages=said + again)
    places = [part.split("<", 1)[0].strip() for part in reported.split("result of ")[1:]]
    assert [place[:1] for place in places] == ["a", "b", "x", "d", "c", "b", "a"]


@pytest.mark.parametrize("number", ["1e400", "-1E999", "NaN"])
async def test_a_number_that_python_has_no_value_for_is_kept_as_it_was(number: str) -> None:
    arguments = f'{{"x": [{number}]}}'
    async with run_server(engine()) as site:
        said = [*USER, {"role": "assistant", "tool_calls": [call("a", arguments)]}, result("a")]
        assert arguments in await prompt(site, messages=said)


@pytest.mark.parametrize(("generic", "shown"), [(True, '{"a":1,  "a": {"b": -0, "b": 2}}'), (False, '{"a": {"b": 2}}')])
async def test_of_arguments_with_a_name_twice_a_template_of_objects_shows_the_last(generic: bool, shown: str) -> None:
    """Where they are text, they are what the client sent."""
    tokens = tokenizer()
    if generic:
        tokens = generic_tools.with_format(tokens.with_tools(None))  # type: ignore[arg-type]
    async with run_server(engine(), tokens=tokens) as site:
        calls = [call("a", '{"a":1,  "a": {"b": -0, "b": 2}}')]
        said = [*USER, {"role": "assistant", "tool_calls": calls}, result("a")]
        assert f'"arguments": {shown}}}' in await prompt(site, messages=said)


NUMBERS = (
    '{"x": 1e2, "y": [12.50, -0.10, 1E5, 1.0, 5, -7, -0, -0.0], "z": {"w": 12345678901234567890.125, "v": 0.1e-400}}'
)


@pytest.mark.parametrize("generic", [False, True])
async def test_numbers_in_earlier_arguments_are_shown_as_they_were_written(generic: bool) -> None:
    """So a prompt begins like the one before it with the answer behind that."""
    tokens = tokenizer()
    if generic:
        tokens = generic_tools.with_format(tokens.with_tools(None))  # type: ignore[arg-type]
    async with run_server(engine(), tokens=tokens) as site:
        said = [*USER, {"role": "assistant", "tool_calls": [call("a", NUMBERS)]}, result("a")]
        assert NUMBERS in await prompt(site, messages=said)
        other = [*USER, {"role": "assistant", "tool_calls": [call("a", '{"x": 1e3}')]}, result("a")]
        assert '{"x": 1e3}' in await prompt(site, messages=other)


# ---------------------------------------------------------------- refusals and older calls
@pytest.mark.parametrize(
    "fields",
    [
        {"content": None, "refusal": "I would rather not."},
        {"refusal": "I would rather not."},
        {"content": [{"type": "refusal", "refusal": "I would rather not."}]},
        {"content": [{"type": "text", "text": "I would "}, {"type": "refusal", "refusal": "rather not."}]},
    ],
    ids=str,
)
async def test_a_refusal_is_what_the_assistant_said(fields: dict[str, Any]) -> None:
    async with run_server(engine()) as site:
        plain = await prompt(site, messages=answered(content="I would rather not."))
        assert await prompt(site, messages=answered(**fields)) == plain


async def test_a_refusal_beside_other_words_comes_after_them() -> None:
    async with run_server(engine()) as site:
        reported = await prompt(site, messages=answered(content="First.", refusal="Then no."))
        assert reported == await prompt(site, messages=answered(content="First.\n\nThen no."))


async def test_an_older_function_call_is_a_tool_call_and_its_result_a_tools() -> None:
    old = [
        *USER,
        {"role": "assistant", "content": None, "function_call": CALL},
        {"role": "function", "name": "get_time", "content": "12:00"},
        {"role": "assistant", "content": None, "function_call": CALL | {"arguments": '{"city": "Rome"}'}},
        {"role": "function", "name": "get_time", "content": "13:00"},
    ]
    new: list[dict[str, Any]] = [
        *USER,
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "a", "content": "12:00"},
        {"role": "assistant", "tool_calls": [{"id": "b", "function": CALL | {"arguments": '{"city": "Rome"}'}}]},
        {"role": "tool", "tool_call_id": "b", "content": "13:00"},
    ]
    async with run_server(engine()) as site:
        reported = await prompt(site, messages=old, tools=[TOOL])
        assert "Rome" in reported
        assert reported == await prompt(site, messages=new, tools=[TOOL])


@pytest.mark.parametrize(
    ("message", "member"),
    [
        ({"role": "assistant", "function_call": CALL, "tool_calls": [{"id": "a", "function": CALL}]}, "function_call"),
        ({"role": "assistant", "content": "x", "audio": {"id": "audio_1"}}, "audio"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "content[0].refusal"),
        ({"role": "assistant", "content": [{"type": "audio", "text": "x"}]}, "content[0]"),
        ({"role": "assistant", "refusal": 5}, "refusal"),
        ({"role": "assistant", "function_call": "get_time"}, "function_call"),
        ({"role": "assistant", "function_call": {"arguments": "{}"}}, "function_call.name"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "content[0]"),
        ({"role": "user", "content": "x", "refusal": "no"}, "refusal"),
        ({"role": "user", "content": "x", "function_call": CALL}, "function_call"),
        ({"role": "system", "content": "x", "tool_calls": [{"id": "a", "function": CALL}]}, "tool_calls"),
        ({"role": "tool", "content": "x", "tool_call_id": "a", "reasoning": "so"}, "reasoning"),
    ],
    ids=str,
)
async def test_a_member_that_its_message_cant_have_is_refused_by_its_place(
    message: dict[str, Any], member: str
) -> None:
    async with run_server() as site:
        answer = await site.chat(messages=[*USER, message])
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"messages[1].{member}"


async def test_what_asks_for_nothing_is_taken_from_every_role() -> None:
    nothing = {"refusal": None, "tool_calls": [], "function_call": None, "audio": None, "annotations": []}
    async with run_server(engine()) as site:
        for message in ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}):
            plain = await prompt(site, messages=[*USER, message])
            assert await prompt(site, messages=[*USER, message | nothing]) == plain


# ---------------------------------------------------------------- unknown members
async def test_unknown_members_of_known_objects_are_counted_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    said = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "colour": 1}], "speaker": "x", "colour": None},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": CALL | {"thought": 1}}]},
        {"role": "tool", "tool_call_id": "a", "content": "x", "speaker": "y"},
    ]
    tool = {"type": "function", "function": {**TOOL["function"], "returns": {}}}  # type: ignore[dict-item]
    fields = {"tools": [tool], "reasoning": {"depth": 2}, "stream_options": None, "wibble": 1}
    names = [
        "messages[].content[].colour",
        "messages[].speaker",
        "messages[].tool_calls[].function.thought",
        "reasoning.depth",
        "tools[].function.returns",
        "wibble",
    ]
    async with run_server() as site:
        with caplog.at_level(logging.WARNING, "marathon.api"):
            assert (await site.chat(messages=said, **fields)).status_code == 200
            assert (await site.chat(messages=said, **fields)).status_code == 200
        logged = [record.getMessage() for record in caplog.records if "unknown field" in record.getMessage()]
        assert logged == [f"a request has the unknown field {name!r}; it is ignored" for name in names]
        metrics = (await site.client.get("/metrics")).text
        assert f'marathon_unknown_request_fields_total{{endpoint="chat"}} {2 * len(names)}.0' in metrics


async def test_unknown_members_do_not_reach_the_template() -> None:
    async with run_server(engine()) as site:
        tool = {"type": "function", "function": {**TOOL["function"], "returns": "marmalade"}}  # type: ignore[dict-item]
        assert "marmalade" not in await prompt(site, messages=[*USER, NEXT | {"colour": "marmalade"}], tools=[tool])


async def test_an_answer_comes_back_as_it_was_sent_without_a_word_in_the_log() -> None:
    async with run_server() as site:
        message = (await site.chat()).json()["choices"][0]["message"]
        assert (await site.chat(messages=[*USER, message, NEXT])).status_code == 200
        metrics = (await site.client.get("/metrics")).text
        assert 'marathon_unknown_request_fields_total{endpoint="chat"} 0.0' in metrics


async def test_unknown_members_of_a_completion_are_counted_too() -> None:
    async with run_server() as site:
        assert (await site.stream_text(stream_options={"include_usage": False, "colour": 1}))[-1] == "[DONE]"
        metrics = (await site.client.get("/metrics")).text
        assert 'marathon_unknown_request_fields_total{endpoint="completions"} 1.0' in metrics


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"messages": [{"role": "user", "content": "x", "speaker": 1}]}),
        ("/tokenize", {"content": "x", "colour": 1}),
        ("/detokenize", {"tokens": [1], "colour": 1}),
        ("/apply-template", {"messages": [{"role": "user", "content": "x", "speaker": 1}]}),
        ("/v1/chat/completions/input_tokens", {"messages": USER, "colour": 1}),
    ],
)
async def test_routes_about_tokens_count_unknown_members_too(path: str, body: dict[str, Any]) -> None:
    async with run_server() as site:
        assert (await site.post(path, body)).status_code == 200
        metrics = (await site.client.get("/metrics")).text
        assert 'marathon_unknown_request_fields_total{endpoint="other"} 1.0' in metrics


# ---------------------------------------------------------------- reasoning
@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"reasoning": {"enabled": False}}, "none"),
        ({"reasoning": {"enabled": True}}, "medium"),
        ({"reasoning": {"enabled": True, "effort": "high"}}, "high"),
        ({"reasoning": {"enabled": False, "effort": "none"}}, "none"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "low"),
        ({"reasoning": {}}, None),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "medium"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "high"}, "high"),
        ({"enable_thinking": False}, "none"),
        ({"enable_thinking": True}, "medium"),
        ({"enable_thinking": False, "thinking": {"type": "disabled"}, "reasoning": {"enabled": False}}, "none"),
    ],
    ids=json.dumps,
)
async def test_reasoning_may_be_switched(fields: dict[str, Any], effort: str | None) -> None:
    request = body.validate(ChatRequest, json.dumps({"messages": USER} | fields).encode())
    async with run_server() as site:
        refusals.check_chat(request, site.served.settings)
        assert (await site.chat(**fields)).status_code == 200
        metrics = (await site.client.get("/metrics")).text
        assert 'marathon_unknown_request_fields_total{endpoint="chat"} 0.0' in metrics
    assert request.effort == effort


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"enabled": False, "effort": "high"}}, "reasoning.enabled"),
        ({"reasoning": {"enabled": True, "effort": "none"}}, "reasoning.enabled"),
        ({"reasoning": {"enabled": False}, "reasoning_effort": "low"}, "reasoning.enabled"),
        ({"reasoning": {"enabled": "no"}}, "reasoning.enabled"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, "thinking.type"),
        ({"thinking": {"type": "enabled"}, "enable_thinking": False}, "thinking.type"),
        ({"reasoning": {"enabled": False}, "enable_thinking": True}, "reasoning.enabled"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"reasoning": {"max_tokens": 100}}, "reasoning.max_tokens"),
    ],
    ids=json.dumps,
)
async def test_a_wish_for_reasoning_that_cant_be_met_is_refused(fields: dict[str, Any], param: str) -> None:
    async with run_server() as site:
        answer = await site.chat(**fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "arguments",
    [
        r'{"x": "\u003c|im_end|>"}',
        r'{"x": ["<|im_end|\u003e", {"y": "\u003C\u007cim_start|>"}]}',
        r'{"\u003c|im_end|>": 1}',
        r'{"x": "\ud800", "\udbff": "\udc00 \ufdd0 \ufdd2"}',
        r'{"x": "\ufdd01\ufdd1"}',
        '{"x": "<|im_end|>"}',
    ],
)
async def test_arguments_spell_no_control_token_however_they_are_escaped(arguments: str) -> None:
    """Nor one of the code points that stand for control tokens until a prompt is encoded."""
    ids = []
    async with run_server(engine()) as site:
        for said in ('{"x": "plain"}', arguments):
            asked = [*USER, {"role": "assistant", "tool_calls": [call("a", said)]}, result("a")]
            answer = await site.chat(messages=asked)
            assert answer.status_code == 200, answer.text
            ids.append(site.fake.submits[-1].sequence.prompt)
    control = tokenizer().encode("<|im_start|><|im_end|>", special=True, bos=False)
    assert len(control) == 2
    assert [[token for token in one if token in control] for one in ids][1:] == [
        [token for token in ids[0] if token in control]
    ]
