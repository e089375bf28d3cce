"""The command `marathon` as a process of its own, in pipes or in a terminal."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from server import cli

COMMAND = (sys.executable, "-P", "-m", "server")
SECONDS = 60.0  # a busy machine takes long to start a process


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str


async def in_thread(capsys: pytest.CaptureFixture[str], *arguments: str, stdin: str = "") -> Outcome:
    """Run a command in a thread of this process, which takes no time to start."""

    def run() -> int:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert isinstance(ended.value.code, int)
        return ended.value.code

    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = await asyncio.to_thread(run)
    return Outcome(code, *capsys.readouterr())


async def marathon(*arguments: str, stdin: str = "", **environment: str) -> Outcome:
    """Run a command in pipes until it ends."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | environment
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(stdin.encode()), SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return Outcome(process.returncode, out.decode(), err.decode())


@dataclass(slots=True)
class Terminal:
    """A command in a terminal of its own: `text` is all that it has shown."""

    process: asyncio.subprocess.Process
    master: int
    text: str = ""

    async def until(self, words: str) -> None:
        async with asyncio.timeout(SECONDS):
            while words not in self.text:
                await self._read()

    async def ctrl_c(self) -> int:
        """Press Ctrl-C and return the exit code."""
        os.write(self.master, b"\x03")
        return await self.end()

    async def end(self) -> int:
        async with asyncio.timeout(SECONDS):
            while self.process.returncode is None:
                await self._read()
        await self._read()
        return await self.process.wait()

    async def _read(self) -> None:
        await asyncio.sleep(0.01)
        try:
            self.text += os.read(self.master, 1 << 16).decode(errors="replace")
        except OSError:  # nothing yet, or the other side has gone
            return


@asynccontextmanager
async def terminal(*arguments: str) -> AsyncIterator[Terminal]:
    """Run a command in a terminal, as its controlling one, so that Ctrl-C reaches it."""
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _IN_SESSION, *COMMAND, *arguments), stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        os.close(master)


_IN_SESSION = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
