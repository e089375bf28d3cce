"""The chaos runs' own judgement: what they call a loss, and what they let pass."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import run_server, says

from loadtests.chaos import __main__, disconnects, shortage
from loadtests.chaos import clients as chaos_clients
from loadtests.chaos.comparison import Verdicts
from loadtests.chaos.monitor import Sample, judge
from loadtests.chaos.scenario import Findings, Scenario
from loadtests.chaos.sse_client import Account, ask, completion
from server.compute.sampling import stream_key, uniforms

WORDS = ["a", "b", "c", "d"]
GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
SEEDED = {"max_tokens": 1, "temperature": 0.5, "top_k": 2, "seed": 2, "ignore_eos": True}


def account(tokens: list[str], top: list[dict[str, float]] | None = None, **body: Any) -> Account:
    """A good answer of these tokens."""
    reported = Account(dict(GREEDY, **body), status=200, done=True, finish="length")
    reported.tokens, reported.text = list(tokens), "".join(tokens)
    reported.top = top or [{token: -0.1, "z": -5.0} for token in tokens]
    reported.usage = {"prompt_tokens": 3, "completion_tokens": len(tokens)}
    return reported


def verdict(expected: Account, seen: Account) -> Verdicts:
    verdicts = Verdicts()
    verdicts.judge("answer", expected, seen)
    return verdicts


# ---------------------------------------------------------------- the same text
def test_the_same_tokens_are_the_same() -> None:
    assert verdict(account(WORDS), account(WORDS)).same == 1


@pytest.mark.parametrize("tokens", [["a", "b", "d"], ["a", "b", "b", "c", "d"]])
def test_a_token_lost_or_repeated_is_a_loss(tokens: list[str]) -> None:
    (problem,) = verdict(account(WORDS), account(tokens)).problems()
    assert f"got {len(tokens)}" in problem


def test_an_answer_that_ends_badly_is_a_loss() -> None:
    cut, failed = account(WORDS), account(WORDS)
    cut.done, failed.error = False, {"code": "generation_failed", "message": "no"}
    for seen in (cut, failed):
        assert "ended badly" in verdict(account(WORDS), seen).problems()[0]


def test_another_token_is_a_loss_unless_the_two_were_equally_likely() -> None:
    tie = [{"a": -0.7, "b": -0.7004}, *({word: -0.1} for word in WORDS[1:])]
    moved = [{"a": -0.7004, "b": -0.7}, *({word: -0.1} for word in WORDS[1:])]
    expected, seen = account(WORDS, tie), account(["b", *WORDS[1:]], moved)
    assert len(verdict(expected, seen).explained) == 1
    clear = [{"a": -0.5, "b": -0.9}, *moved[1:]]
    assert verdict(account(WORDS, clear), account(["b", *WORDS[1:]], clear)).wrong


def test_a_difference_that_only_a_wrong_model_explains_is_a_loss() -> None:
    expected = account(WORDS, [{"a": -0.5, "b": -0.9}] * 4)
    seen = account(["b", *WORDS[1:]], [{"a": -0.9, "b": -0.5}] * 4)
    assert verdict(expected, seen).wrong


@pytest.mark.parametrize(("off", "is_explained"), [(0.0002, True), (0.2, False)])
def test_a_draw_may_differ_where_its_number_lies_at_the_border(off: float, is_explained: bool) -> None:
    drawn = float(uniforms(np.array([stream_key(SEEDED["seed"], 0)], dtype=np.uint64), np.array([0]))[0])
    share = drawn + off  # of the likelier candidate, which is drawn by that much
    assert 0.5 < share < 1
    top = {"a": SEEDED["temperature"] * math.log(share / (1 - share)), "b": 0.0}
    moved = {name: value + 0.001 for name, value in top.items()}
    found = verdict(account(["a"], [top], **SEEDED), account(["b"], [moved], **SEEDED))
    assert bool(found.explained) is is_explained


def test_explained_differences_are_let_pass_only_while_they_are_rare() -> None:
    verdicts = Verdicts(same=98, explained=["one", "two"])
    assert verdicts.problems() == []
    assert len(Verdicts(same=97, explained=["one", "two", "three"]).problems()) == 3


# ---------------------------------------------------------------- the truth about an engine
def samples(*said: tuple[float, int | None, bool, bool, bool]) -> list[Sample]:
    return [Sample(sent, sent + 0.01, *facts) for sent, *facts in said]


UP, DOWN = (True, True, True), (False, False, False)


def test_a_dead_engine_may_be_called_alive_for_200_ms_and_no_longer() -> None:
    good = samples((0.0, 1, *UP), (1.1, 1, *UP), (1.3, None, *DOWN), (2.0, None, *DOWN), (3.0, 2, *UP))
    assert judge(good, {1: 1.0}) == []
    late = samples((0.0, 1, *UP), (1.3, 1, *UP), (1.5, None, *DOWN), (3.0, 2, *UP))
    assert "0.30 s after engine 1 had ended" in judge(late, {1: 1.0})[0]


@pytest.mark.parametrize("lie", [(True, False, False), (False, True, False), (False, False, True)])
def test_every_one_of_the_three_must_say_it(lie: tuple[bool, bool, bool]) -> None:
    reported = samples((1.3, 1, *lie), (1.5, None, *DOWN), (2.0, None, *DOWN), (3.0, 2, *UP))
    assert len(judge(reported, {1: 1.0})) == 1


def test_an_engine_that_lives_must_not_be_called_dead() -> None:
    reported = samples((1.0, 1, *UP), (1.1, 1, True, False, True), (1.2, 1, *UP))
    assert judge(reported, {}) == ["engine 1 lived: /health up, /ready down, marathon_engine_up up"]


# ---------------------------------------------------------------- counting
def test_a_gap_is_the_silence_around_a_time() -> None:
    reported = Account({}, arrivals=[(1.0, 1), (2.0, 2), (5.0, 3)])
    assert (reported.gap_at(3.0), reported.gap_at(1.5), reported.gap_at(0.5), reported.gap_at(6.0)) == (
        3.0,
        1.0,
        None,
        None,
    )
    assert reported.moved_since(4.9)
    assert not reported.moved_since(5.0)


def test_a_row_that_is_preempted_too_often_for_its_progress_is_reported() -> None:
    log = "".join(
        f"x sequence {seq} gave its memory back after {n} tokens and waits\n" for seq, n in ((3, 64), (4, 70), (3, 127))
    )
    rows = shortage.preemptions(log)
    assert rows == [[64, 127], [70]]
    assert shortage.too_often(rows) == ["a row with 127 tokens was preempted 2 times"]


def test_memory_that_goes_on_growing_is_reported() -> None:
    level, growing = [100e6 + (i % 3) * 1e6 for i in range(40)], [100e6 + i * 1e6 for i in range(40)]
    assert disconnects.memory_problems({"server": level}) == []
    assert disconnects.memory_problems({"server": growing})


def test_figures_of_several_servers_add_up() -> None:
    findings = Findings("poison", {"resumes": 2.0}, ["a"])
    findings.add(Findings("poison", {"resumes": 3.0, "deaths": 1.0}, ["b"]))
    assert findings.figures == {"resumes": 5.0, "deaths": 1.0}
    assert findings.problems == ["a", "b"]


def test_a_problem_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    async def bad(scenario: Any) -> Findings:
        return Findings(scenario.mode, {"kills": 3.0}, ["a token was lost"] if scenario.quick else [])

    monkeypatch.setitem(__main__.MODES, "kill", bad)
    monkeypatch.setattr(__main__, "obtain", lambda name, folder: folder / name)
    arguments = ["--mode", "kill", "--model", "llama", "--out", str(tmp_path)]
    assert __main__.main(arguments) == 0
    assert __main__.main([*arguments, "--quick"]) == 1
    assert "problem: a token was lost" in capsys.readouterr().out


# ---------------------------------------------------------------- the listener
async def test_a_mode_that_takes_long_says_what_its_server_has_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    class Counted:
        def metric(self, name: str) -> dict[str, float]:
            return {"": {"marathon_generation_tokens_total": 1234.0, "marathon_engine_restarts_total": 3.0}[name]}

    class Paused:
        def metric(self, name: str) -> dict[str, float]:
            raise TimeoutError

    async def slow(scenario: Scenario) -> Findings:
        for server in (None, Counted(), Paused()):
            scenario.current, scenario.servers = server, 1  # type: ignore[assignment]
            await asyncio.sleep(0.05)
        return Findings(scenario.mode)

    monkeypatch.setitem(__main__.MODES, "leak", slow)
    scenario = Scenario("leak", tmp_path / "llama", tmp_path, quick=True, rng=random.Random(0))
    await __main__.play(scenario, progress_seconds=0.01)
    said = capsys.readouterr().out
    assert "leak (llama, 0 s): server 2 starts" in said
    assert "server 1 has generated 1,234 tokens and lost 3 engines" in said
    assert "server 1 doesn't answer" in said


async def test_the_listener_returns_what_came_streamed_or_plain() -> None:
    async with run_server() as site:
        port = int(site.url.rpartition(":")[2])
        body = completion("Say", 30, ignore_eos=False)
        streamed, plain = await asyncio.gather(
            ask(port, body), ask(port, body | {"stream": False, "stream_options": None})
        )
        for reported in (streamed, plain):
            assert reported.ok
            assert reported.text == "Hello there, how are you?"
            assert reported.usage["completion_tokens"] == len(reported.tokens) + 1  # the end token has no text
            assert len(reported.top) == len(reported.logprobs) == len(reported.tokens)
        refused = await ask(port, body | {"max_tokens": -1})
        assert (refused.status, refused.ok) == (400, False)


async def test_clients_ask_again_and_again_until_they_leave() -> None:
    from serving import engine

    async with run_server(engine(say=says("word", stop=False), step_seconds=0.002)) as site:
        port = int(site.url.rpartition(":")[2])
        expected = await chaos_clients.undisturbed(port, chaos_clients.bodies(20))
        async with chaos_clients.Clients(port, expected) as clients:
            await site.until(lambda: len(clients.finished) > 8)
            assert len(clients.live) == 5
            await clients.leave()
        verdicts = clients.judge()
        assert verdicts.same == len(clients.finished)
        assert verdicts.problems() == []


def test_percentiles_of_next_to_nothing_are_no_error() -> None:
    assert math.isnan(chaos_clients.percentile([], 50))
    assert chaos_clients.percentile([2.0], 99) == 2.0
    assert chaos_clients.percentile([float(i) for i in range(101)], 50) == 50
    assert len(chaos_clients.prompt(9, random.Random(1))) == 9
