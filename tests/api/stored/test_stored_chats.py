"""Chat completions that are kept: they go on without their client, and are listed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from serving import HELLO, MODEL, USER, Site, engine, says
from stored_answers import keeping

from server.api.output.schema import ChatList, ErrorBody, MessageList, StoredChat

CHATS = "/v1/chat/completions"
LONG = " ".join(f"word {n}" for n in range(60))


async def whole(site: Site, id: str) -> dict[str, Any]:
    """The completion once all its choices have come to an end."""
    async with asyncio.timeout(10):
        while True:
            answer = await site.client.get(f"{CHATS}/{id}")
            assert answer.status_code == 200, answer.text
            made: dict[str, Any] = answer.json()
            assert StoredChat.model_validate(made)
            if all(choice["finish_reason"] for choice in made["choices"]):
                return made
            await asyncio.sleep(0.01)


async def test_a_stored_chat_goes_on_without_its_client(tmp_path: Path) -> None:
    fake = engine(say=says(LONG, HELLO), step_seconds=0.005)
    async with keeping(tmp_path, fake) as site:
        body = {"model": MODEL, "messages": USER, "store": True, "n": 2, "logprobs": True, "stream": True}
        async with site.client.stream("POST", CHATS, json=body) as response:
            line = await anext(line async for line in response.aiter_lines() if line.startswith("data: "))
        id = json.loads(line.removeprefix("data: "))["id"]
        under_way = (await site.client.get(f"{CHATS}/{id}")).json()
        assert under_way["choices"][0]["finish_reason"] is None
        made = await whole(site, id)
        assert [choice["message"]["content"] for choice in made["choices"]] == [LONG, HELLO]
        scores = made["choices"][1]["logprobs"]["content"]
        assert "".join(score["token"] for score in scores) == HELLO
        plain = (await site.chat(store=True, n=2, logprobs=True)).json()
        assert made["choices"] == plain["choices"]
        assert made["usage"] == plain["usage"]


async def test_without_the_wish_a_disconnect_cancels_and_nothing_is_kept(tmp_path: Path) -> None:
    fake = engine(say=says(LONG), step_seconds=0.005)
    async with keeping(tmp_path, fake) as site:
        async with site.client.stream(
            "POST", CHATS, json={"messages": USER, "stream": True, "store": False}
        ) as response:
            await anext(response.aiter_bytes())
        await site.until(lambda: not fake.rows)
        made = (await site.chat()).json()
        assert (await site.client.get(f"{CHATS}/{made['id']}")).status_code == 404
        assert (await site.client.get(CHATS)).status_code == 404


async def test_a_streamed_chat_has_the_events_that_it_has_without_storing(tmp_path: Path) -> None:
    async with keeping(tmp_path) as site:
        stored, plain = await site.stream_chat(store=True), await site.stream_chat()
        texts = ["".join(c["choices"][0]["delta"].get("content") or "" for c in s[:-1]) for s in (stored, plain)]
        assert texts == [HELLO, HELLO]
        assert stored[-1] == plain[-1] == "[DONE]"


async def test_a_get_where_no_chat_is_stored_says_how_one_is_made(tmp_path: Path) -> None:
    async with keeping(tmp_path) as site:
        refused = await site.client.get(CHATS)
        assert refused.status_code == 404
        assert "POST" in refused.json()["error"]["message"]
        made = (await site.chat(store=True)).json()
        await site.client.delete(f"{CHATS}/{made['id']}")
        emptied = await site.client.get(CHATS)
        assert (emptied.status_code, emptied.json()["data"]) == (200, [])


async def test_chats_are_listed_by_page_model_and_metadata(tmp_path: Path) -> None:
    async with keeping(tmp_path) as site:
        ids = []
        for number in range(4):
            metadata = {"number": str(number), "even": str(number % 2 == 0)}
            ids.append((await site.chat(store=True, metadata=metadata)).json()["id"])

        async def listed(**query: Any) -> list[str]:
            answer = await site.client.get(CHATS, params=query)
            assert answer.status_code == 200, answer.text
            page = answer.json()
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            return [made["id"] for made in page["data"]]

        assert await listed() == ids
        assert await listed(order="desc", limit=3) == ids[:0:-1]
        assert await listed(after=ids[1], limit=1) == [ids[2]]
        assert await listed(**{"metadata[even]": "True"}) == [ids[0], ids[2]]
        assert await listed(model=MODEL, limit=1) == [ids[0]]
        page = (await site.client.get(CHATS, params={"limit": 3})).json()
        assert page["has_more"] is True
        assert set(page) == set(ChatList.model_fields)
        assert (await site.client.get(CHATS, params={"model": "other"})).json()["data"] == []
        assert (await site.client.get(CHATS, params={"after": "chatcmpl-no"})).status_code == 400


async def test_a_chat_has_its_messages_takes_other_metadata_and_can_be_deleted(tmp_path: Path) -> None:
    async with keeping(tmp_path) as site:
        messages = [{"role": "system", "content": "Be brief."}, *USER]
        id = (await site.chat(store=True, messages=messages, metadata={"a": "b"})).json()["id"]
        page = (await site.client.get(f"{CHATS}/{id}/messages", params={"limit": 1})).json()
        assert MessageList.model_validate(page).has_more
        assert (page["data"][0]["role"], page["data"][0]["content"]) == ("system", "Be brief.")
        changed = await site.post(f"{CHATS}/{id}", {"metadata": {"c": "d"}})
        assert changed.json()["metadata"] == (await whole(site, id))["metadata"] == {"c": "d"}
        bad = await site.post(f"{CHATS}/{id}", {"metadata": {"c": 1}})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "metadata")
        deleted = await site.client.delete(f"{CHATS}/{id}")
        assert deleted.json() == {"object": "chat.completion.deleted", "id": id, "deleted": True}
        for path in (f"{CHATS}/{id}", f"{CHATS}/{id}/messages", f"/v1/responses/{id}"):
            assert (await site.client.get(path)).status_code == 404
        assert (await site.post(f"{CHATS}/{id}", {"metadata": {}})).status_code == 404


async def test_a_stream_that_another_request_deletes_ends_with_a_whole_error(tmp_path: Path) -> None:
    async with keeping(tmp_path, engine(say=says(LONG), step_seconds=0.02)) as site:
        body = {"messages": USER, "store": True, "stream": True}
        async with site.client.stream("POST", CHATS, json=body) as response:
            lines = (line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: "))
            id = json.loads(await anext(lines))["id"]
            assert (await site.client.delete(f"{CHATS}/{id}")).status_code == 200
            last = [line async for line in lines if "error" in line][-1]
        error = ErrorBody.model_validate_json(last).error
        assert (error.code, error.message) == ("cancelled", "The answer was deleted.")
        assert json.loads(last)["error"].keys() >= {"type", "param"}
