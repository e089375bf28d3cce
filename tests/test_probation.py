"""Who comes back after an unplanned death, in which order, and who doesn't."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.probation import (
    LONGEST_TRIAL,
    MAX_DEATHS,
    MAX_STRIKES,
    Past,
    acquit,
    has_proved_itself,
    judge,
    may_start,
    order,
)


@dataclass(eq=False)
class G:
    seq: int
    generated: list[int] = field(default_factory=list)
    past: Past = field(default_factory=Past)

    def moves(self, tokens: int = 1) -> G:
        self.generated += [0] * tokens
        return self


def test_those_that_got_furthest_since_the_death_before_come_first():
    slow, fast = G(1).moves(100), G(2).moves(10)
    judge([slow, fast], stalled=False)
    slow.moves(1)
    fast.moves(5)
    judge([slow, fast], stalled=False)
    assert order([slow, fast]) == [fast, slow]


def test_those_without_progress_are_on_probation_and_come_last():
    moved, stuck = G(9).moves(), G(1)
    assert judge([stuck, moved], stalled=False) == []
    assert order([stuck, moved]) == [moved, stuck]
    assert (moved.past.trial, stuck.past.trial) == (0, 1)


def on_probation(seq: int, strikes: int = 0) -> G:
    return G(seq, past=Past(trial=1, strikes=strikes, deaths=strikes))


def test_one_on_probation_starts_only_when_all_others_have_delivered():
    a, b, stuck = G(1).moves(), G(2).moves(), on_probation(3)
    judge([a, b], stalled=False)
    assert not may_start(stuck, [a, b])
    a.moves()
    assert not may_start(stuck, [a, b])
    b.moves()
    assert may_start(stuck, [a, b])
    assert may_start(stuck, [])


def test_two_on_probation_never_run_together():
    other, tried = G(1).moves(), on_probation(2)
    assert not may_start(on_probation(3), [other, tried])
    assert may_start(other, [tried])


def test_the_last_trial_comes_first_and_with_nobody_else_in_the_engine():
    good, last = G(1).moves(), on_probation(2, strikes=MAX_STRIKES - 1)
    assert order([good, last]) == [last, good]
    assert may_start(last, [])
    assert not may_start(last, [good])
    assert not may_start(good, [last])


def test_a_token_takes_one_off_probation():
    g = G(1)
    judge([g], stalled=False)
    assert not has_proved_itself(g)
    assert has_proved_itself(g.moves())
    acquit(g)
    assert not has_proved_itself(g)
    assert g.past.strikes == g.past.trial == 0


def test_a_death_with_one_on_probation_counts_against_that_one_only():
    good, bad = G(1).moves(), G(2)
    judge([good, bad], stalled=False)
    good.moves()
    judge([good, bad], stalled=False)
    assert (good.past.deaths, bad.past.deaths) == (1, 2)
    assert (good.past.strikes, bad.past.strikes) == (0, 1)


def test_three_deaths_on_probation_end_it():
    good, bad = G(1), G(2)
    for _ in range(MAX_STRIKES):
        assert judge([good.moves(), bad], stalled=False) == []
    assert judge([good.moves(), bad], stalled=False) == [bad]


def test_eight_deaths_end_one_that_was_alone():
    g = G(1)
    for _ in range(MAX_DEATHS - 1):
        assert judge([g.moves()], stalled=False) == []
    assert judge([g.moves()], stalled=False) == [g]


def test_eight_deaths_in_company_end_nobody_but_mean_a_longer_probation():
    a, b = G(1), G(2)
    for _ in range(MAX_DEATHS):
        assert judge([a.moves(3), b.moves(40)], stalled=False) == []
    assert (a.past.trial, b.past.trial) == (4, 41)
    a.moves(3)
    assert not has_proved_itself(a)
    assert has_proved_itself(a.moves())
    acquit(a)
    assert a.past.deaths == 0


def test_one_that_got_far_in_one_of_its_last_two_engines_has_no_longer_probation():
    far, near = G(1), G(2)
    for _ in range(MAX_DEATHS):
        judge([far.moves(LONGEST_TRIAL), near.moves(LONGEST_TRIAL - 1)], stalled=False)
    assert (far.past.trial, near.past.trial) == (0, LONGEST_TRIAL)
    judge([far.moves(2), near], stalled=False)
    assert far.past.trial == 0
    judge([far.moves(2)], stalled=False)
    assert far.past.trial == 3


def test_a_death_with_nobody_on_probation_in_the_engine_takes_a_strike_off_those_that_wait():
    good, waits, clean = G(1).moves(), on_probation(2, strikes=2), on_probation(3)
    judge([good], stalled=False, absent=[waits, clean])
    assert (waits.past.strikes, clean.past.strikes) == (1, 0)
    judge([good, on_probation(4)], stalled=False, absent=[waits])
    judge([], stalled=False, absent=[waits])
    assert waits.past.strikes == 1, "that death may be the doing of the one on probation, or no one's"


def test_random_kills_during_each_resume_end_nobody_who_gets_on():
    """Streams move between two pairs of kills; one request is always the last to come back."""
    streams, last = [G(seq) for seq in range(4)], G(9)
    everyone = [*streams, last]
    for _ in range(25):
        for g in streams:
            g.moves(100)
            if g.past.trial:
                acquit(g)
        assert judge(everyone, stalled=False) == []  # the last one has got nothing yet
        back = [g for g in order(everyone) if not g.past.trial]
        assert last not in back
        assert judge(back, stalled=False, absent=[last]) == []


def test_one_that_was_alone_only_at_the_eighth_death_isnt_ended_by_it():
    a, b = G(1), G(2)
    for _ in range(MAX_DEATHS - 1):
        judge([a.moves(), b.moves()], stalled=False)
    assert judge([a.moves()], stalled=False) == []
    assert a.past.trial == 2


def test_a_longer_probation_ends_one_only_after_its_three_trials():
    a, b = G(1), G(2)
    for _ in range(MAX_DEATHS):
        judge([a.moves(), b.moves()], stalled=False)
    for _ in range(MAX_STRIKES - 1):
        assert judge([a], stalled=False) == []
    assert order([a, b])[0] is a
    assert judge([a], stalled=False) == [a]


def test_stalls_in_company_count_against_nobody():
    a, b = G(1).moves(), G(2)
    judge([a, b], stalled=True)
    assert (a.past.deaths, b.past.deaths) == (0, 0)
    assert b.past.trial == 1


def test_stalls_count_against_one_that_was_alone_or_on_probation():
    alone = G(1).moves()
    judge([alone], stalled=True)
    assert alone.past.deaths == 1
    good, tried = G(2).moves(), G(3)
    judge([good, tried], stalled=True)
    judge([good.moves(), tried], stalled=True)
    assert (good.past.strikes, tried.past.strikes) == (0, 1)


def test_the_least_suspect_is_tried_first():
    a, b, c = G(1), G(2), G(3)
    judge([a, b, c], stalled=False)
    judge([a], stalled=False)
    assert order([a, c, b]) == [b, c, a]


TOKENS = 200


def run(kills_after: dict[int, int], engines: int) -> tuple[set[int], set[int], int]:
    """Plays six generations; generation `seq` kills each engine after `kills_after[seq]` tokens in it (0: in prefill).
    Returns those that ended well, those that were ended, and how many engines it took."""
    waiting = [G(seq) for seq in range(6)]
    done: set[int] = set()
    ended: set[int] = set()
    for engine in range(engines):
        running: list[G] = []
        produced: dict[int, int] = {}
        returning = order(waiting)
        while returning or running:
            while returning and may_start(returning[0], running):
                running.append(returning.pop(0))
                produced[running[-1].seq] = 0
            if any(kills_after.get(g.seq) == produced[g.seq] for g in running):
                convicted = judge(running, stalled=False, absent=returning)
                ended |= {g.seq for g in convicted}
                waiting = [g for g in [*running, *returning] if g not in convicted]
                break
            for g in running:
                g.moves()
                produced[g.seq] += 1
                if has_proved_itself(g):
                    acquit(g)
            done |= {g.seq for g in running if len(g.generated) >= TOKENS}
            running = [g for g in running if len(g.generated) < TOKENS]
        else:
            return done, ended, engine
    raise AssertionError(f"not over after {engines} engines")


@pytest.mark.parametrize("after", range(12))
@pytest.mark.parametrize("seq", [0, 3, 5])
def test_one_that_kills_its_engines_is_found_and_nobody_else_is_harmed(seq: int, after: int):
    done, ended, engines = run({seq: after}, engines=40)
    assert ended == {seq}
    assert done == set(range(6)) - ended
    assert engines <= 30


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(0, 5), st.integers(0, 9), max_size=3))
def test_several_killers_never_get_an_innocent_one_ended(kills_after: dict[int, int]):
    done, ended, _ = run(kills_after, engines=80)
    assert ended <= set(kills_after)
    assert done == set(range(6)) - ended  # a slow killer may come through between the deaths that others cause
