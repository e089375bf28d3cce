"""The error tree: every leaf is mapped, documented, and rendered the same everywhere."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import USER, Site, engine, run_server

from server import errors
from server.api.output.schema import ErrorBody
from server.errors import Draining, ExceedsMemory, InternalError, NotReady, RequestError, RequestTimeout
from server.metrics import REJECTIONS

DOCS = (Path(__file__).parent.parent / "docs" / "api.md").read_text()


def tree(root: type[RequestError] = RequestError) -> Iterator[type[RequestError]]:
    for kind in root.__subclasses__():
        yield kind
        yield from tree(kind)


CHAT = "/v1/chat/completions"
ALL = list(tree())


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_is_mapped_and_documented(kind: type[RequestError]) -> None:
    assert 400 <= kind.status < 600
    assert f"| {kind.__name__} | {kind.status} | {kind.code} |" in DOCS
    assert kind.reason in REJECTIONS
    assert kind.__doc__


def test_the_drawn_tree_has_every_error_with_its_status() -> None:
    drawn = re.findall(r"[├└]── (\w+) +(\d{3})\b", errors.__doc__ or "")
    assert dict(drawn) == {kind.__name__: str(kind.status) for kind in ALL}


def test_codes_distinguish_errors() -> None:
    assert len({kind.code for kind in ALL}) == len(ALL)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_permanent_refusals_are_not_retried_by_sdks(kind: type[RequestError]) -> None:
    retried = kind.status in (408, 409, 429) or kind.status >= 500
    headers = kind("x", retry_after=3).headers()
    transient = kind in (NotReady, Draining, InternalError) or kind.status == 429
    assert not retried or transient or headers["x-should-retry"] == "false"


async def test_unknown_routes_and_methods_have_the_error_body() -> None:
    async with run_server() as site:
        for method, path, status, code in (
            ("POST", "/v1/no-such-thing", 404, "unknown_url"),
            ("GET", "/v1/completions", 405, "method_not_allowed"),
            ("DELETE", "/v1/models", 405, "method_not_allowed"),
            ("GET", "/v1/models/nobody", 404, "model_not_found"),
            ("GET", "/v1/", 404, "unknown_url"),
            ("OPTIONS", "/v1/chat/completions", 405, "method_not_allowed"),
        ):
            answer = await site.client.request(method, path)
            assert answer.status_code == status, (method, path)
            assert ErrorBody.model_validate_json(answer.content).error.code == code
            assert answer.headers["content-type"] == "application/json"


async def test_a_method_that_a_path_does_not_take_is_refused_with_all_that_it_takes() -> None:
    async with run_server() as site:
        for path in (
            "/v1/completions",
            CHAT,
            f"{CHAT}/x",
            "/v1/responses/x",
            "/v1/models",
            "/v1/models/a/b",
            "/",
            "/live",
        ):
            allowed = {name: await _is_taken(site, name, path) for name in ("GET", "HEAD", "POST", "DELETE", "PUT")}
            answer = await site.client.put(path)
            assert answer.status_code == 405
            assert answer.headers["allow"] == ", ".join(name for name, taken in allowed.items() if taken), path


async def _is_taken(site: Site, method: str, path: str) -> bool:
    return (await site.client.request(method, path)).status_code != 405


async def test_a_request_that_is_no_http_has_the_error_body() -> None:
    import asyncio

    async with run_server() as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(site.url.rsplit(":", 1)[1]))
        writer.write(b"HELLO WORLD\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert ErrorBody.model_validate_json(body)
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"\xff", b"{", b'{"messages": NaN}'], ids=repr)
async def test_bodies_that_are_no_json_object_are_400(body: bytes) -> None:
    async with run_server() as site:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
            answer = await site.client.post(path, content=body)
            assert answer.status_code == 400
            assert ErrorBody.model_validate_json(answer.content).error.code == "invalid_value"


async def test_a_body_that_cannot_be_read_is_described_in_the_words_of_json() -> None:
    digits = b"1" * 5000
    async with run_server() as site:
        for body, words in (
            (b"", "empty"),
            (b" \r\n", "empty"),
            (b'{"x": %b}' % digits, "an integer of more than"),
            (b'{"prompt": "x", "guided_json": "{\\"const\\": %b}"}' % digits, "an integer of more than"),
            (b'{"x": -Infinity}', "-Infinity is no JSON number"),
        ):
            error = ErrorBody.model_validate_json(
                (await site.client.post("/v1/completions", content=body)).content
            ).error
            assert words in error.message
            assert "sys." not in error.message


@pytest.mark.parametrize("depth", [200, 400, 600, 800])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/apply-template"])
async def test_what_is_nested_deeply_is_rendered_or_refused(path: str, depth: int) -> None:
    nest = functools.reduce(lambda inner, _: {"a": [inner]}, range(depth // 2), {})
    calls = [{"function": {"name": "f", "arguments": nest}}]
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": nest}}]
    async with run_server() as site:
        for fields in ({"tools": tools}, {"chat_template_kwargs": {"a": nest}}, {"messages": history}):
            answer = await site.post(path, {"messages": USER, "max_tokens": 1, **fields})
            assert answer.status_code in (200, 400), (list(fields), answer.text)
            if answer.status_code == 400:
                assert ErrorBody.model_validate_json(answer.content).error.code == "invalid_value"


async def test_a_probe_may_ask_for_the_head_alone() -> None:
    async with run_server() as site:
        for path in ("/health", "/v1/models", "/metrics", "/"):
            head, whole = await site.client.head(path), await site.client.get(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == whole.headers["content-type"]
        assert (await site.client.head("/v1/models/x")).status_code == 404
        assert (await site.client.head("/v1/completions")).status_code == 405
        assert 'route="/v1/models"' in (await site.client.get("/metrics")).text


async def test_a_client_that_would_rather_speak_http_2_is_answered_in_http_1() -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: %d\r\nHost: localhost"
        b"\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n\r\n" % len(body)
    )
    async with run_server() as site:

        async def ask(*pieces: bytes) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(site.url.rpartition(":")[2]))
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.05)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert answer.startswith(b"HTTP/1.1 200 OK"), (answer, pieces)
            found = re.search(rb"content-length: (\d+)", answer)
            assert found is not None
            assert b'"text_completion"' in await reader.readexactly(int(found[1]))
            writer.close()

        await ask(head + body)
        await ask(head, body)
        upgrade = head.index(b"Upgrade: h2c")
        cuts = range(1, len(head))
        await asyncio.gather(*(ask(head[:cut], head[cut:] + body) for cut in cuts))
        await asyncio.gather(
            *(ask(head[:cut], head[cut : cut + 2], head[cut + 2 :] + body) for cut in cuts[upgrade - 4 :])
        )


async def test_a_form_is_refused_and_json_of_any_name_is_read() -> None:
    async with run_server() as site:
        body = b'{"prompt": "x", "max_tokens": 1}'
        answer = await site.client.post(
            "/v1/completions", content=body, headers={"content-type": "multipart/form-data; boundary=x"}
        )
        assert answer.status_code == 400
        assert "application/json" in answer.json()["error"]["message"]
        for fine in ("application/json; charset=utf-8", "text/plain", "application/x-www-form-urlencoded"):
            answer = await site.client.post("/v1/completions", content=body, headers={"content-type": fine})
            assert answer.status_code == 200


async def test_a_large_body_is_413_whether_or_not_its_length_is_given() -> None:
    async def pieces() -> Any:
        for _ in range(100):
            yield b"x" * 1000

    async with run_server(max_body_bytes=5000) as site:
        for content in (b"x" * 6000, pieces()):
            answer = await site.client.post("/v1/chat/completions", content=content)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"
        metrics = (await site.client.get("/metrics")).text
        assert 'marathon_requests_rejected_total{endpoint="chat",reason="body_too_large"} 2.0' in metrics


async def test_a_mistake_of_ours_is_500_without_a_path_or_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server() as site:
        monkeypatch.setattr("server.api.chat.prepare", lambda *_: 1 / 0)
        answer = await site.chat()
        assert answer.status_code == 500
        error = ErrorBody.model_validate_json(answer.content).error
        assert error.code == "internal_error"
        assert "division" not in error.message
        assert answer.headers["x-request-id"]
        monkeypatch.undo()
        assert (await site.chat()).status_code == 200


async def test_before_the_first_engine_is_up_requests_wait_and_ready_says_so() -> None:
    fake = engine()
    fake.loads.clear()
    async with run_server(fake, ready=False) as site:
        early = await site.client.get("/ready")
        assert (early.status_code, early.json()["error"]["code"]) == (503, "not_ready")
        assert int(early.headers["retry-after"]) >= 1
        assert (await site.client.get("/v1/models")).status_code == 200
        health = (await site.client.get("/health")).json()
        assert (health["status"], health["engine"]["up"], health["batching"]) == ("not ready", False, None)
        assert (await site.client.get("/live")).status_code == 200
        waits = asyncio.create_task(site.chat())
        await asyncio.sleep(0.1)
        assert not waits.done()
        fake.loads.set()
        assert (await waits).status_code == 200


async def test_a_deadline_that_passes_is_408_for_a_plain_answer_and_an_event_in_a_stream() -> None:
    fake = engine(say=lambda sequence, position: 300, step_seconds=0.01)
    async with run_server(fake, request_timeout_seconds=0.2) as site:
        answer = await site.chat()
        assert answer.status_code == RequestTimeout.status
        assert answer.headers["x-should-retry"] == "false"
        events = await site.stream_chat()
        assert events[-1]["error"]["code"] == "timeout"
        await site.until(lambda: not fake.rows)


async def test_a_refusal_is_counted_by_its_reason() -> None:
    async with run_server() as site:
        await site.chat(temperature=5)
        await site.complete(suffix="x")
        metrics = (await site.client.get("/metrics")).text
        assert 'marathon_requests_rejected_total{endpoint="chat",reason="invalid"} 1.0' in metrics
        assert 'marathon_requests_rejected_total{endpoint="completions",reason="unsupported"} 1.0' in metrics
        assert 'marathon_http_requests_total{method="POST",route="/v1/chat/completions",status="400"} 1.0' in metrics


async def test_a_sequence_that_could_never_fit_is_refused_with_both_numbers() -> None:
    fake = engine(ready={"memory_limit": 500, "weights_bytes": 1000})
    async with run_server(fake) as site:
        error = (await site.post("/v1/chat/completions", {"messages": USER})).json()["error"]
        assert error["code"] == ExceedsMemory.code
        assert "500" in error["message"]
