"""What an answer tells besides its text, and what other servers' clients send: over a real uvicorn."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import small_tokenizers as small
from fake_engine import FakeEngine
from serving import HELLO, USER, engine, run_server, says, tokenizer
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

import server
from server.api.input.messages_schema import MessagesRequest
from server.api.input.responses_schema import ResponsesRequest
from server.api.input.schema import ChatRequest, CompletionRequest, ReasoningOptions, Wire, unoffered
from server.api.output.schema import ChatCompletion, ChatCompletionChunk, TextCompletion
from server.text.tokenizer import Tokenizer

SAID = tokenizer().encode(HELLO, bos=False)
IDS = [*SAID, min(tokenizer().eos_ids)]  # the token that ends an answer is one of its tokens
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ASSISTANT = {"role": "assistant", "content": "An apple a day"}


async def test_token_ids_are_those_of_prompt_and_answer() -> None:
    fake = engine()
    async with run_server(fake) as site:
        chat = (await site.chat(return_token_ids=True)).json()
        text = (await site.complete(return_token_ids=True)).json()["choices"][0]
    assert chat["prompt_token_ids"] == fake.submits[0].sequence.prompt
    assert chat["choices"][0]["token_ids"] == IDS
    assert len(IDS) == chat["usage"]["completion_tokens"]
    assert (text["prompt_token_ids"], text["token_ids"]) == (fake.submits[1].sequence.prompt, IDS)


async def test_streamed_token_ids_are_the_plain_ones_and_the_prompts_come_first_and_once() -> None:
    async with run_server(engine(step_seconds=0.002)) as site:
        chat = [ChatCompletionChunk.model_validate(e) for e in (await site.stream_chat(return_token_ids=True))[:-1]]
        text = [TextCompletion.model_validate(e) for e in (await site.stream_text(return_token_ids=True))[:-1]]
        tokens = (await site.post("/tokenize", {"messages": USER})).json()["tokens"]
    assert [chunk.prompt_token_ids for chunk in chat] == [tokens, *[None] * (len(chat) - 1)]
    assert [i for chunk in chat for i in chunk.choices[0].token_ids or []] == IDS
    assert [i for chunk in text for i in chunk.choices[0].token_ids or []] == IDS
    assert [chunk.choices[0].prompt_token_ids is None for chunk in text] == [False, *[True] * (len(text) - 1)]


async def test_log_probabilities_can_name_tokens_by_their_ids() -> None:
    async with run_server() as site:
        options = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        text = (await site.complete(**options, logprobs=1)).json()["choices"][0]
        chat = (await site.chat(**options, logprobs=True, top_logprobs=1)).json()["choices"][0]
    names = [f"token_id:{token}" for token in SAID]
    assert text["logprobs"]["tokens"] == [entry["token"] for entry in chat["logprobs"]["content"]] == names
    assert bytes(chat["logprobs"]["content"][0]["bytes"]) == tokenizer().token_bytes(IDS[0])
    assert all(name.startswith("token_id:") for name in text["logprobs"]["top_logprobs"][0])


async def test_a_template_can_be_applied_without_generating() -> None:
    async with run_server() as site:
        text = (await site.post("/apply-template", {"messages": USER})).json()["prompt"]
        asked = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
        tokens = (await site.post("/tokenize", asked)).json()
        assert tokens["tokens"] == (await site.post("/tokenize", {"messages": USER})).json()["tokens"]
        assert tokens["token_strs"][0] == "<|im_start|>"
        assert (await site.post("/apply-template", {"prompt": "x"})).status_code == 400


async def test_the_tokens_of_a_chats_prompt_are_counted_without_generating() -> None:
    """As llama.cpp does; every field of a chat may come along, and its faults are refused as in a chat."""
    fake = engine()
    options = {"messages": USER, "tools": TOOLS, "max_tokens": 5}
    async with run_server(fake) as site:
        counted = [await site.post(p + "/chat/completions/input_tokens", options) for p in ("/v1", "")]
        asked = (await site.chat(tools=TOOLS, max_tokens=5)).json()["usage"]["prompt_tokens"]
        assert (await site.post("/v1/chat/completions/input_tokens", {"messages": []})).status_code == 400
        assert (await site.post("/v1/chat/completions/input_tokens", options | {"model": "other"})).status_code == 404
    assert [answer.json() for answer in counted] == [{"object": "response.input_tokens", "input_tokens": asked}] * 2
    assert len(fake.submits) == 1


async def test_a_verbose_chat_returns_the_text_of_its_prompt_once() -> None:
    async with run_server(engine(step_seconds=0.002)) as site:
        prompt = (await site.post("/apply-template", {"messages": USER})).json()["prompt"]
        for verbose, reported in ((True, {"prompt": prompt}), (False, None), (None, None)):
            whole = ChatCompletion.model_validate((await site.chat(verbose=verbose)).json())
            assert whole.model_dump(by_alias=True).get("__verbose") == reported
            events = [ChatCompletionChunk.model_validate(e) for e in (await site.stream_chat(verbose=verbose))[:-1]]
            assert [e.model_dump(by_alias=True).get("__verbose") for e in events] == [
                reported,
                *[None] * (len(events) - 1),
            ]


async def test_nothing_more_is_sent_unless_asked_for() -> None:
    async with run_server() as site:
        chat = ChatCompletion.model_validate((await site.chat()).json())
        text = TextCompletion.model_validate((await site.complete()).json())
    assert chat.prompt_logprobs is chat.prompt_token_ids is chat.choices[0].token_ids is None
    assert text.choices[0].prompt_logprobs is text.choices[0].token_ids is None


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of a model that thinks before it answers."""
    tags = (AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>"))
    folder = small.write(
        tmp_path_factory.mktemp("thinker"), small.byte_level(*tags), small.THINKING, eos_token="<|im_end|>"
    )
    return Tokenizer.load(folder, trust_remote_code=False)


async def test_reasoning_is_kept_apart_or_on_request_not_at_all(thinker: Tokenizer) -> None:
    fake = FakeEngine(vocab_size=thinker.vocab_size, say=says("hm hm</think>Yes.", tokens=thinker))
    async with run_server(fake, tokens=thinker) as site:
        shown, hidden = [(await site.chat(include_reasoning=asked)).json() for asked in (None, False)]
        message = shown["choices"][0]["message"]
        assert message["reasoning_content"] == message["reasoning"] == "hm hm"
        assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
        assert hidden["usage"]["completion_tokens_details"]["reasoning_tokens"] > 1
        for asked, thoughts in ((True, "hm hm"), (False, "")):
            deltas = [e["choices"][0]["delta"] for e in (await site.stream_chat(include_reasoning=asked))[:-1]]
            assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thoughts
            assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
            assert all(deltas[:-1]), "an empty delta says nothing"


async def test_signs_of_life_are_never_further_apart_than_was_asked() -> None:
    """Also where news that shows nothing comes just before one is due."""
    fake = engine(say=says("ha " * 200, stop=False), step_seconds=0.45)
    async with run_server(fake, keepalive_seconds=0.5) as site:
        body = {"prompt": "a", "max_tokens": 6, "stop": ["ha " * 300], "stream": True}
        times: list[float] = []
        async with site.client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                times.append(monotonic())
    assert len(times) > 3
    assert max(b - a for a, b in pairwise(times)) < 0.75


async def test_a_stream_that_holds_much_back_shows_signs_of_life(thinker: Tokenizer) -> None:
    fake = FakeEngine(vocab_size=thinker.vocab_size, say=says("hm " * 40 + "</think>Yes.", tokens=thinker))
    fake.step_seconds = 0.02
    async with run_server(fake, tokens=thinker, keepalive_seconds=0.2) as site:
        body = {"messages": USER, "stream": True, "include_reasoning": False}
        async with site.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
    assert sum(line.startswith(":") for line in lines) >= 3
    assert lines[-1] == "data: [DONE]"


async def test_special_tokens_are_shown_to_who_asks() -> None:
    """Also where they were drawn as tokens of the text; the one that ends an answer is no part of it."""
    async with run_server(engine(say=says("a<|im_start|>b"))) as site:
        for asked, text in ((True, "ab"), (None, "ab"), (False, "a<|im_start|>b")):
            chat = (await site.chat(skip_special_tokens=asked)).json()["choices"][0]
            whole = (await site.complete(skip_special_tokens=asked, logprobs=0)).json()["choices"][0]
            assert (chat["message"]["content"], whole["text"]) == (text, text)
            assert whole["logprobs"]["text_offset"] == [0, 1, text.index("b")]


async def test_a_bare_prompt_may_come_with_its_own_begin_token(tmp_path: Path) -> None:
    """A client that renders a template by hand has written it already."""
    made = small.pieces()
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    folder = small.write(tmp_path, made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokens = Tokenizer.load(folder, trust_remote_code=False)
    fake = FakeEngine(vocab_size=tokens.vocab_size, say=says("x", tokens=tokens))
    async with run_server(fake, tokens=tokens) as site:
        for asked in (None, True, False):
            await site.complete("a", add_special_tokens=asked)
    bare = tokens.encode("a", bos=False)
    assert [submit.sequence.prompt for submit in fake.submits] == [tokens.encode("a")] * 2 + [bare]
    assert tokens.encode("a") != bare


async def test_the_tokens_that_may_be_drawn_can_be_named() -> None:
    fake = engine()
    async with run_server(fake) as site:
        await site.chat(allowed_token_ids=[9, 7, 9])
        await site.complete(allowed_token_ids=[7])
        beyond = (await site.chat(allowed_token_ids=[7, tokenizer().vocab_size])).json()["error"]
        forms = (await site.chat(allowed_token_ids=[7], response_format={"type": "json_object"})).json()["error"]
        assert [beyond["param"], forms["param"]] == ["allowed_token_ids"] * 2
        for wrong in ([], [-1], ["a"], 7):
            assert (await site.chat(allowed_token_ids=wrong)).json()["error"]["code"] == "invalid_value"
    assert [submit.sequence.sampling.allowed for submit in fake.submits] == [[7, 9], [7]]


async def test_log_probabilities_of_named_tokens_come_instead_of_the_likeliest_with_the_drawn_one() -> None:
    fake, drawn = engine(), f"token_id:{SAID[0]}"
    options = {"logprob_token_ids": [9, 7], "return_tokens_as_token_ids": True, "max_tokens": 1}
    async with run_server(fake) as site:
        for more in ({}, {"top_logprobs": 1}):
            chat = (await site.chat(logprobs=True, **more, **options)).json()["choices"][0]["logprobs"]["content"][0]
            assert [entry["token"] for entry in chat["top_logprobs"]] == [drawn, "token_id:9", "token_id:7"]
        streamed = (await site.stream_chat(logprobs=True, **options))[1]["choices"][0]["logprobs"]["content"][0]
        text = (await site.complete(logprobs=5, **options)).json()["choices"][0]["logprobs"]["top_logprobs"][0]
        assert (streamed, list(text)) == (chat, [drawn, "token_id:9", "token_id:7"])
        own = (await site.chat(logprobs=True, logprob_token_ids=[SAID[0]], max_tokens=1)).json()
        assert len(own["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 1
        for wrong in ({"logprob_token_ids": [tokenizer().vocab_size], "logprobs": 1}, {"logprob_token_ids": [5]}):
            assert (await site.complete(**wrong)).json()["error"]["param"] == "logprob_token_ids"


async def test_llama_cpps_repeat_penalty_is_the_repetition_penalty() -> None:
    fake = engine()
    async with run_server(fake) as site:
        await site.chat(repeat_penalty=1.3)
        await site.complete(repeat_penalty=1.3, repetition_penalty=1.1)
        assert (await site.chat(repeat_penalty=0)).status_code == 400
    assert [submit.sequence.sampling.repetition_penalty for submit in fake.submits] == [1.3, 1.1]


NOTHING = {
    "bad_words": [], "include_stop_str_in_output": False,
    "thinking_token_budget": None, "mirostat": 0, "typical_p": 1.0, "top_n_sigma": -1, "xtc_probability": 0.0,
    "dry_multiplier": 0, "dynatemp_range": 0.0, "repetition_detection": None, "stop_regex": "", "no_stop_trim": False,
    "post_sampling_probs": False, "t_max_predict_ms": -1, "lora": [], "lora_path": None,
}  # fmt: skip
TEXT_NOTHING = {"max_completion_tokens": None, "top_logprobs": 0, "tools": [], "messages": None}
TEXT_SOMETHING = {"max_completion_tokens": 2, "top_logprobs": 2, "tools": [{}], "messages": [{}]}
SOMETHING = {
    "bad_words": ["x"], "include_stop_str_in_output": True,
    "thinking_token_budget": 9, "mirostat": 2, "typical_p": 0.5, "top_n_sigma": 1.5, "xtc_probability": 0.1,
    "dry_multiplier": 0.8, "dynatemp_range": 0.5, "repetition_detection": {"max_pattern_size": 2}, "stop_regex": "a+",
    "no_stop_trim": True, "post_sampling_probs": True, "t_max_predict_ms": 10, "lora": [{"id": 0, "scale": 1}],
    "lora_path": "x",
}  # fmt: skip
CHAT_NOTHING = {
    "add_special_tokens": False, "chat_template": None, "documents": [], "parse_tool_calls": True,
    "reasoning_format": "auto", "separate_reasoning": True, "audio": None, "web_search_options": None,
    "moderation": None, "functions": [], "function_call": "auto",
}  # fmt: skip
CHAT_SOMETHING = {
    "add_special_tokens": True, "chat_template": "{{ messages }}", "documents": [{"text": "x"}],
    "parse_tool_calls": False, "reasoning_format": "none", "separate_reasoning": False, "audio": {"voice": "x"},
    "web_search_options": {}, "moderation": {}, "functions": [{"name": "f"}], "function_call": {"name": "f"},
}  # fmt: skip


async def test_what_others_offer_is_refused_by_name_unless_it_asks_for_nothing() -> None:
    assert set(SOMETHING) == set(NOTHING)
    assert set(SOMETHING) | set(TEXT_SOMETHING) == unoffered(CompletionRequest).keys()
    async with run_server() as site:
        for ask, nothing, something in (
            (site.chat, NOTHING, SOMETHING),
            (site.complete, NOTHING | TEXT_NOTHING, SOMETHING | TEXT_SOMETHING),
        ):
            assert (await ask(**nothing)).status_code == 200
            for name, value in something.items():
                answer = await ask(**{name: value})
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert (error["param"], error["code"]) == (name, "unsupported_parameter")


async def test_what_would_change_only_a_chat_is_refused_by_name_unless_it_asks_for_nothing() -> None:
    assert set(CHAT_SOMETHING) == set(CHAT_NOTHING)
    assert set(CHAT_SOMETHING) | set(SOMETHING) == unoffered(ChatRequest).keys()
    async with run_server() as site:
        assert (await site.chat(**CHAT_NOTHING)).status_code == 200
        for name, value in CHAT_SOMETHING.items():
            error = (await site.chat(**{name: value})).json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")


RESPONSE: dict[str, Any] = {"input": "x"}
MESSAGE: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
TEXT_FORM = {"type": "text"}
FIELDS_OF_OTHER_ROUTES = [
    ("/v1/responses", RESPONSE, "max_tokens", None, 4, "`max_output_tokens`"),
    ("/v1/responses", RESPONSE, "max_completion_tokens", None, 4, "`max_output_tokens`"),
    ("/v1/responses", RESPONSE, "response_format", TEXT_FORM, {"type": "json_object"}, "`text.format`"),
    ("/v1/responses", RESPONSE, "reasoning_effort", None, "low", "`reasoning.effort`"),
    ("/v1/responses", RESPONSE, "logprobs", False, True, "`top_logprobs`"),
    ("/v1/responses", RESPONSE, "messages", None, USER, "`input`"),
    ("/v1/responses", RESPONSE, "n", 1, 2, "`n`"),
    ("/v1/messages", MESSAGE, "max_completion_tokens", None, 4, "`max_tokens`"),
    ("/v1/messages", MESSAGE, "stop", [], ["x"], "`stop_sequences`"),
    ("/v1/messages", MESSAGE, "response_format", TEXT_FORM, {"type": "json_object"}, "`output_config.format`"),
    ("/v1/messages", MESSAGE, "reasoning_effort", None, "low", "`output_config.effort`"),
    ("/v1/messages", MESSAGE, "n", 1, 2, "`n`"),
    ("/v1/messages", MESSAGE, "min_p", 0, 0.1, "`min_p`"),
    ("/v1/messages", MESSAGE, "presence_penalty", 0.0, 0.5, "`presence_penalty`"),
    ("/v1/messages", MESSAGE, "frequency_penalty", 0, 0.5, "`frequency_penalty`"),
    ("/v1/messages", MESSAGE, "repetition_penalty", 1.0, 1.1, "`repetition_penalty`"),
]


@pytest.mark.parametrize(("path", "body", "name", "neutral", "value", "named"), FIELDS_OF_OTHER_ROUTES)
async def test_a_field_of_another_route_is_refused_with_what_this_one_has_for_it(
    path: str, body: dict[str, Any], name: str, neutral: Any, value: Any, named: str
) -> None:
    async with run_server() as site:
        assert (await site.post(path, body | {name: neutral})).status_code == 200
        answer = await site.post(path, body | {name: value})
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"]
        assert len(site.fake.submits) == 1


@pytest.mark.parametrize("form", [ChatRequest, CompletionRequest, ReasoningOptions, ResponsesRequest, MessagesRequest])
def test_what_is_refused_lets_exactly_its_documented_values_through(form: type[Wire]) -> None:
    shown = form.model_json_schema()["properties"]
    documented = (Path(server.__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
    for name, mark in unoffered(form).items():
        assert shown[name]["description"] == mark.description
        assert all(json.dumps(value) in mark.description for value in mark.neutral)
        assert f"`{name}`" in documented or f".{name}`" in documented


async def test_usage_in_each_chunk_rises_to_the_whole() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with run_server(engine(step_seconds=0.002)) as site:
        for events in (await site.stream_chat(stream_options=options), await site.stream_text(stream_options=options)):
            *chunks, last, _ = events
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            assert counts[-1] == last["usage"]["completion_tokens"] > counts[0]
            assert all(chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for chunk in chunks)


async def test_timings_come_in_every_chunk_but_the_first_and_in_the_plain_answer() -> None:
    options = {"timings_per_token": True, "stream_options": {"include_usage": True}}
    async with run_server(engine(step_seconds=0.002)) as site:
        first, *chunks, last, _ = await site.stream_chat(**options)
        *texts, _ = await site.stream_text(**options)
        plain = [(await ask(timings_per_token=True)).json() for ask in (site.chat, site.complete)]
        unreported = [(await ask()).json() for ask in (site.chat, site.complete)]
    assert "timings" not in first
    assert [chunk["timings"]["predicted_n"] for chunk in chunks][-1] == last["timings"]["predicted_n"] == len(IDS)
    assert all(ChatCompletionChunk.model_validate(chunk).timings for chunk in [*chunks, last])
    assert all(TextCompletion.model_validate(chunk).timings for chunk in texts)
    assert ChatCompletion.model_validate(plain[0]).timings
    assert TextCompletion.model_validate(plain[1]).timings
    for reported in (last["timings"], *(answer["timings"] for answer in plain)):
        assert min(reported["prompt_ms"], reported["predicted_ms"], reported["prompt_per_second"]) > 0
        assert reported["predicted_per_second"] * reported["predicted_ms"] == pytest.approx(
            1000 * (reported["predicted_n"] - 1)
        )
        assert reported["cache_n"] + reported["prompt_n"] > 0
    assert not any("timings" in answer for answer in unreported)


async def test_a_prompt_can_be_truncated_at_either_side() -> None:
    fake, ids = engine(), list(range(5, 13))
    async with run_server(fake) as site:
        for side, kept in ((None, ids[-4:]), ("left", ids[-4:]), ("right", ids[:4])):
            await site.complete(ids, truncate_prompt_tokens=4, truncation_side=side)
            assert fake.submits[-1].sequence.prompt == kept
        echoed = (await site.complete(ids, truncate_prompt_tokens=4, echo=True)).json()
        assert echoed["choices"][0]["text"] == tokenizer().decode(ids[-4:]) + HELLO
        assert echoed["usage"]["prompt_tokens"] == 4
        await site.complete(ids, truncate_prompt_tokens=9)
        assert fake.submits[-1].sequence.prompt == ids
        whole = (await site.chat()).json()["usage"]["prompt_tokens"]
        assert (await site.chat(truncate_prompt_tokens=whole - 1)).json()["usage"]["prompt_tokens"] == whole - 1
        assert fake.submits[-1].sequence.marks == [whole - 1]
        for wrong in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {"truncation_side": "up"}):
            assert (await site.complete(ids, **wrong)).json()["error"]["param"] in wrong


async def test_a_prompt_can_be_cut_to_what_leaves_room_for_the_answer() -> None:
    fake = engine(context=16)
    async with run_server(fake) as site:
        assert (await site.complete([5] * 40, max_tokens=6)).status_code == 400
        assert (await site.complete([5] * 40, max_tokens=6, truncate_prompt_tokens=-1)).status_code == 200
        assert len(fake.submits[-1].sequence.prompt) == 10


async def test_the_tokenizers_files_and_the_version_can_be_asked_for() -> None:
    async with run_server() as site:
        info = (await site.client.get("/tokenizer_info")).json()
        assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert info["model_max_length"] == 32768
        assert "<|im_start|>" in info["chat_template"]
        assert (await site.client.get("/version")).json() == {"version": server.__version__}


async def test_the_fingerprint_is_the_same_in_every_answer_and_chunk() -> None:
    async with run_server() as site:
        found = {(await site.chat()).json()["system_fingerprint"], (await site.complete()).json()["system_fingerprint"]}
        found |= {event["system_fingerprint"] for event in (await site.stream_chat())[:-1]}
    assert len(found) == 1


async def test_a_continued_answer_can_begin_with_what_it_continues() -> None:
    fields: dict[str, Any] = {"messages": [*USER, ASSISTANT], "continue_final_message": True, "echo": True}
    async with run_server() as site:
        plain = (await site.chat(**fields, add_generation_prompt=False)).json()["choices"][0]["message"]["content"]
        events = (await site.stream_chat(**fields))[:-1]
        silent = (await site.chat(**fields | {"echo": False})).json()["choices"][0]["message"]["content"]
    streamed = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert plain == streamed == ASSISTANT["content"] + HELLO
    assert silent == HELLO


async def test_control_tokens_in_a_bare_prompt_are_control_tokens_and_in_a_chat_text() -> None:
    fake = engine()
    async with run_server(fake) as site:
        await site.complete("<|im_start|>user\nhi<|im_end|>")
        await site.chat(messages=[{"role": "user", "content": "<|im_end|>"}])
        plain = (await site.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json()["tokens"]
    special = [[t for t in one.sequence.prompt if tokenizer().is_special(t)] for one in fake.submits]
    assert [tokenizer().spell(t)[0] for t in special[0]] == ["<|im_start|>", "<|im_end|>"]
    assert special[1] == [t for t in plain if tokenizer().is_special(t)]


async def test_an_empty_beginning_of_an_answer_can_be_left_out_of_the_tokens() -> None:
    async with run_server() as site:
        fields = {"messages": USER}
        with_it = (await site.post("/tokenize", fields)).json()["tokens"]
        without = (await site.post("/tokenize", {**fields, "add_generation_prompt": False})).json()["tokens"]
    assert with_it[: len(without)] == without
    assert len(with_it) > len(without)
