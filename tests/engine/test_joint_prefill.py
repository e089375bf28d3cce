"""Prompts are read together where that changes nothing but the time: who goes along, and that the text is the same."""

import copy
import functools
import random

import mlx.core as mx
import pytest
from driving import CLOSE, Rig, model, prompt, row
from lanes import Lane
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from server.cache_guard import cache_arrays, parts, pinned_bytes
from server.compute import cudnn_shapes
from server.compute import merged_caches as together
from server.compute.merged_caches import MergedCaches
from server.engine import model as loading
from server.engine.joint_prefill import FULL, LONGEST, MOST_ROWS, POSITIONS, JointPrefill
from server.engine.plan import OperationFailure

PADDED = ["llama", "gemma3_text", "gpt_oss", "qwen3_5", "falcon_h1", "mamba2", "deepseek_v32", "kimi_linear"]
EVEN = ["nemotron_h", "rwkv7", "recurrent_gemma", "jamba"]


class Passes:
    """The model, and the shape of each of its forward passes."""

    def __init__(self, inner, fault=lambda inputs: False):
        self.inner, self.shapes, self.fault = inner, [], fault

    def __call__(self, inputs, cache=None):
        self.shapes.append(tuple(inputs.shape))
        if self.fault(inputs):
            raise ValueError("boom")
        return self.inner(inputs, cache=cache)


@pytest.fixture(params=[False, True], ids=["", "planned"])
def planned(request, monkeypatch):
    """Whether the device is one that plans shapes."""
    monkeypatch.setattr(cudnn_shapes, "is_planned", lambda: request.param)
    return request.param


def lane(inner, way, *, held=lambda one: 0, marks=(), waits=lambda one, mates: False, seen=None):
    """A prefill lane over a model; `held(row)` tokens of a row are in its caches already."""
    rig = Rig("llama")

    def begin(one):
        one.caches = make_prompt_cache(inner.inner)
        if size := held(one):
            inner.inner(mx.array([one.tokens[:size]]), cache=one.caches)
        return size, [*marks, len(one.tokens) - 1]

    return Lane(
        inner, rig.guard, on_begin=begin,
        on_mark=lambda one, length: seen.append((one.seq, length)) if seen is not None else None,
        joint_prefill=JointPrefill(way, waits),
    )  # fmt: skip


def read(reading, rows, budget=None, enough=10**6):
    for one in rows:
        reading.insert(one)
    done = []
    while len(reading):
        done += reading.run(budget, enough)
    return done


# ---------------------------------------------------------------- the same text
@functools.cache
def burst(family):
    """(rows of any lengths that have read nothing, what each of them says alone)."""
    rng = random.Random(family)
    lengths = [2, 3, 17, 33, 36, 40, 90, 150, 300]
    rows = [row(seq, prompt(rng.choice(lengths), seq), max_tokens=8) for seq in range(10)]
    rig = Rig(family)
    return rows, [rig.alone(one) for one in rows]


@pytest.mark.parametrize(("family", "way"), [(f, "padded") for f in PADDED] + [(f, "even") for f in EVEN])
def test_what_is_read_together_is_what_is_read_alone(family, way, planned):
    """Bursts of any lengths, some of them beyond a window, some on prefixes that were there already. What a pass leaves
    joins a batch as it is, with the rows that came before or come along."""
    raw, rig = model(family), Rig(family)
    rng = random.Random(family)
    prefixes = {seq: rng.choice([0, 0, 1, 21]) for seq in range(10)}
    fresh, alone = burst(family)
    rows = copy.deepcopy(fresh)
    passes, seen = Passes(raw), []
    reading = lane(passes, way, held=lambda one: min(prefixes[one.seq], len(one.tokens) - 1), marks=[37], seen=seen)
    for one in rows:
        reading.insert(one)
    batches, turns, gone = [rig.batch(), rig.batch()], 0, []
    while len(reading):
        done = reading.run(None, 3)
        turns += 1
        if turns == 3:
            gone.append(done.pop())  # cancelled; the others of its pass go on
        first = done[::2] if turns == 2 else done
        batches[0].join(first[::-1])
        batches[1].join([one for one in done if one not in first])
        rig.step(batches[0], 2)
    rig.run(*batches)
    assert max(shape[0] for shape in passes.shapes) > 1
    assert rig.snapshot.pending == 0
    for one in rows:
        if one not in gone:
            rig.assert_as_alone(one, alone[one.seq])
    goals = {one.seq: len(one.sequence.prompt) - 1 for one in rows}
    begun = {seq: min(prefixes[seq], goal) for seq, goal in goals.items()}
    ends = {(seq, mark) for seq, goal in goals.items() for mark in (37, goal)}
    assert set(seen) == {(seq, mark) for seq, mark in ends if begun[seq] < mark <= goals[seq]}


@pytest.mark.parametrize("family", [*PADDED, *EVEN, "llama4"])
def test_the_trial_finds_how_a_model_reads_together(family):
    raw = model(family)
    way = loading.reads_together(raw, loading.try_batching(raw)[1])
    assert way == ("padded" if family in PADDED else "even" if family in EVEN else "alone")


# ---------------------------------------------------------------- who goes along
@pytest.fixture(scope="module")
def llama():
    return model("llama")


def rows_of(*lengths, first=0, **options):
    return [row(first + i, prompt(length, i), **options) for i, length in enumerate(lengths)]


def test_a_burst_of_like_prompts_is_one_pass(llama):
    passes = Passes(llama)
    read(lane(passes, "padded"), rows_of(*range(57, 65)))
    assert passes.shapes == [(8, 63)]


def test_rows_of_a_pass_join_a_batch_without_being_taken_apart(llama, monkeypatch):
    monkeypatch.setattr(MergedCaches, "single", lambda *_: pytest.fail("taken apart"))
    rig = Rig("llama")
    rows = rows_of(*range(57, 65), max_tokens=3)
    alone = [rig.alone(one) for one in rows]
    batch = rig.batch()
    for half in (rows[:4], rows[4:]):
        batch.join(read(lane(Passes(llama), "padded"), half))
    rig.run(batch)
    for one, lonely in zip(rows, alone, strict=True):
        rig.assert_as_alone(one, lonely)


@pytest.mark.parametrize("way", ["padded", "even"])
def test_any_number_of_like_prompts_is_one_pass_of_few_shapes_where_each_is_planned(llama, way, planned):
    for count in range(1, MOST_ROWS + 1):
        passes = Passes(llama)
        read(lane(passes, way), rows_of(*[5] * count))
        rows = 1 << (count - 1).bit_length() if planned else count
        assert passes.shapes == [(rows, 4)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_what_stays_of_a_pass_pins_no_more_than_its_own(family):
    """A row that goes on without a longer row takes none of the padding along that stood for it."""
    inner = model(family)
    caches = together.read_together(
        inner, [make_prompt_cache(inner) for _ in range(3)], [prompt(20, 0), prompt(30, 1), prompt(300, 2)]
    )
    arrays = cache_arrays(together.kept(caches, [0, 1], compacting=True))
    assert pinned_bytes(arrays) <= 1.1 * sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("lengths", [(20, 20, 20), (20, 30, 5)], ids=["alike", "uneven"])
@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "kimi_linear"])
def test_recurrent_layers_go_on_from_a_pass_without_a_mask(family, lengths):
    """What was padding is read by then; a mask would be built, and applied to each state, at every step."""
    inner = model(family)
    fresh = [make_prompt_cache(inner) for _ in lengths]
    caches = together.read_together(inner, fresh, [prompt(length, i) for i, length in enumerate(lengths)])
    recurrent = [part for part in parts(caches) if type(part) is ArraysCache]
    assert recurrent
    assert all(part.left_padding is part.lengths is None for part in recurrent)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_pass_is_taken_apart_at_most_twice(family, monkeypatch):
    """However many of its rows are wanted alone."""
    calls, apart = [], together.taken_apart
    monkeypatch.setattr(
        together, "taken_apart", lambda caches, indices: calls.append(indices) or apart(caches, indices)
    )
    raw = model(family)
    rows = read(lane(Passes(raw), "padded"), rows_of(*range(57, 65)))
    for one in rows[::-1] + rows:
        fresh = make_prompt_cache(raw)
        raw(mx.array([one.tokens[:-1]]), cache=fresh)
        alone, single = (raw(mx.array([one.tokens[-1:]]), cache=copy.deepcopy(c))[0, -1] for c in (fresh, one.single()))
        assert float(mx.abs(alone - single).max()) < CLOSE * float(alone.std())
    assert sorted(map(len, calls)) == [1, 7]


def test_a_few_tokens_that_fit_no_even_pass_do_not_wait_for_ever(llama):
    reading, last = lane(Passes(llama), "even"), row(0, prompt(4))
    read(reading, rows_of(*[65] * 40, first=100), budget=10.0)  # the pace is known
    reading.insert(last)
    for seq in range(1, 40, 2):
        for one in rows_of(65, 65, first=seq):
            reading.insert(one)
        if last in reading.run(10.0, 1):
            break
    assert seq <= 9


def test_even_passes_are_few_whatever_the_lengths(llama):
    passes = Passes(llama)
    read(lane(passes, "even"), rows_of(*range(34, 66)))
    assert len(passes.shapes) <= 2 * 6
    assert sum(batch * width for batch, width in passes.shapes) == sum(range(33, 65)), "nothing is padded"


def test_padding_stays_a_small_part(llama):
    passes = Passes(llama)
    rng = random.Random(1)
    rows = rows_of(*(rng.randrange(2, 400) for _ in range(40)))
    read(lane(passes, "padded"), rows)
    assert len(passes.shapes) < 20
    assert sum(batch * width for batch, width in passes.shapes) <= sum(len(r.tokens) - 1 for r in rows) / FULL


def test_a_pass_is_bounded_in_rows_and_in_positions(llama):
    passes = Passes(llama)
    read(lane(passes, "padded"), rows_of(*[3] * (MOST_ROWS + 4)))
    assert passes.shapes == [(MOST_ROWS, 2), (4, 2)]
    passes.shapes.clear()
    read(lane(passes, "padded", held=lambda one: 600), rows_of(*[650] * 9))
    together = [shape for shape in passes.shapes if shape[1] == 49]
    assert together
    assert all(batch * 649 <= POSITIONS for batch, _ in together)


@pytest.mark.parametrize("way", ["padded", "even"])
def test_who_must_goes_alone(llama, way):
    passes = Passes(llama)
    rows = rows_of(40, 40, 40, LONGEST + 9)
    rows[0].rebuilds = 1
    rows += rows_of(40, first=4, prompt_logprobs=True)
    read(lane(passes, way), rows)
    assert sum(batch for batch, width in passes.shapes if batch > 1 and width <= 40) in (2, 2 * 4)
    assert sum(shape == (1, 39) for shape in passes.shapes) == 2


def test_a_model_that_reads_alone_does(llama):
    passes = Passes(llama)
    read(lane(passes, "alone"), rows_of(20, 20, 20))
    assert passes.shapes == [(1, 19)] * 3


def test_a_row_that_could_use_its_mates_prefix_waits_for_it(llama):
    passes = Passes(llama)
    families = {0: "a", 1: "a", 2: "b", 3: "b"}
    reading = lane(
        passes, "padded", waits=lambda one, mates: families[one.seq] in {families[mate.seq] for mate in mates}
    )
    read(reading, rows_of(*[40] * 4), enough=1)
    assert [shape[0] for shape in passes.shapes] == [2, 2]


def test_a_failed_pass_names_all_its_rows(llama):
    passes = Passes(llama, fault=lambda inputs: inputs.shape[0] > 1)
    reading = lane(passes, "padded")
    for one in [*rows_of(30, 31), *rows_of(300, first=2)]:
        reading.insert(one)
    with pytest.raises(OperationFailure) as caught:
        reading.run(None, 10)
    assert sorted(caught.value.seqs) == [0, 1]
    assert isinstance(caught.value.__cause__, ValueError)
