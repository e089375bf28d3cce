"""Penalties, bias and held-back stop ids equal a plain reference, whatever joins, leaves, moves and resumes."""

import random

import mlx.core as mx
import numpy as np
import pytest
from driving import Rig, prompt, row
from penalty_reference import VOCAB, reference

from server.compute.penalties import LogitAdjustments

WISHES = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.5, "frequency_penalty": -0.3},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.0, "presence_penalty": 0.2},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.4, "logit_bias": {3: -100.0, 5: 4.0}},
    {"logit_bias": {0: 100.0, VOCAB - 1: -2.5}},
    {"min_tokens": 4, "stop_ids": [1, 2]},
    {"min_tokens": 2, "stop_ids": [VOCAB - 1], "presence_penalty": 1.0},
    {"allowed": [3, 9, VOCAB - 1]},
    {"allowed": [3, 5], "logit_bias": {3: -2.0, 7: 90.0}, "min_tokens": 3, "stop_ids": [5]},
]


def assert_adjusted(adjust, rows, dtype=mx.float32):
    logits = mx.array(np.float32(np.random.default_rng(len(rows)).standard_normal((len(rows), VOCAB)) * 3)).astype(
        dtype
    )
    before = np.array(logits.astype(mx.float32))
    positions = np.array([one.produced for one in rows])
    after = np.array(adjust.apply(logits, positions).astype(mx.float32))
    wanted = [reference(one.sequence)(line, one.tokens) for line, one in zip(before, rows, strict=True)]
    np.testing.assert_allclose(after, np.array(wanted).reshape(after.shape), rtol=1e-5, atol=1e-5)
    assert np.array_equal(np.array(logits.astype(mx.float32)), before), "the caller's logits stay as they were"


def made(seq, wish, rng):
    tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 8))]
    generated = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 5]))]
    return row(seq, tokens, generated=generated, **wish)


def adjustments(*rows):
    return LogitAdjustments([(one.sequence, one.tokens, one.penalty_counts) for one in rows])


def draw(adjust, rows, rng):
    tokens = [rng.randrange(VOCAB) for _ in rows]
    adjust.count(mx.array(tokens, dtype=mx.uint32))
    for one, token in zip(rows, tokens, strict=True):
        one.tokens.append(token)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_each_wish_alone_equals_the_reference(wish, dtype):
    rng = random.Random(1)
    rows = [made(0, wish, rng)]
    adjust = adjustments(*rows)
    for _ in range(6):
        assert_adjusted(adjust, rows, dtype)
        draw(adjust, rows, rng)


@pytest.mark.parametrize("seed", range(8))
def test_any_mix_equals_the_reference_through_joins_leaves_and_moves(seed):
    """Random acts on two batches; a row that moves takes its counts along."""
    rng = random.Random(seed)
    batches = [(LogitAdjustments([]), []), (LogitAdjustments([]), [])]
    for seq in range(40):
        here = rng.randrange(2)
        adjust, rows = batches[here]
        act = rng.choice(["join", "join", "leave", "move", "step", "step", "step"])
        if act == "join":
            new = [made(seq, rng.choice(WISHES), rng) for _ in range(rng.randrange(1, 4))]
            batches[here] = adjust.join(adjustments(*new)), rows + new
        elif act == "leave" and rows:
            keep = sorted(rng.sample(range(len(rows)), rng.randrange(len(rows))))
            batches[here] = adjust.filter(keep), [rows[i] for i in keep]
        elif act == "move" and rows:
            i = rng.randrange(len(rows))
            moved, moved.penalty_counts = rows[i], adjust.extract(i)
            keep = [j for j in range(len(rows)) if j != i]
            batches[here] = adjust.filter(keep), [rows[j] for j in keep]
            other, others = batches[1 - here]
            batches[1 - here] = other.join(adjustments(moved)), [*others, moved]
            moved.penalty_counts = None
        for adjust, rows in batches:
            if rows:
                assert_adjusted(adjust, rows)
                if act == "step":
                    draw(adjust, rows, rng)


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_a_row_draws_only_what_it_is_allowed_and_its_mates_draw_as_ever(temperature):
    rig = Rig("llama")
    rows = [row(0, prompt(4), temperature=temperature, allowed=[7, 9]), row(1, prompt(9), max_tokens=12)]
    alone = rig.alone(rows[1])[0]
    batch = rig.batch()
    rig.join(batch, *rig.read(*rows))
    rig.run(batch)
    assert set(rig.tokens[0]) <= {7, 9}
    assert len(rig.tokens[0]) == 16
    assert rig.tokens[1] == alone


def test_rows_that_ask_for_nothing_are_passed_through_untouched():
    logits = mx.zeros((2, VOCAB), dtype=mx.bfloat16)
    adjust = adjustments(row(0, [1]), row(1, [2], stop_ids=[3]))
    assert adjust.apply(logits, np.zeros(2)) is logits
    adjust.count(mx.array([1, 2]))
    assert adjust.state == []


def test_what_travels_with_a_row_holds_its_own_bytes_only():
    wish = {"presence_penalty": 1.0}
    rows = [row(i, prompt(3, i), **wish) for i in range(16)]
    adjust = adjustments(*rows)
    adjust.apply(mx.zeros((16, 2048)), np.zeros(16))
    adjust.count(mx.arange(16))
    kept = adjust.extract(3)
    assert mx.get_array_buffer_size([kept]) <= 2 * 2048 * 4


def test_counts_go_on_where_they_were_at_20_000_tokens_of_output():
    one = row(0, [1, 2], generated=[7] * 20_000 + [8], frequency_penalty=0.001, presence_penalty=0.5)
    assert_adjusted(adjustments(one), [one])


def test_text_with_penalties_and_bias_in_a_batch_of_uneven_rows_is_that_of_the_plain_loop():
    """The whole way: a batch of the engine with joins, leaves, moves and a resumed row against one row at a time."""
    rig = Rig("llama")
    warm = {"temperature": 0.9, "seed": 5}
    rows = [
        row(0, prompt(4), max_tokens=16, repetition_penalty=1.5),
        row(1, prompt(12), max_tokens=12, presence_penalty=2.0, frequency_penalty=1.0, **warm),
        row(2, prompt(30), max_tokens=14, logit_bias={9: 8.0, 11: 8.0, 13: -100.0}, **warm),
        row(3, prompt(7), max_tokens=9),
        row(4, prompt(5), max_tokens=12, generated=prompt(4, 4), frequency_penalty=2.0, logit_bias={20: 9.0}, **warm),
        row(5, prompt(6), max_tokens=12, stop_ids=list(range(0, 2048, 2)), min_tokens=5, temperature=0.7),
        row(6, prompt(1), max_tokens=8, frequency_penalty=-1.5, repetition_penalty=0.7),
    ]
    alone = [rig.alone(one, reference(one.sequence)) for one in rows]
    first, second = rig.batch(), rig.batch()
    rig.join(first, *rig.read(*rows[:4]))
    rig.step(first, 3)
    first.leave([rows[0], rows[2]], keep_caches=True)
    rig.join(second, rows[2])
    rig.join(first, *rig.read(rows[4], rows[5]))
    rig.step(first, 2)
    rig.step(second, 1)
    rig.join(second, rows[0], *rig.read(rows[6]))
    rig.step(second, 2)
    first.leave([rows[1]], keep_caches=True)
    rig.join(second, rows[1])
    rig.run(first, second)
    for one, (tokens, _) in zip(rows, alone, strict=True):
        assert rig.tokens[one.seq] == tokens, one.seq
    assert rig.finish[5] == "stop"
    assert len(rig.tokens[5]) >= 6
    assert rig.snapshot.pending == 0
