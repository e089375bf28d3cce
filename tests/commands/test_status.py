"""`marathon status` and `marathon top`: a running server's state, for people."""

from __future__ import annotations

import asyncio
import json
import re
import signal

from commanding import COMMAND, marathon, terminal
from serving import engine, run_server, says

LONG = {"model": "tiny", "prompt": "a secret of mine", "max_tokens": 100_000, "stream": True}


async def test_a_healthy_server_is_shown_with_its_generations_and_exit_code_0() -> None:
    async with (
        run_server(engine(say=says("word", stop=False), step_seconds=0.05)) as site,
        site.client.stream("POST", "/v1/completions", json=LONG) as answer,
    ):
        pieces = answer.aiter_bytes()
        await anext(pieces)
        told, as_json = await asyncio.gather(
            marathon("status", "--url", site.url), marathon("status", "--json", "--url", f"{site.url}/v1")
        )
    assert (told.code, told.err) == (0, "")
    first, *others = told.out.splitlines()
    assert re.fullmatch(r"\w+: tiny, marathon [\d.]+, up for .*", first)
    assert any(re.search(r"sequences +1 of 32 running, 0 of 256 waiting", line) for line in others)
    assert re.fullmatch(r"  \d+ +\S*completions +decoding +\d+ s +\d+ +[\d,]+/[\d,]+ +\S+ +0", others[-1])
    assert "secret" not in told.out
    assert "\033" not in told.out
    assert json.loads(as_json.out)["verdict"]["level"] == "ok"


async def test_a_server_in_trouble_gives_exit_code_1_and_names_the_trouble() -> None:
    async with run_server(engine(pressure="hold")) as site:
        await site.until(lambda: site.served.feed.report().status.pressure == "hold")
        told = await marathon("status", "--url", site.url)
    assert told.code == 1
    assert "No new work starts until memory or buffers are free again." in told.out


async def test_no_server_gives_exit_code_2_and_one_line() -> None:
    told = await marathon("status", MARATHON_PORT="1")
    assert (told.code, told.out) == (2, "")
    assert told.err == "marathon: no server answers at http://127.0.0.1:1; `marathon serve` starts one\n"


async def test_a_key_is_taken_from_the_environment_and_its_lack_is_one_line() -> None:
    async with run_server(api_key=["sesame"]) as site:
        with_key, without = await asyncio.gather(
            marathon("status", "--url", site.url, MARATHON_API_KEY="sesame"), marathon("status", "--url", site.url)
        )
    assert with_key.code == 0
    assert (without.code, len(without.err.splitlines())) == (2, 1)
    assert " answers 401: " in without.err


async def test_top_in_a_pipe_is_a_line_a_second_until_it_is_interrupted() -> None:
    async with run_server() as site:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "top", "--url", site.url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        lines = [(await asyncio.wait_for(process.stdout.readline(), 20)).decode() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, err) == (0, b"")
    for line in lines:
        assert re.match(r"\d\d:\d\d:\d\d Healthy; speed 0\.0 tokens/s; sequences 0 of 32 running", line)


async def test_top_in_a_terminal_draws_over_its_last_picture_and_outlives_the_server() -> None:
    async with run_server() as site, terminal("top", "--url", site.url) as screen:
        await screen.until("Ready; nothing is running.")
        assert screen.text.startswith("\033[H")
        site.server.handle_exit(2, None)
        await screen.until("it is asked again each second.")
        assert await screen.ctrl_c() == 0
    assert "Traceback" not in screen.text
