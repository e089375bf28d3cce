"""From the open port to the first engine: what is said, what is answered, and how it may end."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import logging
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from commanding import in_thread, terminal
from prometheus_client.parser import text_string_to_metric_families
from serving import engine, run_server

from loadtests import harness
from server import serve
from server.errors import StartupError
from server.metrics import CONTENT_TYPE
from server.model_files.locate import ModelLocation
from server.serving import startup
from server.serving.entrance import Entrance
from server.serving.listening import listen
from server.serving.startup import Startup, StartupInterrupt
from server.settings import load
from server.telemetry import logs
from server.telemetry.progress_bar import ProgressBar

pytestmark = pytest.mark.slow

LINUX = sys.platform == "linux"
ROOT = Path(__file__).parents[2]
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


# ---------------------------------------------------------------- what is said
def test_a_stage_that_takes_long_is_spoken_of_again(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(startup, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(startup, "_TICK_SECONDS", 0.01)
    with Startup() as stages:
        stages.begin("reading")
        deadline = time.monotonic() + 10
        while sum(line.startswith("reading: ") for line in caplog.messages) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        stages.begin("writing")
        stages.say("half of it is written")
        assert stages.reason == "half of it is written"
    assert caplog.messages[0] == "reading"
    assert len([line for line in caplog.messages if line.startswith("reading: ")]) >= 2
    assert stages.seconds.keys() == {"reading", "writing"}
    assert stages.seconds["reading"] >= 0.2
    before = len(caplog.messages)
    time.sleep(0.2)
    assert len(caplog.messages) == before


def test_work_that_says_how_far_it_is_ends_when_the_start_is_given_up():
    stages = Startup()
    stages.say("one")
    stages.give_up()
    with pytest.raises(StartupInterrupt):
        stages.say("two")


class TickClock:
    """A clock that is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Drawn:
    """A bar that remembers what it showed."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, float | None]] = []
        self.cleared = 0

    def draw(self, text: str, share: float | None = None) -> None:
        self.shown.append((text, share))

    def clear(self) -> None:
        self.cleared += 1


def test_a_file_gets_a_line_of_the_progress_now_and_then_with_an_honest_end(caplog):
    caplog.set_level(logging.INFO)
    ticks = TickClock()
    stages = Startup(clock=ticks)
    stages.begin("reading")
    for done in range(11):
        stages.say(f"reading: {done} of 10 GB", done / 10)
        ticks.now += 0.5
    lines = [line for line in caplog.messages if " of 10 GB" in line]
    assert lines == ["reading: 4 of 10 GB (40%), 3 s left", "reading: 8 of 10 GB (80%), 1 s left"]


def test_the_pace_is_of_what_was_read_now_and_not_of_what_was_there(caplog):
    caplog.set_level(logging.INFO)
    ticks = TickClock()
    stages = Startup(clock=ticks)
    stages.begin("fetching")
    stages.say("fetching", 0.5)
    assert caplog.messages == ["fetching"], "one share says nothing of the pace"
    ticks.now += 4
    stages.say("fetching", 0.6)
    assert caplog.messages[-1] == "fetching (60%), 16 s left"


def test_a_terminal_gets_a_bar_in_the_place_of_repeated_lines(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(startup, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(startup, "_TICK_SECONDS", 0.01)
    bar = Drawn()
    with Startup(bar=bar) as stages:
        stages.begin("reading")
        stages.say("reading: 1 of 4 GB", 0.25)
        time.sleep(0.2)
        stages.begin("writing")
        time.sleep(0.1)
    shown = len(bar.shown)
    assert bar.cleared == 1
    assert caplog.messages == ["reading", "writing"]
    assert any(text.startswith("reading: 1 of 4 GB") and share == 0.25 for text, share in bar.shown)
    assert ("writing, 0 s so far", None) in bar.shown
    time.sleep(0.05)
    assert len(bar.shown) == shown, "nothing is drawn once the start is over"


def test_a_bar_keeps_to_its_line_and_a_log_line_takes_its_place(monkeypatch):
    screen = Screen()
    bar = ProgressBar(screen)
    bar.draw("x" * 500, 0.5)
    assert len(screen.lines()[0]) == 79, "a line as wide as the terminal would be broken"
    assert screen.lines()[0].startswith("[##########..........]  50% xxx")
    monkeypatch.setattr(logs, "is_terminal", lambda stream: True)
    handler = logs.handler("text", screen)
    handler.emit(logging.makeLogRecord({"msg": "short", "levelname": "INFO"}))
    bar.draw("on it goes")
    assert [line[20:] for line in screen.lines()[:1]] == ["info    short"]
    assert screen.lines()[1] == "on it goes"
    bar.clear()
    assert screen.lines()[1:] == [""]


class Screen(io.StringIO):
    """What a terminal of 80 columns shows of what is written to it."""

    def lines(self) -> list[str]:
        shown = [""]
        column = 0
        for part in re.findall(r"\r|\n|\x1b\[K|[^\r\n\x1b]+", self.getvalue()):
            match part:
                case "\r":
                    column = 0
                case "\n":
                    shown.append("")
                    column = 0
                case "\x1b[K":
                    shown[-1] = shown[-1][:column]
                case text:
                    line = shown[-1]
                    shown[-1] = line[:column] + text + line[column + len(text) :]
                    column += len(text)
        return shown


# ---------------------------------------------------------------- what is answered
class Place:
    """A server whose model is looked for by `locate`."""

    def __init__(self, server: serve.Server, client: httpx.AsyncClient, task: asyncio.Task[None]) -> None:
        self.server, self.client, self.task = server, client, task


@contextlib.asynccontextmanager
async def entrance(monkeypatch: pytest.MonkeyPatch, locate: Callable[..., ModelLocation]) -> AsyncIterator[Place]:
    monkeypatch.setattr("server.model_files.locate.locate", locate)
    settings = load({"port": 0})
    (sock,) = listen(settings.host, 0)
    with Startup() as stages:
        server = serve.Server(Entrance(settings, stages), None, settings, lambda ready: None)
        task = asyncio.create_task(server.serve_on([sock]))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            try:
                yield Place(server, client, task)
            finally:
                server.handle_exit(signal.SIGTERM, None)
                server.handle_exit(signal.SIGTERM, None)
                await asyncio.wait_for(task, 30)


async def test_while_the_model_is_looked_for_probes_are_answered_and_requests_wait(monkeypatch, tiny, capsys):
    found = threading.Event()

    def locate(settings: Any, report: Callable[[str], None]) -> ModelLocation:
        report("fetching <b>: 12 of 93 MB")
        found.wait(30)
        return ModelLocation(tiny("llama"), "tiny")

    async with entrance(monkeypatch, locate) as place:
        chat = asyncio.create_task(place.client.post("/v1/chat/completions", json=CHAT))
        assert (await place.client.get("/live")).json() == {"status": "live"}
        scraped = await place.client.get("/metrics")
        assert (scraped.status_code, scraped.headers["content-type"]) == (200, CONTENT_TYPE)
        assert [(one.name, one.samples[0].value) for one in text_string_to_metric_families(scraped.text)] == [
            ("marathon_engine_up", 0.0)
        ], "it is up, and has no engine"
        for path in ("/ready", "/status", "/status/events"):
            answer = await place.client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
            assert "12 of 93 MB" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
        health = (await place.client.get("/health")).json()
        assert health["status"] == "not ready"
        assert "12 of 93 MB" in health["reason"]
        page = await place.client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "fetching &lt;b&gt;: 12 of 93 MB" in page.text
        reported = await in_thread(capsys, "status", "--url", str(place.client.base_url))
        assert reported.code == 2
        assert "fetching <b>: 12 of 93 MB" in reported.err
        for host, status in (("evil.example", 403), ("localhost, localhost", 400)):
            refused = await place.client.get("/health", headers={"Host": host})
            assert (refused.status_code, set(refused.json())) == (status, {"error"})
        assert not chat.done()
        found.set()
        assert (await chat).status_code == 200
        assert (await place.client.get("/ready")).status_code == 200
        assert "Try the model" in (await place.client.get("/")).text


async def test_a_server_can_be_ended_while_its_model_is_fetched(monkeypatch):
    cleared = threading.Event()

    def locate(settings: Any, report: Callable[[str], None]) -> ModelLocation:
        try:
            while True:
                report("still fetching")
                time.sleep(0.02)
        finally:
            cleared.set()

    async with entrance(monkeypatch, locate) as place:
        chat = asyncio.create_task(place.client.post("/v1/chat/completions", json=CHAT))
        assert (await place.client.get("/ready")).status_code == 503
        await asyncio.sleep(0.1)
        began = time.monotonic()
        place.server.handle_exit(signal.SIGTERM, None)
        answer = await chat
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        await asyncio.wait_for(asyncio.shield(place.task), 10)
        assert time.monotonic() - began < 5
        assert cleared.is_set()
        assert place.server.failure is None


async def test_without_a_model_the_server_ends_with_the_reason_and_who_waits_hears_it(monkeypatch):
    go = threading.Event()

    def locate(settings: Any, report: Callable[[str], None]) -> ModelLocation:
        go.wait(30)
        raise StartupError("there is no network")

    async with entrance(monkeypatch, locate) as place:
        chat = asyncio.create_task(place.client.post("/v1/chat/completions", json=CHAT))
        await place.client.get("/live")
        await asyncio.sleep(0.1)
        go.set()
        assert (await chat).status_code == 503
        assert "no network" in (await chat).json()["error"]["message"]
        await asyncio.wait_for(asyncio.shield(place.task), 10)
        assert str(place.server.failure) == "there is no network"


async def test_a_fault_of_the_program_ends_the_start_too(monkeypatch):
    def locate(settings: Any, report: Callable[[str], None]) -> ModelLocation:
        raise ZeroDivisionError("a mistake")

    async with entrance(monkeypatch, locate) as place:
        await asyncio.wait_for(asyncio.shield(place.task), 10)
        assert str(place.server.failure) == "the start failed: ZeroDivisionError: a mistake"


async def test_an_engine_that_comes_after_failed_starts_is_announced_too():
    async with run_server(engine(starts=["die", "die", "die", "ok"]), ready=False) as site:
        await site.until(lambda: bool(site.announced), 30)
        assert (await site.chat()).status_code == 200
        assert not site.server.should_exit


# ---------------------------------------------------------------- as a process
def lines_until(process: subprocess.Popen[bytes], word: str, seconds: float) -> list[tuple[float, str]]:
    """Times and lines of its stderr up to the one with `word` in it."""
    assert process.stderr is not None
    found: list[tuple[float, str]] = []
    until, rest = time.monotonic() + seconds, b""
    while not any(word in line for _, line in found):
        assert select.select([process.stderr], [], [], until - time.monotonic())[0], f"no {word!r} in {found}"
        data = os.read(process.stderr.fileno(), 1 << 16)
        assert data, f"no {word!r} in {found}"
        *lines, rest = (rest + data).split(b"\n")
        found += [(time.monotonic(), line.decode()) for line in lines]
    return found


def test_a_start_speaks_every_few_seconds_in_json_on_stderr_and_a_second_server_ends_at_once(tiny, empty_home):
    """The engine fails to start once, dies by SIGABRT once, and all that is heard of it is JSON."""
    values = ["--model", str(tiny("llama")), "--log-format", "json", "--faults", "fail-start:1,abort@decode:3*2"]
    command = [sys.executable, "-P", "-m", "server.cli", "serve", "--port"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(empty_home)}
    with socket_free() as port:
        began = time.monotonic()
        server = subprocess.Popen(
            [*command, str(port), *values],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1500)),
        )
        try:
            first = lines_until(server, "takes requests", 60)
            second = subprocess.run([*command, str(port)], capture_output=True, text=True, env=environment, cwd=ROOT)
            assert (second.returncode, second.stdout) == (2, "")
            assert re.fullmatch(rf"marathon: port {port} on 127.0.0.1 is already in use; .*\n", second.stderr)
            lines = first + lines_until(server, "Marathon serves", 120)
            times = [began, *(at for at, _ in lines)]
            assert max(b - a for a, b in itertools.pairwise(times)) < 6  # 3 on a machine of one's own
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT, trust_env=False, timeout=60)
            assert answer.status_code == 200
            health = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=60).json()
            limits = [open_files_of(pid) for pid in (server.pid, health["engine"]["pid"]) if pid and LINUX]
            assert all(limit == ["1500", "1500"] for limit in limits)  # neither mlx-lm's nor the shell's
        finally:
            server.terminate()
            out, err = server.communicate(timeout=30)
        assert (server.returncode, out) == (0, b"")
        said = [json.loads(line) for line in [*(text for _, text in lines), *err.decode().splitlines()]]
        assert all({"time", "level", "message"} <= line.keys() for line in said)
        assert any("SIGABRT" in line["message"] for line in said)
        assert {line.get("process") for line in said} >= {None, "engine 2"}


def open_files_of(pid: int) -> list[str]:
    """The limit of open files of a process on Linux."""
    text = Path(f"/proc/{pid}/limits").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("Max open files"))
    return line.split()[3:5]


@contextlib.contextmanager
def socket_free() -> Any:
    """A port that is free."""
    (sock,) = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    sock.close()
    yield port


async def test_a_start_in_a_terminal_ends_with_lines_and_no_rest_of_the_bar(tiny):
    values = ("serve", "--model", str(tiny("llama")), "--port", "0", "--journal", "off", "--faults", "slow-start:2.5")
    async with terminal(*values) as shown:
        await shown.until("Marathon serves")
        drawn = shown.text
        assert await shown.ctrl_c() == 0
    assert re.search(r"\r\x1b\[K[^\n]*2 s so far\r", drawn)
    assert "s so far\n" not in drawn, "the bar is no line"
    screen = Screen(drawn.replace("\r\n", "\n"))
    assert all(re.match(r"\d{4}-\d\d-\d\d ", line) for line in screen.lines() if line)


def test_an_engine_starts_also_where_the_folder_of_the_servers_start_is_gone(tiny, empty_home, tmp_path):
    """What paths and imports were given relative to it still counts from there."""
    here, port = tmp_path / "here", harness.free_port()
    here.mkdir()
    (tmp_path / "model").symlink_to(tiny("llama"))
    (tmp_path / "code").symlink_to(ROOT)
    relative = ["--model", "../model", "--kv-disk", "10MB", "--kv-disk-folder", "../kv", "--journal", "../j.db"]
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "server.cli", "serve", "--port", str(port), "--spare-engine", "off", *relative],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "../code", "HOME": str(empty_home)},
        cwd=here,
    )
    body = {"model": "../model", "temperature": 0, **CHAT}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
        try:
            lines_until(server, "Marathon serves", 120)
            before = client.post("/v1/chat/completions", json=body).json()["choices"]
            here.rmdir()
            os.kill(client.get("/health").json()["engine"]["pid"], signal.SIGKILL)
            lines_until(server, "(epoch 2) is ready", 60)
            assert client.post("/v1/chat/completions", json=body).json()["choices"] == before
            assert (tmp_path / "kv" / "lock").exists()
            assert (tmp_path / "j.db").exists()
        finally:
            server.terminate()
            server.communicate(timeout=30)
    assert server.returncode == 0


@pytest.mark.parametrize("named", ["missing", "file", "relative"])
def test_engines_find_a_temporary_folder_where_the_named_one_is_none(tiny, empty_home, tmp_path, named):
    """MLX compiles kernels in it, and the engine runs in another folder than the server: each answer was an error."""
    (tmp_path / "file").touch()
    (tmp_path / "below").mkdir()
    place = {"missing": tmp_path / "none", "file": tmp_path / "file", "relative": Path("below")}[named]
    port = harness.free_port()
    options = ["--port", str(port), "--spare-engine", "off", "--model", str(tiny("llama"))]
    server = subprocess.Popen(
        [sys.executable, "-m", "server.cli", "serve", *options],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(empty_home), "TMPDIR": str(place), "TMP": str(place)},
        cwd=tmp_path,
    )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
        try:
            lines_until(server, "Marathon serves", 120)
            answer = client.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200, answer.text
        finally:
            server.terminate()
            server.communicate(timeout=30)
    assert server.returncode == 0


def test_a_command_works_in_a_folder_that_is_gone(tiny, empty_home, tmp_path):
    (tmp_path / "here").mkdir()
    ended = subprocess.run(
        [
            "sh",
            "-c",
            'rmdir "$PWD" && exec "$@"',
            "sh",
            sys.executable,
            "-P",
            "-m",
            "server",
            "check",
            "--model",
            str(tiny("llama")),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(empty_home)},
        cwd=tmp_path / "here",
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


NO_CONNECTION = "assert not any(stat.S_ISSOCK(os.fstat(number).st_mode) for number in range(3))"
BUSY_ENTRANCE = """
import atexit, os, stat, signal, sys, time
from server import cli
from server.serving import entrance

def make(self, loop):
    signal.raise_signal(signal.SIGTERM)
    time.sleep(60)

atexit.register(print, "Python ended")
entrance._LEAVE_SECONDS = 0.1
entrance.Entrance._make = make
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_server_that_has_not_all_standard_files_starts(tiny, empty_home, closed):
    """As some managers of services start it; and no connection gets the number of one, in which a library may print."""
    script = BUSY_ENTRANCE.replace("    signal.", f"    {NO_CONNECTION}\n    signal.")
    arguments = ["serve", "--port", "0", "--journal", "off", "--model", str(tiny("llama"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(empty_home)}
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", script, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=50)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_signal_while_a_thread_still_imports_ends_well(tiny, empty_home, form):
    """Python's own end would pull the ground from under that thread, and some of them abort."""
    arguments = ["serve", "--port", "0", "--journal", "off", "--log-format", form, "--model", str(tiny("llama"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(empty_home)}
    ended = subprocess.run(
        [sys.executable, "-c", BUSY_ENTRANCE, *arguments], capture_output=True, text=True, env=environment, timeout=50
    )
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "ended before the model was loaded" in ended.stderr
