"""The OpenAPI document and the routes that say what is going on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import Poison
from fastapi.openapi.utils import get_openapi
from jsonschema import Draft202012Validator
from serving import MODEL, USER, build, engine, run_server, tokenizer

from server.api import openapi
from server.api.input.messages_schema import MessagesRequest
from server.api.input.schema import ChatRequest, CompletionRequest
from server.app import create_app
from server.ipc.snapshot import Action, Finding, GroupState

GENERATION = {"200", "400", "401", "403", "404", "405", "408", "413", "415", "429", "500", "503"}


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


async def test_the_document_describes_every_route_field_and_status() -> None:
    async with run_server() as site:
        document = (await site.client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert references(document) <= {f"#/components/schemas/{name}" for name in schemas}
    for path, model in (
        ("/v1/chat/completions", ChatRequest),
        ("/v1/completions", CompletionRequest),
        ("/v1/messages", MessagesRequest),
    ):
        route = document["paths"][path]["post"]
        assert set(route["responses"]) == GENERATION
        assert set(route["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        named = route["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert set(schemas[named]["properties"]) == set(model.model_fields)
        assert all(field.get("description") for field in schemas[named]["properties"].values())
    paths = {"/tokenize", "/detokenize", "/v1/models", "/v1/models/{id}", "/live", "/ready", "/health", "/metrics"}
    assert paths <= set(document["paths"])
    assert all(words.get("summary") for path in document["paths"].values() for words in path.values())


async def test_health_says_what_the_design_promises() -> None:
    ready = {"live_source": "native", "buffer_limit": 1000}
    async with run_server(engine(ready=ready)) as site:
        await site.chat()
        body = (await site.client.get("/health")).json()
        assert body["status"] == "ok"
        assert body["model"] == "tiny"
        assert set(body["engine"]) == {"pid", "epoch", "up", "last_step_age_seconds", "restarts"}
        assert body["engine"]["up"] is True
        assert 0 <= body["engine"]["last_step_age_seconds"] < 60
        assert body["live_buffers"] == {"source": "native", "count": None, "limit": 1000, "reason": None}
        assert (body["batching"], body["draining"], body["pressure"]) == ("batched", False, "calm")
        assert body["journal"] == {"condition": "off", "reason": None, "bytes": 0, "unfinished": 0}


async def test_debug_shows_findings_and_the_acts_of_both_processes_in_order(monkeypatch) -> None:
    async with run_server(engine(progress_seconds=100)) as site:
        await site.until(lambda: site.served.supervisor.engine.snapshot is not None)
        snapshot = site.served.supervisor.engine.snapshot
        assert snapshot is not None
        snapshot.pending, snapshot.findings = 2, [Finding(1, "KVCache", "offset", 2)]
        snapshot.actions = [Action(20.0, "flush", float("inf"), 2.0)]
        snapshot.groups = [GroupState(2, 512, 100, 90)]
        status = replace(site.served.supervisor.engine, actions=(Action(10.0, "rotate", 5.0, 4.0),))
        monkeypatch.setattr(type(site.served.supervisor), "engine", property(lambda supervisor: status))
        guard = (await site.client.get("/debug/guard")).json()
        assert guard["findings"] == [{"layer": 1, "cache": "KVCache", "field": "offset", "count": 2}]
        assert [action["action"] for action in guard["actions"]] == ["rotate", "flush"]
        assert guard["actions"][1]["reading"] is None, "infinity is no JSON number"
        batches = (await site.client.get("/debug/batches")).json()
        assert batches["groups"][0]["rows"] == 2


async def test_metrics_are_prometheus_text() -> None:
    async with run_server() as site:
        await site.chat()
        answer = await site.client.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "marathon_engine_up 1.0" in answer.text
        assert 'marathon_requests_total{endpoint="chat",outcome="stop"} 1.0' in answer.text


STREAMS = [
    ("/v1/chat/completions", {}),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "n": 2, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"return_token_ids": True, "timings_per_token": True, "verbose": True}),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}),
    ("/v1/completions", {"logprobs": 2, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"echo": True, "return_token_ids": True, "timings_per_token": True, "prompt": ["a", "b"]}),
]


def schema_in(document: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": document["components"]})


@pytest.mark.parametrize(("path", "fields"), STREAMS)
@pytest.mark.parametrize("ends", [True, False], ids=["whole", "failed"])
async def test_every_event_of_a_stream_is_what_the_document_says(path: str, fields: dict[str, Any], ends: bool) -> None:
    asked = {"prompt": "Say"} if path == "/v1/completions" else {"messages": USER}
    fake = engine()
    if not ends:
        fake.poison |= dict.fromkeys(range(fake.vocab_size), Poison(after=3, how="fail"))
    async with run_server(fake) as site:
        document = (await site.client.get("/openapi.json")).json()
        answer = await site.post(path, {"model": MODEL, "stream": True, "max_tokens": 8} | asked | fields)
        assert answer.status_code == 200
    event = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["itemSchema"]
    payload = event["properties"]["data"]["anyOf"][0]["contentSchema"]
    reported = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert (reported[-1] == "[DONE]") == ends
    for data in reported:
        schema_in(document, event).validate({"data": data})
        if data != "[DONE]":
            schema_in(document, payload).validate(json.loads(data))
    assert not schema_in(document, payload).is_valid({"object": "something else"})


def test_no_two_schemas_of_the_document_share_a_name() -> None:
    app = create_app(build(engine(), tokenizer()))
    routes = get_openapi(title="answers", version="1", routes=app.routes)["components"]["schemas"]
    requests = openapi.schemas(openapi.REQUESTS, "validation")
    chunks = openapi.schemas(openapi.CHUNKS, "serialization")
    assert not routes.keys() & requests.keys()
    assert not chunks.keys() & requests.keys()
    both = routes.keys() & chunks.keys()
    assert {name: set(routes[name]["properties"]) for name in both} == {
        name: set(chunks[name]["properties"]) for name in both
    }
