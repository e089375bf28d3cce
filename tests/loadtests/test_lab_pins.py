"""What keeps buffers alive in MLX and mlx-lm, as facts measured with the native counter.

Each fact is a reason for something that Marathon does. When one of these tests fails, an upstream release has changed
the fact: look whether the reason still stands. Each has its cure beside it.
"""

import gc

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList

from server.cache_guard import cache_arrays, compact, is_pending, settle
from server.memory.allocator import CountUnavailable
from server.memory.native_count import open_count

STEPS, ROWS, VOCAB = 120, 4, 512
WHOLE = ROWS * VOCAB * 4  # bytes of one step's logits


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    try:
        count = open_count(tmp_path_factory.mktemp("native"), None)
    except CountUnavailable as reason:
        pytest.skip(str(reason))
    yield count
    count.remove()


@pytest.fixture
def per_step(counter):
    """Live buffers and active bytes that each step of `step(i)` leaves behind."""

    def measure(step):
        for i in range(5):
            step(i)
        gc.collect()
        mx.synchronize()
        live, active = counter.difference(), mx.get_active_memory()
        for i in range(STEPS):
            step(i)
        mx.synchronize()
        return (counter.difference() - live) / STEPS, (mx.get_active_memory() - active) / STEPS

    return measure


def logits_of(i):
    return mx.random.normal((ROWS, VOCAB)) * (i + 1)


def logprobs_of(i):
    logits = logits_of(i)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@pytest.fixture(autouse=True)
def empty_pool():
    """A pooled buffer that is reused may be a bit larger than what asks for it."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()


def about(size):
    return pytest.approx(size, rel=0.3)


FLAT = pytest.approx(0, abs=0.05)
ONE = pytest.approx(1, abs=0.05)
NO_BYTES = pytest.approx(0, abs=64)
ALL_BYTES = pytest.approx(WHOLE, rel=0.1)


# ---------------------------------------------------------------- what a step's numbers pin
def test_one_kept_row_of_logprobs_pins_the_whole_batchs(per_step):
    kept = []

    def step(i):
        logprobs = logprobs_of(i)
        kept.append(logprobs[1])
        mx.eval(logprobs)

    live, size = per_step(step)
    assert live >= 0.95
    assert size == ALL_BYTES


def test_a_kept_slice_pins_the_whole_batchs_even_evaluated(per_step):
    kept = []

    def step(i):
        kept.append(logprobs_of(i)[1:2])
        mx.eval(kept[-1])

    assert per_step(step) == (ONE, ALL_BYTES)
    assert mx.get_array_buffer_size(kept[-1]) == about(WHOLE)


def test_a_row_taken_by_its_number_owns_its_bytes_once_evaluated(per_step):
    kept = []

    def step(i):
        kept.append(logprobs_of(i)[1])
        mx.eval(kept[-1])

    assert per_step(step) == (ONE, pytest.approx(WHOLE / ROWS, rel=0.1))


def test_one_kept_logprob_pins_the_whole_batchs_too(per_step):
    kept = []

    def step(i):
        logprobs = logprobs_of(i)
        kept.append(logprobs[1][7])
        mx.eval(logprobs)

    live, size = per_step(step)
    assert live >= 0.95
    assert size >= 0.9 * WHOLE


def test_kept_top_k_indices_pin_the_whole_batchs(per_step):
    kept = []

    def step(i):
        kept.append(mx.argpartition(-logprobs_of(i), 5, axis=-1)[..., :5])
        mx.eval(kept[-1])

    assert per_step(step) == (ONE, ALL_BYTES)


def test_numbers_taken_to_the_host_pin_nothing(per_step):
    kept = []

    def step(i):
        logprobs = logprobs_of(i)
        top = mx.argpartition(-logprobs, 5, axis=-1)[..., :5]
        mx.eval(logprobs, top)
        kept.append((logprobs[1, 7].item(), logprobs[1].tolist(), top.tolist()))

    assert per_step(step) == (FLAT, NO_BYTES)


# ---------------------------------------------------------------- state of processors and samplers
class Counting:
    """A processor or sampler that keeps an array of its own."""

    def __init__(self):
        self.seen = mx.zeros(ROWS)

    def update(self):
        self.seen = self.seen + 1


def test_state_that_no_logit_reads_chains_one_buffer_a_step(per_step):
    state = Counting()

    def step(i):
        state.update()
        mx.eval(mx.argmax(logits_of(i), axis=-1))

    assert per_step(step)[0] == ONE
    assert is_pending([state.seen])


def test_state_that_the_logits_read_does_not_chain(per_step):
    state = Counting()

    def step(i):
        state.update()
        mx.eval(mx.argmax(logits_of(i) + state.seen[:, None], axis=-1))

    assert per_step(step)[0] == FLAT


def test_state_submitted_with_the_step_does_not_chain(per_step):
    state = Counting()

    def step(i):
        state.update()
        mx.eval(mx.argmax(logits_of(i), axis=-1), cache_arrays([state]))

    assert per_step(step)[0] == FLAT
    assert not is_pending([state.seen])


def test_a_history_of_tokens_that_is_never_read_chains_and_evaluated_it_does_not(per_step):
    history = [mx.zeros((1,), mx.int32)]

    def grow(i):
        token = mx.argmax(logits_of(i)[:1], axis=-1)
        history[0] = mx.concatenate([history[0], token])
        mx.eval(token)

    assert per_step(grow)[0] == ONE
    mx.eval(history)

    def grow_and_evaluate(i):
        grow(i)
        mx.eval(history)

    assert per_step(grow_and_evaluate)[0] == FLAT


def test_random_keys_do_not_chain(per_step):
    assert per_step(lambda i: mx.eval(mx.random.categorical(logits_of(i))))[0] == FLAT


# ---------------------------------------------------------------- extracted caches
def arrays_cache(rows=8, width=4096):
    cache = ArraysCache(2)
    cache.cache = [mx.random.normal((rows, width)), mx.random.normal((rows, width))]
    settle([cache])
    return cache


def kv_cache(rows=8, positions=300):
    cache = BatchKVCache([positions - 31, *[0] * (rows - 1)])
    cache.update_and_fetch(*(mx.random.normal((rows, 2, positions, 16)) for _ in range(2)))
    settle([cache])
    return cache


def test_an_extracted_row_pins_its_batch_until_it_is_evaluated():
    batch = kv_cache()
    row = batch.extract(0)
    assert is_pending(cache_arrays([row]))
    whole = mx.get_array_buffer_size([batch.keys, batch.values])
    before = mx.get_active_memory()
    del batch
    gc.collect()
    assert before - mx.get_active_memory() < whole / 100  # nothing came back
    settle([row])
    assert before - mx.get_active_memory() > whole * 0.9
    assert mx.get_array_buffer_size([row.keys, row.values]) == about(2 * 2 * 31 * 16 * 4)


def test_an_extracted_recurrent_row_pins_its_batch_even_then():
    batch = arrays_cache()
    row = batch.extract(3)
    settle([row])
    assert mx.get_array_buffer_size(row.cache) == mx.get_array_buffer_size(batch.cache)
    assert compact([row]) == about(2 * 4096 * 4)


def test_a_nested_row_is_freed_of_its_batch_by_compaction():
    batch = CacheList(arrays_cache(), kv_cache())
    row = batch.extract(0)
    assert compact([row]) == about(2 * 4096 * 4 + 2 * 2 * 31 * 16 * 4)


# ---------------------------------------------------------------- joins and leaves without a next step
def test_leaves_without_a_next_step_chain_and_settled_they_do_not(per_step):
    cache = arrays_cache(rows=4, width=16)
    cache.left_padding = mx.array([0] * 4)

    def leave(i):
        cache.filter(mx.array([0, 1, 2, 3]))
        mx.eval(cache.cache)  # what a step would read; the padding is not

    assert per_step(leave)[0] >= 0.95

    def leave_and_settle(i):
        leave(i)
        settle([cache])

    assert per_step(leave_and_settle)[0] == FLAT


def test_joins_chain_what_no_step_reads_and_settled_they_do_not(per_step):
    cache = arrays_cache(rows=1, width=16)
    cache.left_padding = mx.array([0])

    def join_and_leave(i):
        other = arrays_cache(rows=1, width=16)
        other.left_padding = mx.array([0])
        cache.extend(other)
        cache.filter(mx.array([1]))
        mx.eval(cache.cache)

    assert per_step(join_and_leave)[0] >= 0.95

    def and_settle(i):
        join_and_leave(i)
        settle([cache])

    assert per_step(and_settle)[0] == FLAT


def test_a_leave_without_a_next_step_keeps_the_rows_that_left():
    cache = kv_cache()
    whole = mx.get_array_buffer_size([cache.keys, cache.values])
    before = mx.get_active_memory()
    cache.filter(mx.array([1]))
    gc.collect()
    assert before - mx.get_active_memory() < whole / 100
    settle([cache])
    assert before - mx.get_active_memory() > whole * 0.8


# ---------------------------------------------------------------- the metadata that started it all
@pytest.mark.parametrize("guarded", [False, True], ids=["unguarded", "guarded"])
def test_metadata_that_no_logit_reads_chains_unless_it_is_submitted_too(per_step, guarded):
    state, kv = ArraysCache(1, [0] * ROWS), BatchKVCache([0] * ROWS)
    state.cache = [mx.zeros((ROWS, 8))]
    settle([state, kv])

    def step(i):
        state.advance(1)
        kv.offset = kv.offset + 1
        logits = logits_of(i)
        mx.async_eval(mx.argmax(logits, axis=-1), cache_arrays([state, kv]) if guarded else [])

    assert per_step(step)[0] == (FLAT if guarded else pytest.approx(2, abs=0.05))
