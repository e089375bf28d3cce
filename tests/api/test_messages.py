"""POST /v1/messages over a scripted engine: what comes out, and how it is refused."""

from __future__ import annotations

import json
import pickle
import random
from itertools import pairwise
from typing import Any

import anthropic
import pytest
from fake_engine import Poison
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from messaging import PATH, USER, Event, ask, body, events_of, folded, kinds, plain, stream, without_ids
from serving import HELLO, MODEL, Site, engine, run_server, says, settings, tokenizer
from spelling import Spelled, tool_format

from server.api.context import ServedModel
from server.api.input.sequences import Bounds
from server.api.messages import prepare
from server.api.output.choices import Choice
from server.api.output.messages import SIGNATURE, MessagesForm
from server.api.output.messages_schema import AnthropicErrorBody, AnthropicMessage
from server.api.output.sse import encode
from server.ipc.sequence import Sampling, TokenSequence
from server.supervision.generation import GenerationDelta
from server.text.detokenizer import TextState

TOOLS: list[dict[str, Any]] = [
    {"name": "look_up", "description": "Looks it up.", "input_schema": {"type": "object"}},
    {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True},
    {"type": "web_search_20260209", "name": "web_search"},
]


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


EVERYTHING = "Hello there." + call("look_up", key=1) + call("later")


# ---------------------------------------------------------------- what comes out
async def test_a_stream_carries_each_block_from_its_beginning_to_its_end() -> None:
    async with run_server(engine(say=says(EVERYTHING))) as site:
        events = await stream(site, tools=TOOLS)
        start, delta, stop = (f"content_block_{what}" for what in ("start", "delta", "stop"))
        used = [f"{start} tool_use", f"{delta} input_json_delta", stop]
        text = [f"{start} text", f"{delta} text_delta", stop]
        assert kinds(events) == ["message_start", *text, *used, *used, "message_delta", "message_stop"]
        blocks = [event for event in events if event["type"] == start]
        assert [event["index"] for event in blocks] == [0, 1, 2]
        assert blocks[1]["content_block"] | {"id": ""} == {"type": "tool_use", "id": "", "name": "look_up", "input": {}}
        begun = events[0]["message"]
        assert (begun["content"], begun["stop_reason"], begun["stop_sequence"]) == ([], None, None)
        assert begun["usage"]["input_tokens"] > 0
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None}
        whole = await ask(site, tools=TOOLS)
        assert without_ids(whole["content"]) == [
            {"type": "text", "text": "Hello there."},
            {"type": "tool_use", "name": "look_up", "input": {"key": 1}},
            {"type": "tool_use", "name": "later", "input": {}},
        ]
        assert events[-2]["usage"] == whole["usage"]


ENDS: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, "end_turn", None),
    ({"stop_sequences": ["never", "x", "y", "z", "are"]}, "stop_sequence", "are"),
    ({"stop_sequences": ["never", "how"]}, "stop_sequence", "how"),
    ({"max_tokens": 2}, "max_tokens", None),
    ({"max_tokens": 128_000}, "end_turn", None),
]


@pytest.mark.parametrize(("fields", "reason", "sequence"), ENDS)
async def test_the_reason_for_the_end_is_named(fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    async with run_server() as site:
        whole = await ask(site, **fields)
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
        events = await stream(site, **fields)
        reported = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
        assert events[-2]["delta"] == reported


async def test_an_answer_that_fills_the_context_says_so() -> None:
    async with run_server(engine(say=says("on", stop=False)), context=64) as site:
        assert (await ask(site, max_tokens=128_000))["stop_reason"] == "model_context_window_exceeded"


async def test_a_stream_without_news_shows_pings() -> None:
    async with run_server(engine(prefill_seconds=0.3), keepalive_seconds=0.05) as site:
        answer = await site.post(PATH, body(stream=True))
        assert 'event: ping\ndata: {"type":"ping"}\n\n' in answer.text
        assert events_of(answer.text)[-1]["type"] == "message_stop"


def test_arguments_that_are_no_object_leave_the_plain_answer_with_an_empty_one() -> None:
    form = MessagesForm({}, 9, only_calls=False)
    reader = Reader(call("f", a="Oslo"))
    choice = reader.begin()
    form.keep(choice, choice.take(GenerationDelta(reader.tokens[:-18], finish="length")))
    [block] = form.whole([choice], USAGE)["content"]
    assert (block["name"], block["input"]) == ("f", {})


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": 1e400, "y": [-1E999]}',
        '{"x": 1e2, "y": 1.0, "z": 0.1000000000000000055, "n": 12345678901234567890123}',
        r'{"x": "\ud800", "\udfff": 1}',
        '{"x": NaN, "y": Infinity}',
        "{}",
    ],
)
async def test_the_input_of_a_call_is_the_same_text_streamed_and_plain(arguments: str) -> None:
    script = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    async with run_server(engine(say=says(script))) as site:
        events = await stream(site, tools=TOOLS)
        answer = await site.post(PATH, body(tools=TOOLS))
    assert answer.status_code == 200, answer.text
    joined = "".join(
        event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"
    )
    assert f'"input":{joined}' in answer.text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "later"}])
async def test_a_forced_call_is_one_of_the_tools_and_may_be_a_deferred_one(choice: dict[str, Any]) -> None:
    async with run_server(engine(say=says(EVERYTHING))) as site:
        await ask(site, tools=TOOLS, tool_choice=choice)
        [submitted] = site.fake.submits
        assert submitted.sequence.grammar is not None
        assert ("look_up" in submitted.sequence.grammar.text) == (choice["type"] == "any")


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": {"enum": ["Oslo"]}}}},
        {"output_format": {"type": "json_schema", "schema": {"enum": ["Oslo"]}}},
    ],
)
async def test_a_schema_of_the_answer_is_enforced(fields: dict[str, Any]) -> None:
    async with run_server() as site:
        await ask(site, **fields)
        [submitted] = site.fake.submits
        assert submitted.sequence.grammar is not None
        assert "Oslo" in submitted.sequence.grammar.text


async def test_tokens_are_counted_as_usage_has_them_also_without_an_engine() -> None:
    asked = body(tools=TOOLS, system="Be brief.")
    del asked["max_tokens"]
    async with run_server(engine(starts=["hang"]), ready=False) as site:
        counted = (await site.post(f"{PATH}/count_tokens?beta=true", asked)).json()
    async with run_server() as site:
        whole = await ask(site, tools=TOOLS, system="Be brief.")
        refused = await site.post(f"{PATH}/count_tokens", {"messages": []})
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert counted == {"input_tokens": whole["usage"]["input_tokens"]}


def test_a_request_can_be_prepared_in_another_process() -> None:
    served = ServedModel(settings(), MODEL, 0, tokenizer())
    request = prepare(served, json.dumps(body(tools=TOOLS)).encode(), Bounds(tokenizer().vocab_size, 4096))
    served.checker.close()
    assert isinstance(pickle.loads(pickle.dumps(request.lean().form)), MessagesForm)


# ---------------------------------------------------------------- refusals
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"temperature": 3}, 400, "invalid_request_error"),
    ({"max_tokens": None}, 400, "invalid_request_error"),
    ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error"),
    ({"tool_choice": {"type": "tool", "name": "web_search"}, "tools": TOOLS}, 400, "invalid_request_error"),
    ({"model": "other"}, 404, "not_found_error"),
    ({"system": "x" * 9000}, 413, "request_too_large"),
]


def check_refusal(answer: Any, status: int, kind: str) -> None:
    reported = AnthropicErrorBody.model_validate(answer.json())
    assert (answer.status_code, reported.error.type) == (status, kind), answer.text
    assert reported.request_id == answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("path", [PATH, "/messages", f"{PATH}/count_tokens"])
async def test_refusals_have_anthropics_form_whatever_refuses(path: str) -> None:
    async with run_server(max_body_bytes=8192, api_key=["sk-x"]) as site:
        key = {"x-api-key": "sk-x"}
        for fields, status, kind in REFUSED:
            if "count" not in path or not {"temperature", "max_tokens"} & set(fields):
                check_refusal(await site.client.post(path, json=body(**fields), headers=key), status, kind)
        check_refusal(await site.post(path, body()), 401, "authentication_error")
        foreign = {**key, "origin": "http://elsewhere.example"}
        check_refusal(await site.client.post(path, json=body(), headers=foreign), 403, "permission_error")
        check_refusal(await site.client.post(path, content=b"{", headers=key), 400, "invalid_request_error")
        check_refusal(await site.client.get(path, headers=key), 405, "not_found_error")
        chat = await site.client.post("/v1/chat/completions", json={}, headers=key)
        assert "code" in chat.json()["error"]


async def test_routes_of_the_messages_api_that_arent_here_are_refused_in_its_form_and_others_arent() -> None:
    async with run_server() as site:
        for path in (f"{PATH}/batches", f"{PATH}/batches/x/results", f"{PATH}/msg_1", "/messages/batches", f"{PATH}/"):
            for method in ("GET", "POST", "DELETE"):
                check_refusal(await site.client.request(method, path), 404, "not_found_error")
        async with sdk(site) as client:
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.batches.list()
        for path in ("/v1/messages-of-mine", "/messagesx", "/v1/v1/messages"):
            assert "code" in (await site.client.get(path)).json()["error"]


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
async def test_a_conversation_that_the_server_is_to_hold_is_refused_as_the_sdks_know_it(path: str) -> None:
    """Their tool runners leave the thread out then, and send all messages; any other refusal ends them."""
    async with run_server() as site:
        for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
            answer = await site.post(path, body(thread=thread))
            check_refusal(answer, 400, "invalid_request_error")
            reported = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            assert answer.json()["error"]["details"] == reported


async def test_a_prompt_that_is_too_long_is_named_by_the_words_that_agents_know() -> None:
    async with run_server(context=64) as site:
        answer = await site.post(PATH, body(system="word " * 100))
        check_refusal(answer, 400, "invalid_request_error")
        counted = (await site.post(f"{PATH}/count_tokens", body(system="word " * 100))).json()["input_tokens"]
        assert answer.json()["error"]["message"] == f"prompt is too long: {counted} tokens > 63 maximum"


async def test_a_full_queue_and_a_server_without_engine_ask_to_come_back() -> None:
    fake = engine(starts=["ok", *["load_failed"] * 9])
    async with run_server(fake, outage_seconds=0.0) as site:
        fake.die()
        await site.until(lambda: bool(site.served.supervisor.down_reason))
        check_refusal(await site.post(PATH, body()), 503, "overloaded_error")
    async with run_server(engine(prefill_seconds=5), max_rows=1, queue_limit=0) as site:
        async with site.client.stream("POST", PATH, json=body(stream=True)):
            check_refusal(await site.post(PATH, body()), 429, "rate_limit_error")
        site.served.supervisor.draining = True
        check_refusal(await site.post(PATH, body()), 503, "overloaded_error")


def poisonous() -> Any:
    """An engine that can't go on with these requests."""
    fake = engine()
    fake.poison |= dict.fromkeys(range(fake.vocab_size), Poison(after=0, how="fail"))
    return fake


async def test_a_request_that_can_not_go_on_is_refused_for_good() -> None:
    async with run_server(poisonous()) as site:
        failed = (await stream(site))[-1]
        assert (failed["type"], failed["error"]["type"]) == ("error", "api_error")
        answer = await site.post(PATH, body())
        check_refusal(answer, 400, "invalid_request_error")
        assert answer.headers["x-should-retry"] == "false"


# ---------------------------------------------------------------- streamed and plain are the same
USAGE: dict[str, Any] = {
    "prompt_tokens": 9,
    "completion_tokens": 1,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4},
}


class Reader:
    """One answer, read in news of any size through the server's own text and form."""

    def __init__(self, script: str) -> None:
        self._tokenizer: Any = Spelled(tool_format=tool_format())
        self.tokens = self._tokenizer.tokens(script)
        self.sequence = TokenSequence([1], Sampling(0, 1.0, 1.0, 0, 0.0, 0.0, 0.0, 1.0), 1000, 0, [])

    def begin(self) -> Choice:
        tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
        text = TextState(self._tokenizer, tools=tools)
        return Choice(0, self.sequence, text)  # type: ignore[arg-type]

    def read(self, cuts: list[int]) -> tuple[bytes, dict[str, Any]]:
        """The bytes of a stream, and the plain answer to the same news."""
        head = {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL}
        streamed = MessagesForm(head, 1000, only_calls=False)
        kept = MessagesForm(head, 1000, only_calls=False)
        choice = self.begin()
        data = streamed.first([choice])
        for begin, end in pairwise(sorted({0, *cuts, len(self.tokens)})):
            finish: Any = None
            if end == len(self.tokens):
                finish = "stop"
            pieces = choice.take(GenerationDelta(self.tokens[begin:end], finish=finish))
            data += streamed.chunks(choice, pieces)
            kept.keep(choice, pieces)
        return data + streamed.last([choice], USAGE), json.loads(encode(kept.whole([choice], USAGE)))


WORDS = st.text('abc \n"\\{}<>/é😀', max_size=8)
CALLS = st.tuples(st.sampled_from(["f", "g", "none"]), st.dictionaries(st.sampled_from("ab"), WORDS))
PARTS = st.one_of(
    WORDS,
    WORDS.map(lambda text: f"<think>{text}</think>"),
    CALLS.map(lambda made: call(made[0], **made[1])),
)


@examples(max_examples=100, deadline=None)
@given(st.lists(PARTS, max_size=6).map("".join), st.lists(st.integers(1, 120), max_size=12))
def test_events_put_together_are_the_plain_answer_wherever_the_answer_is_cut(script: str, cuts: list[int]) -> None:
    reader = Reader(script)
    data, whole = reader.read([cut for cut in cuts if cut < len(reader.tokens)])
    events_of(data.decode())
    assert folded(data) == whole
    _, at_once = reader.read([])
    assert without_ids(at_once["content"]) == without_ids(whole["content"]), "the blocks don't depend on the cuts"


# ---------------------------------------------------------------- the official SDK
def sdk(site: Site) -> anthropic.AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(trust_env=False, verify=False)
    return anthropic.AsyncAnthropic(base_url=site.url, api_key="sk-x", max_retries=0, http_client=http)


async def test_the_official_sdk_reads_plain_answers_streams_and_through_its_helper() -> None:
    asked: Any = body(tools=TOOLS)
    async with run_server(engine(say=says(EVERYTHING))) as site, sdk(site) as client:
        whole = await client.messages.create(**asked)
        assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
        names = [event.type async for event in await client.messages.create(**asked, stream=True)]
        assert (names[0], names[-1]) == ("message_start", "message_stop")
        async with client.messages.stream(**asked) as helper:
            text = [piece async for piece in helper.text_stream]
            final = await helper.get_final_message()
        assert "".join(text) == "Hello there."
        assert without_ids(plain(final)["content"]) == without_ids(plain(whole)["content"])
        assert (final.usage.output_tokens, final.stop_reason) == (whole.usage.output_tokens, "tool_use")
        del asked["max_tokens"]
        counted = await client.messages.count_tokens(**asked)
        assert counted.input_tokens == whole.usage.input_tokens


async def test_the_official_sdk_knows_the_errors() -> None:
    asked: Any = body()
    async with run_server(poisonous()) as site, sdk(site) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**asked | {"model": "other"})
        assert missing.value.request_id
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            async with client.messages.stream(**asked) as helper:
                await helper.get_final_message()


# ---------------------------------------------------------------- any request
BLOCKS: list[Any] = [
    "x", [], [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}], [{"type": "image"}],
    [{"type": "text"}], [{"type": "tool_use", "id": "a", "name": "f", "input": {}}], [{"type": "tool_use"}],
    [{"type": "thinking", "thinking": "x", "signature": "y"}], [{"type": "redacted_thinking", "data": "x"}],
    [{"type": "tool_result", "tool_use_id": "a", "content": "x", "is_error": True}], [{"type": "tool_result"}],
    [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "later"}]}],
    [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_result"}]}], 5, None, [1],
]  # fmt: skip
SOME: dict[str, list[Any]] = {
    "system": BLOCKS, "tools": [[], TOOLS, [{}], [{"name": "a b"}], [TOOLS[0], TOOLS[0]], "x"],
    "tool_choice": [
        {"type": "auto"}, {"type": "any", "disable_parallel_tool_use": True}, {"type": "none"}, {"type": "tool"}, "any",
        {"type": "tool", "name": "look_up"},
    ],
    "thinking": [{"type": "adaptive", "display": "omitted"}, {"type": "disabled"}, {"type": "so-so"}, "x"],
    "output_config": [{}, {"effort": "high"}, {"effort": "so-so"}, {"format": {"type": "json_schema"}}],
    "max_tokens": [1, 3, 10**6, 0, -1, "x", 2**70], "stop_sequences": [[], ["x"] * 9, "x", [1]], "stream": [True, 1],
    "temperature": [0, 1, 3, "hot"], "top_p": [0.5, 2], "top_k": [0, 40, -5, "x"], "metadata": [{"user_id": "x"}, 1],
    "context_management": [{"edits": []}], "cache_control": [{"type": "ephemeral"}], "nothing": [1],
}  # fmt: skip


async def test_requests_of_any_shape_are_answered_or_refused_in_the_protocols_form() -> None:
    rng = random.Random(14)
    answered = 0
    async with run_server(engine(say=says(HELLO))) as site:
        for _ in range(100):
            names = rng.sample(sorted(SOME), rng.randrange(4))
            talk = [
                {"role": rng.choice(["user", "assistant", "system"]), "content": rng.choice(BLOCKS)}
                for _ in range(rng.randrange(3))
            ]
            asked = {"messages": [*USER, *talk], "max_tokens": 4} | {name: rng.choice(SOME[name]) for name in names}
            answer = await site.post(PATH, asked)
            assert answer.status_code < 500, (asked, answer.text)
            answered += answer.status_code == 200
            if answer.status_code != 200:
                check_refusal(answer, 400, "invalid_request_error")
            elif asked.get("stream") is True:
                events_of(answer.text)
            else:
                AnthropicMessage.model_validate(answer.json())
    assert 20 < answered < 90


def test_thoughts_come_with_a_signature_at_their_end() -> None:
    data, whole = Reader("<think>Hm.</think>Yes.").read([])
    events: list[Event] = events_of(data.decode())
    thought, text = whole["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE}
    assert text == {"type": "text", "text": "Yes."}
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta", "signature_delta", "text_delta"]
    assert whole["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 1,
    }
