"""Rules that agents and SDKs rely on and that no other test states: ids, hosted tools, headers, refusals."""

from __future__ import annotations

import logging
from typing import Any

import agent_requests as agents
import messaging
import pytest
import responding
from serving import Site, engine, named_events, run_server, says

CALLS = "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"{member}": "x"}}}}\n</tool_call>'
    for name, member in (("exec_command", "cmd"), ("apply_patch", "input"))
)
HOSTED = ("web_search", "image_generation", "tool_search", "local_shell", "mcp", "file_search", "code_interpreter")


async def test_ids_show_the_kind_of_an_item_and_calls_have_an_id_of_their_own() -> None:
    async with run_server(engine(say=says("Hello." + CALLS))) as site:
        answer = await responding.respond(site, tools=agents.CODEX_TOOLS)
        assert answer["id"].startswith("resp_")
        assert [item["id"].partition("_")[0] for item in answer["output"]] == ["msg", "fc", "ctc"]
        calls = [item["call_id"] for item in answer["output"][1:]]
        assert len(set(calls)) == 2
        whole = await messaging.ask(site)
        assert whole["id"].startswith("msg_")


async def test_tools_that_run_on_no_local_server_are_left_out_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    hosted = [{"type": kind, "some_member": {"a": 1}} for kind in HOSTED]
    theirs = [{"type": f"{kind}_20260101", "name": kind} for kind in ("web_search", "bash", "text_editor")]
    async with run_server() as site:
        await responding.respond(site, tools=[*hosted, agents.CODEX_TOOLS[0]])
        await messaging.ask(site, tools=[*theirs, agents.BASH])
    lines = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(lines) == 2
    for kind in (*HOSTED, "bash_20260101"):
        assert kind in " ".join(lines)


async def test_marks_for_a_cache_change_nothing_in_the_prompt() -> None:
    """They move with each turn; a prompt that showed them would begin anew."""

    def marked(value: Any) -> Any:
        if isinstance(value, list):
            return [marked(one) for one in value]
        if isinstance(value, dict):
            held = {name: marked(one) for name, one in value.items() if name not in ("input", "input_schema")}
            return {**value, **held} | (agents.ROLLING if "type" in value or "input_schema" in value else {})
        return value

    plain = agents.claude(2, stream=False)
    marks = marked({name: plain[name] for name in ("messages", "tools", "system")})
    assert str(marks).count("ephemeral") > str(plain).count("ephemeral") + 5
    async with run_server() as site:
        for body in (plain, plain | marks, plain | agents.ROLLING):
            assert (await site.post(messaging.PATH, body)).status_code == 200
        prompts = {tuple(command.sequence.prompt) for command in site.fake.submits}
    assert len(prompts) == 1


@pytest.mark.parametrize("path", [responding.PATH, messaging.PATH])
async def test_a_stream_of_named_events_has_no_other_end_than_its_last_event(path: str) -> None:
    body = {"input": "x"} if path == responding.PATH else messaging.body()
    async with run_server() as site:
        text = (await site.post(path, body | {"stream": True})).text
    assert "[DONE]" not in text
    blocks = [block.splitlines() for block in text.strip().split("\n\n")]
    assert all(block[0].startswith("event: ") for block in blocks if not block[0].startswith(":"))
    assert named_events(text)[-1]["type"] in ("response.completed", "message_stop")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sk-right"},
        {"x-api-key": "sk-right"},
        {"authorization": "Bearer sk-right", "x-api-key": "sk-right"},
    ],
)
async def test_a_key_comes_in_either_header_or_in_both(headers: dict[str, str]) -> None:
    async with run_server(api_key=["sk-right"]) as site:
        for path, body in ((messaging.PATH, messaging.body()), (responding.PATH, {"input": "x"})):
            assert (await site.post(path, body, **headers)).status_code == 200


async def test_schemas_of_tools_may_lack_a_type_and_name_their_draft() -> None:
    draft = "https://json-schema.org/draft/2020-12/schema"
    schemas: list[dict[str, Any]] = [{}, {"properties": {"a": {}}}, {"$schema": draft, "type": "object"}]
    async with run_server() as site:
        for schema in schemas:
            await messaging.ask(site, tools=[{"name": "f", "input_schema": schema}])
            tool = {"type": "function", "name": "f", "parameters": schema, "strict": False}
            await responding.respond(site, tools=[tool])


async def test_models_are_found_under_the_names_that_an_agent_keeps() -> None:
    """Claude Code asks with a limit, and keeps ids in which `claude` stands."""
    async with run_server(model_alias=["claude-local"]) as site:
        listed = (await site.client.get("/v1/models?limit=1000")).json()
        assert "claude-local" in {model["id"] for model in listed["data"]}
        assert (await site.post(messaging.PATH, messaging.body(model="claude-local"))).status_code == 200


async def test_a_prompt_beyond_the_context_has_the_code_that_codex_knows() -> None:
    async with run_server(context=64) as site:
        for streamed in (False, True):
            answer = await site.post(responding.PATH, {"input": "word " * 100, "stream": streamed})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_who_is_turned_away_for_a_while_learns_for_how_long() -> None:
    """Agents wait exactly so long; without it they try dozens of times."""
    async with run_server(engine(starts=["die"] * 9), ready=False) as site:
        await site.until(lambda: site.served.supervisor.hopeless)
        await turned_away(site, 503)
    async with (
        run_server(engine(prefill_seconds=5), max_rows=1, queue_limit=0) as site,
        site.client.stream("POST", messaging.PATH, json=messaging.body(stream=True)),
    ):
        await turned_away(site, 429)


async def turned_away(site: Site, status: int) -> None:
    for path, body in ((responding.PATH, {"input": "x"}), (messaging.PATH, messaging.body())):
        answer = await site.post(path, body)
        assert answer.status_code == status
        assert int(answer.headers["retry-after"]) > 0


# ---------------------------------------------------------------- as other servers' tests ask
THOUGHT = {"type": "reasoning", "id": "lol", "summary": [], "content": [{"type": "reasoning_text", "text": "Greet."}]}
BARE_THOUGHT = {"type": "reasoning", "summary": [], "encrypted_content": None}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Acknowledged."}]}
HELLO_THERE = {"type": "message", "role": "user", "content": "Hello."}


@pytest.mark.parametrize(
    "history",
    [
        [HELLO_THERE, THOUGHT],
        [
            HELLO_THERE,
            SAID | {"id": "msg_1", "status": "completed"},
            BARE_THOUGHT | {"status": "completed"},
            HELLO_THERE,
        ],
        [HELLO_THERE, SAID, BARE_THOUGHT, HELLO_THERE],
        [{"role": "system", "content": "Be brief."}, HELLO_THERE, {"role": "assistant", "content": "15."}, HELLO_THERE],
    ],
    ids=["a thought at the end", "with ids", "without ids", "plain"],
)
async def test_a_history_is_taken_with_thoughts_anywhere_and_with_ids_or_without(history: list[dict[str, Any]]) -> None:
    async with run_server() as site:
        assert (await responding.respond(site, history))["status"] == "completed"


async def test_a_call_is_sent_back_as_it_came_also_without_tools() -> None:
    async with run_server(engine(say=says(CALLS))) as site:
        calls = (await responding.respond(site, tools=agents.CODEX_TOOLS))["output"]
        results = [{"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "20 °C"} for call in calls]
        made = await responding.respond(site, [HELLO_THERE, *calls, *results])
        assert made["status"] == "completed"


async def test_sampling_fields_beyond_openais_are_taken_on_the_responses_route_too() -> None:
    async with run_server() as site:
        await responding.respond(site, top_k=40, repetition_penalty=1.2, seed=42, temperature=0.7, top_p=0.9)
        sampling = site.fake.submits[-1].sequence.sampling
    assert (sampling.top_k, sampling.repetition_penalty, sampling.temperature) == (40, 1.2, 0.7)


async def test_what_is_opened_in_a_stream_is_closed_in_the_order_of_its_nesting() -> None:
    async with run_server(engine(say=says("Hello there." + CALLS))) as site:
        events = await responding.stream(site, tools=agents.CODEX_TOOLS)
    opened: list[str] = []
    for event in events:
        kind, _, act = event["type"].removeprefix("response.").rpartition(".")
        if act == "added" or (act == "delta" and opened[-1] != kind):
            opened.append(kind)
        elif act == "done":
            assert opened.pop() == kind
    assert opened == []
