"""The live page in a real browser: it shows what happens, and chats."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from browser import Page, browser, chromium
from serving import engine, run_server, says

from server.ipc.messages import WeightsRead
from server.status import feed

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROGRAM = chromium()
SHOTS = os.environ.get("PAGE_SCREENSHOTS")  # a folder; what is drawn can then be looked at
STORY = (
    "# Paris\n\n**Paris** is the capital of France. <img src=x onerror=alert(1)> "
    "![a](http://evil.example/x) [b](https://example.com) " + "It goes on and on. " * 400
)
TEXT = "document.querySelector('.turn.assistant:last-child')?.innerText ?? ''"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def page() -> AsyncIterator[Page]:
    if PROGRAM is None:
        pytest.skip("no Chromium; `make tools` fetches one")
    async with browser(PROGRAM) as found:
        yield found


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_goes_wrong(page: Page) -> AsyncIterator[None]:
    """No error on the console, no request to another host."""
    await page.leave()
    page.errors.clear()
    page.requests.clear()
    yield
    assert page.errors == []
    assert {urlsplit(url).hostname for url in page.requests} <= {"127.0.0.1", None}


async def shoot(page: Page, name: str) -> None:
    if SHOTS:
        await page.screenshot(Path(SHOTS) / f"{name}.png")


async def reads(page: Page, title: str, words: str) -> None:
    """Wait until the verdict has this title, and a sentence with these words."""
    verdict = "document.getElementById('verdict')"
    await page.until(f"{verdict}.innerText.startsWith({title!r}) && {verdict}.innerText.includes({words!r})")


async def ask(page: Page, text: str) -> None:
    await page.value("document.getElementById('message').focus()")
    await page.type(text)
    await page.press("Enter")


async def test_charts_move_and_a_chat_goes_on_through_a_death(page: Page) -> None:
    async with run_server(engine(say=says(STORY), step_seconds=0.01)) as site:
        await page.open(site.url)
        await page.until("document.getElementById('verdict').dataset.level === 'ok'")
        await page.until("document.querySelectorAll('.chart canvas').length === 4")
        await ask(page, "Where is Paris?")
        await page.until(f"({TEXT}).includes('capital of France')")
        await page.until("[...document.querySelectorAll('#rows td')].some(cell => cell.textContent === 'decoding')")
        before = len(await page.value(TEXT))
        site.fake.die()
        await page.until("document.querySelector('#events [data-kind=death]')")
        await page.until(f"({TEXT}).length > {before + 200}")
        await page.until("[...document.querySelectorAll('#rows td')].some(cell => cell.textContent === '1×')")
        assert await page.value("document.querySelectorAll('.turn.assistant .error').length") == 0
        await shoot(page, "light")
        await page.open(site.url, scheme="dark")
        await page.until("document.querySelector('#events [data-kind=death]')")
        await shoot(page, "dark")
        await page.open(site.url, width=390, height=800)
        await page.until("document.querySelector('#events [data-kind=death]')")
        assert await page.value("document.documentElement.scrollWidth <= innerWidth"), "a phone needn't scroll sideways"
        await shoot(page, "phone")


async def test_markdown_is_drawn_and_nothing_in_it_runs(page: Page) -> None:
    async with run_server(engine(say=says(STORY))) as site:
        await page.open(site.url)
        await ask(page, "Where is Paris?")
        await page.until("document.querySelector('.turn.assistant strong')?.textContent === 'Paris'")
        await page.until("!document.getElementById('send').disabled")
        assert await page.value("document.querySelectorAll('.turn img').length") == 0
        assert "<img src=x onerror=alert(1)>" in await page.value(TEXT), "HTML is shown as text"
        assert await page.value("document.querySelector('.turn a').rel") == "noopener noreferrer nofollow"


async def test_the_keyboard_alone_suffices(page: Page) -> None:
    async with run_server(engine(say=says("word", stop=False), step_seconds=0.01)) as site:
        await page.open(site.url)
        await page.until("document.getElementById('verdict').dataset.level === 'ok'")
        await page.press("Tab")
        assert await page.value("document.activeElement.className") == "skip"
        await page.value("document.getElementById('message').focus()")
        await page.type("Say a word")
        await page.press("Enter")
        await page.until("!document.getElementById('stop').disabled")
        for _ in range(10):
            if await page.value("document.activeElement.id") == "stop":
                break
            await page.press("Tab")
        await page.press("Enter")
        await page.until("!document.getElementById('send').disabled")
        assert "stopped" in await page.value(TEXT)


async def test_a_stranger_reads_each_state_in_words(page: Page) -> None:
    """Loading, a leak, an engine that is gone while an answer waits, one that keeps dying, none at all."""
    counted = {"live_source": "native", "buffer_limit": 30_000}
    read = WeightsRead(3_200_000_000, 14_900_000_000)
    fake = engine(say=says(STORY), step_seconds=0.01, ready=counted, weights=read)
    fake.loads.clear()
    leak = {"live_settled": 9_000, "buffers_per_token": 3.0, "seconds_to_exhaustion": {"buffers": 900.0}}
    async with run_server(fake, ready=False) as site:
        await page.open(site.url)
        await reads(page, "Loading", "3.2 of 14.9 GB, 21%")
        assert 0.2 < await page.value("document.getElementById('loading').value") < 0.22
        await shoot(page, "loading")
        fake.loads.set()
        fake.snapshot |= {"live_settled": 900, "buffers_per_token": 0.0}
        await reads(page, "Healthy", "Live buffers are flat: 900 of 30,000")
        assert await page.value("document.getElementById('loading').hidden")
        fake.snapshot |= leak
        await reads(page, "A leak", "they rise by 3 a token and reach the limit in 15 minutes")
        await shoot(page, "leak")
        fake.snapshot.clear()
        fake.loads.clear()
        await ask(page, "Where is Paris?")
        await page.until(f"({TEXT}).includes('capital of France')")
        fake.die()
        await reads(page, "Recovering", "1 answer waits and will go on where it was")
        await page.until("[...document.querySelectorAll('#rows td')].some(cell => cell.textContent === 'resuming')")
        await shoot(page, "recovering")
        fake.loads.set()
        for number in (1, 2):
            await page.until(f"document.querySelectorAll('#events [data-kind=ready]').length > {number}")
            fake.die()
            await page.until(f"document.querySelectorAll('#events [data-kind=death]').length > {number}")
        await reads(page, "The engine keeps dying", "3 times in the last ten minutes")
        await shoot(page, "dying")


async def test_a_key_is_asked_for_in_the_page(page: Page) -> None:
    async with run_server(api_key="secret-1") as site:
        await page.open(site.url)
        await page.until("document.getElementById('key-dialog').open")
        await page.type("secret-1")
        await page.press("Enter")
        await page.until("document.getElementById('verdict').dataset.level === 'ok'")
        page.errors.clear()  # the browser itself reports the 401
        await page.value("sessionStorage.clear()")
        await page.open(site.url)
        await page.until("document.getElementById('key-dialog').open")
        await page.type("secret-2")
        await page.press("Enter")
        await page.until("document.getElementById('key-note').textContent.includes(\"doesn't take that key\")")
        await page.type("secret-1")
        await page.press("Enter")
        await page.until("document.getElementById('verdict').dataset.level === 'ok'")
        page.errors.clear()
        await page.value("sessionStorage.clear()")


async def test_a_long_prompt_shows_what_is_read_how_fast_and_where_the_log_is(page: Page) -> None:
    slow = engine(say=says("word"), prefill_seconds=30.0, prefill_chunks=60, progress_seconds=0.2)
    async with run_server(slow) as site:
        await page.open(site.url)
        await page.until("document.getElementById('log').textContent !== ''")
        await ask(page, "word " * 1500)
        await reads(page, "Healthy", "A long prompt is being read")
        state = "document.querySelector('#rows td:nth-child(3)')?.textContent ?? ''"
        await page.until(f"/reading [\\d,]+ of [\\d,.]+, [\\d,.]+\\/s, \\d+ s left/.test({state})")
        await reads(page, "Healthy", "a second, about")
        await shoot(page, "long-prompt")
        await page.until(f"/reading the prompt: \\d+ of \\d+ tokens, \\d+ a second/.test({TEXT})")
        await page.value("document.getElementById('stop').click()")
        await page.until("!document.getElementById('send').disabled")


async def test_legends_name_the_newest_values_without_a_pointer(page: Page) -> None:
    async with run_server(engine(ready={"live_source": "native", "buffer_limit": 30_000})) as site:
        site.fake.snapshot |= {"live_settled": 900, "active_bytes": 5_000_000}
        await page.open(site.url)
        legends = "[...document.querySelectorAll('.u-legend .u-value')].map(cell => cell.textContent)"
        await page.until(f"{legends}.includes('900')")
        await page.until(f"{legends}.includes('5.00 MB')")
        assert not [text for text in await page.value(legends) if text == "--"]
        await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=300, y=300)
        await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
        await asyncio.sleep(1.5)
        assert not [text for text in await page.value(legends) if text == "--"]


async def test_a_server_that_stands_still_is_not_called_healthy(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection lasts, and nothing comes: as from a stopped process, or after the machine has slept."""
    async with run_server() as site:
        await page.open(site.url)
        await page.until("document.getElementById('verdict').dataset.level === 'ok'")
        monkeypatch.setattr(feed, "TICK_SECONDS", 3600.0)
        await reads(page, "No answer", "has sent nothing for 10 seconds")
        assert await page.value("'stale' in document.body.dataset")
        await shoot(page, "silent")


async def test_an_open_page_goes_on_with_a_server_that_was_restarted(page: Page) -> None:
    async with run_server(engine(say=says("word"))) as first:
        port = urlsplit(first.url).port
        await page.open(first.url)
        await page.until("document.getElementById('verdict').dataset.level === 'ok'")
        await first.chat()
        first.fake.die()
        await page.until("document.querySelector('#events [data-kind=death]')")
    await reads(page, "No answer", "doesn't answer")
    page.errors.clear()  # the browser itself reports refused connections
    async with run_server(engine(say=says("word")), port=port):
        await page.until("document.getElementById('verdict').dataset.level === 'ok'")
        assert await page.value("document.querySelectorAll('#events [data-kind=death]').length") == 0
        assert await page.value("document.querySelectorAll('#events li').length") >= 1, "its own events are shown"
        assert not await page.value("'stale' in document.body.dataset")
        page.errors.clear()


async def test_a_page_under_a_name_that_is_refused_says_what_the_server_answered(page: Page) -> None:
    async with run_server() as site:
        await page.open(site.url)
        await page.until("document.getElementById('verdict').dataset.level === 'ok'")
        answer = "new Response(JSON.stringify({error: {message: 'No.'}}), {status: 403})"
        await page.value(f"window.fetch = () => Promise.resolve({answer})")
        site.server.handle_exit(2, None)
        await reads(page, "Refused", "No.")
        page.errors.clear()


async def test_fifty_generations_are_in_the_table_and_the_keyboard_scrolls_it(page: Page) -> None:
    fake = engine(say=says("word", stop=False), step_seconds=0.05)
    body = {"model": "tiny", "prompt": ["Say"] * 10, "max_tokens": 2000, "stream": True}
    async with run_server(fake, max_rows=64) as site, AsyncExitStack() as stack:
        for _ in range(5):
            await stack.enter_async_context(site.client.stream("POST", "/v1/completions", json=body))
        await page.open(site.url)
        await page.until("document.querySelectorAll('#rows tr').length === 50")
        region = "document.querySelector('[aria-labelledby=rows-title].scroll')"
        assert await page.value(f"{region}.scrollHeight > {region}.clientHeight")
        for _ in range(6):
            await page.press("Tab")
            if await page.value(f"document.activeElement === {region}"):
                break
        await page.press("End")
        await page.until(f"{region}.scrollTop > 0")
        await asyncio.sleep(2.5)
        assert await page.value(f"{region}.scrollTop > 0"), "a new report leaves it where it was scrolled to"
        await shoot(page, "fifty")


ATTACKS = [
    "<script>window.hit=1</script>", "<svg onload=window.hit=1>", "<iframe srcdoc='<script>parent.hit=1</script>'>",
    "[x](javascript:window.hit=1)", "[x](data:text/html,<script>window.hit=1</script>)", "[x](vbscript:x)",
    "![x](http://evil.example/p.png)", "[a]: javascript:window.hit=1\n\n[a]", "<javascript:window.hit=1>",
    "`<img src=x onerror=window.hit=1>`", "```<b id=send onclick=window.hit=1>\nx\n```",
    '[x](https://e.example "t\" onmouseover=window.hit=1 x=\"")', "<a href=jav&#x09;ascript:window.hit=1>x</a>",
    "<form action=//evil.example><button>x</button></form>", "<style>body{background:url(//evil.example)}</style>",
    "<math><mtext></mtext><mglyph><style><img src=x onerror=window.hit=1>", "<base href=//evil.example>",
    "| a |\n|---|\n| <img src=x onerror=window.hit=1> |", "<details open ontoggle=window.hit=1>x</details>",
]  # fmt: skip


async def test_no_answer_runs_loads_or_sends_anything(page: Page) -> None:
    text = "\n\n".join(ATTACKS) + "\n\nThe end."
    async with run_server(engine(say=says(text))) as site:
        await page.open(site.url)
        await ask(page, "Attack")
        await page.until(f"({TEXT}).includes('The end.')")
        await page.until("!document.getElementById('send').disabled")
        assert await page.value("window.hit") is None
        box = "document.querySelector('.turn.assistant:last-child')"
        for tag in ("script", "img", "svg", "iframe", "form", "style", "base", "math", "details:not(:first-of-type)"):
            assert await page.value(f"{box}.querySelectorAll('div {tag}').length") == 0, tag
        links = await page.value(f"[...{box}.querySelectorAll('[href]')].map(link => link.href)")
        assert all(link.startswith(("https://", "http://", "mailto:")) for link in links), links
        attributes = f"[...{box}.querySelectorAll('*')].flatMap(one => one.getAttributeNames())"
        assert not [name for name in await page.value(attributes) if name.startswith("on") or name == "id"]
        assert not [url for url in page.requests if "evil" in url]
