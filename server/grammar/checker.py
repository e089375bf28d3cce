"""Grammars are checked in a process of their own.

llguidance may overflow the stack or never come back, and the process that asks keeps every answer under way. Owns that
process: started at the first question, again after each end. `fault` may be called from any thread, one at a time gets
its turn; the other end of the pipe is `main`. It never compiles for a tokenizer: that is the engine's work.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO

from server.config import child_place
from server.errors import NotReady
from server.grammar import walk
from server.ipc.sequence import MAX_GRAMMAR_SIZE, MAX_GRAMMAR_WIDTH
from server.supervision.exit_status import DYING_SECONDS, TRIES, was_ended_from_outside

SECONDS = 5  # of computing, for one answer; checking the largest grammar that is allowed takes a tenth
NO_TEXT = "no text could follow it"
_DEAD_END = "NoExtensionBias"  # llguidance's word for a grammar that allows no token and no end
_START_SECONDS = 60.0  # a process that starts on a busy machine

log = logging.getLogger("marathon.api")
Prove = Callable[[str], str]


def fault(grammar: str) -> str:
    """What is wrong with an llguidance grammar, in its own words; empty if nothing is. In this very process."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_grammar_size=MAX_GRAMMAR_SIZE, max_items_in_row=MAX_GRAMMAR_WIDTH, verbose_errors=False)
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if wrong:
        return str(messages[0])
    tokens, ids = walk.tokenizer(grammar)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()
    if _DEAD_END in matcher.get_error():
        return NO_TEXT
    return walk.fault(matcher, ids)


class Checker:
    """Asks the other process. Owned by `AppContext`."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process that checks grammars; None before the first question."""
        if self._process is None:
            return None
        return self._process.pid

    def fault(self, grammar: str) -> str:
        """As the function `fault`; a grammar that the check doesn't survive is at fault. Raises NotReady when there is
        no process to be had."""
        with self._lock:
            for _ in range(TRIES):
                if answer := self._answer(grammar):
                    return str(json.loads(answer))
                if self._closed or not was_ended_from_outside(self._end()):
                    break
        log.error("a grammar ended the process that checks grammars: %.300s", grammar)
        return f"checking it fails, or takes longer than {self._seconds:g} s"

    def _answer(self, grammar: str) -> bytes:
        """The line that comes back; empty when there is none."""
        process = self._process
        wait = self._seconds
        if process is None or process.poll() is not None:
            process = self._start()
            wait = _START_SECONDS
        try:
            return _ask(process, grammar, wait + 1)
        except OSError:
            return b""

    def _start(self) -> subprocess.Popen[bytes]:
        self._end()  # it may have ended by itself
        command = [sys.executable, "-P", "-m", "server.grammar.checker", f"{self._seconds:g}"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd=child_place.FOLDER,
            )
        except OSError as error:
            log.error("no process to check a grammar: %s", error)
            raise NotReady("No process can be started that checks the grammar", retry_after=2) from None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        return self._process

    def _end(self) -> int | None:
        """Nothing of the process is left. Returns its exit status: one that didn't hear its own alarm was stopped from
        outside, and has to be killed."""
        process = self._process
        self._process = None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DYING_SECONDS)
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return process.wait()

    def close(self) -> None:
        """Nothing of it is left; those that wait for an answer get one."""
        self._closed = True
        if process := self._process:
            process.kill()
        with self._lock:
            self._end()


def _ask(process: subprocess.Popen[bytes], grammar: str, seconds: float) -> bytes:
    """The line that comes back; empty when the process ends first or takes longer. One that was stopped doesn't read,
    either."""
    assert process.stdin is not None
    assert process.stdout is not None
    question = memoryview(json.dumps(grammar).encode() + b"\n")
    answer = b""
    while question:
        if not _is_ready(process.stdin, selectors.EVENT_WRITE, seconds):
            return b""
        question = question[os.write(process.stdin.fileno(), question) :]
    while not answer.endswith(b"\n"):
        if not _is_ready(process.stdout, selectors.EVENT_READ, seconds):
            return b""
        if not (part := os.read(process.stdout.fileno(), 1 << 16)):
            return b""
        answer += part
    return answer


def _is_ready(pipe: IO[bytes], event: int, seconds: float) -> bool:
    with selectors.PollSelector() as selector:  # which takes no descriptor of its own
        selector.register(pipe, event)
        return bool(selector.select(seconds))


def main() -> None:
    """Answers lines until there are no more. The alarm ends a check that doesn't: no Python code could. It counts what
    is computed, as hours may pass while a terminal's Ctrl-Z has all its processes stopped."""
    seconds = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the server's to hear
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(fault(json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
