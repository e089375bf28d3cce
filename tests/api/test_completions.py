"""Text completions and tokens as a client meets them: over a real uvicorn, from a scripted engine."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import HELLO, MODEL, USER, engine, run_server, says, tokenizer

from server.api.output.choices import ScoredToken
from server.api.output.logprobs import Lists
from server.api.output.schema import DetokenizeAnswer, TextCompletion, TokenizeAnswer
from server.ipc.sequence import TokenLogprobs

ABC = tokenizer().encode("a b c", bos=False)


def said(events: list[Any], index: int = 0) -> str:
    return "".join(c["text"] for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index)


async def test_a_plain_answer_has_the_documented_shape_and_sixteen_tokens() -> None:
    async with run_server(engine(say=says("x", stop=False))) as site:
        body = TextCompletion.model_validate_json((await site.complete()).content)
        assert body.choices[0].finish_reason == "length"
        assert body.usage is not None
        assert body.usage.completion_tokens == 16


async def test_a_stream_says_the_same_as_the_plain_answer() -> None:
    async with run_server() as site:
        events = await site.stream_text(stream_options={"include_usage": True})
        assert said(events) == (await site.complete()).json()["choices"][0]["text"] == HELLO
        *chunks, last, done = events
        assert done == "[DONE]"
        assert [TextCompletion.model_validate(event).object for event in events[:-1]] == ["text_completion"] * len(
            events[:-1]
        )
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] > 0
        assert all(chunk["usage"] is None for chunk in chunks)
        assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["stop"]


@pytest.mark.parametrize("prompt", ["a b c", ABC], ids=["text", "ids"])
async def test_text_and_its_ids_are_the_same_prompt(prompt: Any) -> None:
    fake = engine()
    async with run_server(fake) as site:
        assert (await site.complete(prompt)).status_code == 200
        assert fake.submits[0].sequence.prompt == ABC


async def test_text_and_ids_may_stand_side_by_side() -> None:
    fake = engine()
    async with run_server(fake) as site:
        assert (await site.complete(["a b c", ABC, "d"])).status_code == 200
        assert [submit.sequence.prompt for submit in fake.submits][:2] == [ABC, ABC]


@pytest.mark.parametrize("options", [{"n_predict": 5}, {"n_predict": 5, "max_tokens": 7}, {"n_predict": -1}, {}])
async def test_llama_cpps_limit_holds_where_there_is_no_other(options: dict[str, int]) -> None:
    fake = engine()
    async with run_server(fake) as site:
        assert (await site.complete(**options)).status_code == 200
        room = fake.context - len(fake.submits[0].sequence.prompt)
        expected = options.get("max_tokens") or {5: 5, -1: room, None: 16}[options.get("n_predict")]
        assert fake.submits[0].sequence.max_tokens == expected


async def test_a_bias_may_come_as_pairs() -> None:
    fake = engine()
    async with run_server(fake) as site:
        assert (await site.complete(logit_bias=[[5, 1.5], [7, False]])).status_code == 200
        assert fake.submits[0].sequence.sampling.logit_bias == {5: 1.5, 7: -100}


async def test_several_prompts_and_choices_are_indexed_prompt_by_prompt() -> None:
    fake = engine(say=says("0", "1", "2", "3"))
    async with run_server(fake) as site:
        for prompts in (["a b c", "Say"], [ABC, tokenizer().encode("Say", bos=False)]):
            body = (await site.complete(prompts, n=2)).json()
            assert [choice["text"] for choice in body["choices"]] == ["0", "1", "2", "3"]
            assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
            last = [submit.sequence for submit in fake.submits[-4:]]
            assert [s.prompt for s in last] == [ABC, ABC, last[2].prompt, last[2].prompt]
            assert [s.choice for s in last] == [0, 1, 2, 3]
            assert body["usage"]["prompt_tokens"] == len(ABC) + len(last[2].prompt)
        events = await site.stream_text(["a b c", "Say"])
        assert [said(events, index) for index in (0, 1)] == ["0", "1"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [5, 2048]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 6}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
    ids=str,
)
async def test_what_cannot_be_done_is_refused_and_the_server_goes_on(fields: dict[str, Any], param: str) -> None:
    async with run_server() as site:
        answer = await site.complete(**{"prompt": "Say", **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith(param)
        assert (await site.complete(best_of=1, suffix="")).status_code == 200


async def test_a_stop_string_never_shows() -> None:
    async with run_server() as site:
        cut = HELLO.partition("ow ar")[0]
        assert (await site.complete(stop="ow ar")).json()["choices"][0]["text"] == cut
        assert said(await site.stream_text(stop=["zz", "ow ar"])) == cut


async def test_echo_puts_the_prompt_before_each_answer() -> None:
    async with run_server(engine(say=says("x"))) as site:
        body = (await site.complete(["a b c", "Say"], echo=True)).json()
        assert [choice["text"] for choice in body["choices"]] == ["a b cx", "Sayx"]
        assert (await site.complete([1, *ABC], echo=True)).json()["choices"][0]["text"] == "<|im_start|>a b cx"
        assert said(await site.stream_text("a b c", echo=True)) == "a b cx"


# ---------------------------------------------------------------- log probabilities
async def test_logprobs_are_parallel_lists_whose_tokens_join_to_the_text() -> None:
    async with run_server(engine(say=says("né 🎉 x"))) as site:
        choice = (await site.complete(logprobs=1)).json()["choices"][0]
        scores = choice["logprobs"]
        assert len({len(values) for values in scores.values()}) == 1
        assert scores["text_offset"][0] == 0
        assert scores["text_offset"] == sorted(scores["text_offset"])
        assert choice["text"][scores["text_offset"][-1] :] == scores["tokens"][-1]
        assert set(scores["token_logprobs"]) == {-0.5}
        events = await site.stream_text(logprobs=1)
        streamed = [c["logprobs"] for e in events if e != "[DONE]" for c in e["choices"]]
        for name, values in scores.items():
            assert [value for part in streamed for value in part[name]] == values


def test_the_drawn_token_is_always_among_the_alternatives() -> None:
    token, other = ABC[0], ABC[1]
    lists = Lists(tokenizer(), 5)
    scored = [
        ScoredToken(token, TokenLogprobs(-5.0, [(other, -0.1)])),
        ScoredToken(token, TokenLogprobs(float("-inf"), [])),
    ]
    made = lists.answer(scored)
    assert made["top_logprobs"][0] == {tokenizer().spell(other)[0]: -0.1, tokenizer().spell(token)[0]: -5.0}
    assert made["token_logprobs"][1] < -1000, "minus infinity is no JSON number"


TORN = [b"\xe2", b"\xe2\x82", b"\xc3", b"\xf0\x9f\x8e", b"\xff"]  # each shows as one replacement character
BYTES = {tokenizer().token_bytes(token): token for token in reversed(range(tokenizer().vocab_size))}


@given(st.lists(st.one_of(st.characters(codec="utf-8").map(str.encode), st.sampled_from(TORN)), max_size=9))
def test_offsets_are_where_tokens_begin_whatever_their_bytes(characters: list[bytes]) -> None:
    data = [(place, bytes([byte])) for place, character in enumerate(characters) for byte in character]
    assert len(b"".join(characters).decode(errors="replace")) == len(characters)
    made = Lists(tokenizer(), 1).answer([ScoredToken(BYTES[byte], TokenLogprobs(-1.0, [])) for _, byte in data])
    assert made["text_offset"] == [place for place, _ in data]


def scored(*tokens: int) -> list[ScoredToken]:
    return [ScoredToken(token, TokenLogprobs(-1.0, [])) for token in tokens]


def test_half_a_surrogate_shows_as_two_characters() -> None:
    made = Lists(tokenizer(), 1).answer(scored(*(BYTES[bytes([byte])] for byte in b"\xed\xa0z\xed\xa0\x80z")))
    text = b"\xed\xa0z\xed\xa0\x80z".decode(errors="replace")
    assert [text[made["text_offset"][i]] for i in (2, 6)] == ["z", "z"]


def test_an_answer_does_not_go_on_with_the_prompts_half_character() -> None:
    lists = Lists(tokenizer(), 1)
    lists.prompt([BYTES[b"a"], BYTES[b"\xc3"]], [TokenLogprobs(-1.0, [])])
    assert lists.answer(scored(BYTES[b"\xa9"], BYTES[b"z"]))["text_offset"] == [2, 3]


def test_special_tokens_take_room_in_the_prompt_and_none_in_the_answer() -> None:
    lists, end = Lists(tokenizer(), 1), min(tokenizer().eos_ids)
    spelled = len(tokenizer().spell(end)[0])
    asked = lists.prompt([BYTES[b"a"], end, BYTES[b"b"]], [TokenLogprobs(-1.0, [])] * 2)
    assert asked["text_offset"] == [0, 1, 1 + spelled]
    assert lists.answer(scored(end, BYTES[b"c"], end))["text_offset"] == [2 + spelled, 2 + spelled, 3 + spelled]


def test_a_scored_prompt_knows_nothing_of_its_first_token() -> None:
    made = Lists(tokenizer(), 5).prompt(ABC, [TokenLogprobs(-1.0, [(5, -0.5)])] * (len(ABC) - 1))
    assert (made["token_logprobs"][0], made["top_logprobs"][0]) == (None, None)
    assert made["token_logprobs"][1:] == [-1.0] * (len(ABC) - 1)
    assert "".join(made["tokens"]) == "a b c"
    assert made["text_offset"][0] == 0


async def test_echo_with_logprobs_asks_for_the_prompts_scores() -> None:
    fake = engine()
    async with run_server(fake) as site:
        await site.complete("a b c", echo=True, stream=True)
        assert not fake.submits[-1].sequence.prompt_logprobs
        await site.complete("a b c", logprobs=2, stream=True)
        sequence = fake.submits[-1].sequence
        assert (sequence.prompt_logprobs, sequence.logprobs) == (False, 2)
        task = site.complete("a b c", echo=True, logprobs=0, max_tokens=0, stream=True)
        await task
        sequence = fake.submits[-1].sequence
        assert (sequence.prompt_logprobs, sequence.logprobs, sequence.max_tokens) == (True, 0, 0)


# ---------------------------------------------------------------- tokens
async def test_both_forms_of_tokenize_are_understood() -> None:
    async with run_server() as site:
        plain = (await site.post("/tokenize", {"content": "a b c"})).json()
        assert plain["tokens"] == ABC
        vllm = (await site.post("/tokenize", {"model": MODEL, "prompt": "a b c", "return_token_strs": True})).json()
        assert vllm["tokens"] == ABC
        assert (vllm["count"], vllm["max_model_len"]) == (len(ABC), 4096)
        assert vllm["token_strs"] == ["a", "Ġb", "Ġc"]
        pieces = (await site.post("/tokenize", {"content": "é\U0001f389", "with_pieces": True})).json()["tokens"]
        data = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
        assert data.decode() == "é\U0001f389"
        TokenizeAnswer.model_validate(vllm)


async def test_a_tokenized_conversation_is_the_prompt_of_a_chat() -> None:
    fake = engine()
    async with run_server(fake) as site:
        tokens = (await site.post("/tokenize", {"messages": USER})).json()["tokens"]
        await site.chat()
        assert tokens == fake.submits[0].sequence.prompt


async def test_detokenize_undoes_tokenize() -> None:
    async with run_server() as site:
        body = (await site.post("/detokenize", {"tokens": [1, *ABC]})).json()
        assert body == {"content": "<|im_start|>a b c", "prompt": "<|im_start|>a b c"}


async def test_detokenize_takes_every_id_that_the_model_may_draw_and_no_other() -> None:
    fake = engine()
    async with run_server(fake) as site:
        assert (await site.post("/detokenize", {"tokens": [fake.vocab_size - 1]})).status_code == 200
        refused = await site.post("/detokenize", {"tokens": [*ABC, fake.vocab_size]})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "tokens"
        assert str(fake.vocab_size) in refused.json()["error"]["message"]


async def test_detokenize_answers_vllms_clients_who_name_the_model_as_vllm_does() -> None:
    async with run_server() as site:
        answer = await site.post("/detokenize", {"model": MODEL, "tokens": ABC})
        assert answer.json() == {"prompt": "a b c"}
        DetokenizeAnswer.model_validate(answer.json())


async def test_neither_a_prompt_nor_its_embeddings_is_said_in_one_sentence() -> None:
    async with run_server() as site:
        for nothing in ({"prompt_embeds": []}, {"prompt": None, "prompt_embeds": []}):
            answer = await site.post("/v1/completions", nothing)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "prompt")
            assert "Either prompt or prompt_embeds must be provided and non-empty." in error["message"]
        assert (await site.complete(prompt_embeds=[])).status_code == 200
        assert (await site.complete(prompt_embeds=["x"])).json()["error"]["param"] == "prompt_embeds"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"content": 5}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [-1]}),
    ],
    ids=str,
)
async def test_a_bad_token_request_is_refused(path: str, body: dict[str, Any]) -> None:
    async with run_server() as site:
        assert (await site.post(path, body)).status_code == 400


async def test_the_sdk_reads_completions() -> None:
    async with run_server() as site, httpx.AsyncClient(trust_env=False, verify=False) as http:
        sdk = openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="x", http_client=http)
        answer = await sdk.completions.create(model=MODEL, prompt="Say")
        assert answer.choices[0].text == HELLO
        stream = await sdk.completions.create(model=MODEL, prompt="Say", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == HELLO
