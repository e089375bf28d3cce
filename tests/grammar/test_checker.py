"""Grammars are checked where a crash or an endless check costs no other request anything."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from llguidance import LLMatcher
from serving import run_server

from server.errors import NotReady
from server.grammar import checker as module
from server.grammar.checker import Checker


@pytest.fixture
def checker():
    made = Checker()
    yield made
    made.close()


def lark(text):
    return LLMatcher.grammar_from_lark(text)


CRASHES = 'start: %json {"const": -9223372036854775808}'


def test_it_says_what_the_library_says(checker):
    for text in ('start: "a"', "start: (", 'start: %json {"type": "nonsense"}', 'start: "\u00e4\n\u2028"'):
        assert checker.fault(lark(text)) == module.fault(lark(text))
    assert checker.fault(lark("start: ("))


@pytest.mark.parametrize(
    "text",
    [
        'start: %json {"$ref": "#"}',
        'start: %json {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#"}}}',
        'start: start "a"',
        r"start: /[^\s\S]/",
    ],
)
def test_a_grammar_that_no_text_could_follow_is_at_fault(text):
    assert "no text" in module.fault(lark(text))


@pytest.mark.parametrize(
    "text",
    [
        'start: ""',
        "start: <[151657]> /x*/",
        'start: %json {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}',
    ],
)
def test_a_grammar_that_comes_to_an_end_is_not(text):
    assert module.fault(lark(text)) == ""


def test_a_grammar_that_crashes_the_library_is_at_fault_and_the_next_is_checked(checker):
    assert "checking it fails" in checker.fault(lark(CRASHES))
    assert checker.fault(lark('start: "a"')) == ""


def test_a_check_that_never_ends_ends(monkeypatch):
    checker = Checker(seconds=0.3)
    endless = [sys.executable, "-c", "import time; time.sleep(600)"]
    popen = module.subprocess.Popen
    monkeypatch.setattr(module, "_START_SECONDS", 0.3)
    monkeypatch.setattr(module.subprocess, "Popen", lambda command, **options: popen(endless, **options))
    began = time.monotonic()
    assert "0.3 s" in checker.fault("x")
    assert time.monotonic() - began < 5


BUSY = """
from server.grammar import checker
def fault(grammar):
    while True:
        pass
checker.fault = fault
checker.main()
"""


def test_a_check_that_computes_without_end_is_ended_by_its_own_alarm_and_asked_once(monkeypatch):
    popen = module.subprocess.Popen
    started = []

    def start(command, **options):
        started.append(popen([sys.executable, "-c", BUSY, command[-1]], **options))
        return started[-1]

    monkeypatch.setattr(module.subprocess, "Popen", start)
    checker = Checker(seconds=0.5)
    assert "0.5 s" in checker.fault("x")
    assert [process.returncode for process in started] == [-signal.SIGPROF]


def test_the_alarm_of_the_other_process_ends_it_by_itself():
    checker = Checker(seconds=0.5)
    assert checker.fault(lark('start: "a"')) == ""
    pid = checker.pid
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGPROF)
    os.kill(pid, signal.SIGCONT)
    assert checker._process.wait(5) == -signal.SIGPROF
    assert checker.fault(lark('start: "b"')) == ""
    checker.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_grammar_isnt_at_fault_where_its_check_is_ended_from_outside(end):
    checker = Checker(seconds=0.5)
    checker.fault(lark('start: "a"'))
    pid = checker.pid
    os.kill(pid, signal.SIGSTOP)
    answers = []
    asker = threading.Thread(target=lambda: answers.append(checker.fault(lark('start: "b"'))))
    asker.start()
    time.sleep(0.1)  # by now it waits for an answer
    os.kill(pid, end)
    os.kill(pid, signal.SIGSTOP if end == signal.SIGSTOP else signal.SIGCONT)
    asker.join(60)
    checker.close()
    assert answers == [""]


SLOW = """
import pathlib, sys, time
from server.grammar import checker
right = checker.fault
def fault(grammar):
    if grammar != "slow":
        return right(grammar)
    pathlib.Path(sys.argv[2]).touch()
    time.sleep(0.4)
    return ""
checker.fault = fault
checker.main()
"""
ASKS = """
import sys
from server.grammar import checker
slow, mark = sys.argv[1:]
popen = checker.subprocess.Popen
checker.subprocess.Popen = lambda command, **options: popen([sys.executable, "-c", slow, command[-1], mark], **options)
made = checker.Checker(seconds=1)
made.fault("")
print([made.fault("slow")])
made.close()
"""


@pytest.mark.parametrize("stopped", [1.5, 3.0])
def test_a_grammar_isnt_at_fault_where_server_and_check_are_stopped_together(tmp_path, stopped):
    """As by Ctrl-Z: all processes of a terminal's group stand still, and go on together."""
    mark = tmp_path / "begun"
    command = [sys.executable, "-c", ASKS, SLOW, str(mark)]
    asks = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    while not mark.exists():
        assert asks.poll() is None
        time.sleep(0.005)
    os.killpg(asks.pid, signal.SIGSTOP)
    time.sleep(stopped)
    os.killpg(asks.pid, signal.SIGCONT)
    assert asks.communicate(timeout=60)[0] == b"['']\n"


def test_a_check_that_is_ended_again_and_again_comes_to_an_end(monkeypatch):
    popen = module.subprocess.Popen
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr(module.subprocess, "Popen", lambda command, **options: popen(killed, **options))
    assert "checking it fails" in Checker().fault("x")


def test_it_ends_with_the_process_that_asked(checker):
    checker.fault(lark('start: "a"'))
    process = checker._process
    process.stdin.close()
    assert process.wait(10) == 0


def test_closing_answers_those_that_wait(checker):
    checker.fault(lark('start: "a"'))
    os.kill(checker.pid, signal.SIGSTOP)
    answers = []
    asker = threading.Thread(target=lambda: answers.append(checker.fault(lark('start: "b"'))))
    asker.start()
    time.sleep(0.1)
    checker.close()
    asker.join(5)
    assert answers
    assert answers[0]


async def test_a_schema_that_crashes_the_check_is_refused_and_the_server_goes_on(monkeypatch):
    monkeypatch.setattr("server.grammar.build.hazard", lambda lark: "")
    schema = {"type": "object", "properties": {"a": {"const": -9223372036854775808}}}
    wish = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    async with run_server() as site:
        answer = await site.chat(response_format=wish)
        assert answer.status_code == 400
        assert "schema" in answer.json()["error"]["param"]
        assert (await site.chat()).status_code == 200
        await asyncio.to_thread(site.served.checker.fault, lark('start: "a"'))
        pid = site.served.checker.pid
    assert sys.platform != "linux" or not Path(f"/proc/{pid}").exists()


def test_the_process_that_checks_grammars_loads_nothing_of_the_server() -> None:
    """Each of them would make its start several times as long."""
    says = "import sys; import server.grammar.checker; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True).stdout.split()
    assert "server.grammar.checker" in loaded
    assert not {"asyncio", "fastapi", "pydantic", "mlx", "transformers", "server.settings"} & set(loaded)


@pytest.mark.parametrize("size", [1_000, 200_000])
def test_a_stopped_check_is_noticed_whatever_the_size_of_the_grammar(size):
    checker = Checker(seconds=0.5)
    grammar = lark(f'start: "a" // {"a" * size}')  # checked in no time: only its sending depends on the size
    expected = module.fault(grammar)
    checker.fault(lark('start: "a"'))
    os.kill(checker.pid, signal.SIGSTOP)
    answers = []
    asker = threading.Thread(target=lambda: answers.append(checker.fault(grammar)), daemon=True)
    asker.start()
    asker.join(30)
    try:
        assert answers == [expected]
    finally:
        checker.close()


def test_where_no_process_can_be_started_the_grammar_isnt_at_fault(checker, monkeypatch):
    def none(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(module.subprocess, "Popen", none)
    with pytest.raises(NotReady, match="No process") as caught:
        checker.fault(lark('start: "a"'))
    assert caught.value.retry_after
    monkeypatch.undo()
    assert checker.fault(lark('start: "a"')) == ""
