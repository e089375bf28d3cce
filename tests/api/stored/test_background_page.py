"""The commands of docs/background.md, as they are printed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from serving import HELLO
from stored_answers import ended, keeping, numbers

PAGE = (Path(__file__).parents[3] / "docs" / "background.md").read_text(encoding="utf-8")
BASE = "http://127.0.0.1:8080"


def commands() -> list[list[str]]:
    """The words of each curl command."""
    blocks = re.findall(r"^```sh\n(curl .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [shlex.split(block.replace("\\\n", " ")) for block in blocks]


async def test_the_commands_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    create, get, follow = commands()
    async with keeping(tmp_path) as site:
        body = json.loads(create[create.index("-d") + 1])
        made = (await site.post(create[2].removeprefix(BASE), body)).json()
        assert made["status"] == "queued"
        path = get[-1].removeprefix(BASE).replace("$ID", made["id"])
        assert (await site.client.get(path)).json()["id"] == made["id"]
        assert (await ended(site, made["id"]))["output"][0]["content"][0]["text"] == HELLO
        streamed = await site.post("/v1/responses", body | {"stream": True})
        id = json.loads(streamed.text.partition("data: ")[2].partition("\n")[0])["response"]["id"]
        rest = await site.client.get(follow[-1].removeprefix(BASE).replace("$ID", id))
        assert rest.status_code == 200
        assert numbers(rest.text) == numbers(streamed.text)[21:]
