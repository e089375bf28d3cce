"""A server says where its log can be read."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest

from server.telemetry.log_place import log_place


def test_a_file_is_named_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "marathon.log"
    with path.open("w") as file:
        assert Path(log_place({}, file.fileno())).samefile(path)


def test_a_terminal_and_a_pipe_are_said_in_words() -> None:
    for ends, words in ((pty.openpty(), "the terminal"), (os.pipe(), "a pipe")):
        assert log_place({}, ends[1]).startswith(words)
        for end in ends:
            os.close(end)


def test_a_log_that_goes_nowhere_is_said_to() -> None:
    with open(os.devnull, "w") as nothing:
        assert log_place({}, nothing.fileno()) == "nowhere: the server's stderr is /dev/null"
        number = nothing.fileno()
    assert "closed" in log_place({}, number)


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
def test_a_unit_of_systemd_names_the_command_that_shows_its_log() -> None:
    """JOURNAL_STREAM says which descriptor is the journal's: one that was sent elsewhere since isn't."""
    read, write = os.pipe()
    status = os.fstat(write)
    given = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}", "INVOCATION_ID": "abc"}
    assert log_place(given, write) == "journalctl _SYSTEMD_INVOCATION_ID=abc"
    assert log_place(given | {"JOURNAL_STREAM": "1:2"}, write).startswith("a pipe")
    for end in (read, write):
        os.close(end)
