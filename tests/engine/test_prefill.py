"""Prompts are read in chunks of few sizes, within the budget, and none waits for ever."""

import mlx.core as mx
import numpy as np
import pytest
from driving import Rig, prompt, row
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import Lane
from mlx_lm.models.cache import make_prompt_cache

from server.cache_guard import Guard
from server.engine import executor as module
from server.engine import prefill
from server.engine.chunk_timing import CHUNKS, FORGOTTEN, ChunkTiming
from server.engine.joint_prefill import JointPrefill
from server.engine.plan import OperationFailure
from server.grammar.build import answer
from server.ipc.snapshot import Snapshot

MS = 0.001


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Bench:
    """A prefill lane over a model that only takes time: `cost(tokens, position)` seconds a chunk."""

    def __init__(self, clock, cost):
        self.clock, self.cost = clock, cost
        self.read = {}  # tokens by seq
        self.chunks = []  # (seq, tokens)
        self.marks = []  # (seq, length)
        self.shapes = []  # (rows, tokens) of passes, where rows share them
        self.begins = {}  # by seq: (length held, marks)
        self.lane = self.make_lane()

    def make_lane(self, **options):
        return Lane(
            self, Guard(True, 8, Snapshot()), on_begin=self.begin, on_chunk=self.chunk, on_mark=self.mark,
            clock=self.clock, **options,
        )  # fmt: skip

    def begin(self, one):
        self.read[one.seq], marks = self.begins.get(one.seq, (0, []))
        one.caches = [one.seq]
        return self.read[one.seq], marks

    def __call__(self, inputs, cache=None):
        seq = cache[0]
        self.clock.now += self.cost(inputs.shape[1], self.read[seq])
        self.read[seq] += inputs.shape[1]
        return mx.zeros((1, 1, 1))

    def chunk(self, one, tokens, seconds):
        self.chunks.append((one.seq, tokens))

    def mark(self, one, length):
        assert self.read[one.seq] == length
        self.marks.append((one.seq, length))

    def insert(self, seq, length, **options):
        self.lane.insert(row(seq, [5] * length, **options))

    def run(self, budget=None, enough=1000, patience=None):
        return [one.seq for one in self.lane.run(budget, enough, patience)]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def bench(clock):
    return Bench(clock, lambda tokens, position: 2 * MS + tokens * MS / 4)


# ---------------------------------------------------------------- chunks
def test_full_chunks_come_from_the_list_and_the_last_one_has_any_length(bench):
    bench.insert(0, 5000)
    assert bench.run() == [0]
    assert bench.chunks == [(0, 2048), (0, 2048), (0, 903)]
    assert bench.read[0] == 4999, "the last token goes through the decode lane"
    assert len(bench.lane) == 0


def test_where_each_chunk_is_planned_a_long_prompt_is_read_in_few(clock, monkeypatch):
    """A pass takes 55 ms for its plan and 10 us a token; a budget of a second still bounds each chunk."""
    monkeypatch.setattr(prefill, "longest_chunk", lambda: 8 * 2048)
    monkeypatch.setattr(prefill, "chunk_growth", lambda: 8)
    quick = Bench(clock, lambda tokens, position: 55 * MS + tokens * MS / 100)
    quick.insert(0, 30_001)
    while not quick.run(budget=1.0):
        pass
    assert quick.read[0] == 30_000
    assert len(quick.chunks) <= 5

    slow = Bench(clock, lambda tokens, position: 55 * MS + tokens * MS / 2)
    slow.insert(0, 30_001)
    while not slow.run(budget=1.0):
        pass
    assert max(size for _, size in slow.chunks) <= 2048


def test_a_prompt_of_one_token_needs_no_chunk(bench):
    bench.insert(0, 1)
    assert bench.run(budget=1.0) == [0]
    assert bench.chunks == []


def test_what_the_prefix_cache_holds_is_not_read_again(bench):
    bench.begins = {0: (90, []), 1: (99, [])}
    bench.insert(0, 100)
    bench.insert(1, 100)
    assert sorted(bench.run()) == [0, 1]
    assert bench.chunks == [(0, 9)]


def test_chunks_end_exactly_at_the_marks_whatever_order_they_come_in(bench):
    bench.begins = {0: (50, [400, 100, 100, 30, 50, 299, 299, 300, 999, 0])}
    bench.insert(0, 301)
    assert bench.run(budget=0.040) == []
    while bench.run(budget=0.040) != [0]:
        pass
    assert bench.marks == [(0, 100), (0, 299), (0, 300)]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 3000),
    held=st.integers(0, 200),
    marks=st.lists(st.integers(0, 3200), max_size=5),
    budget=st.sampled_from([None, 0.001, 0.03, 0.2]),
)
def test_every_token_is_read_once_and_every_mark_within_is_hit(length, held, marks, budget):
    held = min(held, length - 1)
    bench = Bench(Clock(), lambda tokens, position: 2 * MS + tokens * MS / 4)
    bench.begins = {0: (held, marks)}
    bench.insert(0, length)
    while not bench.run(budget):
        pass
    assert bench.read[0] == length - 1
    assert bench.marks == [(0, mark) for mark in sorted(set(marks)) if held < mark < length]
    stops = [held, *(mark for _, mark in bench.marks), length - 1]
    odd = [size for _, size in bench.chunks if size not in CHUNKS]
    assert len(odd) <= len(stops) - 1
    assert all(size >= 1 for _, size in bench.chunks)


# ---------------------------------------------------------------- the budget
def trials(bench):
    """How often a length may have been tried that was too long."""
    return 2 + (max(map(len, (bench.chunks, bench.shapes))) // FORGOTTEN).bit_length()


@pytest.mark.parametrize("budget", [0.05, 0.1, 0.25])
@pytest.mark.parametrize("each", [0.05, 0.25, 1.0], ids=lambda ms: f"{ms} ms a token")
def test_the_budget_holds_from_the_first_prompts_on(clock, budget, each):
    """Short prompts first, whose chunks say little of long ones; then a long one beside running rows. A length that
    that hasn't been tried may take two budgets, twice, and once more when that is long ago."""
    bench = Bench(clock, lambda tokens, position: 2 * MS + tokens * each * MS)
    for seq in range(3):
        bench.insert(seq, 6)
        bench.run(budget)
    bench.insert(9, 40_000)
    smallest = 2 * MS + 64 * each * MS
    spent = []
    while True:
        before = clock.now
        done = bench.run(budget)
        spent.append(clock.now - before)
        if done:
            break
    assert max(spent) <= 2 * max(budget, smallest) + 1e-9
    assert sum(seconds > max(budget * 1.15, smallest) + 1e-9 for seconds in spent) <= trials(bench)
    assert np.mean(spent[:-1]) >= min(budget, smallest) * 0.5, "what there is of a budget is used"


def test_chunks_get_long_where_a_pass_takes_the_same_time_however_long_it_is(clock):
    bench = Bench(clock, lambda tokens, position: 80 * MS + tokens * MS / 1000)
    bench.insert(0, 63)
    bench.run(0.1)
    bench.insert(1, 40_000)
    while not bench.run(0.1):
        pass
    assert [size for seq, size in bench.chunks if seq][:11:2] == [64, 128, 256, 512, 1024, 2048]


class Together(Bench):
    """Rows share passes; `cost(tokens of all rows, tokens a row)` seconds each, and `new` more for the first of a
    shape."""

    def __init__(self, clock, cost, monkeypatch, new=0.0):
        super().__init__(clock, lambda tokens, position: 0.0)
        self.share, self.new, self.known = cost, new, set()
        self.lane = self.make_lane(joint_prefill=JointPrefill("padded"))
        monkeypatch.setattr(module, "read_together", self.read_together)

    def __call__(self, inputs, cache=None):
        self.take(*inputs.shape)
        return super().__call__(inputs, cache)

    def take(self, rows, width):
        self.shapes.append((rows, width))
        self.clock.now += self.share(rows * width, width) + (self.new if (rows, width) not in self.known else 0.0)
        self.known.add((rows, width))

    def read_together(self, model, caches, texts):
        self.take(len(texts), len(texts[0]))
        return ["caches"]

    def burst(self, first, count, length, budget):
        """Seconds of each run."""
        for seq in range(first, first + count):
            self.insert(seq, length)
        spent = []
        while len(self.lane):
            before = self.clock.now
            self.run(budget)
            spent.append(self.clock.now - before)
        return spent


@pytest.mark.parametrize("new", [0, 2.5], ids=["", "first of its shape 2.5 s"])
@pytest.mark.parametrize("fixed", [8, 60, 130, 400])
@pytest.mark.parametrize("alone", [True, False])
def test_many_short_prompts_are_read_together_where_a_pass_takes_long_anyway(clock, monkeypatch, fixed, new, alone):
    """On such a device the number of rows is no matter, and only trying shows it."""
    bench = Together(clock, lambda tokens, width: fixed * MS + tokens * MS / 1000, monkeypatch, new)
    if alone:  # nothing else runs, and the first pass is a large one
        bench.burst(900, 32, 64, 1.0)
    for burst in range(6):
        bench.burst(100 * burst, 64, 64, 0.1)
    bench.shapes.clear()
    bench.burst(700, 64, 64, 0.1)
    assert len(bench.shapes) <= 3, "the bursts before have shown it"


@pytest.mark.parametrize("each", [0.25, 1, 3], ids=lambda ms: f"{ms} ms a token")
def test_the_budget_bounds_a_shared_pass_too(clock, monkeypatch, each):
    bench = Together(clock, lambda tokens, width: 2 * MS + tokens * each * MS, monkeypatch)
    smallest = 2 * MS + 64 * each * MS
    spent = bench.burst(0, 64, 33, 0.1)
    assert max(spent) <= 2 * max(0.1, smallest)
    assert sum(seconds > max(0.115, smallest) for seconds in spent) <= trials(bench)


def test_bursts_of_short_prompts_say_nothing_of_a_long_one(clock, monkeypatch):
    """Whose tokens attend to each other."""
    bench = Together(clock, lambda tokens, width: tokens * MS * (0.05 + width / 1000), monkeypatch)
    for burst in range(8):
        bench.burst(100 * burst, 32, 64, 0.1)
    assert max(rows * width for rows, width in bench.shapes) > 500
    assert max(bench.burst(9000, 1, 4000, 0.1)) < 0.15


def test_the_budget_holds_as_a_long_prompt_gets_slower(clock):
    bench = Bench(clock, lambda tokens, position: 2 * MS + tokens * (0.05 + position / 20_000) * MS)
    bench.insert(0, 20_000)
    spent = []
    while True:
        before = clock.now
        done = bench.run(0.1)
        spent.append(clock.now - before)
        if done:
            break
    assert max(spent) <= 0.1 * 2
    assert sum(seconds > 0.1 * 1.25 for seconds in spent) <= trials(bench)


class Scoring(Bench):
    """A model of which a scored token takes twenty times as long as another."""

    def __call__(self, inputs, cache=None):
        super().__call__(inputs, cache)
        if cache[0] < 100:
            return mx.zeros((1, 1, 1))
        self.clock.now += inputs.shape[1] * MS
        return mx.zeros((1, inputs.shape[1], 7))


def test_the_budget_holds_for_scored_prompts_after_and_before_others(clock):
    bench = Scoring(clock, lambda tokens, position: tokens * MS / 20)
    spent = {}
    for seq, scored in ((0, False), (100, True), (1, False), (101, True)):
        bench.insert(seq, 3000, prompt_logprobs=scored, logprobs=1)
        while True:
            before = clock.now
            done = bench.run(0.1)
            spent.setdefault(seq, []).append(clock.now - before)
            if done:
                break
    assert max(map(max, spent.values())) <= 0.1 * 2
    assert len(spent[1]) <= 4, "what scores cost says nothing of a prompt without"


def test_without_running_rows_there_is_no_budget_and_a_prompt_is_read_in_the_largest_chunks(bench):
    bench.insert(0, 8193)
    assert bench.run(budget=None) == [0]
    assert {size for _, size in bench.chunks} == {2048}


@pytest.mark.parametrize(("room", "largest"), [(10**9, 2048), (2048, 2048), (1500, 1024), (64, 64), (0, 64)])
def test_a_chunk_is_no_longer_than_memory_has_room_for_and_every_prompt_is_read(bench, room, largest):
    bench.lane = bench.make_lane(most=lambda: room)
    bench.insert(0, 8193)
    assert bench.run() == [0]
    assert {size for _, size in bench.chunks} == {largest}


def test_one_slow_first_time_does_not_rule_a_chunk_length_out_for_ever(clock):
    slow = [True]

    def cost(tokens, position):
        extra = 5.0 if tokens == 512 and slow and slow.pop() else 0.0
        return 1 * MS + tokens * 0.1 * MS + extra

    bench = Bench(clock, cost)
    bench.insert(0, 60_000)
    while not bench.run(0.06):
        pass
    sizes = [size for _, size in bench.chunks]
    first = sizes.index(512)
    assert sizes[first + 1] < 512
    assert 512 in sizes[first + 1 :]


def test_a_few_tokens_say_nothing_of_the_pace_of_many():
    timing = ChunkTiming()
    assert timing.seconds(64) is None
    timing.learn(3, 0.020)
    assert timing.seconds(2048) >= 0.020 * 2048 / 3 * 0.99, "while nothing else is known: the careful guess"
    for _ in range(8):
        timing.learn(256, 0.050)
    known = timing.seconds(256)
    for _ in range(20):
        timing.learn(5, 0.019)
    assert timing.seconds(256) == known == pytest.approx(0.050)
    timing.learn(100, 0.050)
    assert timing.seconds(64) < 0.050


# ---------------------------------------------------------------- fairness
def finish_order(bench, budget, arrivals, runs=2000):
    """Sequences in the order of their completion; `arrivals` by run: (seq, length)."""
    order = []
    for run in range(runs):
        for seq, length in arrivals.get(run, ()):
            bench.insert(seq, length)
        order += bench.run(budget)
        if not len(bench.lane) and run >= max(arrivals):
            break
    return order


@pytest.mark.parametrize("budget", [0.02, 0.1, 0.4], ids=["one chunk a run", "some", "many"])
def test_a_stream_of_short_prompts_does_not_starve_a_long_one(bench, budget):
    arrivals = {0: [(0, 4000)]} | {run: [(run, 60)] for run in range(1, 600)}
    order = finish_order(bench, budget, arrivals)
    ideal = 4000 * MS / 4
    assert 0 in order[:-1], "the long one ends while short ones still arrive"
    chunks_before = bench.chunks[: max(i for i, (seq, _) in enumerate(bench.chunks) if seq == 0) + 1]
    share = sum(size for seq, size in chunks_before if seq == 0) / sum(size for _, size in chunks_before)
    assert share >= 0.3, (share, ideal)


@pytest.mark.parametrize("budget", [0.02, 0.1, 0.4], ids=["one chunk a run", "some", "many"])
def test_a_long_prompt_does_not_hold_up_short_ones(bench, budget):
    arrivals = {0: [(0, 20_000)]} | {run: [(run, 60)] for run in range(1, 40, 4)}
    waited = {}
    for run in range(60):
        for seq, length in arrivals.get(run, ()):
            bench.insert(seq, length)
            waited[seq] = -run
        for seq in bench.run(budget):
            waited[seq] += run
    assert max(runs for seq, runs in waited.items() if seq) <= 2


def test_the_oldest_of_many_long_ones_is_not_left_behind(bench):
    arrivals = {0: [(0, 3000)]} | {run: [(run, 2900 - run)] for run in range(1, 30)}
    order = finish_order(bench, 0.1, arrivals)
    assert order.index(0) <= 3


def test_enough_complete_prompts_end_a_run_early(bench):
    for seq in range(10):
        bench.insert(seq, 60)
    assert len(bench.run(budget=10.0, enough=4)) == 4
    assert len(bench.run(budget=10.0, enough=4)) == 4
    assert len(bench.run(budget=10.0, enough=4)) == 2


def test_a_complete_prompt_waits_for_longer_ones_only_as_long_as_running_rows_would(bench):
    bench.insert(9, 200)
    bench.run()  # the pace is learned
    for seq, length in enumerate((60, 4000, 4000)):
        bench.insert(seq, length)
    before = bench.clock()
    assert bench.run(budget=10.0, enough=4, patience=0.1) == [0]
    assert bench.clock() - before < 0.15
    while len(bench.lane):
        bench.run(budget=10.0, enough=4, patience=0.1)


def test_rows_that_are_not_ready_stay_and_do_not_hold_others_up(bench):
    for seq in range(6):
        bench.insert(seq, 60, grammar=answer({"type": "boolean"}))
    for seq in range(6, 12):
        bench.insert(seq, 60)
    assert bench.run(10.0, 4) == [6, 7, 8, 9]
    assert bench.run(10.0, 4) == [10, 11]
    assert bench.run(10.0, 4) == []
    assert len(bench.lane) == 6
    for one in bench.lane.rows.values():
        one.constraint = one.constraint or object()  # its grammar is compiled
    assert len(bench.run()) == 6


def test_a_cancelled_prompt_leaves_at_once_read_or_not(bench):
    bench.insert(0, 5000)
    bench.insert(1, 5000)
    bench.run(budget=0.05)
    for _ in range(2):
        bench.lane.remove(0)
    assert bench.run() == [1]


def test_a_failed_chunk_names_its_row_and_loses_no_other(clock):
    def cost(tokens, position):
        if tokens == 77:
            raise ValueError("boom")
        return MS

    bench = Bench(clock, cost)
    bench.insert(0, 40)
    bench.insert(1, 78)
    bench.insert(2, 400)
    with pytest.raises(OperationFailure) as caught:
        bench.run()
    assert caught.value.seqs == (1,)
    assert str(caught.value.__cause__) == "boom"
    bench.lane.remove(1)
    assert sorted(bench.run()) == [0, 2]


# ---------------------------------------------------------------- with a model
def lane(rig, **callbacks):
    def begin(one):
        one.caches = make_prompt_cache(rig.raw)
        return 0, callbacks.get("marks", [])

    return Lane(rig.raw, rig.guard, on_begin=begin, on_mark=callbacks.get("on_mark", lambda *_: None))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_text_after_chunks_and_marks_is_that_of_one_whole_read(family):
    rig = Rig(family)
    one = row(0, prompt(300), max_tokens=6)
    alone = rig.alone(one)
    seen = []
    reading = lane(rig, marks=[7, 64, 130, 299], on_mark=lambda r, n: seen.append(n))
    reading.insert(one)
    rows = []
    while not rows:
        rows = reading.run(1e-6, 1)
    batch = rig.batch()
    batch.join(rows)
    rig.run(batch)
    rig.assert_as_alone(one, alone)
    assert seen == [7, 64, 130, 299]


@pytest.mark.parametrize("alternatives", [0, 3])
def test_prompt_logprobs_are_those_of_the_whole_prompt_across_chunks(alternatives):
    rig = Rig("llama")
    one = row(0, prompt(200), max_tokens=1, prompt_logprobs=True, logprobs=alternatives)
    reading = lane(rig)
    reading.insert(one)
    while not reading.run(1e-6, 1):
        pass
    logits = np.float64(np.array(rig.raw(mx.array([one.tokens[:-1]]))[0]))
    plain = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    assert len(one.prompt_scores) == 199
    for entry, values, token in zip(one.prompt_scores, plain, one.tokens[1:], strict=True):
        assert entry.logprob == pytest.approx(values[token], abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx(
            np.sort(values)[::-1][:alternatives].tolist(), abs=1e-3
        )


def test_a_resumed_row_does_not_score_what_was_scored_before():
    rig = Rig("llama")
    one = row(0, prompt(50), max_tokens=9, prompt_logprobs=True, generated=[7, 8])
    reading = lane(rig)
    reading.insert(one)
    assert reading.run(None, 1) == [one]
    assert one.prompt_scores == []
