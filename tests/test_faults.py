"""What `--faults` accepts, and when what it names happens."""

import os
import signal
import time

import pytest

from server import faults
from server.errors import StartupError
from server.faults import Fault, Faults, Spec, parse


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("", Spec()),
        (" , ", Spec()),
        ("kill@decode:100", Spec((Fault("kill", "decode", 100),))),
        (
            "abort@prefill:1*3, stall@resume:2",
            Spec((Fault("abort", "prefill", 1, 3), Fault("stall", "resume", 2))),
        ),
        ("poison@prefill:0,poison@decode:77", Spec((Fault("poison", "prefill", 0), Fault("poison", "decode", 77)))),
        ("slow-start", Spec(slow_start=5.0)),
        ("slow-start:0.25,fail-start:2,leak:3", Spec(slow_start=0.25, fail_start=2, leak=3)),
        ("fail-start", Spec(fail_start=10**6)),
        ("slow-disk", Spec(slow_disk=1e6)),
        ("slow-disk:5000,full-disk", Spec(slow_disk=5000.0, full_disk=True)),
        ("garbage@decode:5,raise@decode:6", Spec((Fault("garbage", "decode", 5), Fault("raise", "decode", 6)))),
    ],
)
def test_a_spec_is_read_as_documented(text, spec):
    assert parse(text) == spec
    assert bool(parse(text)) == (spec != Spec())


@pytest.mark.parametrize(
    "text",
    [
        "explode@decode:1",
        "kill@lunch:1",
        "kill@decode",
        "kill@decode:",
        "kill@decode:x",
        "kill@decode:0",
        "kill@decode:-1",
        "kill@decode:1.5",
        "kill@decode:1*0",
        "kill@decode:1*",
        "kill",
        "kill:5",
        "@:",
        "poison@resume:5",
        "poison@decode:5*2",
        "leak",
        "leak:0",
        "leak:-1",
        "leak:2.5",
        "leak:nan",
        "leak:inf",
        "slow-start:nan",
        "slow-start:-1",
        "slow-start:inf",
        "fail-start:0",
        "kill@decode:1 leak:2",
    ],
)
def test_what_cannot_be_read_is_refused_by_name(text):
    with pytest.raises(StartupError, match="no such fault") as caught:
        parse(f"leak:1,{text}")
    assert repr(text) in str(caught.value)


@pytest.fixture
def made(monkeypatch):
    """Faults whose acts are noted instead of done."""

    def make(text, *, epoch=1):
        happened = []
        monkeypatch.setattr(Faults, "_act", lambda self, act: happened.append(act))
        return Faults(parse(text), epoch=epoch, write_garbage=lambda: None), happened

    return make


def test_a_fault_happens_at_its_step_once_and_counts_its_place_only(made):
    faults, happened = made("kill@decode:3,stall@prefill:2")
    for _ in range(2):
        faults.reached("decode")
    faults.reached("prefill")
    assert happened == []
    faults.reached("decode")
    assert happened == ["kill"]
    faults.reached("decode")
    faults.reached("prefill")
    assert happened == ["kill", "stall"]


@pytest.mark.parametrize(("epoch", "count"), [(1, 1), (2, 1), (3, 0)])
def test_a_fault_belongs_to_the_first_engines(made, epoch, count):
    faults, happened = made("kill@decode:1*2", epoch=epoch)
    faults.reached("decode")
    assert len(happened) == count


def test_poison_acts_in_every_engine_on_its_own_prompts_only(made):
    faults, happened = made("poison@prefill:7,poison@decode:9", epoch=5)
    assert faults.poison == {7, 9}
    faults.poisoned("prefill", 9, 0)
    faults.poisoned("decode", 9, 4)
    faults.poisoned("decode", 7, 50)
    assert happened == []
    faults.poisoned("prefill", 7, 0)
    faults.poisoned("decode", 9, 5)
    assert happened == ["kill", "kill"]
    for place in ("prefill", "decode"):
        for _ in range(10):
            faults.reached(place)
    assert len(happened) == 2


def test_the_acts_are_what_they_say(monkeypatch):
    seen = []
    monkeypatch.setattr(os, "kill", lambda pid, sign: seen.append((pid, sign)))
    monkeypatch.setattr(os, "abort", lambda: seen.append("abort"))
    monkeypatch.setattr(time, "sleep", lambda seconds: seen.append(seconds))
    made = Faults(parse("kill@decode:1,abort@decode:2,stall@decode:3,garbage@decode:4,raise@decode:5"),
                  epoch=1, write_garbage=lambda: seen.append("garbage"))  # fmt: skip
    for _ in range(4):
        made.reached("decode")
    assert seen == [(os.getpid(), signal.SIGKILL), "abort", 86400, "garbage"]
    with pytest.raises(RuntimeError, match="Resource limit"):
        made.reached("decode")


def test_the_start_is_slow_or_fails_as_asked(monkeypatch):
    slept, left = [], []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    monkeypatch.setattr(faults.os, "_exit", left.append)
    Faults(parse("slow-start:1.5,fail-start:2"), epoch=2, write_garbage=lambda: None).at_start()
    assert (slept, left) == ([1.5], [3])
    Faults(parse("fail-start:2"), epoch=3, write_garbage=lambda: None).at_start()
    Faults(parse(""), epoch=1, write_garbage=lambda: None).at_start()
    assert left == [3]
