"""`marathon ask`: a question, and its answer as text."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import small_tokenizers as small
from commanding import COMMAND, in_thread, marathon, terminal
from fake_engine import FakeEngine
from serving import HELLO, Site, engine, run_server, says
from tokenizers import AddedToken

from server.commands import reading
from server.ipc import messages
from server.text.tokenizer import Tokenizer


def prompts(site: Site) -> list[str]:
    """What each sequence that the engine got began with, as text."""
    found = [command.sequence for command in site.fake.commands if isinstance(command, messages.Submit)]
    return [site.served.tokenizer.decode(sequence.prompt, special=True) for sequence in found]


async def test_an_answer_is_text_on_stdout_and_nothing_else() -> None:
    async with run_server() as site:
        reported = await marathon("ask", "Say", "hello.", "--url", site.url)
        [prompt] = prompts(site)
    assert (reported.code, reported.out, reported.err) == (0, f"{HELLO}\n", "")
    assert "Say hello." in prompt


async def test_what_is_piped_in_follows_the_text_and_system_text_precedes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with run_server() as site:
        both = (
            "ask",
            "Explain:",
            "--system",
            "Be brief.",
            "--max-tokens",
            "2",
            "--temperature",
            "0.5",
            "--url",
            site.url,
        )
        reported = await in_thread(capsys, *both, stdin="a piped file\n")
        await in_thread(capsys, "ask", "-", "--url", site.url, stdin="only piped\n")
        first, second = prompts(site)
        submitted = [command for command in site.fake.commands if isinstance(command, messages.Submit)]
    assert first.index("Be brief.") < first.index("Explain:") < first.index("a piped file")
    assert "only piped" in second
    assert "-\n" not in second
    assert (submitted[0].sequence.max_tokens, submitted[0].sequence.sampling.temperature) == (2, 0.5)
    assert reported.code == 0


async def test_reasoning_is_dimmed_in_a_terminal_and_left_out_of_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tags = (AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>"))
    small.write(tmp_path, small.byte_level(*tags), small.THINKING, eos_token="<|im_end|>")
    thinker = Tokenizer.load(tmp_path, trust_remote_code=False)
    script = says("hm hm</think>It is \x1b[31mOslo.", tokens=thinker)
    fake = FakeEngine(vocab_size=thinker.vocab_size, say=script)
    async with run_server(fake, tokens=thinker) as site, terminal("ask", "Where?", "--url", site.url) as screen:
        code = await screen.end()
        piped = await in_thread(capsys, "ask", "Where?", "--url", site.url)
    assert code == 0
    assert (piped.out, piped.err) == ("It is \x1b[31mOslo.\n", "")
    thoughts, _, answer = screen.text.partition("\r\n")
    assert "".join(re.findall(r"\x1b\[2m(.+?)\x1b\[0m", thoughts)) == "hm hm"
    assert answer == "It is [31mOslo.\r\n", "no escape sequence of a model's reaches a terminal"


async def test_a_terminal_shows_how_far_a_long_prompt_is_read_until_the_answer_begins() -> None:
    slow = engine(prefill_seconds=4.0, prefill_chunks=8)
    async with run_server(slow) as site, terminal("ask", "word " * 200, "--url", site.url) as screen:
        await screen.until("reading [")
        assert await screen.end() == 0
    shown, _, answer = screen.text.rpartition("\r\x1b[K")
    assert answer == f"{HELLO}\r\n", "the line is gone before the answer begins"
    done = [int(number) for number in re.findall(r"\[[#.]{20}\] (\d+) of \d+ tokens", shown)]
    assert done == sorted(done)
    assert done[-1] > 0
    assert re.search(r"\d+ of \d+ tokens, \d+/s, \d seconds left\r", shown)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"state": "reading", "read": 512, "to_read": 2048}, "#####."),
        ({"state": "reading", "read": None, "to_read": 2048}, ".] 0 of 2,048 tokens"),
        ({"state": "reading", "read": None, "to_read": None}, ""),
        ({"state": "waiting", "read": None, "to_read": None}, "waiting for room"),
        ({"state": "resuming", "read": None, "to_read": None}, "goes on in the next"),
        ({"state": "decoding", "read": None, "to_read": None}, ""),
    ],
)
def test_the_line_says_what_a_question_waits_for(row: dict[str, object], said: str) -> None:
    assert said in reading.words(row)
    assert bool(said) == bool(reading.words(row))


async def test_where_no_server_runs_one_is_started_and_ended(tiny: Callable[..., Path]) -> None:
    """Its log on stderr has its process id; the model is tiny and random, so the answer only has to be there."""
    environment = {"MARATHON_PORT": "1", "MARATHON_LIVE_BUFFERS": "off"}  # no counter has to be built
    reported = await marathon("ask", "Hello", "--max-tokens", "3", "--model", str(tiny("llama")), **environment)
    assert reported.code == 0, reported.err
    assert reported.err.startswith("marathon: no server answers at http://127.0.0.1:1, so one is started")
    assert "Marathon serves" in reported.err
    [port] = set(re.findall(r"http://127\.0\.0\.1:(\d\d+)", reported.err))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/live", trust_env=False)


async def test_an_error_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    async with run_server() as site:
        refused = await in_thread(capsys, "ask", "Hello", "--temperature", "99", "--url", site.url)
        empty = await in_thread(capsys, "ask", "--url", site.url)
    nowhere = await in_thread(capsys, "ask", "Hello", "--url", "http://127.0.0.1:1")
    for reported, words in (
        (refused, "temperature"),
        (empty, "there is no question"),
        (nowhere, "`marathon serve` starts"),
    ):
        assert (reported.code, reported.out, len(reported.err.splitlines())) == (1, "", 1)
        assert words in reported.err


@pytest.mark.parametrize(
    "event",
    [
        b"hello",
        b"[]",
        b"{}",
        b"\xff",
        b'{"choices": 1}',
        b'{"choices": [{"text": "x"}]}',
        b'{"choices": [{"delta": {"content": 1}}]}',
        b'{"choices": [{"delta": {"content": "\\ud800"}}]}',
        b'{"error": "boom"}',
        b'{"error": {"message": "boom"}}',
    ],
)
@pytest.mark.parametrize("name", [b"message", b"\xff"])
async def test_a_stream_of_something_else_is_one_line_and_exit_code_1(
    event: bytes, name: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n"
        writer.write(head + b"event: " + name + b"\ndata: " + event + b"\n\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answered, "127.0.0.1", 0) as other:
        url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
        reported = await in_thread(capsys, "ask", "Hello", "--url", url)
    assert (reported.code, reported.out, len(reported.err.splitlines())) == (1, "", 1), reported.err
    assert ("boom" in reported.err) == (b"boom" in event)


@pytest.mark.parametrize("temperature", ["nan", "inf", "-inf", "1e999", "warm"])
async def test_a_temperature_that_is_no_number_is_one_line(
    temperature: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reported = await in_thread(capsys, "ask", "Hello", f"--temperature={temperature}", "--url", "http://127.0.0.1:1")
    assert (reported.code, reported.out, len(reported.err.splitlines())) == (2, "", 1)
    assert f"--temperature: invalid number value: '{temperature}'" in reported.err


async def test_ctrl_c_stops_the_answer_and_frees_its_row() -> None:
    async with run_server(engine(say=says("word and", stop=False), step_seconds=0.05)) as site:
        process = await asyncio.create_subprocess_exec(
            *(*COMMAND, "ask", "Go on.", "--url", site.url),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.read(4), 20)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 20)
        await site.until(lambda: not any(site.served.supervisor.generations()))
    assert (process.returncode, err) == (130, b"")
