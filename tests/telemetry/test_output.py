"""What a command prints, where that can't be written: on a full disk, into a closed pipe, without any output at all."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
from commanding import COMMAND, Outcome, in_thread
from journaling import opened, record
from serving import run_server

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="only Linux has a device that is always full")
QUICK = [
    ["--help"],
    ["--version"],
    ["serve", "--help"],
    ["config"],
    ["completion", "bash"],
    ["cache"],
    ["cache", "clear"],
    ["journal"],
]
OF_A_SERVER = [["status"], ["status", "--json"], ["top"], ["ask", "Where?"]]


@contextmanager
def closed_pipe() -> Iterator[TextIO]:
    """What `| head` leaves to the command before it."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        yield stream


@contextmanager
def full_disk() -> Iterator[TextIO]:
    with FULL.open("w") as stream:
        yield stream


async def printed_to(stream: TextIO, capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        return await in_thread(capsys, *arguments)


def says_that_it_is_lost(outcome: Outcome) -> bool:
    return outcome.code in (1, 2) and outcome.err == (
        "marathon: standard output can't be written: No space left on device\n"
    )


@needs_full
@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
async def test_output_that_is_lost_is_one_line_and_a_failure(arguments: list[str], capsys) -> None:
    with full_disk() as stream:
        assert says_that_it_is_lost(await printed_to(stream, capsys, *arguments))


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
async def test_a_reader_that_has_enough_ends_a_command_without_a_word(arguments: list[str], capsys) -> None:
    with closed_pipe() as stream:
        ended = await printed_to(stream, capsys, *arguments)
    assert (ended.code, ended.err) == (141, "")


@needs_full
async def test_output_about_a_server_is_no_less_missed(capsys) -> None:
    async with run_server() as site:
        for arguments in OF_A_SERVER:
            with full_disk() as stream:
                assert says_that_it_is_lost(await printed_to(stream, capsys, *arguments, "--url", site.url)), arguments
            with closed_pipe() as stream:
                ended = await printed_to(stream, capsys, *arguments, "--url", site.url)
            assert (ended.code, ended.err) == (141, ""), arguments


@needs_full
async def test_lost_output_is_no_fault_of_the_journal(tmp_path: Path, capsys) -> None:
    path = tmp_path / "j.db"
    async with opened(path) as journal:
        await journal.add(record("resp_1"))
        for action in ("list", "show", "export"):
            ids = ["resp_1"] * (action == "show")
            with full_disk() as stream:
                arguments = ("journal", action, *ids, "--journal", str(path))
                assert says_that_it_is_lost(await printed_to(stream, capsys, *arguments)), action


@needs_full
@pytest.mark.parametrize("redirected", [">/dev/full", ">&-", ">/dev/full 2>/dev/full", "| true"])
async def test_python_adds_nothing_at_its_own_end(redirected: str) -> None:
    line = f'set -o pipefail; "$@" {redirected}'
    ended = await asyncio.to_thread(
        subprocess.run, ["bash", "-c", line, "bash", *COMMAND, "--help"], stderr=subprocess.PIPE, check=False
    )
    assert ended.returncode == (141 if "true" in redirected else 2)
    assert ended.stderr.count(b"\n") == (redirected in (">/dev/full", ">&-"))
    assert b"Traceback" not in ended.stderr
