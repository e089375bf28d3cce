"""Log lines of every process, in both forms."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHATTY = """
import logging, os, subprocess, sys, threading, warnings
from server.telemetry import logs

def speak():
    logging.getLogger("marathon").info("said by %s", "us")
    logging.getLogger("server.x").error("failed", extra={{"facts": {{"seconds": 0.5}}}})
    warnings.warn("a warning\\nof two lines", RuntimeWarning)
    print("printed", file=sys.stderr)
    os.write(2, b"written by a library\\n")
    os.write(2, b"bar 1 %\\rbar 2 %\\rbar 100 %\\n")
    subprocess.run([sys.executable, "-c", "import os; os.write(2, b'of a child\\\\n' + bytes([255]) + b'\\\\n')"])
    thread = threading.Thread(target=lambda: 1 / 0, name="unlucky")
    thread.start()
    thread.join()
    os.write(2, b"without an end")

logs.configure("info", "{form}", "{process}")
if "{form}" == "json":
    with logs.StrayLines():
        speak()
else:
    speak()
raise ValueError("at the top")
"""


def spoken(form: str, process: str = "") -> list[str]:
    """The lines on stderr of a process that says what there is to say."""
    command = [sys.executable, "-P", "-c", CHATTY.format(form=form, process=process)]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.stdout == b""
    return done.stderr.decode("utf-8", "strict" if form == "json" else "replace").splitlines()


def parsed(lines: list[str]) -> list[dict[str, Any]]:
    """The objects of JSON lines, each of which has a time and a level."""
    found = [json.loads(line) for line in lines]
    for line in found:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]), line
        assert line["level"] in {"debug", "info", "warning", "error", "critical"}
        assert isinstance(line["message"], str)
    return found


def test_in_json_every_line_is_an_object_of_any_writer():
    lines = parsed(spoken("json", "engine 7"))
    said = {line["message"]: line for line in lines}
    assert said["said by us"]["level"] == "info"
    assert said["failed"]["seconds"] == 0.5
    assert said["the thread unlucky ends"]["traceback"].endswith("ZeroDivisionError: division by zero")
    assert said["the process ends: ValueError"]["level"] == "critical"
    assert {"printed", "written by a library", "bar 100 %", "of a child", "without an end"} <= said.keys()
    assert {line["logger"] for line in lines if line["message"] == "printed"} == {"stderr"}
    assert any("a warning" in message for message in said)


def test_a_process_of_its_own_names_itself():
    assert parsed([spoken("json", "engine 7")[-1]])[0]["process"] == "engine 7"
    assert " engine 7: said by us" in spoken("text", "engine 7")[0]


def test_lines_for_people_have_a_date_and_a_time():
    ours = [line for line in spoken("text") if "said by us" in line or "failed" in line or "RuntimeWarning" in line]
    assert len(ours) == 3
    for line in ours:
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (info|warning|error) ", line)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--log-format", "json", "--port", "x"],
        ["serve", "--log-format=json", "--nonsense"],
        ["serve", "--log-format=json", "--model", "/nowhere/at/all", "--port=0"],
        ["check", "--log-format=json", "--model", "/nowhere/at/all"],
    ],
)
def test_what_ends_a_start_is_json_too(arguments):
    command = [sys.executable, "-P", "-m", "server.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.returncode == 2
    assert parsed(done.stderr.splitlines())[-1]["level"] == "critical"


LOST = """
import logging, os, sys
from server.telemetry import logs

logs.configure("info", "json")
with logs.StrayLines():
    for number in range(3000):
        logging.getLogger("marathon").info("line %d of a log that nobody reads", number)
        os.write(2, b"from a library\\n" + b'{"of": "an engine"}\\n')
        print("printed", file=sys.stderr)
print("went on")
"""


@pytest.mark.parametrize("place", ["a pipe without a reader", "a full disk"])
def test_a_log_that_cannot_be_written_loses_lines_and_nothing_else(place: str) -> None:
    reader, writer = os.pipe()
    if place == "a full disk":
        if not Path("/dev/full").exists():
            pytest.skip("this system has no device that is always full")
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    os.close(reader)
    command = [sys.executable, "-P", "-c", LOST]
    done = subprocess.run(command, stdout=-1, stderr=writer, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout=60)
    os.close(writer)
    assert done.stdout == b"went on\n"
