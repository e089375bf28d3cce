"""POST /v1/responses over a scripted engine: items in, items and events out."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import Poison
from hypothesis import given, settings
from hypothesis import strategies as st
from responding import PATH, Event, events_of, folded, kinds, respond, stream, without_ends, without_ids
from scripted_site import SCRIPTS
from serving import HELLO, MODEL, Site, engine, run_server, says, tokenizer

from loadtests.zoo import scripted
from server.api.input.responses_input import messages, seal, unseal
from server.api.input.responses_schema import ResponsesRequest
from server.api.input.responses_tools import ToolIdentity
from server.api.output.choices import Choice
from server.api.output.respond import ProtocolFormat
from server.api.output.responses import ResponsesForm
from server.api.output.responses_schema import ResponseEvent, ResponseObject
from server.api.output.schema import ErrorBody
from server.api.prepare import render
from server.api.responses import conversation
from server.ipc.sequence import Sampling, TokenSequence
from server.settings import load
from server.supervision.generation import GenerationDelta
from server.text.detokenizer import TextState
from server.text.tokenizer import Tokenizer

OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
SEALED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
REGEX = {"structured_outputs": {"regex": "a"}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "look_up", "parameters": {"type": "object"}, "strict": False},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close", "parameters": {}}]},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
    {"type": "web_search", "external_web_access": False},
]


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


EVERYTHING = "Hello there." + call("look_up", key=1) + call("agents__close", id="a") + call("patch", input='*** "x"\n')


# ---------------------------------------------------------------- what comes out
async def test_a_stream_carries_each_item_from_its_beginning_to_its_end() -> None:
    async with run_server(engine(say=says(EVERYTHING))) as site:
        events = await stream(site, tools=TOOLS)
        text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
        function = [f"function_call_arguments.{what}" for what in ("delta", "done")]
        custom = [f"custom_tool_call_input.{what}" for what in ("delta", "done")]
        assert kinds(events) == [
            "created",
            "in_progress",
            *[*text, "content_part.done", "output_item.done"],
            *(["output_item.added", *function, "output_item.done"] * 2),
            *["output_item.added", *custom, "output_item.done"],
            "completed",
        ]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["response"]["output"] == done, "the same items with the same ids"
        plain = await respond(site, tools=TOOLS)
        assert without_ids(plain["output"]) == without_ids(done)
        assert (plain["usage"]["output_tokens"], plain["status"]) == (len(say(EVERYTHING)) + 1, "completed")


def say(text: str) -> list[int]:
    return tokenizer().encode(text, special=True, bos=False)


async def test_calls_come_back_under_the_names_and_kinds_that_the_client_gave() -> None:
    async with run_server(engine(say=says(EVERYTHING))) as site:
        _, function, spaced, custom = (await respond(site, tools=TOOLS))["output"]
        assert (function["type"], function["name"], json.loads(function["arguments"])) == (
            "function_call",
            "look_up",
            {"key": 1},
        )
        assert (spaced["name"], spaced["namespace"]) == ("close", "agents")
        assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", '*** "x"\n')
        assert len({item["call_id"] for item in (function, spaced, custom)}) == 3


async def test_an_answer_that_is_cut_is_incomplete_and_so_is_its_last_item() -> None:
    async with run_server() as site:
        events = await stream(site, max_output_tokens=3)
        response = events[-1]["response"]
        assert (events[-1]["type"], response["status"]) == ("response.incomplete", "incomplete")
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in response["output"]] == ["incomplete"]
        assert (await respond(site, max_output_tokens=3))["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_usage_has_every_count_from_the_beginning_and_the_count_of_a_prompt_agrees() -> None:
    async with run_server() as site:
        made = await respond(site, instructions="Be brief.", tools=TOOLS)
        usage = made["usage"]
        assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
        assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
        assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
        body = {"model": MODEL, "input": "Say hello.", "instructions": "Be brief.", "tools": TOOLS}
        counted = (await site.post(f"{PATH}/input_tokens", body)).json()
        assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}


async def test_the_answer_repeats_what_was_asked_and_says_that_nothing_is_stored() -> None:
    async with run_server() as site:
        reported: dict[str, Any] = {
            "metadata": {"a": "b"}, "tool_choice": {"type": "function", "name": "look_up"}, "tools": TOOLS,
            "prompt_cache_key": "thread-1", "safety_identifier": "person-7", "user": "person-7",
        }  # fmt: skip
        made = await respond(site, store=True, temperature=0, **reported)
        assert ResponseObject.model_validate(made)
        assert {name: made[name] for name in reported} == reported
        assert (made["store"], made["background"], made["temperature"]) == (False, False, 0)


async def test_labels_that_were_not_given_are_null_and_every_event_with_the_response_has_them() -> None:
    async with run_server() as site:
        whole = [event["response"] for event in await stream(site, prompt_cache_key="k") if "response" in event]
        labels = [(made["prompt_cache_key"], made["safety_identifier"], made["user"]) for made in whole]
        assert labels == [("k", None, None)] * 3


async def test_the_form_of_an_answer_may_be_asked_for_in_the_words_of_vllm() -> None:
    async with run_server() as site:
        for fields in ({}, {"structured_outputs": {}}, {"structured_outputs": {"choice": ["yes", "no"]}}):
            await respond(site, max_output_tokens=2, **fields)
        grammars = [submitted.sequence.grammar for submitted in site.fake.submits]
    assert [grammar is not None for grammar in grammars] == [False, False, True]


async def test_token_ids_that_end_an_answer_are_those_of_a_chat() -> None:
    async with run_server() as site:
        for fields in ({}, {"stop_token_ids": [9]}, {"stop_token_ids": [9], "ignore_eos": True}):
            await respond(site, max_output_tokens=2, **fields)
        ends = [set(submitted.sequence.stop_ids) for submitted in site.fake.submits]
    own = tokenizer().eos_ids
    assert ends == [{*own}, {9, *own}, {9}]


async def test_what_asks_for_nothing_in_the_words_of_vllm_is_let_through() -> None:
    async with run_server() as site:
        await respond(
            site,
            include_reasoning=True,
            skip_special_tokens=True,
            include_stop_str_in_output=False,
            previous_input_messages=[],
        )


async def test_every_event_is_what_the_document_says() -> None:
    async with run_server(engine(say=says(EVERYTHING))) as site:
        for event in await stream(site, tools=TOOLS, include=[LOGPROBS], top_logprobs=1):
            assert ResponseEvent.model_validate(event)


async def test_log_probabilities_are_those_of_the_texts_tokens() -> None:
    async with run_server(engine(say=says(EVERYTHING))) as site:
        fields: dict[str, Any] = {"include": [LOGPROBS], "top_logprobs": 2, "tools": TOOLS}
        events = await stream(site, **fields)
        reported = [
            entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]
        ]
        assert "".join(entry["token"] for entry in reported) == "Hello there."
        assert {len(entry["top_logprobs"]) for entry in reported} == {2}
        [message] = [item for item in events[-1]["response"]["output"] if item["type"] == "message"]
        assert message["content"][0]["logprobs"] == reported
        plain = await respond(site, **fields)
        assert plain["output"][0]["content"][0]["logprobs"] == reported


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "look_up"}, "look_up"),
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "function", "name": "close", "namespace": "agents"}, "close"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "close"}]}, "close"),
    ],
)
async def test_a_choice_in_its_flat_form_forces_the_call(choice: dict[str, Any], name: str) -> None:
    async with run_server() as site:
        submitted = await site.post(PATH, {"input": "x", "tools": TOOLS, "tool_choice": choice, "max_output_tokens": 4})
        assert submitted.status_code == 200
        [sequence] = site.fake.submits[-1:]
        grammar = json.dumps(json.loads(json.dumps(str(sequence))))
        assert name in grammar


async def test_a_schema_holds_the_text_and_says_where_it_is_wrong() -> None:
    async with run_server() as site:
        form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
        await respond(site, text={"format": form}, max_output_tokens=2)
        bad = await site.post(PATH, {"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}})
        assert bad.json()["error"]["param"] == "text.format.schema"
        wrong = await site.post(PATH, {"input": "x", "text": {"format": form | {"schema": {"type": "nothing"}}}})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text.format.schema")


# ---------------------------------------------------------------- what goes in
async def test_items_become_turns_in_which_thoughts_texts_and_calls_are_one() -> None:
    said = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "Hi", "id": "msg_1"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One moment."}]},
        {"type": "function_call", "call_id": "c1", "name": "close", "namespace": "agents", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": 'a"b'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "closed"}]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "patched"},
        {"type": "web_search_call", "id": "ws", "action": {"query": 1}, "status": "completed"},
        {"role": "system", "content": "Still brief."},
    ]
    request = ResponsesRequest.model_validate({"input": said})
    made = messages(request.input, "You are kind.")
    assert [message["role"] for message in made] == [
        *["system", "developer", "user", "assistant"],
        *["tool", "tool", "system"],
    ]
    turn = made[3]
    assert (turn["reasoning_content"], turn["content"]) == ("Hm.", "One moment.")
    assert [(c["id"], c["function"]["name"]) for c in turn["tool_calls"]] == [("c1", "agents__close"), ("c2", "patch")]
    assert json.loads(turn["tool_calls"][1]["function"]["arguments"]) == {"input": 'a"b'}
    assert [message["content"] for message in made[4:]] == ["closed", "patched", "Still brief."]


def test_a_sealed_thought_comes_back_and_a_foreign_one_is_left_out() -> None:
    def thought(**members: Any) -> str:
        item = {"type": "reasoning", "id": "rs", "summary": []} | members
        request = ResponsesRequest.model_validate({"input": [item, {"role": "assistant", "content": "x"}]})
        return str(messages(request.input, None)[0]["reasoning_content"])

    assert thought(encrypted_content=seal("Hm… “so”")) == "Hm… “so”"
    assert thought(encrypted_content="gAAAAB") == ""
    assert thought(encrypted_content=seal("old"), content=[{"type": "reasoning_text", "text": "new"}]) == "new"
    assert thought(summary=[{"type": "summary_text", "text": "In short."}]) == "In short."
    assert unseal("marathon-1:???") is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [OUTPUT | {"output": [{"type": "input_file"}]}]}, "input[0].output[0]"),
        ({"input": [{"type": "a_new_kind"}]}, "input[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[4]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "nope"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"a word": 1}}, "logit_bias"),
        ({"logit_bias": [["9" * 5000, 1]]}, "logit_bias"),
        ({"model": "other"}, "model"),
        ({"structured_outputs": {"regex": "[.*"}}, "structured_outputs.regex"),
        (REGEX | {"text": {"format": {"type": "json_object"}}}, "structured_outputs.regex"),
        (REGEX | {"tools": TOOLS, "tool_choice": "required"}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"previous_input_messages": [{"role": "user", "content": "x"}]}, "previous_input_messages"),
        ({"prompt_cache_key": 1}, "prompt_cache_key"),
    ],
)  # fmt: skip
async def test_what_is_not_offered_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    async with run_server() as site:
        for streamed in (False, True):
            answer = await site.post(PATH, {"input": "x", "stream": streamed} | fields)
            assert answer.status_code in (400, 404)
            assert ErrorBody.model_validate(answer.json()).error.param == param


async def test_what_asks_for_nothing_is_let_through() -> None:
    async with run_server() as site:
        made = await site.post("/responses", {
            "input": "x", "tools": [], "tool_choice": "auto", "parallel_tool_calls": False, "store": False,
            "background": False, "truncation": "disabled", "include": ["file_search_call.results"],
            "reasoning": {"summary": "auto"}, "prompt_cache_key": "k", "client_metadata": {"a": "b"},
            "stream_options": {"include_obfuscation": True}, "service_tier": "auto",
        })  # fmt: skip
        assert made.status_code == 200, made.text


async def test_a_prompt_begins_with_the_one_before_it_where_the_template_wants_one_system_message_first(
    tmp_path: Path,
) -> None:
    """Developer texts stand between the turns, as agents send them; nothing moves to the front."""
    strict = Tokenizer.load(scripted.write(tmp_path, SCRIPTS), trust_remote_code=False)
    said = [
        {"role": "developer", "content": "You are a coding agent."},
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "Sandbox."}, {"type": "input_text", "text": "!"}],
        },
        {"role": "user", "content": "Context."},
        {"role": "user", "content": "SCRIPT:ab List the files."},
        {"role": "developer", "content": "It rains."},
        None,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look it up."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "One moment."}]},
        {"type": "function_call", "call_id": "call_1", "name": "look_up", "arguments": '{"key": "oslo"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "Oslo"},
        {"role": "developer", "content": "It still rains."},
        None,
        {"role": "assistant", "content": "It is Oslo."},
        {"role": "developer", "content": "Be quick."},
        {"role": "user", "content": "Thanks."},
        None,
    ]
    prompts = []
    for end in [n for n, item in enumerate(said) if item is None]:
        given = [item for item in said[:end] if item is not None]
        request = ResponsesRequest.model_validate({"input": given, "tools": TOOLS})
        talk, _ = conversation(request, load({}))
        prompts.append(render(strict, talk).ids)
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before


# ---------------------------------------------------------------- when it goes wrong
async def test_a_failure_in_a_stream_ends_it_with_a_response_that_failed() -> None:
    fake = engine()
    fake.poison |= dict.fromkeys(range(fake.vocab_size), Poison(after=3, how="fail"))
    async with run_server(fake) as site:
        last = (await stream(site))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "invalid_prompt", "trying again would fail again"


async def test_a_prompt_that_kills_engines_is_final_in_each_protocol_and_not_tried_again_at_once() -> None:
    fake = engine()
    fake.poison |= dict.fromkeys(range(fake.vocab_size), Poison())
    async with run_server(fake, ready=False) as site:
        last = (await stream(site))[-1]
        assert last["response"]["error"]["code"] == "invalid_prompt"
        lives = len(fake.lives)
        for answer in (
            await site.post(PATH, {"input": "Say hello.", "stream": True}),
            await site.chat(),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_prompt")
        assert len(fake.lives) == lives


async def test_a_mistake_of_the_servers_in_a_stream_asks_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bytes:
        raise RuntimeError("broken")

    monkeypatch.setattr(ResponsesForm, "chunks", broken)
    async with run_server() as site:
        assert (await stream(site))[-1]["response"]["error"]["code"] == "server_error"


async def test_a_stream_without_news_shows_signs_of_life_that_count_as_events() -> None:
    fake = engine(prefill_seconds=0.3)
    async with run_server(fake, keepalive_seconds=0.05) as site:
        answer = await site.post(PATH, {"input": "x", "stream": True})
        assert 'event: keepalive\ndata: {"type":"keepalive","sequence_number":1}\n\n' in answer.text
        assert events_of(answer.text)[-1]["type"] == "response.completed"


# ---------------------------------------------------------------- streamed and plain are the same
class Reader:
    """One answer, read in news of any size through the server's own text and form."""

    def __init__(self, script: str) -> None:
        self.tokens = [*say(script), min(tokenizer().eos_ids)]
        sampling = Sampling(0, 1.0, 1.0, 0, 0.0, 0.0, 0.0, 1.0)
        self.sequence = TokenSequence([1], sampling, 1000, 0, list(tokenizer().eos_ids))

    def read(self, cuts: list[int]) -> tuple[list[Event], dict[str, Any]]:
        choice, form = self._begin()
        usage: dict[str, Any] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        usage |= {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {}}
        data = form.first([choice])
        edges = sorted({0, *cuts, len(self.tokens)})
        for begin, end in pairwise(edges):
            finish: Any = None
            if end == len(self.tokens):
                finish = "stop"
            data += form.chunks(choice, choice.take(GenerationDelta(self.tokens[begin:end], finish=finish)))
        data += form.last([choice], usage)
        return events_of(data.decode()), form.whole([choice], usage)

    def _begin(self) -> tuple[Choice, ProtocolFormat]:
        tools = [{"type": "function", "function": {"name": name}} for name in ("f", "ns__f", "patch")]
        text = TextState(tokenizer(), tools=tools, stop_ids=self.sequence.stop_ids)
        names = {
            "f": ToolIdentity("function", "f"),
            "ns__f": ToolIdentity("function", "f", "ns"),
            "patch": ToolIdentity("custom", "patch"),
        }
        form = ResponsesForm({"id": "resp_1"}, tokenizer(), names, top=None, seals=True, only_calls=False)
        return Choice(0, self.sequence, text), form


WORDS = st.text('abc \n"\\{}<>/é😀', max_size=8)
CALLS = st.tuples(st.sampled_from(["f", "ns__f", "patch", "none"]), st.dictionaries(st.sampled_from("ab"), WORDS))
PARTS = st.one_of(
    WORDS,
    WORDS.map(lambda text: f"<think>{text}</think>"),
    CALLS.map(lambda made: call(made[0], **made[1])),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(PARTS, max_size=6).map("".join), st.lists(st.integers(1, 120), max_size=12))
def test_events_put_together_are_the_plain_answer_wherever_the_answer_is_cut(script: str, cuts: list[int]) -> None:
    reader = Reader(script)
    events, whole = reader.read([cut for cut in cuts if cut < len(reader.tokens)])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == whole["output"] == done
    assert without_ends(folded(events)) == without_ends(done)
    _, at_once = reader.read([])
    assert without_ids(at_once["output"]) == without_ids(done), "the items don't depend on the cuts"


# ---------------------------------------------------------------- the official SDK
def sdk(site: Site) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)
    return openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="sk-x", max_retries=0, http_client=http)


async def test_the_official_sdk_reads_plain_answers_streams_and_through_its_helper() -> None:
    tools: Any = TOOLS
    async with run_server(engine(say=says(EVERYTHING))) as site, sdk(site) as client:
        plain = await client.responses.create(model=MODEL, input="x", tools=tools)
        assert plain.output_text == "Hello there."
        names = [
            event.type
            async for event in await client.responses.create(model=MODEL, input="x", tools=tools, stream=True)
        ]
        assert (names[0], names[-1]) == ("response.created", "response.completed")
        async with client.responses.stream(model=MODEL, input="x", tools=tools) as helper:
            text = [event.delta async for event in helper if event.type == "response.output_text.delta"]
            final = await helper.get_final_response()
        assert "".join(text) == final.output_text == "Hello there."
        assert [item.type for item in final.output] == [item.type for item in plain.output]
        counted = await client.responses.input_tokens.count(model=MODEL, input="x", tools=tools)
        assert plain.usage is not None
        assert counted.input_tokens == plain.usage.input_tokens


# ---------------------------------------------------------------- any request
SOME: dict[str, list[Any]] = {
    "input": [
        "x", "", [], [{"role": "user", "content": "x"}], [{"role": "nobody", "content": "x"}], [{"type": "reasoning"}],
        [{"role": "user", "content": [{"type": "input_text"}]}], [1], 5, None, [OUTPUT],
        [{"type": "function_call", "call_id": "c", "name": "f"}], [{"type": "custom_tool_call", "name": 1}],
    ],
    "tools": [
        [], TOOLS, [{}], [{"type": "function", "name": "a b"}], [{"type": "mcp"}], "x",
        [{"type": "namespace", "name": "n"}],
    ],
    "tool_choice": [
        "auto", "none", "required", "any", {}, {"type": "function"}, {"type": "allowed_tools", "tools": []},
    ],
    "text": [{}, {"format": {"type": "text"}}, {"format": {"type": "json_object"}}, {"format": {"type": "xml"}}, 1],
    "include": [[], [SEALED], [LOGPROBS], "x", [1]],
    "max_output_tokens": [1, 3, 0, -1, "x", 1.0, 2**70],
    "reasoning": [{}, {"effort": "low"}, {"effort": "none"}, {"effort": "so-so"}, {"summary": "auto"}, "x"],
    "temperature": [0, 1, 3, "hot"], "top_p": [0.5, 2], "top_logprobs": [0, 3, 30], "stream": [True, False, "yes"],
    "instructions": ["x", 1, None], "metadata": [{}, {"a": 1}, []], "parallel_tool_calls": [True, False, 1],
    "logit_bias": [{"5": 1}, {"x": 1}, {"-1": 1}, {"5": 101}, [[5, 1]], 3], "seed": [1, 2**80], "stop": ["x", [""], 5],
    "truncation": ["disabled", "auto"], "background": [False, True], "store": [True], "user": [1], "nothing": [1],
}  # fmt: skip


async def test_requests_of_any_shape_are_answered_or_refused_in_the_protocols_form() -> None:
    rng = random.Random(14)
    answered = 0
    async with run_server(engine(say=says(HELLO))) as site:
        for _ in range(100):
            names = rng.sample(sorted(SOME), rng.randrange(5))
            body = {"input": "x", "max_output_tokens": 4} | {name: rng.choice(SOME[name]) for name in names}
            answer = await site.post(PATH, body)
            assert answer.status_code < 500, (body, answer.text)
            answered += answer.status_code == 200
            if answer.status_code != 200:
                assert ErrorBody.model_validate(answer.json()), body
            elif body.get("stream") is True:
                events_of(answer.text)
            else:
                assert ResponseObject.model_validate(answer.json()), body
    assert 25 < answered < 95
