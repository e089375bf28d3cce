"""Chat completions as a client meets them: over a real uvicorn, from a scripted engine."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import openai
import pytest
from fake_engine import Poison
from serving import HELLO, MODEL, USER, Site, engine, payloads, run_server, says, tokenizer

from server.api.output import respond, sse
from server.api.output.schema import ChatCompletion, ChatCompletionChunk, ErrorBody

TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call>'


def text(events: list[Any]) -> str:
    return "".join(c["delta"].get("content") or "" for c in choices(events))


def choices(events: list[Any]) -> list[Any]:
    return [choice for event in events if event != "[DONE]" for choice in event.get("choices", [])]


def finishes(events: list[Any]) -> list[str]:
    return [choice["finish_reason"] for choice in choices(events) if choice["finish_reason"]]


def client(site: Site, **options: Any) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(trust_env=False, verify=False)
    return openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="sk-x", max_retries=0, http_client=http, **options)


# ---------------------------------------------------------------- shape
async def test_a_plain_answer_has_the_documented_shape() -> None:
    async with run_server() as site:
        answer = await site.chat()
        body = ChatCompletion.model_validate_json(answer.content)
        assert body.choices[0].message.content == HELLO
        assert body.choices[0].finish_reason == "stop"
        assert body.usage.completion_tokens == len(tokenizer().encode(HELLO, bos=False)) + 1
        assert body.usage.total_tokens == body.usage.prompt_tokens + body.usage.completion_tokens
        assert body.model == MODEL


async def test_a_stream_says_the_same_as_the_plain_answer() -> None:
    async with run_server() as site:
        events = await site.stream_chat()
        assert text(events) == HELLO
        assert finishes(events) == ["stop"]
        assert events[-1] == "[DONE]"
        chunks = [ChatCompletionChunk.model_validate(event) for event in events[:-1]]
        assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
        assert all("usage" not in event for event in events[:-1])


async def test_the_role_comes_first_and_once_and_no_delta_is_empty_text() -> None:
    async with run_server() as site:
        deltas = [choice["delta"] for choice in choices(await site.stream_chat())]
        assert deltas[0] == {"role": "assistant", "content": None}
        assert all("role" not in delta for delta in deltas[1:])
        assert all(delta.get("content") != "" for delta in deltas)


async def test_a_reader_that_keeps_up_gets_a_chunk_a_token_and_one_more_that_says_why_it_ends() -> None:
    async with run_server(engine(step_seconds=0.02, say=says("one two three four five", stop=False))) as site:
        events = choices(await site.stream_chat(max_tokens=4))
        assert len(events) == 1 + 4 + 1
        assert events[-1]["finish_reason"] == "length"


async def test_the_usage_chunk_comes_last_and_only_when_asked_for() -> None:
    async with run_server() as site:
        *chunks, usage, done = await site.stream_chat(stream_options={"include_usage": True})
        assert done == "[DONE]"
        assert usage["choices"] == []
        assert usage["object"] == "chat.completion.chunk"
        assert usage["usage"]["completion_tokens"] == len(tokenizer().encode(HELLO, bos=False)) + 1
        assert all(chunk["usage"] is None for chunk in chunks)
        for options in (None, {}, {"include_usage": False}):
            events = await site.stream_chat(stream_options=options)
            assert all(event["choices"] and "usage" not in event for event in events[:-1])


async def test_stream_headers_let_no_proxy_hold_it_back() -> None:
    async with run_server() as site:
        body = {"model": MODEL, "messages": USER, "stream": True}
        async with site.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert "no-cache" in response.headers["cache-control"]
            assert response.headers["x-accel-buffering"] == "no"
            assert response.headers["x-request-id"]
            assert "connection" not in response.headers
            await response.aread()


# ---------------------------------------------------------------- limits, stops, choices
async def test_max_completion_tokens_wins_over_its_older_name() -> None:
    async with run_server() as site:
        body = (await site.chat(max_tokens=5, max_completion_tokens=3)).json()
        assert body["usage"]["completion_tokens"] == 3
        assert body["choices"][0]["finish_reason"] == "length"


async def test_an_absent_limit_is_what_the_context_leaves_and_a_larger_one_is_cut_to_it() -> None:
    async with run_server(engine(say=says("x", stop=False), context=64)) as site:
        for limit in ({}, {"max_tokens": 1000}):
            usage = (await site.chat(**limit)).json()["usage"]
            assert usage["total_tokens"] == 64


async def test_the_default_limit_is_a_setting() -> None:
    async with run_server(engine(say=says("x", stop=False)), default_max_tokens=7) as site:
        assert (await site.chat()).json()["usage"]["completion_tokens"] == 7


async def test_a_stop_string_cuts_before_itself_and_frees_the_row() -> None:
    fake = engine(step_seconds=0.005)
    async with run_server(fake) as site:
        for stop in ("ow ar", ["zzz", "ow ar"]):
            body = (await site.chat(stop=stop)).json()
            assert body["choices"][0]["message"]["content"] == HELLO.partition("ow ar")[0]
            assert body["choices"][0]["finish_reason"] == "stop"
        events = await site.stream_chat(stop="ow ar")
        assert text(events) == HELLO.partition("ow ar")[0]
        assert finishes(events) == ["stop"]
        await site.until(lambda: not fake.rows)


async def test_n_choices_share_a_seed_and_differ_by_their_index() -> None:
    fake = engine(say=says("first", "second", "third"))
    async with run_server(fake) as site:
        body = (await site.chat(n=3, seed=-7)).json()
        assert [c["message"]["content"] for c in body["choices"]] == ["first", "second", "third"]
        assert [c["index"] for c in body["choices"]] == [0, 1, 2]
        assert {s.sequence.sampling.seed for s in fake.submits} == {2**64 - 7}
        assert [s.sequence.choice for s in fake.submits] == [0, 1, 2]
        assert body["usage"]["prompt_tokens"] == len(fake.submits[0].sequence.prompt), "one prompt is counted once"

        events = await site.stream_chat(n=2)
        for index, wanted in enumerate(("first", "second")):
            own = [c for c in choices(events) if c["index"] == index]
            assert "".join(c["delta"].get("content") or "" for c in own) == wanted
            assert own[0]["delta"]["role"] == "assistant"
            assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]


async def test_every_sampling_field_reaches_the_engine() -> None:
    fake = engine()
    async with run_server(fake) as site:
        fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1.0}
        fields |= {"frequency_penalty": -1.0, "repetition_penalty": 1.2, "seed": 9}
        answer = await site.chat(**fields, logit_bias={"7": -5}, min_tokens=2, max_tokens=9, stop_token_ids=[4])
        assert answer.status_code == 200
        sequence = fake.submits[0].sequence
        assert {name: getattr(sequence.sampling, name) for name in fields} == fields
        assert sequence.sampling.logit_bias == {7: -5.0}
        assert (sequence.min_tokens, sequence.max_tokens) == (2, 9)
        assert set(sequence.stop_ids) == {4, *tokenizer().eos_ids}
        assert sequence.marks[-1] == len(sequence.prompt)


async def test_a_seed_is_drawn_for_a_request_without_one() -> None:
    fake = engine()
    async with run_server(fake) as site:
        await asyncio.gather(site.chat(), site.chat())
        assert len({submit.sequence.sampling.seed for submit in fake.submits}) == 2


async def test_more_min_tokens_than_max_tokens_are_refused() -> None:
    async with run_server() as site:
        assert (await site.chat(min_tokens=5, max_tokens=4)).json()["error"]["param"] == "min_tokens"


# ---------------------------------------------------------------- log probabilities
async def test_logprobs_are_decoded_tokens_with_bytes() -> None:
    async with run_server(engine(say=says("né 🎉"))) as site:
        choice = (await site.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
        entries = choice["logprobs"]["content"]
        assert bytes(b for entry in entries for b in entry["bytes"]).decode() == "né 🎉"
        assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] == -0.5 for entry in entries)
        plain = (await site.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
        assert all(entry["top_logprobs"] == [] for entry in plain)
        assert (await site.chat()).json()["choices"][0]["logprobs"] is None


async def test_streamed_logprobs_are_the_plain_ones() -> None:
    async with run_server(engine(say=says("né 🎉 done"))) as site:
        plain = (await site.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"]
        events = choices(await site.stream_chat(logprobs=True, top_logprobs=1))
        assert [e for c in events for e in (c["logprobs"] or {"content": []})["content"]] == plain


async def test_many_logprobs_are_written_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 1,000 tokens with 20 alternatives held every stream for 60 ms."""
    threads: list[threading.Thread] = []

    def noted(made: object) -> bytes:
        threads.append(threading.current_thread())
        return sse.encode(made)

    monkeypatch.setattr(respond, "encode", noted)
    async with run_server(engine(say=says("and on " * 200))) as site:
        few = await site.chat(max_tokens=20, logprobs=True, top_logprobs=2)
        many = await site.chat(max_tokens=300, logprobs=True, top_logprobs=2)
    sizes = [len(answer.json()["choices"][0]["logprobs"]["content"]) for answer in (few, many)]
    assert sizes[0] == 20
    assert sizes[1] > 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


# ---------------------------------------------------------------- tools
async def test_a_tool_call_is_streamed_name_first_and_arguments_in_pieces() -> None:
    async with run_server(engine(say=says(CALL))) as site:
        events = await site.stream_chat(tools=[TOOL])
        calls = [call for c in choices(events) for call in c["delta"].get("tool_calls", [])]
        assert calls[0]["function"] == {"name": "get_time", "arguments": ""}
        assert calls[0]["id"]
        assert calls[0]["type"] == "function"
        assert all("id" not in call and "name" not in call["function"] for call in calls[1:])
        assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Oslo"}
        assert len(calls) > 2
        assert finishes(events) == ["tool_calls"]
        assert text(events) == ""


async def test_a_plain_tool_call_has_null_content() -> None:
    async with run_server(engine(say=says(CALL + "\n" + CALL))) as site:
        choice = ChatCompletion.model_validate_json((await site.chat(tools=[TOOL])).content).choices[0]
        assert choice.message.content is None
        assert [call.function.name for call in choice.message.tool_calls or []] == ["get_time"] * 2
        assert choice.finish_reason == "tool_calls"


async def test_a_call_cut_short_ends_with_length_and_what_there_is() -> None:
    async with run_server(engine(say=says(CALL))) as site:
        cut = len(tokenizer().encode(CALL, bos=False)) - 12
        choice = (await site.chat(tools=[TOOL], max_tokens=cut)).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_time"


async def test_what_is_no_call_becomes_content() -> None:
    broken = "<tool_call>\nnonsense\n</tool_call>"
    async with run_server(engine(say=says(broken))) as site:
        choice = (await site.chat(tools=[TOOL])).json()["choices"][0]
        assert choice["message"]["content"] == broken
        assert choice["finish_reason"] == "stop"


async def test_tool_choice_none_keeps_tools_from_the_model_and_calls_from_the_client() -> None:
    fake = engine(say=says(CALL))
    async with run_server(fake) as site:
        choice = (await site.chat(tools=[TOOL], tool_choice="none")).json()["choices"][0]
        assert choice["message"]["content"] == CALL
        await site.chat()
        assert fake.submits[0].sequence.prompt == fake.submits[1].sequence.prompt


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "get_time"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "get_time"}}]}},
    ],
    ids=["required", "named", "allowed"],
)
async def test_a_forced_call_goes_to_the_engine_with_a_grammar(choice: Any) -> None:
    fake = engine(say=says(CALL))
    async with run_server(fake) as site:
        body = (await site.chat(tools=[TOOL], tool_choice=choice)).json()
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        grammar = fake.submits[0].sequence.grammar
        assert grammar is not None
        assert "get_time" in grammar.text


async def test_a_response_format_may_stand_beside_a_forced_call() -> None:
    async with run_server(engine(say=says(CALL))) as site:
        answer = await site.chat(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"})
        assert answer.json()["choices"][0]["message"]["tool_calls"]


async def test_the_stump_of_a_forced_call_is_no_content() -> None:
    async with run_server(engine(say=says(CALL + "\n<tool_c", stop=False))) as site:
        fields = {
            "tools": [TOOL],
            "tool_choice": "required",
            "max_tokens": len(tokenizer().encode(CALL, bos=False)) + 4,
        }
        message = (await site.chat(**fields)).json()["choices"][0]["message"]
        assert message["content"] is None
        assert len(message["tool_calls"]) == 1
        events = await site.stream_chat(**fields)
        assert text(events) == ""
        assert finishes(events) == ["length"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": []}, "tool_choice"),
        (
            {"tool_choice": "required", "tools": [TOOL], "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
    ],
    ids=str,
)
async def test_a_tool_choice_that_makes_no_sense_is_refused(fields: dict[str, Any], param: str) -> None:
    async with run_server() as site:
        answer = await site.chat(**fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": None}], ids=str)
@pytest.mark.parametrize("choice", ["auto", "none", None])
async def test_a_tool_choice_that_asks_for_nothing_needs_no_tools(fields: dict[str, Any], choice: str | None) -> None:
    fake = engine()
    async with run_server(fake) as site:
        assert (await site.chat()).status_code == 200
        assert (await site.chat(tool_choice=choice, **fields)).status_code == 200
        assert (await site.stream_chat(tool_choice=choice, **fields))[-1] == "[DONE]"
        prompts = [submit.sequence.prompt for submit in fake.submits]
        assert prompts == prompts[:1] * 3
        body = {"messages": USER, "tool_choice": choice, **fields}
        counted = await site.post("/v1/chat/completions/input_tokens", body)
        assert counted.json()["input_tokens"] == len(prompts[0])


async def test_a_history_of_calls_is_read() -> None:
    history = [
        {"role": "user", "content": "time in Oslo?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Oslo"}'}},
                {"id": "c2", "type": "function", "function": {"name": "get_time", "arguments": "no json"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        {
            "role": "tool",
            "tool_call_id": "c2",
            "content": [{"type": "text", "text": "12"}, {"type": "text", "text": ":01"}],
        },
    ]
    fake = engine()
    async with run_server(fake) as site:
        assert (await site.chat(messages=history, tools=[TOOL])).status_code == 200
        prompt = tokenizer().decode(fake.submits[0].sequence.prompt)
        for piece in ("12:00", "12:01", "no json", '"city": "Oslo"'):
            assert piece in prompt


# ---------------------------------------------------------------- formats
async def test_json_wishes_go_to_the_engine_with_a_grammar() -> None:
    fake = engine(say=says('{"a": 1}'))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with run_server(fake) as site:
        for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}):
            body = (await site.chat(response_format=form)).json()
            assert body["choices"][0]["message"]["content"] == '{"a": 1}'
        await site.chat(response_format={"type": "text"})
        grammars = [submit.sequence.grammar for submit in fake.submits]
        assert grammars[0] is not None
        assert grammars[1] is not None
        assert '"integer"' in grammars[1].text
        assert grammars[2] is None


async def test_a_schema_that_cannot_be_enforced_is_refused_by_its_place() -> None:
    fake = engine()
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "strin"}}}}
    async with run_server(fake) as site:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        error = (await site.chat(response_format=form)).json()["error"]
        assert error["param"] == "response_format.json_schema.schema.properties.a.items"
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        error = (await site.chat(tools=[TOOL, tool], tool_choice="required")).json()["error"]
        assert error["param"] == "tools[1].function.parameters.properties.a.items"
        assert not fake.submits


# ---------------------------------------------------------------- refusals and failures
async def test_a_bad_request_for_a_stream_is_no_stream() -> None:
    async with run_server() as site:
        answer = await site.chat(messages=[], stream=True)
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/json"


async def test_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    async with run_server(engine(context=16)) as site:
        error = (await site.chat(stream=True)).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["n_prompt_tokens"] >= error["n_ctx"] > 0
        ErrorBody.model_validate({"error": error})
        assert "16" in error["message"]


async def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    fake = engine(say=says("x", stop=False), prefill_seconds=0.2)
    async with run_server(fake, max_rows=1, queue_limit=0) as site:
        task = asyncio.create_task(site.stream_chat(max_tokens=50))
        await site.until(lambda: bool(fake.rows))
        answer = await site.chat(n=4)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        await task


async def test_a_failure_in_a_stream_is_one_event_and_no_done() -> None:
    fake = engine(say=says("x", stop=False), step_seconds=0.005)
    async with run_server(fake) as site:
        body = {"model": MODEL, "messages": USER, "stream": True}
        async with site.client.stream("POST", "/v1/chat/completions", json=body) as response:
            events = []
            async for event in payloads(response):
                events.append(event)
                if len(events) == 3:
                    fake.fail_row(next(iter(fake.rows)))
        assert events[-1]["error"]["code"] == "generation_failed"
        assert ErrorBody.model_validate(events[-1])
        assert "[DONE]" not in events
        assert finishes(events) == []


async def test_a_failed_plain_answer_asks_sdks_not_to_try_again() -> None:
    fake = engine()
    prompt = tokenizer().chat(USER).ids
    fake.poison[prompt[0]] = Poison(after=1, how="fail")
    async with run_server(fake) as site:
        answer = await site.chat()
        assert answer.status_code == 500
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["code"] == "generation_failed"


async def test_leaving_a_stream_frees_its_rows() -> None:
    fake = engine(say=says("x", stop=False), step_seconds=0.005)
    async with run_server(fake) as site:
        body = {"model": MODEL, "messages": USER, "stream": True, "n": 3}
        async with site.client.stream("POST", "/v1/chat/completions", json=body) as response:
            await anext(payloads(response))
            assert len(fake.rows) == 3
        await site.until(lambda: not fake.rows)
        assert len(fake.cancels) == 3


async def test_leaving_a_plain_request_frees_its_row() -> None:
    fake = engine(say=says("x", stop=False), step_seconds=0.005)
    async with run_server(fake) as site:
        task = asyncio.create_task(site.chat())
        await site.until(lambda: bool(fake.rows))
        task.cancel()
        await site.until(lambda: not fake.rows)


async def test_a_silent_stream_shows_signs_of_life() -> None:
    fake = engine(prefill_seconds=0.5)
    async with run_server(fake, keepalive_seconds=0.1) as site:
        body = {"model": MODEL, "messages": USER, "stream": True}
        async with site.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines()]
        first = next(i for i, line in enumerate(lines) if line.startswith("data:"))
        assert sum(line.startswith(":") for line in lines[:first]) >= 3
        assert lines[-2:] == ["data: [DONE]", ""]


async def test_a_reader_that_takes_nothing_is_dropped() -> None:
    fake = engine(say=says("a long word " * 50, stop=False), step_seconds=0.0, context=10**9)
    async with run_server(fake, send_timeout_seconds=0.4) as site:
        body = json.dumps({"messages": USER, "stream": True, "n": 8, "logprobs": True, "top_logprobs": 2}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", int(site.url.rsplit(":", 1)[1]), limit=1024)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await site.until(lambda: bool(fake.rows))
        await site.until(lambda: not fake.rows, seconds=15)
        writer.transport.abort()


# ---------------------------------------------------------------- models and SDK
async def test_the_model_answers_to_its_names_and_to_no_other() -> None:
    async with run_server(model_alias="gpt-x,other/name") as site:
        for name in (MODEL, "default", "gpt-x", "other/name", None):
            assert (await site.chat(model=name)).json()["model"] == MODEL
        answer = await site.chat(model="no/such-model")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert "no/such-model" in answer.json()["error"]["message"]
        listed = (await site.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == [MODEL, "gpt-x", "other/name"]
        assert (await site.client.get("/v1/models/other/name")).json()["id"] == "other/name"
        assert (await site.client.get("/v1/models/nobody/there")).status_code == 404


async def test_the_sdk_reads_plain_answers_and_streams() -> None:
    async with run_server() as site, client(site) as sdk:
        messages: Any = USER
        answer = await sdk.chat.completions.create(model=MODEL, messages=messages)
        assert answer.choices[0].message.content == HELLO
        stream = await sdk.chat.completions.create(model=MODEL, messages=messages, stream=True)
        got = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(got) == HELLO


async def test_the_sdk_raises_the_right_class_with_all_four_facts() -> None:
    async with run_server() as site, client(site) as sdk:
        messages: Any = USER
        with pytest.raises(openai.BadRequestError) as bad:
            await sdk.chat.completions.create(model=MODEL, messages=messages, temperature=3)
        assert (bad.value.param, bad.value.code, bad.value.type) == (
            "temperature",
            "invalid_value",
            "invalid_request_error",
        )
        with pytest.raises(openai.NotFoundError) as missing:
            await sdk.chat.completions.create(model="nobody", messages=messages)
        assert missing.value.code == "model_not_found"
        assert missing.value.request_id


async def test_paths_without_v1_work_too() -> None:
    async with run_server() as site:
        answer = await site.post("/chat/completions", {"messages": USER})
        assert answer.json()["choices"][0]["message"]["content"] == HELLO


async def test_unknown_fields_are_ignored_and_counted() -> None:
    async with run_server() as site:
        assert (await site.chat(frobnicate=1, wibble=None, top_a=2)).status_code == 200
        metrics = (await site.client.get("/metrics")).text
        assert 'marathon_unknown_request_fields_total{endpoint="chat"} 2.0' in metrics
