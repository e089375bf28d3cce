"""Responses that are kept: asked for again, gone on from, made in the background, followed by many."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, Poison
from responding import PATH, respond
from scripted_site import SCRIPTS
from serving import HELLO, MODEL, Site, engine, named_events, says
from stored_answers import create, ended, events_text, first_events, get, keeping, numbers, without_signs

from loadtests.zoo import scripted
from server.api.output.responses_schema import InputItemList, ResponseObject
from server.api.output.schema import ErrorBody
from server.text.tokenizer import Tokenizer

LOGPROBS = "message.output_text.logprobs"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "look_up", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch"},
]


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


EVERYTHING = "Hello – there 😀." + call("look_up", key=1) + call("patch", input='*** "x"\n')
LONG = " ".join(f"word {n}" for n in range(60))


def slow(text: str = LONG, seconds: float = 0.01, **options: Any) -> FakeEngine:
    return engine(say=says(text), step_seconds=seconds, **options)


def poisoned(after: int) -> FakeEngine:
    fake = engine(say=says(LONG))
    fake.poison |= dict.fromkeys(range(fake.vocab_size), Poison(after=after, how="fail"))
    return fake


# ---------------------------------------------------------------- the same events
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": (lambda: engine(), {}),
    "thoughts and calls": (lambda: engine(say=says(EVERYTHING)), {"tools": TOOLS}),
    "log probabilities": (lambda: engine(say=says(EVERYTHING)), {"include": [LOGPROBS], "top_logprobs": 2}),
    "a stop string": (lambda: engine(say=says(LONG)), {"stop": ["word 7"]}),
    "a limit": (lambda: engine(say=says(LONG)), {"max_output_tokens": 7}),
    "an end without words": (lambda: engine(say=says("")), {}),
    "an error": (lambda: poisoned(5), {}),
    "an error at once": (lambda: poisoned(0), {}),
    "a grammar": (lambda: engine(say=says('{"a": 1}')), {"text": {"format": {"type": "json_object"}}}),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_events_are_the_same_bytes_live_and_replayed(tmp_path: Path, kind: str) -> None:
    make, fields = KINDS[kind]
    async with keeping(tmp_path, make()) as site:
        for background in (True, False):
            await assert_replayed(site, background=background, **fields)


async def assert_replayed(site: Site, **fields: Any) -> dict[str, Any]:
    """The object that a stream ended with, once all its events have been replayed."""
    body = {"model": MODEL, "input": "Say hello.", "stream": True} | fields
    live = without_signs((await site.post(PATH, body)).text)
    made = named_events(live)
    id = made[0]["response"]["id"]
    assert without_signs(await events_text(site, id)) == live
    assert numbers(live) == list(range(len(made)))
    last: dict[str, Any] = made[-1]["response"]
    assert last == await get(site, id), "the object is what the last event said"
    assert ResponseObject.model_validate(last).store is True
    middle = len(made) // 2
    assert numbers(await events_text(site, id, middle)) == list(range(middle + 1, len(made)))
    return last


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose model thinks."""
    return Tokenizer.load(scripted.write(tmp_path_factory.mktemp("model"), SCRIPTS), trust_remote_code=False)


def thinker(tokens: Tokenizer) -> FakeEngine:
    say = says("<think>I look it up.</think>One moment.", tokens=tokens)
    return FakeEngine(vocab_size=tokens.vocab_size, say=say)


async def test_thoughts_are_replayed_as_they_were_and_sealed_where_a_reader_asks(
    tmp_path: Path, thinking: Tokenizer
) -> None:
    async with keeping(tmp_path, thinker(thinking), tokens=thinking) as site:
        made = await assert_replayed(site)
        assert [item["type"] for item in made["output"]] == ["reasoning", "message"]
        assert made["output"][0]["encrypted_content"] is None
        reported = await get(site, made["id"], include="reasoning.encrypted_content")
        sealed = (await assert_replayed(site, include=["reasoning.encrypted_content"]))["output"][0][
            "encrypted_content"
        ]
        assert reported["output"][0]["encrypted_content"] == sealed
        assert sealed.startswith("marathon-1:")


async def test_a_response_in_the_background_is_shown_as_queued_and_then_in_progress(tmp_path: Path) -> None:
    async with keeping(tmp_path) as site:
        made = await create(site)
        assert (made["status"], made["background"], made["output"]) == ("queued", True, [])
        done = await ended(site, made["id"])
        assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", HELLO)
        first = await first_events(site, {"input": "x", "background": True}, 3)
        assert [(event["type"], event["response"]["status"]) for event in first] == [
            ("response.created", "queued"),
            ("response.queued", "queued"),
            ("response.in_progress", "in_progress"),
        ]


async def test_a_dropped_stream_goes_on_and_is_picked_up_at_any_event(tmp_path: Path) -> None:
    async with keeping(tmp_path, slow()) as site:
        seen = await first_events(site, {"input": "x", "background": True}, 20)
        id = seen[0]["response"]["id"]
        rest = await events_text(site, id, 19)
        whole = await events_text(site, id)
        assert numbers(whole) == list(range(len(numbers(whole))))
        assert without_signs(whole).endswith(without_signs(rest))
        assert numbers(rest)[0] == 20
        text = "".join(event["delta"] for event in named_events(whole) if event["type"].endswith("text.delta"))
        assert text == LONG


async def test_readers_are_counted_while_they_read(tmp_path: Path) -> None:
    async with keeping(tmp_path, slow()) as site:
        [created] = await first_events(site, {"input": "x", "background": True}, 1)
        id = created["response"]["id"]
        journal = site.served.journal
        await site.until(lambda: journal.state.readers == 0)
        reading = asyncio.create_task(events_text(site, id))
        await site.until(lambda: journal.state.readers == 1)
        await reading
        await site.until(lambda: journal.state.readers == 0)


async def test_readers_of_any_speed_and_none_are_the_same_to_the_answer(tmp_path: Path) -> None:
    async with keeping(tmp_path, slow()) as site:
        id = (await create(site, stream=False))["id"]
        assert (await ended(site, id))["status"] == "completed", "without a reader"
        [created] = await first_events(site, {"input": "x", "background": True}, 1)
        id = created["response"]["id"]
        async with site.client.stream("GET", f"{PATH}/{id}", params={"stream": "true"}) as idle:
            texts = await asyncio.gather(
                events_text(site, id), slowly(site, id), events_text(site, id, 30), events_text(site, id)
            )
            assert without_signs(texts[0]) == without_signs(texts[1]) == without_signs(texts[3])
            assert without_signs(texts[0]).endswith(without_signs(texts[2]))
            assert without_signs((await idle.aread()).decode()) == without_signs(texts[0]), "it has read nothing so far"


async def slowly(site: Site, id: str) -> str:
    text = ""
    async with site.client.stream("GET", f"{PATH}/{id}", params={"stream": "true"}) as response:
        async for piece in response.aiter_text(512):
            text += piece
            await asyncio.sleep(0.005)
    return text


# ---------------------------------------------------------------- cancel and delete
async def test_cancelling_ends_every_reader_keeps_the_output_and_changes_nothing_twice(tmp_path: Path) -> None:
    fake = slow()
    async with keeping(tmp_path, fake) as site:
        seen = await first_events(site, {"input": "x", "background": True}, 12)
        id = seen[0]["response"]["id"]
        reader = asyncio.create_task(events_text(site, id))
        await asyncio.sleep(0.05)
        first = (await site.client.post(f"{PATH}/{id}/cancel")).json()
        assert (first["status"], first["output"][0]["status"]) == ("cancelled", "incomplete")
        reported = await asyncio.wait_for(reader, 5)
        assert named_events(without_signs(reported))[-1]["type"] == "response.cancelled"
        assert not fake.rows, "the row is free"
        await asyncio.sleep(0.05)
        assert without_signs(await events_text(site, id)) == without_signs(reported)
        second = await site.client.post(f"{PATH}/{id}/cancel")
        assert (second.status_code, second.json()) == (200, first)
        assert await get(site, id) == first
        text = first["output"][0]["content"][0]["text"]
        assert LONG.startswith(text)
        assert len(text) > 10


async def test_cancelling_what_waits_for_room_frees_its_place(tmp_path: Path) -> None:
    async with keeping(tmp_path, slow(), max_rows=1) as site:
        first, second = await create(site), await create(site)
        assert (await get(site, second["id"]))["status"] == "queued"
        made = (await site.client.post(f"{PATH}/{second['id']}/cancel")).json()
        assert (made["status"], made["output"]) == ("cancelled", [])
        assert (await ended(site, first["id"]))["status"] == "completed"


async def test_only_background_responses_can_be_cancelled_and_ended_ones_stay_as_they_are(tmp_path: Path) -> None:
    async with keeping(tmp_path) as site:
        made = await respond(site)
        refused = await site.client.post(f"{PATH}/{made['id']}/cancel")
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "Cannot cancel a synchronous response."
        done = await ended(site, (await create(site))["id"])
        again = await site.client.post(f"{PATH}/{done['id']}/cancel")
        assert (again.status_code, again.json()) == (200, done)


async def test_a_deleted_response_is_gone_for_every_reader(tmp_path: Path) -> None:
    fake = slow()
    async with keeping(tmp_path, fake) as site:
        done, running = await respond(site), await create(site)
        for id in (done["id"], running["id"]):
            deleted = await site.client.delete(f"{PATH}/{id}")
            assert deleted.json() == {"id": id, "object": "response", "deleted": True}
        assert not fake.rows
        for id in (done["id"], running["id"], "resp_unknown"):
            for answer in (
                await site.client.get(f"{PATH}/{id}"),
                await site.client.get(f"{PATH}/{id}", params={"stream": "true"}),
                await site.client.delete(f"{PATH}/{id}"),
                await site.client.post(f"{PATH}/{id}/cancel"),
                await site.client.get(f"{PATH}/{id}/input_items"),
            ):
                assert answer.status_code == 404
                assert f"Response with id '{id}' not found." in ErrorBody.model_validate(answer.json()).error.message


async def test_the_last_reader_of_a_response_in_the_foreground_takes_it_along(tmp_path: Path) -> None:
    fake = slow()
    async with keeping(tmp_path, fake) as site:
        seen = await first_events(site, {"input": "x"}, 8)
        made = await ended(site, seen[0]["response"]["id"])
        assert (made["status"], made["output"][0]["status"]) == ("cancelled", "incomplete")
        assert not fake.rows
        task = asyncio.create_task(site.post(PATH, {"input": "x"}))
        await site.until(lambda: bool(fake.rows))
        task.cancel()
        await site.until(lambda: not fake.rows)


# ---------------------------------------------------------------- what is stored
async def test_what_is_not_stored_is_not_there(tmp_path: Path) -> None:
    async with keeping(tmp_path) as site:
        made = await respond(site, store=False)
        assert made["store"] is False
        assert (await site.client.get(f"{PATH}/{made['id']}")).status_code == 404
    async with keeping(tmp_path, store_responses=False) as site:
        assert (await respond(site))["store"] is False
        assert (await respond(site, store=True))["store"] is True
        assert (await create(site))["store"] is True


async def test_only_a_response_that_was_streamed_at_first_can_be_streamed_again(tmp_path: Path) -> None:
    async with keeping(tmp_path) as site:
        for made in (await respond(site), await create(site)):
            answer = await site.client.get(f"{PATH}/{made['id']}", params={"stream": "true"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"background_options": {"completion_window": "2h"}}, "background_options.completion_window"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": "yes"}, "store"),
    ],
)
async def test_what_can_not_be_kept_is_refused_by_its_name(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with keeping(tmp_path) as site:
        answer = await site.post(PATH, {"input": "x"} | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert await site.served.journal.unfinished() == []


async def test_a_full_queue_refuses_before_anything_is_stored(tmp_path: Path) -> None:
    async with keeping(tmp_path, slow(), max_rows=1, queue_limit=1) as site:
        await create(site)
        await create(site)
        answer = await site.post(PATH, {"input": "x", "background": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert len(await site.served.journal.unfinished()) == 2


async def test_input_items_are_listed_a_page_at_a_time(tmp_path: Path) -> None:
    items = [{"role": "user", "content": f"Part {n}."} for n in range(5)]
    async with keeping(tmp_path) as site:
        id = (await respond(site, items))["id"]
        page = (await site.client.get(f"{PATH}/{id}/input_items", params={"limit": 2})).json()
        assert InputItemList.model_validate(page).has_more
        assert [item["content"][0]["text"] for item in page["data"]] == ["Part 4.", "Part 3."]
        query = {"limit": 3, "after": page["last_id"]}
        rest = (await site.client.get(f"{PATH}/{id}/input_items", params=query)).json()
        assert ([item["content"][0]["text"] for item in rest["data"]], rest["has_more"]) == (
            ["Part 2.", "Part 1.", "Part 0."],
            False,
        )
        up = (await site.client.get(f"{PATH}/{id}/input_items", params={"order": "asc"})).json()
        assert up["data"] == [*rest["data"][::-1], *page["data"][::-1]]
        for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "msg_no"}, "after")):
            answer = await site.client.get(f"{PATH}/{id}/input_items", params=query)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        text = (await respond(site, "Hello."))["id"]
        [only] = (await site.client.get(f"{PATH}/{text}/input_items")).json()["data"]
        assert (only["type"], only["role"], only["content"]) == (
            "message",
            "user",
            [{"type": "input_text", "text": "Hello."}],
        )


# ---------------------------------------------------------------- going on from a response
async def test_a_response_goes_on_from_an_earlier_one_with_its_input_and_output_and_calls(tmp_path: Path) -> None:
    fake = engine(say=says(EVERYTHING))
    async with keeping(tmp_path, fake) as site:
        first = await respond(site, "Who?", tools=TOOLS, instructions="Be loud.")
        calls = [item for item in first["output"] if item["type"].endswith("_call")]
        outputs = [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"} for item in calls]
        second = await respond(site, outputs, tools=TOOLS, previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        said = [{"role": "user", "content": "Who?"}, *first["output"], *outputs]
        await respond(site, said, tools=TOOLS, store=False)
        prompts = [submit.sequence.prompt for submit in fake.submits]
        assert prompts[1] == prompts[2]
        own = (await site.client.get(f"{PATH}/{second['id']}/input_items")).json()["data"]
        assert [item["call_id"] for item in own] == [item["call_id"] for item in calls][::-1]
        third = await respond(site, "And?", tools=TOOLS, previous_response_id=second["id"])
        await respond(site, [*said, *second["output"], {"role": "user", "content": "And?"}], tools=TOOLS, store=False)
        prompts = [submit.sequence.prompt for submit in fake.submits]
        assert prompts[3] == prompts[4]
        assert third["status"] == "completed"


async def test_the_count_of_a_prompt_has_what_earlier_responses_said(tmp_path: Path) -> None:
    async with keeping(tmp_path, engine(say=says(EVERYTHING))) as site:
        first = await respond(site, "Who?", tools=TOOLS)
        calls = [item for item in first["output"] if item["type"].endswith("_call")]
        outputs = [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"} for item in calls]
        named = {"type": "item_reference", "id": first["output"][0]["id"]}
        for given in (
            {"input": outputs, "previous_response_id": first["id"]},
            {"input": [{"role": "user", "content": "Who?"}, named]},
        ):
            asked = {"model": MODEL, "tools": TOOLS, **given}
            made = (await site.post(PATH, asked)).json()
            for path in (PATH, "/responses"):
                counted = (await site.post(f"{path}/input_tokens", asked)).json()
                assert counted["input_tokens"] == made["usage"]["input_tokens"]
        alone = (await site.post(f"{PATH}/input_tokens", {"input": "And?"})).json()["input_tokens"]
        more = await site.post(f"{PATH}/input_tokens", {"input": "And?", "previous_response_id": first["id"]})
        assert more.json()["input_tokens"] > alone


async def test_a_count_is_refused_as_the_response_would_be(tmp_path: Path) -> None:
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("mine", "other"))
    async with keeping(tmp_path, slow(), api_key=["mine", "other"]) as site:
        done = (await site.post(PATH, {"input": "x", "max_output_tokens": 1, "store": True}, **mine)).json()
        under_way = (await site.post(PATH, {"input": "x", "background": True}, **mine)).json()
        bad = [{"role": "user", "content": "x"}, {"type": "function_call_output", "output": "x"}]
        for fields, status, param in (
            ({"previous_response_id": "resp_unknown"}, 400, "previous_response_id"),
            ({"previous_response_id": under_way["id"]}, 400, "previous_response_id"),
            ({"previous_response_id": done["id"], "input": bad}, 400, "input[1].call_id"),
            ({"previous_response_id": done["id"], "model": "another"}, 404, "model"),
            ({"background": True, "store": False}, 400, "background"),
        ):
            refused = [
                await site.post(path, {"input": "x"} | fields, **mine) for path in (PATH, f"{PATH}/input_tokens")
            ]
            assert [(one.status_code, one.json()["error"]["param"]) for one in refused] == [(status, param)] * 2
            assert refused[0].json() == refused[1].json()
        asked = {"input": "x", "previous_response_id": done["id"]}
        foreign = await site.post(f"{PATH}/input_tokens", asked, **other)
        assert foreign.json()["error"]["code"] == "previous_response_not_found"
        assert (await site.post(f"{PATH}/input_tokens", asked, **mine)).status_code == 200


async def test_nothing_goes_on_from_a_response_that_has_not_ended(tmp_path: Path) -> None:
    async with keeping(tmp_path, slow()) as site:
        made = await create(site)
        answer = await site.post(PATH, {"input": "x", "previous_response_id": made["id"]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")
        unknown = await site.post(PATH, {"input": "x", "previous_response_id": "resp_unknown"})
        assert unknown.json()["error"] | {"message": ""} == {
            "message": "",
            "type": "invalid_request_error",
            "param": "previous_response_id",
            "code": "previous_response_not_found",
        }


async def test_an_error_names_the_place_among_the_items_that_were_sent(tmp_path: Path) -> None:
    async with keeping(tmp_path) as site:
        first = await respond(site)
        bad = [{"role": "user", "content": "x"}, {"type": "function_call_output", "output": "x"}]
        answer = await site.post(PATH, {"input": bad, "previous_response_id": first["id"]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[1].call_id")
        assert "input[1]" in answer.json()["error"]["message"]


async def test_an_item_is_named_by_its_id(tmp_path: Path) -> None:
    fake = engine()
    async with keeping(tmp_path, fake) as site:
        first = await respond(site, "Who?")
        [own] = (await site.client.get(f"{PATH}/{first['id']}/input_items")).json()["data"]
        named = [{"type": "item_reference", "id": item["id"]} for item in (own, first["output"][0])]
        await respond(site, [*named, {"role": "user", "content": "And?"}])
        await respond(site, "And?", previous_response_id=first["id"])
        prompts = [submit.sequence.prompt for submit in fake.submits]
        assert prompts[1] == prompts[2]
        unknown = await site.post(PATH, {"input": [{"type": "item_reference", "id": "msg_" + "0" * 28}]})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "input[0].id")


# ---------------------------------------------------------------- owners
async def test_with_keys_an_answer_belongs_to_the_key_that_made_it(tmp_path: Path) -> None:
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("mine", "other"))
    async with keeping(tmp_path, slow(), api_key=["mine", "other"]) as site:
        answer = await site.post(PATH, {"input": "x", "background": True, "stream": False}, **mine)
        id = answer.json()["id"]
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            found = await site.client.request(method, f"{PATH}/{id}{path}", headers=other)
            assert found.status_code == 404
        follow = await site.post(PATH, {"input": "x", "previous_response_id": id}, **other)
        assert follow.json()["error"]["code"] == "previous_response_not_found"
        assert (await site.client.get(f"{PATH}/{id}", headers=mine)).status_code == 200


# ---------------------------------------------------------------- bodies that readers of JSON differ about
HALVES = [r"cut \ud83d", r"\udc00 at once", r"both \ud83d\ude00 and \uD83D"]


@pytest.mark.parametrize("text", HALVES)
async def test_half_an_emoji_costs_no_conversation(tmp_path: Path, text: str) -> None:
    async with keeping(tmp_path) as site:
        first = await respond(site, "My name is Ada. " * 20, store=True)

        async def sent(**fields: Any) -> Any:
            body = json.dumps({"model": MODEL, "input": "INPUT"} | fields).replace("INPUT", text)
            return await site.client.post(PATH, content=body, headers={"content-type": "application/json"})

        second = await sent(previous_response_id=first["id"])
        assert second.status_code == 200
        assert second.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        third = await sent(previous_response_id=second.json()["id"])
        assert third.json()["usage"]["input_tokens"] > second.json()["usage"]["input_tokens"]
        unknown = await sent(previous_response_id="resp_" + 24 * "0")
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "previous_response_id")
        listed = await site.client.get(f"{PATH}/{first['id']}/input_items")
        reference = {"type": "item_reference", "id": listed.json()["data"][0]["id"]}
        assert (await sent(input=[reference, {"role": "user", "content": "INPUT"}])).status_code == 200


@pytest.mark.parametrize("mark", ["", r"\u0041", "item_reference", "previous_response_id"])
@pytest.mark.parametrize("depth", [260, 500, 1200, 20_000])
async def test_what_is_nested_too_deeply_is_refused(tmp_path: Path, depth: int, mark: str) -> None:
    deep = depth * '{"a":' + "1" + depth * "}"
    said = f'{{"role":"user","content":"{mark}"'
    async with keeping(tmp_path) as site:
        for path, name in ((PATH, "input"), ("/v1/chat/completions", "messages")):
            for rest in (f'{said},"foo":{deep}}}]', f'{said}}}],"foo":{deep}'):
                content = f'{{"store":true,"{name}":[{rest}}}'
                answer = await site.client.post(path, content=content, headers={"content-type": "application/json"})
                assert answer.status_code in (200, 400), answer.text
                if answer.status_code == 400:
                    assert "nested too deeply" in answer.text


@pytest.mark.parametrize("value", ["1e999", "-1e999", "123456789012345678901234567890"])
async def test_a_number_out_of_range_is_no_matter_beside_a_reference(tmp_path: Path, value: str) -> None:
    async with keeping(tmp_path) as site:
        first = await respond(site, store=True)
        item = f'{{"role":"user","content":"item_reference","x":{value}}}'
        content = f'{{"previous_response_id":"{first["id"]}","input":[{item}]}}'
        answer = await site.client.post(PATH, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
