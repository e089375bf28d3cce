"""The newest positions of rows, logged with their steps: they come back bit for bit, and what is damaged never does."""

import itertools
import os
import random
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from driving import Rig, prompt, row
from keeping import AMPLE, PATIENCE, kept
from little_room import files_end_at

from server.cache_guard import cache_arrays
from server.engine import tail
from server.engine.tail import LONGEST, MOST, Tail
from server.kv_store import layout
from server.kv_store.allowance import Allowance
from server.kv_store.files import tail_log
from server.kv_store.files.keys import BLOCK, KeyChain
from server.kv_store.newest import has_newest, newest
from server.kv_store.store import Disk
from server.kv_store.tail_recovery import recover
from server.kv_store.tail_writer import TailWriter
from server.kv_store.trees import UnknownCache


class Logging:
    """One batch whose rows are logged, in a folder that outlives it."""

    def __init__(self, disk, folder, rig, *rows, hourly=AMPLE):
        self.folder = folder
        self.log = TailWriter(disk.store, folder, Allowance.hourly(hourly))
        self.tier = SimpleNamespace(tail=self.log, store=disk.store, layout=disk.layout)
        self.batch = rig.batch()
        rig.join(self.batch, *rig.read(*rows))
        self.rows = rows
        self.begin(Allowance(1.0, 0.0, lambda: 0.0), lambda: 0.0)

    def begin(self, pieces, clock, **options):
        self.tail = Tail({1: self.batch}, pieces, clock)
        for one in self.rows:
            self.tail.begin(one.seq, KeyChain(self.tier.store.root, one.tokens), **options)

    def step(self, count=1, *, every=1):
        for i in range(count):
            positions = 0
            if i % every == 0:
                positions = self.tail.positions(1, self.tier)
            if positions:
                self.batch.step(lambda caches: self.tail.copy(1, positions, caches, self.tier.layout))  # noqa: B023
            else:
                self.batch.step()
            self.tail.take(self.tier)
            self.tail.admit(self.tier)

    def crash(self):
        """End as a killed engine does, once all that was copied is in the file."""
        assert self.log.flush(PATIENCE)
        self.log.close(PATIENCE)


@contextmanager
def logging(rig, home, *rows, disk=None, patience=PATIENCE, **options):
    with kept(rig.raw, home, disk=disk) as store:
        folder = home / store.store.root.hex()
        one = Logging(store, folder, rig, *rows, **options)
        yield one
        one.log.close(patience)


def next_logits(model, caches):
    logits = model(mx.array([[5]]), cache=caches)[0, -1].astype(mx.float32)
    mx.eval(logits, cache_arrays(caches))
    return np.array(logits)


# ---------------------------------------------------------------- there and back
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gpt_neox", "deepseek_v3", "qwen3_5", "nemotron_h", "mamba2", "rwkv7"]
)
@pytest.mark.parametrize("every", [1, 5])
def test_all_rows_of_a_batch_come_back_bit_for_bit_from_the_log(family, every, tmp_path):
    rig = Rig(family)
    rows = [row(1, prompt(BLOCK - 8), max_tokens=99), row(2, prompt(20), max_tokens=99), row(3, [7], max_tokens=99)]
    with logging(rig, tmp_path, *rows) as live:
        live.step(31, every=every)
        live.crash()
        held = [list(live.batch.held_tokens(one)) for one in rows]
        caches = [live.batch.single_caches(place) for place in range(3)]
    with kept(rig.raw, tmp_path) as disk:
        assert recover(disk.store, disk.layout, live.folder) == 3
        for tokens, own in zip(held, caches, strict=True):
            found, length = disk.read([*tokens, 1])
            assert len(tokens) - 2 * every - 1 <= length <= len(tokens)
            rest = tokens[length:]
            if rest:
                rig.raw(mx.array([rest]), cache=found)
            tolerance = 1e-4 if rest else 0.0
            assert np.allclose(next_logits(rig.raw, found), next_logits(rig.raw, own), tolerance, tolerance)


def test_a_lone_row_comes_back_and_so_does_one_that_was_joined_by_another(tmp_path):
    rig = Rig("llama")
    first, second = row(1, prompt(30), max_tokens=99), row(2, prompt(60), max_tokens=99)
    with logging(rig, tmp_path, first) as live:
        live.step(10)
        live.tail.begin(second.seq, KeyChain(live.tier.store.root, second.tokens))
        rig.join(live.batch, *rig.read(second))
        live.step(10)
        live.batch.leave([first])
        live.step(10)
        live.crash()
        held = list(live.batch.held_tokens(second))
    with kept(rig.raw, tmp_path) as disk:
        assert recover(disk.store, disk.layout, live.folder) == 2
        assert disk.read([*held, 1])[1] >= len(held) - 2
        assert disk.read([*first.tokens, 1])[1] >= len(first.tokens) - 3


def test_a_record_goes_on_where_a_piece_ends(tmp_path):
    rig = Rig("llama")
    one = row(1, prompt(2 * BLOCK + 100), max_tokens=200)
    with kept(rig.raw, tmp_path) as disk:
        live = Logging(disk, tmp_path / disk.store.root.hex(), rig, one)
        live.step(12)
        assert live.log.flush(PATIENCE)
        assert tail_log.segments(live.folder) == [], "a long prompt is for a piece"
        progress = disk.keeper.begin(one.tokens)
        for _ in range(2):
            held = live.batch.held_tokens(one)
            disk.save(held, live.batch.caches, progress)
            live.tail.saved(1, len(held), live.tier)
            live.step(12)
        disk.flush()
        live.crash()
        held = list(live.batch.held_tokens(one))
    with kept(rig.raw, tmp_path) as disk:
        assert recover(disk.store, disk.layout, live.folder) == 1
        assert disk.read([*held, 1])[1] >= len(held) - 2
        assert tail_log.segments(live.folder) == []


def test_two_rows_of_one_prompt_both_come_back(tmp_path):
    rig = Rig("llama")
    rows = [row(seq, prompt(40), max_tokens=99, temperature=1.0, seed=seq) for seq in (1, 2)]
    with logging(rig, tmp_path, *rows) as live:
        live.step(20)
        live.crash()
        held = [list(live.batch.held_tokens(one)) for one in rows]
    assert held[0] != held[1]
    with kept(rig.raw, tmp_path) as disk:
        recover(disk.store, disk.layout, live.folder)
        for tokens in held:
            assert disk.read([*tokens, 1])[1] >= len(tokens) - 2


def test_only_rows_that_can_go_on_from_positions_and_states_are_logged(tmp_path):
    for family, expected in {"llama": True, "qwen3_5": True, "gemma3_text": False, "mamba2": True}.items():
        with kept(Rig(family).raw, tmp_path / family) as disk:
            assert has_newest(disk.layout, 1) is has_newest(disk.layout, 4) is expected, family


# ---------------------------------------------------------------- never wrong
def test_damaged_and_cut_logs_bring_less_and_nothing_wrong(tmp_path):
    rig = Rig("llama")
    rows = [row(1, prompt(20), max_tokens=99), row(2, prompt(33, 2), max_tokens=99)]
    with logging(rig, tmp_path, *rows) as live:
        live.step(16, every=3)
        live.crash()
        held = [list(live.batch.held_tokens(one)) for one in rows]
    (segment,) = tail_log.segments(live.folder)
    whole = segment.read_bytes()
    rng = random.Random(5)
    lengths = set()
    for case in range(24):
        damaged = bytearray(whole)
        if case % 2:
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        else:
            del damaged[rng.randrange(len(damaged)) :]
        home = tmp_path / f"case{case}"
        folder = home / live.folder.name
        folder.mkdir(parents=True)
        (folder / segment.name).write_bytes(damaged)
        with kept(rig.raw, home, layout=live.tier.layout) as disk:
            recover(disk.store, disk.layout, folder)
            for tokens in held:
                if found := disk.read([*tokens, 1]):
                    lengths.add(found[1])
                    (alone,) = rig.read(row(9, tokens[: found[1] + 1], max_tokens=1))
                    assert np.allclose(next_logits(rig.raw, found[0]), next_logits(rig.raw, alone.caches), 1e-3, 1e-3)
    assert len(lengths) > 3, "cuts at different places bring different lengths"


def test_a_record_that_the_full_disk_cuts_costs_none_that_follow_it(tmp_path):
    rig = Rig("llama")
    with logging(rig, tmp_path, row(1, prompt(20), max_tokens=99)) as live:
        live.step(6)
        assert live.log.flush(PATIENCE)
        (segment,) = tail_log.segments(live.folder)
        whole, before = segment.read_bytes(), live.tier.store
        with files_end_at(len(whole) + 100), pytest.raises(OSError, match="large"):
            before.append(segment, [whole])
        before.append(segment, [whole])
    assert segment.read_bytes() == 2 * whole


def test_what_the_full_disk_refuses_at_a_start_may_be_written_later(tmp_path):
    rig = Rig("llama")
    with logging(rig, tmp_path, row(1, prompt(20), max_tokens=99)) as live:
        live.step(6)
        live.crash()
    with kept(rig.raw, tmp_path, disk=Disk(is_full=True)) as disk:
        assert recover(disk.store, disk.layout, live.folder) == 0
        assert (disk.store.files, disk.store.size) == (0, 0)


def _pipe(path):
    os.mkfifo(path)


def _huge(path):
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("put", [Path.mkdir, _pipe, _huge, lambda path: path.symlink_to("/dev/zero")])
def test_something_else_in_the_logs_place_holds_nothing_up(put, tmp_path):
    rig = Rig("llama")
    with logging(rig, tmp_path, row(1, prompt(20), max_tokens=99)) as live:
        live.step(9)
        live.crash()
        held = list(live.batch.held_tokens(live.batch.rows[0]))
    put(tail_log.segment(live.folder, 1))
    with kept(rig.raw, tmp_path) as disk:
        assert recover(disk.store, disk.layout, live.folder) == 1
        assert disk.read([*held, 1])[1] >= len(held) - 2


def test_another_models_log_is_left_alone(tmp_path):
    rig = Rig("llama")
    with logging(rig, tmp_path, row(1, prompt(20), max_tokens=99)) as live:
        live.step(9)
        live.crash()
    with kept(rig.raw, tmp_path, name=b"another") as disk:
        assert recover(disk.store, disk.layout, live.folder) == 0
        assert disk.store.files == 0


# ---------------------------------------------------------------- never in the way
@pytest.mark.parametrize("disk", [Disk(is_full=True), Disk(bytes_per_second=1000.0)])
def test_a_disk_that_takes_nothing_costs_no_step(disk, tmp_path):
    rig = Rig("llama")
    one = row(1, prompt(20), max_tokens=99)
    with logging(rig, tmp_path, one, disk=disk, patience=0.1) as live:  # what is queued would take minutes
        live.step(40)
        assert live.batch.produced(one) >= 39


def test_no_more_is_logged_than_may_be_written_in_an_hour(tmp_path):
    rig = Rig("llama")
    with logging(rig, tmp_path, row(1, prompt(20), max_tokens=300), hourly=400_000) as live:
        live.step(200)
        live.crash()
        assert live.tier.store.counts.written_bytes < 100_000


@pytest.mark.parametrize("most", [1.0, 0.0])
def test_records_take_what_pieces_leave_of_their_time_and_not_their_reserve(most, tmp_path, monkeypatch):
    ticks = itertools.count(0, 0.0005)  # half a millisecond passes between two looks at the clock
    monkeypatch.setattr("server.kv_store.tail_writer.time.thread_time", lambda: 0.0)
    pieces = Allowance(most, 0.0, lambda: 0.0)
    with logging(Rig("llama"), tmp_path, row(1, prompt(20), max_tokens=999)) as live:
        live.begin(pieces, lambda: next(ticks))
        live.step(300)
        live.crash()
        records = len(list(tail_log.unpacked(tail_log.read(tail_log.segments(live.folder)[0]))))
    assert tail.KEPT * most - 0.02 < pieces.left <= tail.KEPT * most
    assert (records > 50) == bool(most)


def test_records_take_more_time_for_a_minute_behind_a_death(tmp_path, monkeypatch):
    monkeypatch.setattr("server.kv_store.tail_writer.time.thread_time", lambda: 0.0)
    now = 0.0

    def clock():
        nonlocal now
        now += 0.0005
        return now

    with logging(Rig("llama"), tmp_path, row(1, prompt(20), max_tokens=999)) as live:
        live.begin(Allowance(0.0, 0.0, clock), clock, after_death=True)
        records = [0]
        for wait in (0.0, tail.AFTER_DEATH_SECONDS):
            now += wait
            for _ in range(300):
                now += 0.02
                live.step()
            assert live.log.flush(PATIENCE)
            found = [tail_log.read(segment) for segment in tail_log.segments(live.folder)]
            records.append(sum(len(list(tail_log.unpacked(raw))) for raw in found))
    behind, later = (last - first for first, last in itertools.pairwise(records))
    assert behind > 2 * later > 0


def test_a_log_that_is_removed_while_it_is_written_is_begun_anew(tmp_path):
    rig = Rig("llama")
    one = row(1, prompt(20), max_tokens=99)
    with logging(rig, tmp_path, one) as live:
        live.step(10)
        assert live.log.flush(PATIENCE)
        (segment,) = tail_log.segments(live.folder)
        segment.unlink()
        live.step(10)
        live.crash()
        (segment,) = tail_log.segments(live.folder)
        records = [described for described, _ in tail_log.unpacked(tail_log.read(segment))]
        assert records[-1].rows[0].end >= len(live.batch.held_tokens(one)) - 2
    with kept(rig.raw, tmp_path) as disk:
        assert recover(disk.store, disk.layout, live.folder) == 0, "what came before them is gone"


def test_the_memory_of_a_record_is_used_again_once_it_is_written(tmp_path):
    with logging(Rig("llama"), tmp_path, row(1, prompt(20), max_tokens=99)) as live:
        live.step(10)
        assert live.log.flush(PATIENCE)
        spare = live.log.memory(1)
        assert len(spare) > 1, "that of a record"
        assert live.log.memory(len(spare)) is not spare, "it is used by one record at a time"


def test_what_the_logs_thread_works_counts_as_time_of_the_steps(tmp_path, monkeypatch):
    worked = itertools.count(0, 1.0)  # a second for each record
    monkeypatch.setattr("server.kv_store.tail_writer.time.thread_time", lambda: next(worked))
    with logging(Rig("llama"), tmp_path, row(1, prompt(20), max_tokens=99)) as live:
        live.step(10)
        assert live.log.flush(PATIENCE)
        live.step(1)
        live.tail.take(live.tier)
        assert not live.tail.positions(1, live.tier)


def test_segments_go_once_no_row_needs_them(tmp_path, monkeypatch):
    monkeypatch.setattr("server.kv_store.tail_writer.SEGMENT_BYTES", 20_000)
    rig = Rig("llama")
    one, other = row(1, prompt(20), max_tokens=300), row(2, prompt(30), max_tokens=300)
    with kept(rig.raw, tmp_path) as disk:
        live = Logging(disk, tmp_path / disk.store.root.hex(), rig, one, other)
        live.step(60)
        assert live.log.flush(PATIENCE)
        assert len(tail_log.segments(live.folder)) > 3
        disk.save(live.batch.held_tokens(one), live.batch.caches, row=0)
        live.tail.saved(1, len(live.batch.held_tokens(one)), live.tier)
        live.tail.forget(2, live.tier)
        live.crash()
        assert tail_log.segments(live.folder) == []


def test_a_clock_that_is_set_back_leaves_the_log_in_its_order(tmp_path, monkeypatch):
    monkeypatch.setattr("server.kv_store.tail_writer.SEGMENT_BYTES", 20_000)
    clock = itertools.count(10**18, -(10**15))
    monkeypatch.setattr("server.kv_store.tail_writer.time.time_ns", lambda: next(clock))
    rig = Rig("llama")
    with logging(rig, tmp_path, row(1, prompt(20), max_tokens=99)) as live:
        live.step(30)
        live.crash()
        held = list(live.batch.held_tokens(live.batch.rows[0]))
    assert len(tail_log.segments(live.folder)) > 1
    with kept(rig.raw, tmp_path) as disk:
        assert recover(disk.store, disk.layout, live.folder) == 1
        assert disk.read([*held, 1])[1] >= len(held) - 2


def test_a_segment_that_cant_be_removed_stops_no_later_record(tmp_path, monkeypatch):
    monkeypatch.setattr("server.kv_store.tail_writer.SEGMENT_BYTES", 1)
    rig = Rig("llama")
    first, second = row(1, prompt(20), max_tokens=99), row(2, prompt(20, 2), max_tokens=99)
    with logging(rig, tmp_path, first, second) as live:
        live.step(4)
        assert live.log.flush(PATIENCE)
        for segment in tail_log.segments(live.folder):
            segment.unlink()
            segment.mkdir()
        live.batch.leave([first])
        for one in (first, second):
            live.log.release(one.seq)
        live.step(4)
        assert live.log.flush(1.0)


@pytest.mark.parametrize("size", [0, tail.RECORD_BYTES], ids=["of many bytes", "of few bytes"])
def test_a_row_that_is_too_far_behind_waits_for_a_piece(size, tmp_path, monkeypatch):
    """Too far is what one record doesn't take: some positions always, more of them as long as they are small."""
    monkeypatch.setattr(tail, "RECORD_BYTES", size)
    too_far = LONGEST if size else MOST
    rig = Rig("llama")
    one = row(1, prompt(20), max_tokens=600)
    with logging(rig, tmp_path, one) as live:
        live.step(5)
        for _ in range(MOST + 5):
            live.batch.step()
        assert bool(live.tail.positions(1, live.tier)) == bool(size)
        for _ in range(too_far):
            live.batch.step()
        assert live.tail.positions(1, live.tier) == 0
        live.tail.saved(1, live.batch.held(one), live.tier)
        live.step(5)
        assert 0 < live.tail.positions(1, live.tier) <= 2


def test_states_that_are_large_beside_the_positions_come_after_so_many_of_those(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "POSITION_BYTES", 1)
    with logging(Rig("qwen3_5"), tmp_path, row(1, prompt(20), max_tokens=300)) as live:
        known = live.tier.layout
        monkeypatch.setattr(layout, "STATE_SHARE", known.state_bytes // (10 * known.position_bytes))
        live.step(3)
        steps = 0
        while not (positions := live.tail.positions(1, live.tier)):
            live.batch.step()
            steps += 1
        assert positions == 10
        assert 8 <= steps <= 10


@pytest.mark.parametrize(("name", "value"), [("STATE_SHARE", 1e-3), ("RECORD_BYTES", 1000)])
def test_states_that_a_record_has_no_room_for_are_left_to_checkpoints(name, value, tmp_path, monkeypatch):
    monkeypatch.setattr({"STATE_SHARE": layout, "RECORD_BYTES": tail}[name], name, value)
    one = row(1, prompt(20), max_tokens=300)
    with logging(Rig("qwen3_5"), tmp_path, one) as live:
        for _ in range(MOST + 5):
            live.step()
            assert live.tail.positions(1, live.tier) == 0
        assert not live.tail.covers(1, live.batch.held(one)), "so that none of its checkpoints are put off"


def test_a_state_that_has_changed_its_form_is_not_logged(tmp_path):
    with logging(Rig("qwen3_5"), tmp_path, row(1, prompt(20), max_tokens=300)) as live:
        state = live.batch.caches[0]
        state[0] = mx.concatenate([state[0], state[0]], 1)
        with pytest.raises(UnknownCache, match="form"):
            newest(live.tier.layout, live.batch.caches, 1, 20, 1)
