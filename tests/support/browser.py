"""A headless Chromium for tests of the live page, spoken to through a pipe (the DevTools protocol)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0


def chromium() -> str | None:
    """The browser of `make tools`, or one that is installed; None where there is none."""
    own = ROOT / "build" / "tools" / "chromium"
    if own.exists():
        return str(own)
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. `requests`: addresses that it asked for; `errors`: what its console and its code complained of."""

    def __init__(self, reader: asyncio.StreamReader, pipe: int) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._reader = reader
        self._pipe = pipe
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self._listening = asyncio.create_task(self._listen())

    async def open(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Open `url` in a window of this size. `scheme`: light or dark."""
        if self._session is None:
            target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
            attached = await self.send("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                await self.send(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.send("Emulation.setEmulatedMedia", features=features)
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.protocol === 'http:'")

    async def leave(self) -> None:
        """Close what is open: it goes on asking for a server that has ended."""
        if self._session is not None:
            await self.send("Page.navigate", url="about:blank")
            await self.until("location.protocol === 'about:'")

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Raises RuntimeError for what the browser refuses."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._answers[number] = asyncio.get_running_loop().create_future()
        os.write(self._pipe, json.dumps(message).encode() + b"\0")
        answer = await asyncio.wait_for(self._answers[number], SECONDS)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    async def value(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        found = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def until(self, script: str, seconds: float = SECONDS) -> None:
        """Wait until an expression is true. Raises TimeoutError that names it."""
        deadline = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < deadline:
            if await self.value(f"!!({script})"):
                return
            await asyncio.sleep(0.1)
        raise TimeoutError(f"never true: {script}")

    async def press(self, key: str, text: str = "") -> None:
        """Press and release a key, as a user without a mouse does."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35}
        fields: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        if text or key == "Enter":
            fields["text"] = text or "\r"
        await self.send("Input.dispatchKeyEvent", type="keyDown", **fields)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=codes.get(key, 0))

    async def type(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        found = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    async def _listen(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                self._take(json.loads((await self._reader.readuntil(b"\0"))[:-1]))

    def _take(self, message: dict[str, Any]) -> None:
        if (waiting := self._answers.pop(message.get("id", 0), None)) is not None:
            waiting.set_result(message)
            return
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:1000])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(json.dumps(params["args"])[:1000])

    def close(self) -> None:
        self._listening.cancel()


@contextlib.contextmanager
def _pipes() -> Iterator[list[int]]:
    """Two pipes, all ends at numbers that the browser's own (3 and 4) can't collide with."""
    plain = [*os.pipe(), *os.pipe()]
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in plain]
    for end in plain:
        os.close(end)
    try:
        yield ends
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                os.close(end)


@asynccontextmanager
async def browser(program: str) -> AsyncIterator[Page]:
    """A tab of a browser that runs as long as the context."""
    with _pipes() as (to_read, write, read, from_browser), tempfile.TemporaryDirectory() as profile:

        def plumb() -> None:
            os.dup2(to_read, 3)
            os.dup2(from_browser, 4)

        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        process = await asyncio.create_subprocess_exec(
            program, *options, f"--user-data-dir={profile}", "about:blank",
            pass_fds=(3, 4), preexec_fn=plumb, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        reader = asyncio.StreamReader(limit=1 << 27)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(read), "rb")
        )
        page = Page(reader, write)
        try:
            yield page
        finally:
            page.close()
            transport.close()
            process.terminate()
            await process.wait()
