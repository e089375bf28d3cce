"""Readings, slopes, time to exhaustion, and the pressure that follows from them."""

import logging
import math
import random
import sys

import mlx.core as mx
import pytest

from server.errors import StartupError
from server.ipc.snapshot import Snapshot
from server.memory import residency as module
from server.memory.allocator import CountUnavailable
from server.memory.pressure import BUFFERS, BYTES, HYSTERESIS, RUNGS, Level, Pressure, PressureReading, Slope, Verb
from server.memory.residency import HIGH_SECONDS, SETTLE_STEPS, NoCount, Residency, open_source
from server.settings import load
from server.telemetry.footprint import footprint, total_memory

LIMIT = 1000


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Count:
    """A scripted source; `pool` is what only a raw reading sees."""

    name, reason = "native", ""

    def __init__(self, live=100, limit=LIMIT, pool=0, pooled=False):
        self.live, self.limit, self.pool, self.pooled = live, limit, pool, pooled

    def raw(self):
        return self.live + self.pool

    def settled(self):
        self.pool = 0
        return self.live


class Rig:
    """A residency whose engine is this test: `step` is one decode step and a quarter of a second."""

    def __init__(self, source=None, **settings):
        self.clock, self.snapshot = Clock(), Snapshot()
        self.source = source or Count()
        self.kv = self.takes = 0
        self.idle = 3  # prefixes that may be dropped
        self.asked = 0
        self.residency = Residency(self.source, load(settings), self.snapshot, self.clock)
        self.evicted = self.flushed = 0

    def step(self, steps=1, rows=1):
        self.snapshot.steps += steps
        self.snapshot.generated_tokens += steps * rows
        self.clock.now += 0.25
        return self.residency.tick(self)

    def wait(self, seconds):
        self.clock.now += seconds
        return self.residency.tick(self)

    def reclaim(self, act=None):
        return self.residency.reclaim(self, act)

    def kv_bytes(self):
        self.asked += 1
        return self.kv

    def growth(self):
        return self.takes

    def flush(self):
        self.flushed += 1

    def evict(self, size, buffers):
        self.evicted += 1
        self.surplus = size, buffers
        return self.idle


def names(acts):
    return [act.name for act in acts]


# ---------------------------------------------------------------- slope
def test_the_slope_of_a_line_is_exact_and_certain():
    slope = Slope(spacing=1)
    for x in range(100):
        slope.add(x, 7 + 3 * x, x / 10)
    assert slope.fit.slope == pytest.approx(3)
    assert slope.fit.half_width < 1e-9
    assert slope.tokens_per_second() == pytest.approx(10)


def test_noise_without_a_slope_is_flat():
    draw = random.Random(1)
    slope = Slope(spacing=1)
    for x in range(200):
        slope.add(x, draw.gauss(0, 20), x)
    assert not slope.fit.rising
    assert slope.fit.exhaustion(1000) == math.inf


def test_readings_that_work_in_flight_lifts_now_and_then_do_not_rise():
    """A busy spell lifts all readings in it alike, so that the interval of independent ones says nothing."""
    draw = random.Random(9)
    for _ in range(100):
        slope, busy = Slope(spacing=1), False
        for x in range(draw.randrange(6, 60)):
            busy = busy if draw.random() < 0.8 else not busy
            slope.add(x, 56 + busy * draw.randrange(6, 36), x)
            assert not (slope.fit and slope.fit.rising and x >= 8)


def test_the_interval_holds_the_true_slope_in_95_of_100_cases():
    draw, inside = random.Random(2), 0
    for _ in range(400):
        slope = Slope(spacing=1)
        for x in range(12):
            slope.add(x, 0.5 * x + draw.gauss(0, 3), x)
        inside += abs(slope.fit.slope - 0.5) <= slope.fit.half_width
    assert 0.92 <= inside / 400 <= 0.98


def test_a_constant_has_no_slope_at_all():
    slope = Slope(spacing=1)
    for x in range(50):
        slope.add(x, 12_345_678_901, x)
    assert (slope.fit.slope, slope.fit.rising) == (0, False)


def test_the_window_forgets_and_its_points_keep_their_distance():
    slope = Slope(points=10, spacing=5)
    for x in range(1000):
        slope.add(x, 0 if x < 900 else x, x)
    assert slope.fit.slope == pytest.approx(1)


def test_readings_at_one_and_the_same_place_have_no_slope_yet():
    slope = Slope(spacing=0)
    for value in range(20):
        slope.add(5.0, value, 0.0)
    assert slope.fit is None
    for tokens in range(6, 40):
        slope.add(tokens, 2.0 * tokens, 0.0)
    assert slope.fit is not None


def test_too_few_points_mean_nothing():
    slope = Slope(spacing=1)
    for x in range(4):
        slope.add(x, x, x)
    assert slope.fit is None


# ---------------------------------------------------------------- pressure
def buffers(ratio, rising=False):
    return [PressureReading(BUFFERS, ratio * LIMIT, LIMIT, rising)]


def memory(ratio, **facts):
    return [PressureReading(BYTES, ratio * LIMIT, LIMIT, **facts)]


def test_nothing_is_due_while_calm():
    pressure = Pressure(0)
    assert pressure.judge(buffers(0.74) + memory(0.79), 1) == []
    assert (pressure.level, pressure.admits, pressure.calm_seconds(11)) == (Level.CALM, True, 11)


@pytest.mark.parametrize("ratio", [0.76, 0.86, 0.99])
def test_the_first_answer_is_always_a_reclaim(ratio):
    pressure = Pressure(0)
    (act,) = pressure.judge(buffers(ratio, rising=True), 1)
    assert act.name == Verb.RECLAIM
    assert pressure.level == Level.RECLAIM
    assert pressure.admits
    assert pressure.calm_seconds(2) == 0


def test_what_a_reclaim_frees_holds_no_row_up():
    pressure = Pressure(0)
    pressure.judge(buffers(0.99), 1)
    assert pressure.judge(buffers(0.5), 1, reclaimed=True) == []
    assert pressure.level == Level.CALM


def test_a_reading_still_high_after_a_reclaim_holds_once():
    pressure = Pressure(0)
    pressure.judge(buffers(0.88), 1)
    (act,) = pressure.judge(buffers(0.88), 1, reclaimed=True)
    assert (act.name, act.reading, act.threshold) == (Verb.HOLD, 880, pytest.approx(850))
    assert not pressure.admits
    pressure.judge(buffers(0.88), 20)
    assert pressure.judge(buffers(0.88), 20, reclaimed=True) == []


def test_a_level_is_left_only_well_below_where_it_was_entered():
    pressure, rungs = Pressure(0), RUNGS[BUFFERS]
    pressure.judge(buffers(rungs.hold), 1)
    pressure.judge(buffers(rungs.hold), 1, reclaimed=True)
    pressure.judge(buffers(rungs.hold - HYSTERESIS + 0.01), 2)
    assert pressure.level == Level.HOLD
    pressure.judge(buffers(rungs.hold - HYSTERESIS - 0.01), 3)
    assert pressure.level == Level.RECLAIM
    pressure.judge(buffers(rungs.reclaim - HYSTERESIS - 0.01), 4)
    assert pressure.level == Level.CALM


def test_a_level_that_lasts_reclaims_every_ten_seconds_and_not_more_often():
    pressure = Pressure(0)
    asked = [now for now in range(100, 131) if pressure.judge(buffers(0.77), now)]
    assert asked == [100, 110, 120, 130]


def test_an_engine_is_replaced_after_two_readings_and_a_rising_count():
    pressure = Pressure(0)
    pressure.judge(buffers(0.95, rising=True), 1)
    assert names(pressure.judge(buffers(0.95, rising=True), 1, reclaimed=True)) == [Verb.HOLD]
    assert names(pressure.judge(buffers(0.95, rising=True), 3)) == [Verb.RECLAIM]
    assert names(pressure.judge(buffers(0.95, rising=True), 3, reclaimed=True)) == [Verb.ROTATE]
    assert pressure.level == Level.ROTATE


def test_the_second_reading_of_a_rising_count_is_not_waited_for():
    pressure = Pressure(0)
    pressure.judge(buffers(0.95, rising=True), 1)
    pressure.judge(buffers(0.95, rising=True), 1, reclaimed=True)
    assert names(pressure.judge(buffers(0.95, rising=False), 1.25)) == []
    assert names(pressure.judge(buffers(0.95, rising=True), 1.25)) == [Verb.RECLAIM]
    assert names(pressure.judge(buffers(0.95, rising=True), 1.25, reclaimed=True)) == [Verb.ROTATE]
    assert names(pressure.judge(buffers(0.95, rising=True), 1.5)) == []


def test_a_high_count_that_stands_still_is_never_a_reason_to_rotate():
    pressure = Pressure(0)
    reported = []
    for now in range(1, 200, 5):
        reported += pressure.judge(buffers(0.95), now)
        reported += pressure.judge(buffers(0.95), now, reclaimed=True)
    assert set(names(reported)) == {Verb.RECLAIM, Verb.HOLD}
    assert pressure.level == Level.HOLD


def test_two_readings_must_follow_each_other_to_rotate():
    pressure = Pressure(0)
    reported = []
    for now in range(1, 60, 5):
        for ratio in (0.95, 0.90):
            reported += pressure.judge(buffers(ratio, rising=True), now, reclaimed=True)
    assert Verb.ROTATE not in names(reported)


def test_bytes_preempt_as_long_as_they_are_short_after_a_reclaim():
    pressure = Pressure(0)
    acts = []
    for now, ratio in ((1, 0.97), (3, 0.96), (5, 0.93)):
        pressure.judge(memory(ratio), now)
        acts += names(pressure.judge(memory(ratio), now, reclaimed=True))
    assert acts == [Verb.PREEMPT, Verb.PREEMPT]
    assert not pressure.admits


def test_bytes_above_the_last_rung_dont_wait_but_below_it_the_level_lasts_in_peace():
    pressure = Pressure(0)
    for now in (1, 1.01, 1.02):
        assert names(pressure.judge(memory(0.97), now)) == [Verb.RECLAIM]
        assert names(pressure.judge(memory(0.97), now, reclaimed=True)) == [Verb.PREEMPT]
    asked = [now for now in range(2, 33) if pressure.judge(memory(0.92), now)]
    assert asked == [12, 22, 32]
    assert pressure.level == Level.HOLD


def test_a_reading_that_a_reclaim_showed_to_be_harmless_is_no_hurry_until_it_rises():
    pressure = Pressure(0)
    pressure.judge(memory(0.955), 1)
    pressure.judge(memory(0.945), 1, reclaimed=True)
    assert [now for now in range(2, 20) if pressure.judge(memory(0.956), now)] == [11]
    assert names(pressure.judge(memory(0.97), 20)) == [Verb.RECLAIM]
    assert names(pressure.judge(memory(0.96), 20, reclaimed=True)) == [Verb.PREEMPT]


def test_no_reading_beyond_the_limit_is_harmless():
    pressure = Pressure(0)
    pressure.judge(memory(1.2), 1)
    pressure.judge(memory(0.90), 1, reclaimed=True)
    for now in (1.01, 1.02):
        assert names(pressure.judge(memory(1.0), now)) == [Verb.RECLAIM]
        pressure.judge(memory(0.90), now, reclaimed=True)


def test_a_reclaim_that_was_not_asked_for_shows_no_earlier_reading_to_be_harmless():
    pressure = Pressure(0)
    pressure.judge(memory(0.99), 1)
    pressure.judge(memory(0.97), 1, reclaimed=True)
    pressure.judge(memory(0.90), 2, reclaimed=True)
    assert names(pressure.judge(memory(0.96), 2.01)) == [Verb.RECLAIM]


def test_one_reclaim_serves_both_resources():
    pressure = Pressure(0)
    readings = buffers(0.88) + memory(0.92)
    assert names(pressure.judge(readings, 1)) == [Verb.RECLAIM]
    assert names(pressure.judge(readings, 1, reclaimed=True)) == [Verb.HOLD, Verb.HOLD]


@pytest.mark.parametrize("resource", [BUFFERS, BYTES])
@pytest.mark.parametrize("share", [0.3, 0.8, 0.82, 0.91, 0.96, 0.999])
def test_weights_are_no_pressure_however_much_of_the_limit_they_take(resource, share):
    pressure = Pressure(0)
    for now, taken in enumerate((0, 0.4, RUNGS[resource].reclaim - 0.01)):
        value = (share + taken * (1 - share)) * LIMIT
        assert pressure.judge([PressureReading(resource, value, LIMIT, True, floor=share * LIMIT)], now) == []
    assert (pressure.level, pressure.admits) == (Level.CALM, True)


@pytest.mark.parametrize("share", [0.3, 0.82, 0.96])
def test_beside_weights_the_levels_come_one_after_the_other_and_before_the_limit(share):
    pressure, reported = Pressure(0), {}
    for now in range(110):
        reading = memory(share + now / 100 * (1 - share), floor=share * LIMIT)
        acts = pressure.judge(reading, now)
        acts += pressure.judge(reading, now, reclaimed=True) if acts else []
        for act in acts:
            reported.setdefault(act.name, now)
            assert act.threshold <= act.reading
    assert list(reported) == [Verb.RECLAIM, Verb.HOLD, Verb.PREEMPT]
    assert reported[Verb.RECLAIM] < reported[Verb.HOLD] < reported[Verb.PREEMPT] < 100
    assert share * LIMIT < pressure.urgent_bytes(LIMIT, share * LIMIT) < LIMIT


def test_weights_beyond_the_limit_leave_no_room_and_break_nothing():
    pressure = Pressure(0)
    assert pressure.judge(memory(1.2, floor=1.2 * LIMIT), 1) == []
    assert names(pressure.judge(memory(1.3, floor=1.2 * LIMIT), 2)) == [Verb.RECLAIM]
    assert names(pressure.judge(memory(1.3, floor=1.2 * LIMIT), 2, reclaimed=True)) == [Verb.PREEMPT]


@pytest.mark.parametrize(
    ("taken", "idle", "goes"),
    [
        (0.79, 0.5, 0),  # calm
        (0.81, 0.5, 0.06),  # to where calm lasts, not all of it
        (0.81, 0.02, 0),  # rows hold too much for calm, and no row is held up
        (0.89, 0.05, 0),
        (0.91, 0.5, 0.16),
        (0.91, 0.08, 0.06),  # no calm to be had, but no row need be held up
        (0.91, 0.005, 0),  # new work is held up with or without
        (0.96, 0.2, 0.11),
        (0.96, 0.03, 0.03),  # new work is held up, but no row has to go
        (0.99, 0.01, 0.01),  # a row will have to go: each byte counts
    ],
)
@pytest.mark.parametrize("floor", [0, 820])
def test_no_more_is_evicted_than_it_takes_and_nothing_where_that_cant_help(taken, idle, goes, floor):
    pressure, room = Pressure(0), LIMIT - floor
    (reading,) = memory((floor + taken * room) / LIMIT, floor=floor, idle=idle * room)
    pressure.judge([reading], 1)
    assert pressure.surplus(reading) == pytest.approx(goes * room, abs=1.01)


def test_a_level_that_rows_alone_keep_up_evicts_nothing_however_long_it_lasts():
    pressure, evicted = Pressure(0), 0
    for taken in (0.82, 0.92):
        for now in range(100):
            (reading,) = memory(taken, idle=0.01 * LIMIT)
            if pressure.judge([reading], now + 1000 * taken):
                evicted += pressure.surplus(reading)
                pressure.judge([reading], now, reclaimed=True)
    assert evicted == 0


# ---------------------------------------------------------------- residency
@pytest.mark.parametrize("rows", [1, 4])
def test_a_leak_of_three_buffers_a_step_gives_the_tokens_that_are_left(rows):
    draw, rig = random.Random(3), Rig(Count(limit=499_000))
    for _ in range(100):
        rig.step(20, rows)
        rig.source.live = 400 + 3 * rig.snapshot.steps + draw.randrange(40)
    left = (499_000 - rig.snapshot.live_settled) / 3 * rows
    assert rig.snapshot.buffers_per_token == pytest.approx(3 / rows, rel=0.05)
    assert rig.snapshot.tokens_to_exhaustion[BUFFERS] == pytest.approx(left, rel=0.05)
    assert rig.snapshot.seconds_to_exhaustion[BUFFERS] == pytest.approx(left / (80 * rows), rel=0.05)


def test_a_flat_count_never_ends():
    draw, rig = random.Random(4), Rig()
    for _ in range(200):
        rig.source.live = 400 + draw.randrange(40)
        rig.step(20)
    assert rig.snapshot.tokens_to_exhaustion[BUFFERS] == math.inf
    assert rig.snapshot.seconds_to_exhaustion[BUFFERS] == math.inf
    assert abs(rig.snapshot.buffers_per_token) < 0.01


def test_a_flat_server_whose_prefix_cache_fills_and_whose_rows_change_never_ends():
    draw, rig = random.Random(5), Rig(Count(limit=3000))
    for turn in range(200):
        rig.snapshot.kv_cached_buffers = 24 * min(turn, 64)
        rig.snapshot.kv_buffers = 24 * draw.randrange(8)
        rig.source.live = 400 + rig.snapshot.kv_cached_buffers + rig.snapshot.kv_buffers + draw.randrange(40)
        rig.step(20)
        assert rig.snapshot.tokens_to_exhaustion.get(BUFFERS, math.inf) == math.inf
    assert abs(rig.snapshot.buffers_per_token) < 0.01
    assert rig.snapshot.live_settled == rig.source.live


def test_a_leak_is_found_while_the_prefix_cache_fills():
    draw, rig = random.Random(6), Rig(Count(limit=100_000))
    for turn in range(100):
        rig.snapshot.kv_cached_buffers = 24 * min(turn, 64)
        rig.source.live = 400 + rig.snapshot.kv_cached_buffers + 3 * rig.snapshot.steps + draw.randrange(40)
        rig.step(20)
    left = 100_000 - rig.source.live
    assert rig.snapshot.buffers_per_token == pytest.approx(3, rel=0.05)
    assert rig.snapshot.tokens_to_exhaustion[BUFFERS] == pytest.approx(left / 3, rel=0.05)


def test_without_a_source_the_count_is_absent_and_bytes_are_still_read():
    rig = Rig(NoCount("because"))
    for _ in range(20):
        rig.step(100)
    snapshot = rig.snapshot
    assert (snapshot.live_settled, snapshot.live_raw, snapshot.buffers_per_token) == (None, None, None)
    assert BUFFERS not in snapshot.tokens_to_exhaustion
    assert snapshot.tokens_to_exhaustion[BYTES] == math.inf
    assert snapshot.active_bytes == mx.get_active_memory()
    assert snapshot.footprint_bytes > 2**20
    assert snapshot.memory_limit_bytes > 2**20


def test_growth_that_kv_explains_is_no_leak(monkeypatch):
    rig = Rig()
    monkeypatch.setattr(mx, "get_active_memory", lambda: 10**8 + rig.kv + rig.snapshot.kv_cached_bytes)
    for _ in range(40):
        rig.kv += 64_000
        rig.snapshot.kv_cached_bytes += 1000
        rig.step(64)
    assert rig.snapshot.unexplained_bytes_per_token == 0
    assert rig.snapshot.tokens_to_exhaustion[BYTES] == math.inf


def test_growth_beyond_kv_is_reported_and_its_end_reckoned(monkeypatch):
    rig = Rig(memory_limit=10**9)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 10**8 + rig.kv + 500 * rig.snapshot.generated_tokens)
    for _ in range(40):
        rig.kv += 64_000
        rig.step(64)
    left = (10**9 - mx.get_active_memory()) / 500
    assert rig.snapshot.unexplained_bytes_per_token == pytest.approx(500)
    assert rig.snapshot.tokens_to_exhaustion[BYTES] == pytest.approx(left)


def test_readings_are_taken_at_most_four_times_a_second():
    rig = Rig()
    for _ in range(1000):
        rig.clock.now += 0.001
        rig.residency.tick(rig)
    assert 4 <= rig.asked <= 5


def test_a_pooled_count_is_settled_by_steps_and_once_when_idle(monkeypatch):
    cleared = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(1))
    rig = Rig(Count(pool=50, pooled=True))
    rig.step()
    assert rig.snapshot.live_settled is None
    assert rig.snapshot.live_raw == 150
    rig.step(SETTLE_STEPS)
    assert (rig.snapshot.live_settled, len(cleared)) == (100, 1)
    rig.source.pool = 70
    rig.step(SETTLE_STEPS - 1)
    assert (rig.snapshot.live_settled, rig.snapshot.live_raw, len(cleared)) == (100, 170, 1)
    rig.wait(1)
    rig.wait(1)
    assert (rig.snapshot.live_settled, rig.snapshot.live_raw, len(cleared)) == (100, 100, 2)


def test_a_raw_count_that_looks_high_is_settled_before_anything_is_due():
    rig = Rig(Count(live=100, pool=850, pooled=True))
    assert rig.step() == []
    assert (rig.snapshot.live_settled, rig.snapshot.pressure) == (100, "calm")
    rig.source.pool = 850
    assert rig.step() == []  # too soon to drop the pool again
    assert rig.snapshot.live_raw == 950
    rig.wait(HIGH_SECONDS)
    assert rig.snapshot.live_raw == 100


def test_pressure_goes_the_whole_way_in_order_and_everything_is_recorded(caplog):
    rig, reported = Rig(Count(live=0)), []
    with caplog.at_level(logging.INFO):
        for _ in range(40):
            rig.source.live += 25
            for act in rig.step(64):
                reported.append((act.name, rig.source.live))
                for then in rig.reclaim(act):
                    reported.append((then.name, rig.source.live))
            rig.clock.now += 1
    first = dict(reversed(reported))
    assert first == {Verb.RECLAIM: 750, Verb.HOLD: 850, Verb.ROTATE: 950}
    assert rig.snapshot.pressure == "rotate"
    counts = rig.snapshot.action_counts
    assert set(counts) == {"flush", "clear_pool", "hold", "rotate"}
    assert (counts["hold"], counts["rotate"]) == (1, 1)
    assert counts["flush"] == counts["clear_pool"] == rig.flushed > rig.evicted == 0
    rotate = next(action for action in rig.snapshot.actions if action.action == "rotate")
    assert (rotate.reading, rotate.threshold) == (950, pytest.approx(920))
    lines = [record.getMessage() for record in caplog.records]
    assert "guard: rotate at a reading of 950, threshold 920" in lines
    assert "pressure: hold, was reclaim" in lines


def test_a_reclaim_that_the_server_asked_for_reads_again_and_asks_for_nothing():
    rig = Rig(Count(live=800, pool=50, pooled=True))
    assert rig.reclaim() == []
    assert (rig.snapshot.live_settled, rig.snapshot.live_raw) == (800, 800)
    assert rig.snapshot.action_counts == {"flush": 1, "clear_pool": 1}


def test_what_the_next_step_takes_counts_before_it_is_taken():
    weights = mx.zeros(10_000_000)
    mx.eval(weights)
    limit = mx.get_active_memory() * 4 // 3  # 75 % are in use
    rig = Rig(memory_limit=limit)
    rig.step()
    rig.takes = limit // 10
    assert rig.residency.tick(rig) == []
    rig.takes = limit // 4
    (act,) = rig.residency.tick(rig)
    assert act.name == Verb.RECLAIM
    assert names(rig.reclaim(act)) == [Verb.PREEMPT]
    assert rig.snapshot.active_bytes < 0.8 * limit
    assert weights.size


def test_what_is_left_is_reported_until_nothing_may_wait():
    weights = mx.zeros(10_000_000)
    mx.eval(weights)
    limit = mx.get_active_memory() * 2
    residency = Rig(memory_limit=limit).residency
    assert residency.room == pytest.approx(0.45 * limit, rel=0.01)
    more = mx.zeros(limit // 2, dtype=mx.uint8)
    mx.eval(more)
    assert residency.room == 0
    assert weights.nbytes < more.nbytes


def test_an_eviction_that_found_nothing_is_no_action():
    rig = Rig(Count(live=800))
    rig.snapshot.kv_cached_buffers = 100
    rig.idle = 0
    rig.reclaim()
    assert rig.evicted == 1
    assert "evict_prefix" not in rig.snapshot.action_counts


def test_weights_at_82_percent_of_the_limit_cost_no_prefix_and_no_warning(caplog):
    weights = mx.zeros(10_000_000)
    mx.eval(weights)
    rig = Rig(Count(live=820), memory_limit=round(mx.get_active_memory() / 0.82))
    rig.residency.note_weights()
    rig.snapshot.kv_cached_buffers, rig.snapshot.kv_cached_bytes = 10, 1000
    with caplog.at_level(logging.INFO):
        reported = [act for _ in range(1000) for act in rig.step(64)]
        assert rig.reclaim() == []  # also when the server asks
    assert (reported, rig.evicted, rig.snapshot.pressure, caplog.records) == ([], 0, "calm", [])
    assert weights.size


def test_a_level_that_lasts_warns_of_nothing_and_evicts_nothing_in_vain(caplog):
    rig = Rig(Count(live=860))
    rig.snapshot.kv_cached_buffers = 5
    with caplog.at_level(logging.WARNING):
        for _ in range(400):
            for act in rig.step(64):
                rig.reclaim(act)
    assert rig.evicted == 0
    assert [record.getMessage() for record in caplog.records] == [
        "guard: hold at a reading of 860, threshold 850",
        "pressure: hold, was reclaim",
    ]


def test_prefixes_give_way_before_anything_is_held_up():
    rig = Rig(Count(live=860))
    rig.snapshot.kv_cached_buffers = 500

    def evict(size, buffers):
        assert size == 0
        rig.source.live -= buffers
        rig.snapshot.kv_cached_buffers -= buffers
        return 1

    rig.evict = evict
    (act,) = rig.step(64)
    assert rig.reclaim(act) == []
    assert (rig.snapshot.pressure, rig.snapshot.live_settled) == ("calm", 699)
    assert rig.snapshot.kv_cached_buffers == 339


# ---------------------------------------------------------------- limits and sources
def test_the_default_memory_limit_is_a_share_of_what_there_is():
    assert 0 < module.memory_limit(None) <= total_memory()
    assert module.memory_limit(12_345) == 12_345


def test_mlx_never_waits_below_a_limit_of_ours():
    before = mx.get_memory_limit()
    try:
        assert module.memory_limit(before + 2**30) == mx.get_memory_limit() == before + 2**30
    finally:
        mx.set_memory_limit(before)


def test_reading_the_pools_limit_leaves_it_alone():
    before = mx.set_cache_limit(7 * 2**20)
    try:
        assert module.pool_limit() == module.pool_limit() == 7 * 2**20
    finally:
        mx.set_cache_limit(before)


def test_the_footprint_grows_with_the_memory_in_use():
    before = footprint()
    block = bytearray(b"x") * (64 * 2**20)
    assert footprint() - before > 32 * 2**20
    del block


@pytest.mark.skipif(sys.platform != "linux", reason="macOS counts Metal's buffers, which no malloc keeps")
def test_dropping_the_pool_gives_the_memory_back_also_from_between_what_is_kept():
    rig = Rig()
    blocks = [mx.zeros((20_000,)) for _ in range(1000)]  # 80 kB each: malloc takes them from its heap
    mx.eval(blocks)
    full = footprint()
    kept = blocks[::50]
    del blocks
    rig.residency.settle()
    assert full - footprint() > 0.8 * (1000 - len(kept)) * 80_000


def test_off_says_that_it_was_switched_off():
    source = open_source(load({"live_buffers": "off"}))
    assert (source.name, source.raw(), source.settled()) == ("off", None, None)
    assert "--live-buffers off" in source.reason


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac may have the count")
def test_auto_without_metal_is_off_with_the_reason():
    source = open_source(load({}))
    assert (source.name, source.limit, source.reason) == ("off", None, "no Metal on this machine")


def test_auto_that_cant_be_proved_is_off_with_the_reason(monkeypatch):
    def refuse(limit):
        raise CountUnavailable("no word moved with the buffers")

    monkeypatch.setattr(module.metal_count, "open_count", refuse)
    assert open_source(load({})).reason == "no word moved with the buffers"


def test_a_source_asked_for_by_name_that_cant_be_had_ends_the_start(monkeypatch, tmp_path):
    def refuse(folder, limit):
        raise CountUnavailable("no C++ compiler found")

    monkeypatch.setattr(module.native_count, "open_count", refuse)
    with pytest.raises(StartupError, match="--live-buffers native: no C"):
        open_source(load({"live_buffers": "native", "cache_dir": tmp_path}))
