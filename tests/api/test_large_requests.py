"""Large requests are prepared in another process: the answers are the same, and nothing waits for them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import threading
from typing import Any

import large_works
import pytest
from pydantic import ValidationError
from serving import MODEL, USER, engine, payloads, run_server, settings, tokenizer
from ticks import Ticks

from loadtests import process_tree
from server.api import context, request_worker
from server.api.context import Recipe
from server.api.input import body, large_requests
from server.api.input.large_requests import LargeRequests, Packer, Unpacker
from server.api.input.schema import CompletionRequest, refusal
from server.errors import ContextLengthError, InternalError, NotReady, RequestTooLarge

pytestmark = pytest.mark.slow

LONG = 1 << 18  # characters of a prompt, or tokens of a context
CALCULATE = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
HISTORY = [
    {"role": "system", "content": "Be <|im_end|> brief."},
    {"role": "user", "content": [{"type": "text", "text": "Add."}, {"type": "text", "text": " Please."}]},
    {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": USER}),
    (CHAT, {"messages": HISTORY, "tools": [CALCULATE], "n": 2, "stream": True}),
    (CHAT, {"messages": USER, "tools": [CALCULATE], "tool_choice": "required"}),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 2, "stop": ["you"], "verbose": True}),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    (CHAT, {"messages": [*USER, {"role": "assistant", "content": "Well"}], "echo": True, "timings_per_token": False}),
    (CHAT, {"messages": USER, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}),
    (CHAT, {"messages": USER, "logit_bias": {"7": 1.5}, "unheard": 1}),
    (TEXT, {"prompt": ["Say", "Tell"], "echo": True, "logprobs": 1, "max_tokens": 3}),
    (TEXT, {"prompt": [[5, 6, 7], "more"], "n": 2, "seed": 1, "return_token_ids": True}),
    (TEXT, {"prompt": "Say", "stream": True, "stop_token_ids": [5]}),
    ("/tokenize", {"content": "Hello <|im_end|>", "with_pieces": True}),
    ("/tokenize", {"messages": HISTORY, "return_token_strs": True, "unheard": 1}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/apply-template", {"messages": HISTORY, "tools": [CALCULATE]}),
    ("/v1/chat/completions/input_tokens", {"messages": HISTORY}),
    # and what is refused
    (CHAT, {"messages": USER, "temperature": "hot"}),
    (CHAT, {"messages": [{"role": "user"}]}),
    (CHAT, {"messages": USER, "model": "other"}),
    (CHAT, {"messages": USER, "audio": {}}),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 5000}]}),
    (TEXT, {"prompt": [1] * 5000}),
    (TEXT, {"prompt": [10**6]}),
    ("/tokenize", {}),
]


def shown(answer: Any) -> Any:
    """Without what differs between two answers to the same request."""
    if isinstance(answer, dict):
        return {name: shown(value) for name, value in answer.items() if name not in ("id", "created")}
    return [shown(item) for item in answer] if isinstance(answer, list) else answer


async def answer(site, path, asked) -> Any:
    asked = {"model": MODEL, "seed": 5, **asked} if path in (CHAT, TEXT) else asked
    async with site.client.stream("POST", path, json=asked) as response:
        if response.headers["content-type"].startswith("text/event-stream"):
            return response.status_code, shown([payload async for payload in payloads(response)])
        return response.status_code, shown(json.loads(await response.aread()))


async def test_a_request_gets_the_same_answer_wherever_it_is_prepared(monkeypatch):
    async with run_server(engine(), max_schema_bytes=1000) as site:
        expected = [await answer(site, path, asked) for path, asked in ASKED]
        notes = len(site.served.noted)
        assert site.served.large.pid is None
        monkeypatch.setattr(context, "LARGE_BYTES", 0)
        monkeypatch.setattr(body, "parse", lambda content: pytest.fail("parsed in the server process"))
        for (path, asked), wanted in zip(ASKED, expected, strict=True):
            assert await answer(site, path, asked) == wanted, (path, asked)
        assert site.served.large.pid is not None
        assert len(site.served.noted) == notes > 0


async def test_a_request_that_fits_is_answered_and_one_that_doesnt_is_refused(monkeypatch):
    monkeypatch.setattr(body, "parse", lambda content: pytest.fail("parsed in the server process"))
    fake = engine(context=100_000)
    async with run_server(fake) as site:
        prompt = "the quick brown fox\n" * (LONG // 20 + 1)
        fits = await site.complete(prompt, max_tokens=2)
        twice = await site.complete(prompt * 3)
        far = await site.complete(prompt * 100)
        pid = site.served.large.pid
        assert fits.json()["usage"]["prompt_tokens"] == len(fake.submits[0].sequence.prompt) > 60_000
        assert fake.submits[0].sequence.prompt == tokenizer().encode(prompt)
        assert (twice.status_code, far.status_code) == (400, 400)
        assert far.json()["error"]["code"] == "context_length_exceeded"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_schema_that_takes_long_to_check_delays_no_text(monkeypatch):
    checked = threading.Event()
    async with run_server(engine(context=LONG)) as site:
        monkeypatch.setattr(site.served.checker, "fault", lambda grammar: "" if checked.wait(20) else "late")
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        slow = [asyncio.create_task(site.chat(response_format=form)) for _ in range(5)]
        assert (await site.complete("word " * 2_000)).status_code == 200
        assert not any(one.done() for one in slow)
        checked.set()
        assert [one.status_code for one in await asyncio.gather(*slow)] == [200] * 5


async def test_what_a_hostile_request_takes_is_given_back():
    """Five million lists; they are of a field that isn't known, so the answer is as usual."""
    content = b'{"prompt": "Say", "unheard": [' + b"[]," * 5_000_000 + b"[]]}"
    async with run_server(engine(context=LONG)) as site:
        await site.complete("word " * 60_000)
        before = process_tree.memory_bytes(site.served.large.pid)
        assert (await site.client.post(TEXT, content=content)).status_code == 200
        after = 0 if (pid := site.served.large.pid) is None else process_tree.memory_bytes(pid)
        assert after < before + request_worker.GROWN_BYTES


@pytest.mark.parametrize(
    ("members", "at_fault"),
    [
        (b'"prompt": [' + b"-1," * 500_000 + b"1]", "prompt[0]"),
        (b'"prompt": [' + b"[]," * 500_000 + b"[]]", "prompt[0]"),
        (b'"prompt": "a", "stop": [' + b'"a",' * 500_000 + b'"a"]', "stop"),
        (b'"prompt": "a", "logit_bias": {' + b",".join(b'"%d":999' % n for n in range(200_000)) + b"}", "logit_bias.0"),
        (b'"prompt": "a", "stop_token_ids": [' + b"null," * 500_000 + b"1]", "stop_token_ids[0]"),
    ],
)
def test_a_million_faults_cost_what_one_costs(members, at_fault):
    """Each takes a kilobyte, and the first is the only one that is reported."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body.parse(b"{" + members + b"}"))
    assert caught.value.error_count() == 1
    assert refusal(caught.value).param == at_fault


# ---------------------------------------------------------------- the process
@pytest.fixture
def make(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(large_works.__file__))  # for large_works
    recipe, made = Recipe(settings().model_dump_json(), MODEL, 1, tokenizer().folder), []

    def one(**options: Any) -> LargeRequests:
        made.append(LargeRequests(recipe, tokenizer(), **options))
        return made[-1]

    yield one
    for large in made:
        large.close()
        assert large.pid is None


async def test_a_request_that_takes_too_long_ends_its_process(make):
    large = make(seconds=1)
    with pytest.raises(RequestTooLarge, match="longer than 1 s"):
        await large.prepare(large_works.sleep, b"content")
    assert large.pid is None


async def test_what_a_request_does_to_its_process_is_its_own_affair(make):
    large = make(idle=0.1)
    with pytest.raises(RequestTooLarge, match="7 bytes"):
        await large.prepare(large_works.die, b"content")
    assert await large.prepare(large_works.reply, b"content", 1, "a") == (7, (1, "a"))
    with pytest.raises(ContextLengthError) as caught:
        await large.prepare(large_works.refuse, b"")
    assert caught.value.numbers == {"n_prompt_tokens": 5, "n_ctx": 4}
    with pytest.raises(InternalError, match="made a mistake"):
        await large.prepare(large_works.fail, b"")
    await ended(large)  # it isn't needed any more


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "SIGSTOP"])
async def test_a_request_isnt_too_large_where_its_process_is_ended_or_stopped_from_outside(make, tmp_path, end):
    """One that is stopped is noticed soon; another process prepares the request."""
    large = make()
    mark = tmp_path / "begun"
    waiting = asyncio.create_task(large.prepare(large_works.sleep_at_first, b"content", str(mark)))
    async with asyncio.timeout(60):
        while not mark.exists():
            await asyncio.sleep(0.01)
        os.kill(large.pid, getattr(signal, end))
        assert await waiting == 7


async def test_a_stopped_process_is_noticed_while_it_is_sent_a_request(make):
    large = make()
    await large.prepare(large_works.reply, b"")
    os.kill(large.pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        assert await large.prepare(large_works.reply, bytes(8 << 20)) == (8 << 20, ())


async def test_a_request_whose_process_is_stopped_each_time_may_be_sent_again(make):
    large = make()
    async with asyncio.timeout(60):
        with pytest.raises(NotReady, match="stopped") as caught:
            await large.prepare(large_works.be_stopped, b"content")
    assert caught.value.retry_after
    assert await large.prepare(large_works.reply, b"content") == (7, ())


async def test_a_client_that_leaves_while_others_wait_gives_its_turn_up(make, tmp_path):
    large = make()
    first = asyncio.create_task(large.prepare(large_works.sleep_at_first, b"", str(tmp_path / "begun")))
    second = asyncio.create_task(large.prepare(large_works.sleep_at_first, b"", str(tmp_path / "other")))
    async with asyncio.timeout(60):
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
    second.cancel()
    await asyncio.wait([second])
    os.kill(large.pid, signal.SIGKILL)
    await first
    assert await large.prepare(large_works.reply, b"content") == (7, ())
    assert not (tmp_path / "other").exists()


async def test_a_request_whose_process_is_killed_each_time_is_refused(make):
    large = make()
    with pytest.raises(RequestTooLarge, match="7 bytes"):
        await large.prepare(large_works.be_killed, b"content")


async def ended(large):
    async with asyncio.timeout(10):
        while large.pid is not None:
            await asyncio.sleep(0.01)


async def test_who_waits_when_the_server_ends_is_answered(make):
    large = make()
    waiting = asyncio.create_task(large.prepare(large_works.sleep, b"content"))
    while large.pid is None:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(large.close)
    with pytest.raises(RequestTooLarge):
        await waiting


async def test_without_a_process_a_large_request_is_refused_and_others_are_served(monkeypatch):
    async with run_server() as site:

        def none(*_: object, **__: object) -> None:
            raise OSError("no more processes")

        monkeypatch.setattr(large_requests.subprocess, "Popen", none)
        refused = await site.complete("word " * 60_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert (await site.complete()).status_code == 200


def test_a_large_result_is_loaded_in_turns_with_other_threads():
    numbers, own = list(range(2_000_000)), object()
    file = io.BytesIO()
    Packer(file, own).dump((numbers, own, "text"))
    shares = []
    for _ in range(3):
        file.seek(0)
        with Ticks() as ticks:
            loaded = Unpacker(file, "mine").load()
        shares.append(ticks.longest / ticks.seconds)
    assert loaded == (numbers, "mine", "text")
    assert min(shares) < 0.5


@pytest.mark.parametrize(
    ("path", "reported"),
    [
        ("/tokenize", "content"),
        ("/tokenize", "prompt"),
        ("/tokenize", "messages"),
        ("/apply-template", "messages"),
        ("/v1/chat/completions/input_tokens", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/v1/responses/input_tokens", "input"),
    ],
)
async def test_what_is_far_beyond_the_context_is_not_counted_to_its_end(path, reported, monkeypatch):
    """Large requests wait for each other; each of these took half a minute."""
    monkeypatch.setattr("server.api.prepare.COUNTED", 1000)
    monkeypatch.setattr("server.text.tokens.pieces.PIECE", 1000)
    monkeypatch.setattr("server.text.tokens.encoding.PIECE", 1000)

    def asked(count):
        text = "word of many, " * count
        return {reported: text if reported != "messages" else [{"role": "user", "content": text}], "model": "default"}

    async with run_server(context=512) as site:
        some = await site.post(path, asked(100))
        assert some.status_code == 200
        refused = await site.post(path, asked(4_000))
        error = refused.json()["error"]
        assert refused.status_code == 400
        if path == "/v1/messages/count_tokens":
            assert "prompt is too long" in error["message"]
        else:
            assert error["code"] == "context_length_exceeded"
            assert "at least" in error["message"]
