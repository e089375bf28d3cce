"""May this sequence start, wait, or never fit?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import ContextLengthError, ExceedsMemory
from server.ipc.messages import Ready
from server.ipc.probe import GROWTH, LayerCost, Probe
from server.ipc.sequence import Sampling, TokenSequence
from server.supervision.admission import Capacity, Outlook, Room

FULL = LayerCost(0, 10)
SLIDING = LayerCost(0, 10, cap=512)
STATE = LayerCost(5000, 0)


def ready(
    *layers: LayerCost, limit: int = 0, context: int = 4096, weights: int = 1000, chunk: int = 0, pair: int = 0
) -> Ready:
    probe = Probe(100, "batched", list(layers), chunk, 0, pair_bytes=pair)
    return Ready(
        epoch=1, pid=1, probe=probe, context=context, weights_bytes=weights,
        model_type="t", quantization="none", device="cpu", mlx="0", mlx_lm="0", load_seconds=0, memory_limit=limit,
    )  # fmt: skip


def capacity(*layers: LayerCost, max_rows: int = 32, context: int | None = None, **fields: int) -> Capacity:
    return Capacity(ready(*layers, **fields), context, max_rows)


def sequence(prompt: int, max_tokens: int = 100) -> TokenSequence:
    return TokenSequence([1] * prompt, Sampling(seed=0), max_tokens)


def test_a_row_costs_the_sum_of_its_arrays_each_growing_in_its_own_way():
    c = capacity(FULL, FULL, SLIDING, STATE)
    assert c.cost(1) == 3 * 2560 + 5000
    assert c.cost(256) == c.cost(1)
    assert c.cost(257) == 3 * 5120 + 5000
    assert c.cost(1000) == 2 * 10240 + 5120 + 5000


def test_the_largest_array_is_what_a_join_copies():
    assert capacity(FULL, STATE).largest(10) == 5000
    assert capacity(FULL, STATE).largest(600) == 7680
    assert capacity().largest(600) == 0


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_both_numbers():
    capacity(context=100).check(sequence(99))
    with pytest.raises(ContextLengthError, match=r"context length is 100\b.*\b100 tokens") as caught:
        capacity(context=100).check(sequence(100))
    assert caught.value.status == 400
    reported = caught.value.body()["error"]
    assert (reported["n_prompt_tokens"], reported["n_ctx"]) == (100, 100), "llama.cpp's clients read them there"


def test_the_smaller_of_setting_and_model_is_the_context():
    assert capacity(context=100).context == 100
    assert capacity(context=9999).context == 4096
    assert capacity().context == 4096


def test_a_prompt_that_could_never_fit_is_refused_with_both_numbers():
    c = capacity(FULL, limit=1000 + 2560 * 2)
    c.check(sequence(255))
    with pytest.raises(ExceedsMemory, match=r"needs 11240 bytes.* limit is 6120 bytes"):
        c.check(sequence(256))


def test_an_unknown_memory_limit_refuses_no_request():
    capacity(FULL, context=10**9).check(sequence(4000))
    room = Room(capacity(FULL), [4000] * 31)
    assert room.admits_new(4000)


def test_rows_are_bounded_whatever_the_memory():
    room = Room(capacity(max_rows=2), [10])
    assert room.admits_new(10)
    room.take(10)
    assert not room.admits_new(10)


def test_new_rows_wait_for_bytes_and_the_peak_of_one_chunk():
    # weights 1000, three rows of 2560, as much for their joins, a chunk of 256 where 2048 need 800
    exact = 1000 + 100 + 3 * 2560 + 3 * 2560
    assert Room(capacity(FULL, limit=exact, chunk=800), [10, 10], unread=5000).admits_new(10, 3000)
    assert not Room(capacity(FULL, limit=exact - 1, chunk=800), [10, 10], unread=5000).admits_new(10, 3000)


def test_a_short_prompt_needs_its_part_of_the_largest_chunks_peak():
    exact = 1000 + 50 + 3 * 2560 + 3 * 2560
    assert Room(capacity(FULL, limit=exact, chunk=800), [10, 10]).admits_new(10, 128)
    assert not Room(capacity(FULL, limit=exact, chunk=800), [10, 10]).admits_new(10, 132)
    assert not Room(capacity(FULL, limit=exact, chunk=800), [10, 10], unread=132).admits_new(10)
    room = Room(capacity(FULL, limit=exact, chunk=800), [10])
    room.take(10, 132)
    assert not room.admits_new(10)


def test_what_a_chunk_may_take_refuses_no_request():
    """It is an estimate, and the engine reads a lone prompt in chunks as short as need be."""
    capacity(FULL, limit=1000 + 2 * 2560, chunk=800).check(sequence(128))
    with pytest.raises(ExceedsMemory):
        capacity(FULL, limit=1000 + 2 * 2560 - 1, chunk=800).check(sequence(128))


def test_a_chunk_of_a_long_prompt_attends_to_all_of_it():
    c = capacity(FULL, chunk=2048 * (5 + 2048 * 3), pair=3)
    assert c.peak(100) == 100 * (5 + 3 * 100)
    assert c.peak(256) == 256 * (5 + 3 * 256)
    assert c.peak(1000) == 256 * (5 + 3 * 1000)


def test_a_long_row_comes_back_beside_others_though_one_chunk_of_it_all_would_not_fit():
    exact = 1000 + 100 + 2560 + 8 * 2560 + 2560 + 8 * 2560
    room = Room(capacity(FULL, limit=exact, chunk=800), [10], calm=10)
    assert room.admits_preempted(1700)
    assert not Room(capacity(FULL, limit=exact, chunk=809), [10], calm=10).admits_preempted(1700)


def test_padding_of_the_groups_is_charged():
    c = capacity(FULL, limit=20_000)
    assert Room(c, [10, 10], padding=1.0).admits_new(10)
    assert not Room(c, [10, 10], padding=3.0).admits_new(10)


@pytest.mark.parametrize(
    ("pressure", "admitted"), [("calm", True), ("reclaim", True), ("hold", False), ("rotate", False)]
)
def test_hold_and_rotate_admit_nothing_new(pressure: str, admitted: bool):
    assert Room(capacity(), [10], pressure=pressure).admits_new(10) is admitted


def test_with_nothing_running_one_sequence_may_always_start():
    room = Room(capacity(FULL, limit=1), [], pressure="rotate")
    assert room.admits_new(4000)
    assert room.admits_preempted(4000)
    assert room.holds(4000)


def test_a_preempted_row_waits_for_calm_and_for_room_to_grow():
    c = capacity(FULL, limit=1000 + 2 * (2560 + 5120))
    assert Room(c, [10], calm=10).admits_preempted(200)
    assert not Room(c, [10], calm=9.9).admits_preempted(200)
    assert not Room(c, [10], calm=10, pressure="reclaim").admits_preempted(200)
    assert not Room(c, [10], calm=10).admits_preempted(200 + 2 * GROWTH)


def test_continued_rows_dont_mind_the_pressure():
    assert Room(capacity(), [10], pressure="hold").holds(10)


def test_room_is_planned_for_the_answers_that_one_sees():
    outlook = Outlook()
    assert outlook.length(sequence(10, max_tokens=100), 0) == 110
    assert outlook.length(sequence(10, max_tokens=9999), 0) == 10 + 256
    for _ in range(50):
        outlook.finished(600)
    assert outlook.length(sequence(10, max_tokens=9999), 0) == pytest.approx(610, abs=2)
    assert outlook.length(sequence(10, max_tokens=9999), 5000) == 5011
    outlook.preempted(1000)
    assert outlook.length(sequence(10, max_tokens=9999), 0) == 10 + 1000 + GROWTH


@given(st.lists(st.integers(1, 3000), max_size=20), st.integers(1, 3000), st.integers(1, 500_000))
def test_what_is_admitted_fits(lengths: list[int], length: int, limit: int):
    c = capacity(FULL, SLIDING, STATE, limit=limit)
    room = Room(c, lengths)
    if lengths and room.admits_new(length):
        assert c.weights + sum(map(c.cost, [*lengths, length])) <= limit
