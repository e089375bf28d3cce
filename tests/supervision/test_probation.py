"""Who comes back after an unplanned death, in which order, and who doesn't."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.supervision.probation import (
    LONGEST_SETTLE,
    LONGEST_TRIAL,
    MANY_DEATHS,
    MAX_ALIKE,
    MAX_BLAMED,
    SETTLE_SECONDS,
    DeathRecord,
    has_proved_itself,
    may_start,
    order,
    release,
    runs_apart,
    settle_seconds,
)
from server.supervision.probation import record_death as judge_at


@dataclass(eq=False)
class G:
    seq: int
    generated: list[int] = field(default_factory=list)
    past: DeathRecord = field(default_factory=DeathRecord)

    def moves(self, tokens: int = 1) -> G:
        self.generated += [0] * tokens
        return self


def judge(aboard: list[G], *, stalled: bool = False, absent: Collection[G] = (), age: float = 1.0) -> list[G]:
    return judge_at(aboard, stalled=stalled, absent=absent, age=age)


def test_those_that_got_furthest_since_the_death_before_come_first():
    slow, fast = G(1).moves(100), G(2).moves(10)
    judge([slow, fast])
    slow.moves(1)
    fast.moves(5)
    judge([slow, fast])
    assert order([slow, fast]) == [fast, slow]


def test_those_without_progress_are_on_probation_and_come_last():
    moved, stuck = G(9).moves(), G(1)
    assert judge([stuck, moved]) == []
    assert order([stuck, moved]) == [moved, stuck]
    assert (moved.past.trial, stuck.past.trial) == (0, 1)


def on_probation(seq: int, blamed: int = 0) -> G:
    return G(seq, past=DeathRecord(trial=1, blamed=blamed, barren=blamed, deaths=blamed))


def test_one_on_probation_starts_only_when_all_others_have_delivered():
    a, b, stuck = G(1).moves(), G(2).moves(), on_probation(3)
    judge([a, b])
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


def test_the_last_trial_comes_first_and_alone_in_the_engine():
    good, last = G(1).moves(), on_probation(2, blamed=MAX_BLAMED - 1)
    assert order([good, last]) == [last, good]
    assert may_start(last, [])
    assert not may_start(last, [good])
    assert not may_start(good, [last])


def test_a_token_takes_one_off_probation():
    g = G(1)
    judge([g])
    assert not has_proved_itself(g)
    assert has_proved_itself(g.moves())
    release(g)
    assert not has_proved_itself(g)
    assert g.past.blamed == g.past.trial == 0


def test_a_death_with_one_on_probation_counts_against_that_one_only():
    good, bad = G(1).moves(), G(2)
    judge([good, bad])
    good.moves()
    judge([good, bad])
    assert (good.past.deaths, bad.past.deaths) == (1, 2)
    assert (good.past.blamed, bad.past.blamed) == (0, 1)


def test_three_deaths_on_probation_end_it():
    good, bad = G(1), G(2)
    for _ in range(MAX_BLAMED):
        assert judge([good.moves(), bad]) == []
    assert judge([good.moves(), bad]) == [bad]


def test_one_that_gets_a_token_each_time_is_never_ended():
    g = G(1)
    for _ in range(100):
        assert judge([g.moves()]) == []
        assert g.past.barren == 0


def test_one_token_wipes_out_all_deaths_without_one():
    g = on_probation(1, blamed=MAX_BLAMED - 1)
    assert judge([g.moves()]) == []
    for _ in range(MAX_BLAMED - 1):
        assert judge([g]) == []
    assert judge([g]) == [g]


def test_three_trials_with_tokens_make_one_run_apart_and_last():
    slow, others = G(1), [G(2), G(3)]
    for _ in range(MANY_DEATHS):
        judge([slow.moves(3), *(g.moves(100) for g in others)])
    assert slow.past.trial
    for _ in range(MAX_BLAMED):
        assert not runs_apart(slow.past)
        judge([slow.moves(2)])
    assert runs_apart(slow.past)
    assert order([slow, *others])[-1] is slow
    assert may_start(slow, [])
    assert not may_start(slow, [others[0].moves()])
    assert not may_start(others[0], [slow])
    slow.moves(LONGEST_TRIAL)
    assert has_proved_itself(slow)
    release(slow)
    assert not runs_apart(slow.past)


def test_all_that_fare_alike_are_ended_later_than_one_that_doesnt():
    """Four that suddenly kill their engines are less likely than one cause for all of them."""
    four = [G(seq) for seq in range(4)]
    judge(four)
    for _ in range(MAX_ALIKE - 1):
        for g in four:
            assert judge([g], absent=[other for other in four if other is not g]) == []
    assert judge([four[0]], absent=four[1:]) == [four[0]]


def test_one_that_dies_where_others_had_got_tokens_is_ended_however_many_others_die():
    bad, worse, good = G(1), G(2), G(3)
    judge([bad, worse, good])
    for _ in range(MAX_BLAMED - 1):
        assert judge([good.moves(), bad], absent=[worse]) == []
        assert judge([good.moves(), worse], absent=[bad]) == []
    assert judge([bad], absent=[worse, good]) == [bad]
    assert judge([worse], absent=[good]) == [worse]


def test_an_engine_must_have_outlived_those_that_died_before_it_is_given_a_suspect():
    g = G(1)
    judge([g], age=0.2)
    assert settle_seconds(g.past) == 0, "the first death says next to nothing"
    judge([g], age=0.2)
    assert settle_seconds(g.past) == 0.2 + SETTLE_SECONDS
    judge([], absent=[g], age=3.0)
    assert settle_seconds(g.past) == 3.0 + SETTLE_SECONDS, "killed while it had nothing to do"
    judge([], absent=[g], age=300.0)
    assert settle_seconds(g.past) == LONGEST_SETTLE
    release(g.moves())
    assert settle_seconds(g.past) == 0


def test_idle_engines_that_die_take_blame_off_but_the_last():
    g = on_probation(1, blamed=2)
    judge([], absent=[g])
    assert (g.past.blamed, g.past.barren) == (1, 1)
    judge([], absent=[g])
    assert (g.past.blamed, g.past.barren) == (1, 1)


def test_eight_deaths_in_company_end_no_generation_but_mean_a_longer_probation():
    a, b = G(1), G(2)
    for _ in range(MANY_DEATHS):
        assert judge([a.moves(3), b.moves(40)]) == []
    assert (a.past.trial, b.past.trial) == (4, 41)
    a.moves(3)
    assert not has_proved_itself(a)
    assert has_proved_itself(a.moves())
    release(a)
    assert a.past.deaths == 0


def test_one_that_got_far_in_one_of_its_last_two_engines_has_no_longer_probation():
    far, near = G(1), G(2)
    for _ in range(MANY_DEATHS):
        judge([far.moves(LONGEST_TRIAL), near.moves(LONGEST_TRIAL - 1)])
    assert (far.past.trial, near.past.trial) == (0, LONGEST_TRIAL)
    judge([far.moves(2), near])
    assert far.past.trial == 0
    judge([far.moves(2)])
    assert far.past.trial == 3


def test_a_death_of_an_engine_without_probation_takes_blame_off_those_that_wait():
    good, waits, clean = G(1).moves(), on_probation(2, blamed=2), on_probation(3)
    judge([good], absent=[waits, clean])
    assert (waits.past.blamed, clean.past.blamed) == (1, 0)
    judge([good, on_probation(4)], absent=[waits])
    assert waits.past.blamed == 1, "that death may be the doing of the one on probation"


def test_random_kills_during_each_resume_end_no_generation_that_gets_on():
    """Streams move between two pairs of kills; one request is always the last to come back."""
    streams, last = [G(seq) for seq in range(4)], G(9)
    everyone = [*streams, last]
    for _ in range(25):
        for g in streams:
            g.moves(100)
            if g.past.trial:
                release(g)
        assert judge(everyone) == []  # the last one has got nothing yet
        back = [g for g in order(everyone) if not g.past.trial]
        assert last not in back
        assert judge(back, absent=[last]) == []


def test_the_trial_that_may_be_the_last_comes_first():
    a, b = G(1), G(2)
    for _ in range(MANY_DEATHS):
        judge([a.moves(), b.moves()])
    for _ in range(MAX_BLAMED - 1):
        assert judge([a]) == []
    assert order([a, b])[0] is a
    assert judge([a]) == [a]


def test_stalls_in_company_count_against_no_generation():
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
    assert (good.past.blamed, tried.past.blamed) == (0, 1)


def test_the_least_suspect_is_tried_first():
    a, b, c = G(1), G(2), G(3)
    judge([a, b, c])
    judge([a])
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
                quarantined = judge(running, absent=returning)
                ended |= {g.seq for g in quarantined}
                waiting = [g for g in [*running, *returning] if g not in quarantined]
                break
            for g in running:
                g.moves()
                produced[g.seq] += 1
                if has_proved_itself(g):
                    release(g)
            done |= {g.seq for g in running if len(g.generated) >= TOKENS}
            running = [g for g in running if len(g.generated) < TOKENS]
        else:
            return done, ended, engine
    raise AssertionError(f"not over after {engines} engines")


@pytest.mark.parametrize("after", range(12))
@pytest.mark.parametrize("seq", [0, 3, 5])
def test_one_that_kills_its_engines_is_found_and_no_other_is_harmed(seq: int, after: int):
    done, ended, engines = run({seq: after}, engines=300)
    assert ended == ({seq} if after == 0 else set()), "one that gets on ends by its own limit"
    assert done == set(range(6)) - ended
    assert engines <= 30 + (TOKENS // after if after else 0)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(0, 5), st.integers(0, 9), max_size=3))
def test_several_killers_never_get_one_ended_that_gets_on(kills_after: dict[int, int]):
    done, ended, _ = run(kills_after, engines=1000)
    assert ended <= {seq for seq, after in kills_after.items() if after == 0}
    assert done == set(range(6)) - ended
