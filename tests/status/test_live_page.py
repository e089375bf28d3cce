"""The live page in a real browser: it shows what happens, and chats."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from browser import Page, browser, chromium
from serving import engine, run_server, says

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


@pytest.fixture(autouse=True)
def nothing_goes_wrong(page: Page) -> Iterator[None]:
    """No error on the console, no request to another host."""
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
    fake = engine(say=says(STORY), step_seconds=0.01, load_seconds=2.0, ready=counted)
    leak = {"live_settled": 9_000, "buffers_per_token": 3.0, "seconds_to_exhaustion": {"buffers": 900.0}}
    async with run_server(fake, ready=False) as site:
        await page.open(site.url)
        await reads(page, "Loading", "The model is being loaded")
        await shoot(page, "loading")
        fake.snapshot |= {"live_settled": 900, "buffers_per_token": 0.0}
        await reads(page, "Healthy", "Live buffers are flat: 900 of 30,000")
        fake.snapshot |= leak
        await reads(page, "A leak", "they rise by 3 a token and reach the limit in 15 minutes")
        await shoot(page, "leak")
        fake.snapshot.clear()
        fake.load_seconds = 3.0
        await ask(page, "Where is Paris?")
        await page.until(f"({TEXT}).includes('capital of France')")
        fake.die()
        await reads(page, "Recovering", "1 answer waits and will go on where it was")
        await page.until("[...document.querySelectorAll('#rows td')].some(cell => cell.textContent === 'resuming')")
        await shoot(page, "recovering")
        fake.load_seconds = 0.0
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
