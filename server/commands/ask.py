"""What `marathon ask` does: one question, its answer as text while it comes.

Owns the reading of the question, the stream, and the server that is started where none runs. Runs in the main thread of
a short-lived process; such a server is its child and ends with it.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import httpx
import msgspec

from server.commands.reading import ReadingBar
from server.commands.remote import Remote, check, events, find, words_of
from server.errors import StartupError

EXIT_FAILURE = 1
LOOK_SECONDS = 0.1
LIVE_SECONDS = 5.0
END_SECONDS = 5.0
DIM = "\033[2m"
PLAIN = "\033[0m"


def ask(options: Mapping[str, Any]) -> int:
    """Print the answer and return the exit code. Text goes to stdout; the rest, an error's line too, to stderr."""
    try:
        question = read_question(options["text"], sys.stdin)
        remote = find(options["url"], options["api_key"])
        if remote.is_default and not is_running(remote):
            with started(remote, options["model"]) as own:
                stream(own, body_of(question, {**options, "model": None}))
        else:
            stream(remote, body_of(question, options))
    except StartupError as error:
        print(f"marathon: {error}", file=sys.stderr)
        return EXIT_FAILURE
    return 0


def read_question(words: Sequence[str], stdin: TextIO) -> str:
    """Join the words of the command line with what is piped in. Raises StartupError where there is neither."""
    given = [" ".join(words)] * bool(words and list(words) != ["-"])
    if not given or not stdin.isatty():
        given.append(stdin.buffer.read().decode("utf-8", "replace").strip())
    question = "\n\n".join(filter(None, given))
    if not question.strip():
        raise StartupError('there is no question; `marathon ask "…"` or standard input has it')
    return question


def body_of(question: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Make the chat request. What isn't given is left to the server."""
    messages = [{"role": "user", "content": question}]
    if options["system"]:
        messages.insert(0, {"role": "system", "content": options["system"]})
    fields = {name: options[name] for name in ("max_tokens", "temperature") if options[name] is not None}
    return {"model": options["model"] or "default", "messages": messages, "stream": True, **fields}


# ---------------------------------------------------------------- the answer
def stream(remote: Remote, body: Mapping[str, Any]) -> None:
    """Print the answer as it comes. Raises StartupError where it can't be had or breaks off."""
    paper = Paper(sys.stdout, sys.stderr)
    try:
        with (
            ReadingBar(remote, sys.stderr) as bar,
            remote.client(None) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            check(response)
            for _, data in events(response):
                if data == b"[DONE]":
                    return
                _take(msgspec.json.decode(data, type=ShownChunk), paper, bar)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartupError(f"what {remote.url} streams is no chat completion: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise remote.unreachable(error) from error
    finally:
        paper.end()
    raise StartupError(f"the answer broke off: the server at {remote.url} has ended")


class ShownDelta(msgspec.Struct):
    """What an event adds to the answer."""

    content: str | None = None
    reasoning_content: str | None = None


class ShownChoice(msgspec.Struct):
    """Of several answers one; a question asks for one."""

    delta: ShownDelta


class ShownChunk(msgspec.Struct):
    """One event of a chat completion's stream, as far as it is shown."""

    choices: list[ShownChoice] = []
    error: Any = None


def _take(event: ShownChunk, paper: Paper, bar: ReadingBar) -> None:
    if event.error:
        raise StartupError(words_of(event.error))
    for choice in event.choices:
        thought = choice.delta.reasoning_content or ""
        text = choice.delta.content or ""
        if thought or text:
            bar.stop()
        paper.think(thought)
        paper.write(text)


class Paper:
    """Where an answer is written. Reasoning is shown, dimmed, in a terminal only.

    A model's control characters never reach a terminal, which might obey them.
    """

    def __init__(self, out: TextIO, aside: TextIO) -> None:
        self._out = out
        self._aside = aside
        self._last = "\n"
        self._thought = ""

    def think(self, text: str) -> None:
        if text and self._aside.isatty():
            self._thought = text
            print(f"{DIM}{printable(text)}{PLAIN}", end="", file=self._aside, flush=True)

    def write(self, text: str) -> None:
        if not text:
            return
        self._end_thought()
        self._last = text
        if self._out.isatty():
            text = printable(text)
        print(text, end="", file=self._out, flush=True)

    def end(self) -> None:
        """End the last line, so that a prompt or an error begins on one of its own."""
        self._end_thought()
        if not self._last.endswith("\n"):
            print(file=self._out, flush=True)

    def _end_thought(self) -> None:
        if self._thought:
            print(file=self._aside, flush=True)
        self._thought = ""


def printable(text: str) -> str:
    """Leave out control characters other than tabs and the ends of lines."""
    return "".join(letter for letter in text if letter in "\n\t" or not _is_control(ord(letter)))


def _is_control(code: int) -> bool:
    return code < 32 or 127 <= code < 160


# ---------------------------------------------------------------- a server for the question
def is_running(remote: Remote) -> bool:
    """Return whether anything listens at the address."""
    try:
        with remote.client(LIVE_SECONDS) as client:
            client.get("/live")
    except httpx.ConnectError:
        return False
    except httpx.HTTPError:
        return True
    return True


@contextmanager
def started(remote: Remote, model: str | None) -> Iterator[Remote]:
    """Start a server on a free port, wait until it is ready, and end it afterwards. Its log, which says how far it is,
    goes to stderr. Raises StartupError where it ends by itself."""
    print(
        f"marathon: no server answers at {remote.url}, so one is started for this question; "
        "`marathon serve` keeps one running",
        file=sys.stderr,
        flush=True,
    )
    port = _free_port()
    command = [sys.executable, "-P", "-m", "server", "serve", "--host", "127.0.0.1", "--port", str(port)]
    if model is not None:
        command += ["--model", model]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the child must not outlive this process
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    own = Remote(f"http://127.0.0.1:{port}", remote.key)
    try:
        _await_ready(own, child)
        yield own
    finally:
        _end(child)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def _await_ready(own: Remote, child: subprocess.Popen[bytes]) -> None:
    with own.client(None) as client:
        while not _is_ready(client):
            if child.poll() is not None:
                raise StartupError("the server that was started for this question has ended; its own line says why")
            time.sleep(LOOK_SECONDS)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").is_success
    except httpx.HTTPError:
        return False


def _end(child: subprocess.Popen[bytes]) -> None:
    """A second signal ends a server that still drains."""
    for send in (child.terminate, child.terminate, child.kill):
        send()
        try:
            child.wait(END_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue
