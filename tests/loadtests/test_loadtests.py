"""The load tests measure what they say: statistics, the client, the processes they start, and their tables."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic, process_time, sleep

import pytest
from serving import engine, run_server
from tokenizers import Tokenizer

from loadtests import gpu, harness, pages, process_tree, speed, versions
from loadtests.bench import rows as speed_rows
from loadtests.bench.client import Channel, last_usage, obey
from loadtests.bench.ledger import COLUMNS, Bar, Ledger, Verdict, interval, judge, of, quotient, ratio
from loadtests.bench.raw import Direct
from loadtests.bench.rounds import Work
from loadtests.bench.targets import MARATHON, NAMES, RAW, REFERENCE, checked
from loadtests.bench.workload import (
    LoadRequest,
    Order,
    Stream,
    chunks_a_token,
    first_p50,
    to_line,
    to_order,
    to_streams,
    tokens_a_second,
)
from loadtests.harness import HarnessError, Server, Worker
from loadtests.zoo import models

WITH_USAGE = {"completion_tokens": 3, "prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}

Tiny = Callable[..., Path]


# ---------------------------------------------------------------- statistics
def test_an_interval_holds_the_median_and_shrinks_with_more_rounds() -> None:
    draw = random.Random(1)
    many = [draw.gauss(1.0, 0.1) for _ in range(200)]
    few_low, few_high = interval(many[:5])
    low, high = interval(many)
    assert few_low <= sorted(many[:5])[2] <= few_high
    assert low < 1.0 < high
    assert high - low < (few_high - few_low) / 2


def test_an_interval_of_equal_values_is_that_value() -> None:
    assert interval([0.5] * 5) == (0.5, 0.5)


def test_an_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(40):
        draw = random.Random(seed)
        low, high = interval([draw.random() for _ in range(9)], seed=seed)
        hits += low <= 0.5 <= high
    assert 34 <= hits <= 40


def rounds(*pairs: tuple[float, float]) -> list[dict[str, dict[str, float]]]:
    return [{MARATHON: {"tok_s": a}, RAW: {"tok_s": b}} for a, b in pairs]


def test_ratios_are_taken_within_a_round_and_the_median_is_judged() -> None:
    """A machine that was half as fast in one round changes nothing."""
    [verdict] = judge("row", [Bar("x", ratio("tok_s"), "≥", 0.95)], rounds((96, 100), (48, 50), (10, 100)), NAMES)
    assert verdict.values == [0.96, 0.96, 0.1]
    assert verdict.figure == 0.96
    assert verdict.passed is True


def test_a_worst_bar_is_judged_by_its_worst_round() -> None:
    bar = Bar("x", of("tok_s"), "≤", 2.0, worst=True)
    [verdict] = judge("row", [bar], rounds((1, 1), (1, 1), (3, 1)), NAMES)
    assert verdict.figure == 3
    assert verdict.passed is False


def test_a_round_in_which_a_subject_failed_does_not_count() -> None:
    broken = [{MARATHON: {"tok_s": 1.0}}, *rounds((2, 1))]
    [verdict] = judge("row", [Bar("x", ratio("tok_s"), "≥", 1.5)], broken, NAMES)
    assert verdict.values == [2.0]


def test_a_bar_that_was_not_measured_fails_unless_it_was_not_asked_for() -> None:
    bar = Bar("x", ratio("tok_s", REFERENCE), "≥", 1.0)
    [verdict] = judge("row", [bar], rounds((1, 1)), NAMES)
    assert verdict.passed is False
    assert verdict.cells()[-1] == "FAIL"
    assert judge("row", [bar], rounds((1, 1)), [MARATHON, RAW]) == []


def test_a_figure_without_a_limit_neither_passes_nor_fails() -> None:
    assert Verdict("row", Bar("x", of("tok_s")), [1.0]).passed is None


def test_quotients_stay_within_a_subject() -> None:
    assert quotient("a", "b")({MARATHON: {"a": 1.0, "b": 4.0}}) == 0.25


def test_the_csv_has_one_row_a_measurement_and_runs_share_it(tmp_path: Path) -> None:
    for _ in range(2):
        with Ledger(tmp_path, "speed", "a chip") as ledger:
            ledger.note("greedy-1", "cheap", (1, 0), MARATHON, {"tok_s": 123.4567, "stall": 0.5})
    with (tmp_path / "speed.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS
    assert [(line["figure"], line["value"]) for line in lines] == [("tok_s", "123.457"), ("stall", "0.5")] * 2
    assert {line["device"] for line in lines} == {"a chip"}


def test_the_report_names_the_machine_and_each_verdict(tmp_path: Path) -> None:
    with Ledger(tmp_path, "speed", "a chip") as ledger:
        text = ledger.report([Verdict("greedy-1", Bar("tok/s × raw", of("x"), "≥", 0.95), [0.9, 1.0, 0.9])], ["a note"])
    assert "a chip" in text.splitlines()[0]
    assert "| greedy-1 | tok/s × raw | 0.9 | 0.9 – 1 | 3 | ≥ 0.95 | FAIL |" in text
    assert (tmp_path / "speed.md").read_text(encoding="utf-8") == text


# ---------------------------------------------------------------- streams
def test_a_gap_counts_if_it_reaches_into_the_window() -> None:
    stream = Stream(0.0, [1.0, 2.0, 5.0, 5.5, 9.0], [1] * 5, 5)
    assert stream.longest_gap() == 3.5
    assert stream.longest_gap(4.0, 5.2) == 3.0
    assert stream.longest_gap(5.1, 5.4) == 0.5
    assert stream.longest_gap(9.5) == 0.0


def test_rates_count_tokens_by_usage_and_chunks_by_arrival() -> None:
    streams = [Stream(0.0, [1.0, 2.0], [1, 1], 4), Stream(0.5, [1.0, 4.0], [2, 2], 4)]
    assert tokens_a_second(streams) == 2.0
    assert chunks_a_token(streams) == 0.75
    assert first_p50(streams) == 0.75


def test_orders_and_streams_survive_the_pipe() -> None:
    sampling: dict[str, int | float] = {"top_k": 40, "temperature": 0.5}
    order = Order([LoadRequest(5, "hi", sampling=sampling, after=(0, 3))], 80, {"model": "m"}, True)
    read = to_order(to_line(order))
    assert read == order
    assert type(read.requests[0].sampling["top_k"]) is int  # a server may refuse 40.0
    streams = [Stream(0.5, [1.0], [1], 1, 2, 0, "broke")]
    assert to_streams(to_line(streams)) == streams


def test_half_a_load_is_no_measurement() -> None:
    requests = [LoadRequest(4)]
    whole = [Stream(0.0, [1.0], [1], 4)]
    assert checked("it", requests, whole, exact=True) == whole
    short = [Stream(0.0, [1.0], [1], 3)]
    assert checked("it", requests, short, exact=False) == short
    with pytest.raises(HarnessError, match="3 tokens instead of 4"):
        checked("it", requests, short, exact=True)
    with pytest.raises(HarnessError, match="broke"):
        checked("it", requests, [Stream(0.0, error="broke")], exact=False)


# ---------------------------------------------------------------- the client, against a scripted server
Script = Callable[[asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
USAGE = b"data: " + json.dumps({"choices": [], "usage": WITH_USAGE}).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"


def text(piece: str | None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": piece, "index": 0}], "usage": None}).encode() + b"\n\n"


def delta(**fields: str) -> bytes:
    event = {"choices": [{"delta": fields, "index": 0}]}
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


@asynccontextmanager
async def scripted(*scripts: Script) -> AsyncIterator[int]:
    """The n-th request gets the n-th script, the last one again and again; gives the port."""
    seen = 0
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        serving.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError):  # a connection that was opened and not used
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            script, seen = scripts[min(seen, len(scripts) - 1)], seen + 1
            await script(writer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*filter(None, serving))


def says(*parts: bytes, pause: float = 0.0) -> Script:
    async def script(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)

    return script


async def test_the_client_counts_text_and_nothing_else() -> None:
    """A role, an empty piece, a null, a keep-alive comment and the usage are no tokens."""
    parts = [delta(role="assistant", content=""), b": keep-alive\n\n", delta(content='"content":"'), delta(content="b")]
    async with scripted(says(HEAD, *parts, delta(), USAGE + DONE, pause=0.005)) as port:
        [stream] = await obey(Order([LoadRequest(3, messages=[{"role": "user", "content": "hi"}])], port))
    assert stream.error == ""
    assert stream.counts == [1, 1]
    assert (stream.tokens, stream.prompt_tokens, stream.cached_tokens) == (3, 5, 2)
    assert stream.first > 0.01  # the role came earlier


async def test_pieces_torn_or_joined_on_the_way_are_counted_once() -> None:
    whole = text("a") + text("b") + text("") + text("c")
    torn = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    async with scripted(says(HEAD[:10], HEAD[10:] + torn[0], *torn[1:], USAGE[:30], USAGE[30:] + DONE)) as port:
        [stream] = await obey(Order([LoadRequest(3, "hi")], port))
    assert stream.chunks == 3
    assert stream.tokens == 3


async def test_an_ask_waits_for_the_stream_that_it_names() -> None:
    slow = [text("a") for _ in range(6)]
    async with scripted(says(HEAD, *slow, USAGE, DONE, pause=0.02), says(HEAD, text("b"), USAGE, DONE)) as port:
        first, second = await obey(Order([LoadRequest(6, "hi"), LoadRequest(1, "ho", after=(0, 3))], port))
    assert first.times[2] <= second.started < first.times[3]
    assert second.first < 0.02


async def test_an_ask_whose_turn_never_comes_says_so() -> None:
    async with scripted(says(HEAD, text("a"), USAGE, DONE)) as port:
        first, second = await obey(Order([LoadRequest(1, "hi"), LoadRequest(1, "ho", after=(0, 3))], port))
    assert not first.error
    assert second.error == "stream 0 ended after 1 chunks instead of 3"


async def test_turns_come_one_after_another() -> None:
    async with scripted(says(HEAD, text("a"), USAGE, DONE, pause=0.01)) as port:
        started = monotonic()
        streams = await obey(Order([LoadRequest(1, "hi")] * 3, port, reuse=True))
    assert len(streams) == 3
    assert monotonic() - started > 0.06


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\n{}"], "status 503"),
        ([HEAD, text("a")], "closed before the end"),
        ([HEAD, USAGE, DONE], "no text"),
    ],
)
async def test_what_is_no_answer_is_an_error(parts: list[bytes], message: str) -> None:
    async with scripted(says(*parts)) as port:
        [stream] = await obey(Order([LoadRequest(1, "hi")], port))
    assert message in stream.error


def test_usage_is_found_before_done_and_not_in_text() -> None:
    assert last_usage(text("a") + USAGE + DONE) == WITH_USAGE
    assert last_usage(text('"usage"') + DONE) is None


async def test_a_chunk_costs_the_client_less_than_15_microseconds() -> None:
    frame = b"ac\r\n" + text(" word") + b"\r\n"
    best = 1.0
    for _ in range(3):
        channel = Channel(LoadRequest(1, "hi"), lambda: None)
        channel.data_received(HEAD)
        started = process_time()
        for _ in range(5000):
            channel.data_received(frame)
        best = min(best, (process_time() - started) / 5000)
        assert channel.total == 5000
    assert best < 15e-6


async def test_the_client_and_a_real_server_agree_on_every_token() -> None:
    requests = [LoadRequest(300, f"Say {i}") for i in range(4)]
    async with run_server(engine(step_seconds=0.002, say=lambda sequence, position: 100 + position)) as site:
        port = site.client.base_url.port
        assert port is not None
        streams = await obey(Order(requests, port, {"model": "tiny", "ignore_eos": True}))
        chats = [LoadRequest(20, messages=[{"role": "user", "content": "Say"}])]
        [chat] = await obey(Order(chats, port, {"model": "tiny", "ignore_eos": True}))
    assert [stream.error for stream in [*streams, chat]] == [""] * 5
    assert [stream.tokens for stream in streams] == [300] * 4
    assert all(0 < stream.chunks <= 300 for stream in streams)
    assert chat.tokens == 20
    assert 0 < chat.chunks <= 20


# ---------------------------------------------------------------- processes
class Reporting(Server):
    """A server of which only its reports are known, the last one for ever."""

    def __init__(self, *reports: tuple[int, bytes]) -> None:
        self.name = "reporting"
        self.log = Path(os.devnull)
        self.reports = list(reports)

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, bytes]:
        assert path == "/status"
        return self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]


def _with_engine(**facts: bool) -> tuple[int, bytes]:
    return 200, json.dumps({"status": {"engine": {"up": True, **facts}}}).encode()


def test_a_server_is_whole_once_its_spare_engine_is_ready() -> None:
    server = Reporting(_with_engine(spare=False), _with_engine(spare=True))
    server.wait_whole(20)
    assert len(server.reports) == 1
    with pytest.raises(HarnessError, match="no spare engine"):
        Reporting(_with_engine(spare=False)).wait_whole(0.1)


@pytest.mark.parametrize("report", [(404, b"no such page"), _with_engine()], ids=["no status", "no spare"])
def test_a_checkout_without_spare_engines_is_whole_at_once(report: tuple[int, bytes]) -> None:
    Reporting(report).wait_whole(0.0)


SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'# HELP m x\\nm_total{part="a"} 1.5\\nm_total{part="b"} 2\\nm_totals 9\\n'
        self.send_response(200 if self.path != "/never" else 503); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def small_server(tmp_path: Path, ready: str = "/ready") -> Server:
    port = harness.free_port()
    return Server("small", [sys.executable, "-c", SERVER, str(port)], port, ready, tmp_path / "log")


def test_a_stopped_server_leaves_no_process_behind(tmp_path: Path) -> None:
    server = small_server(tmp_path)
    try:
        server.wait_ready(20)
        tree = process_tree.descendants(server.pid)
        assert len(tree) == 2
        assert server.memory_bytes() > 1 << 20
        assert server.cpu_seconds() > 0
        assert server.metric("m_total") == {'{part="a"}': 1.5, '{part="b"}': 2.0}
    finally:
        server.stop()
    deadline = monotonic() + 5
    while monotonic() < deadline and any(os.path.exists(f"/proc/{p.pid}") and _runs(p.pid) for p in tree):
        sleep(0.02)
    assert not any(_runs(process.pid) for process in tree)


def _runs(pid: int) -> bool:
    """Not even as a process that is about to end; a zombie that isn't reaped doesn't run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_server_that_does_not_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    server = Server("it", command, 1, "/ready", tmp_path / "log")
    with pytest.raises(HarnessError, match="it ended with 1 while starting: no such model"):
        server.wait_ready(20)
    server.stop()


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    server = small_server(tmp_path, "/never")
    try:
        with pytest.raises(HarnessError, match="wasn't ready after"):
            server.wait_ready(1)
    finally:
        server.stop()
    assert server.process.returncode is not None


def test_a_worker_answers_lines_and_ends_with_its_input(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    with Worker("loadtests.bench.client", log=tmp_path / "log") as worker:
        assert to_streams(worker.ask(to_line(Order([])))) == []
    assert worker.process.returncode == 0


def test_a_worker_that_dies_is_a_failure_and_not_a_wait(tmp_path: Path) -> None:
    with Worker("loadtests.bench.client", log=tmp_path / "log") as worker:
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(HarnessError, match=r"loadtests.bench.client"):
            worker.ask(to_line(Order([])), 10)


def test_the_columns_of_ps_are_read_in_every_form() -> None:
    text = "    1     0   1024   0:01.50\n  77     1  2048 1-02:03:04\n"
    first, second = process_tree.from_ps(text)
    assert (first.pid, first.parent, first.memory_bytes, first.cpu_seconds) == (1, 0, 1 << 20, 1.5)
    assert second.cpu_seconds == 86400 + 2 * 3600 + 3 * 60 + 4
    assert process_tree.descendants(1, [second, first]) == [first, second]


def test_settings_of_the_user_do_not_reach_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARATHON_MAX_ROWS", "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    found = harness.environment()
    assert not any(name.startswith("MARATHON_") for name in found)
    assert found["PYTHONPATH"].split(os.pathsep) == [str(harness.ROOT), "/elsewhere"]


# ---------------------------------------------------------------- models and prompts
def test_prompts_have_exactly_the_tokens_asked_for() -> None:
    tokenizer = Tokenizer.from_file(str(models.TOKENIZER / "tokenizer.json"))
    assert len(models.words()) > 200
    for size in (1, 32, 500):
        assert len(tokenizer.encode(Work(random.Random(size)).prompt(size)).ids) == size


def test_every_token_of_a_wide_vocabulary_has_text(tmp_path: Path) -> None:
    models.write_tokenizer(tmp_path, 2500)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 2500
    dull = set(models.unseen())
    assert {0, 1, 2} <= dull
    pieces = {id: tokenizer.decode([id], skip_special_tokens=False) for id in range(2500) if id not in dull}
    assert all(piece and "\ufffd" not in piece for piece in pieces.values())
    assert len(pieces) > 2200


def test_a_model_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(folder: Path, vocab: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(models, "write_tokenizer", breaks)
    with pytest.raises(OSError, match="disk full"):
        models.write("cheap", tmp_path / "cheap")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- mlx-lm, called directly
def conversation(turns: int) -> list[LoadRequest]:
    work, history, requests = Work(random.Random(7)), [], []
    for _ in range(turns):
        history.append({"role": "user", "content": work.prompt(20).strip()})
        requests.append(LoadRequest(4, messages=list(history)))
        history.append({"role": "assistant", "content": work.prompt(20).strip()})
    return requests


def test_raw_runs_what_it_is_asked(tiny: Tiny) -> None:
    direct = Direct(tiny("llama"), 8)
    work = Work(random.Random(3))
    sampled = LoadRequest(5, work.prompt(12), sampling={"temperature": 0.8, "top_k": 5, "seed": 1})
    late = LoadRequest(3, work.prompt(40), after=(0, 4))
    first, second, third = direct.obey(Order([LoadRequest(9, work.prompt(6)), sampled, late]))
    assert [(s.tokens, s.prompt_tokens) for s in (first, second, third)] == [(9, 6), (5, 12), (3, 40)]
    assert first.times[3] <= third.started
    assert third.times[0] <= first.times[8]


def test_raw_keeps_the_caches_of_a_conversation(tiny: Tiny) -> None:
    """The ideal that the prefix cache is held to reads nothing twice, and its caches hold what they should."""
    direct = Direct(tiny("llama"), 8)
    requests = conversation(3)
    streams = direct.obey(Order(requests, reuse=True))
    lengths = [len(direct.tokens(ask)) for ask in requests]
    assert [stream.prompt_tokens for stream in streams] == lengths
    assert streams[0].cached_tokens == 0
    for before, stream in zip(lengths, streams[1:], strict=False):
        assert before <= stream.cached_tokens <= before + 4


# ---------------------------------------------------------------- the tables
class Steady:
    """A subject that answers everything after the same times."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, requests: Sequence[LoadRequest], *, in_turn: bool = False) -> list[Stream]:
        return [self._stream(0.15 if ask.after else 0.0, ask.max_tokens) for ask in requests]

    @staticmethod
    def _stream(started: float, tokens: int) -> Stream:
        times = [started + 0.1 + 0.01 * i for i in range(tokens)]
        return Stream(started, times, [1] * tokens, tokens, 10, 5)

    def cpu_seconds(self) -> float:
        return process_time()

    def memory_bytes(self) -> int:
        return 1

    def host_seconds(self) -> dict[str, float]:
        self.steps = getattr(self, "steps", 0.0) + 10
        return {"steps": self.steps} | dict.fromkeys(gpu.PARTS, self.steps / 1000)


@pytest.mark.parametrize(
    "row",
    [
        *speed_rows.ROWS,
        *map(speed_rows.with_earlier, speed_rows.ROWS),
        *gpu.rows_of("llama-1b"),
        *versions.rows_of("cheap", [1]),
    ],
    ids=lambda row: f"{row.name} of {len(row.targets)}",
)
def test_every_bar_finds_its_figures(row: speed_rows.Row) -> None:
    work = Work(random.Random(0), quick=True, profile=True)
    taken = {name: row.measure(Steady(name), work) for name in row.targets}
    for verdict in judge(row.name, row.bars, [taken], row.targets):
        assert len(verdict.values) == 1, verdict.bar.label


def test_the_bars_of_the_pages_find_their_figures_and_pages_that_are_closed_are_a_failure() -> None:
    row = speed_rows.greedy("pages", "cheap", 1, 8, [])
    taken = {
        name: row.measure(Steady(name), Work(random.Random(0), quick=True)) for name in (pages.WITH, pages.WITHOUT)
    }
    verdicts = judge(row.name, pages.bars(), [taken], list(taken))
    assert [len(verdict.values) for verdict in verdicts] == [1] * len(verdicts)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(harness.HarnessError, match="0 bytes came"),
        pages.opened_pages(silent.getsockname()[1], 1),
    ):
        pass


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for parse, words in [(versions.parse, []), (speed.parse, ["--earlier"])]:
        with pytest.raises(SystemExit):
            parse([*words, str(tmp_path)])
        assert f"{tmp_path} is no checkout of Marathon" in capsys.readouterr().err
    assert versions.parse([str(harness.ROOT)]).earlier == harness.ROOT


def test_another_checkout_is_served_from_its_folder_with_its_own_python(tmp_path: Path) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    assert harness.python_of(tmp_path) == sys.executable
    python.parent.mkdir(parents=True)
    python.touch()
    assert harness.python_of(tmp_path) == str(python)
    assert harness.environment(tmp_path)["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)


def test_every_subject_gets_the_same_prompts_and_a_load_of_256_tokens_a_stream() -> None:
    """`--quick` aside, nothing shorter is measured for speed."""
    row = next(row for row in speed_rows.ROWS if row.name == "greedy-16")
    figures = row.measure(Steady(RAW), Work(random.Random(0)))
    assert figures["shortest"] >= 256
    assert Work(random.Random(5)).prompt(9) == Work(random.Random(5)).prompt(9)


def test_rows_are_chosen_by_name_or_by_its_beginning() -> None:
    names = [row.name for row in speed_rows.ROWS]
    assert len(set(names)) == len(names)
    rows, groups = speed.chosen(["greedy", "groups"])
    assert [row.name for row in rows] == ["greedy-1", "greedy-4", "greedy-16", "greedy-32"]
    assert groups
    assert len(speed.chosen([""])[0]) == len(names)
    assert [row.name for row in speed.chosen(["greedy-1", "turns-q"])[0]] == ["greedy-1", "turns-qwen3_5"]
    with pytest.raises(SystemExit, match="no row begins with nonsense"):
        speed.chosen(["nonsense"])
