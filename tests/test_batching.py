"""Rows that share a forward pass get the text, the ends and the logprobs that they get alone."""

import copy
import functools

import mlx.core as mx
import numpy as np
import pytest
from driving import FAMILIES, Rig, prompt, row

BATCHING = [family for family in FAMILIES if family != "minimax_m3_vl"]


@pytest.fixture(params=[False, True], ids=["with the next step", "early"])
def early(request):
    """Whether the newest tokens are fetched before the next step."""
    return request.param


@functools.cache
def uneven(family):
    """(rows that have read nothing, what each of them says alone)."""
    seeded = {"temperature": 0.8, "seed": 7}
    rows = [
        row(0, prompt(5), max_tokens=34),
        row(1, prompt(40), max_tokens=22, **seeded),
        row(2, prompt(1), max_tokens=9),
        row(3, prompt(70), max_tokens=18, top_k=20, **seeded),
        row(4, prompt(31), max_tokens=12, generated=prompt(3, 9), top_p=0.9, **seeded),
        row(5, prompt(1, 1), max_tokens=5),
    ]
    rig = Rig(family)
    return rows, [rig.alone(one) for one in rows]


@pytest.mark.parametrize("family", BATCHING)
def test_text_in_a_batch_of_uneven_rows_with_joins_and_leaves_is_the_text_alone(family, early):
    """Windows (32 positions) turn over, rows of one token join others, rows leave and come back elsewhere."""
    rig = Rig(family, early=early)
    fresh, alone = uneven(family)
    rows = copy.deepcopy(fresh)
    first, second = rig.batch(), rig.batch()
    rig.join(first, *rig.read(rows[0], rows[1]))
    rig.step(first, 3)
    rig.join(first, *rig.read(rows[2], rows[3], rows[5]))
    rig.step(first, 4)
    first.leave([rows[1], rows[3]], keep_caches=True)
    rig.join(second, rows[3])
    rig.step(second, 1)
    rig.join(second, rows[1])
    rig.step(first, 1)
    rig.join(second, *rig.read(rows[4]))
    rig.step(second, 3)
    second.leave([rows[3]], keep_caches=True)
    rig.join(first, rows[3])
    rig.run(first, second)
    for one, lonely in zip(rows, alone, strict=True):
        rig.assert_as_alone(one, lonely)
        assert rig.finish[one.seq] == "length"
    assert rig.snapshot.pending == 0


# ---------------------------------------------------------------- ends
@pytest.fixture(scope="module")
def llama():
    """(tokens, logits) of ten rows alone, greedy, by prompt length."""
    rig = Rig("llama")
    return {length: rig.alone(row(length, prompt(length), max_tokens=14)) for length in (1, 4, 9, 20, 33)}


def started(rig, *rows):
    batch = rig.batch()
    rig.join(batch, *rig.read(*rows))
    return batch


def test_rows_end_at_their_own_limits_and_the_first_token_may_be_the_last(llama, early):
    rig = Rig("llama", early=early)
    limits = {1: 1, 4: 1, 9: 2, 20: 7, 33: 14}
    batch = started(rig, *(row(length, prompt(length), max_tokens=limit) for length, limit in limits.items()))
    rig.run(batch)
    for length, limit in limits.items():
        assert rig.tokens[length] == llama[length][0][:limit]
        assert rig.finish[length] == "length"


def test_a_drawn_stop_id_is_delivered_as_the_last_token_also_as_the_first_one(llama, early):
    rig = Rig("llama", early=early)
    fifth = llama[20][0][4]
    rows = [
        row(4, prompt(4), max_tokens=14, stop_ids=[llama[4][0][0]]),
        row(9, prompt(9), max_tokens=14, stop_ids=[2047]),
        row(20, prompt(20), max_tokens=14, stop_ids=[2000, fifth]),
    ]
    rig.run(started(rig, *rows))
    assert (rig.tokens[4], rig.finish[4]) == (llama[4][0][:1], "stop")
    assert (rig.tokens[20], rig.finish[20]) == (llama[20][0][: llama[20][0].index(fifth) + 1], "stop")
    assert (rig.tokens[9], rig.finish[9]) == (llama[9][0], "length"), "a stop id belongs to its own row"


def test_a_stop_id_drawn_at_the_limit_counts_as_stop(llama, early):
    rig = Rig("llama", early=early)
    third = llama[9][0][2]
    assert third not in llama[9][0][:2]
    rig.run(started(rig, row(9, prompt(9), max_tokens=3, stop_ids=[third]), row(4, prompt(4), max_tokens=3)))
    assert (rig.tokens[9], rig.finish) == (llama[9][0][:3], {9: "stop", 4: "length"})


def test_a_cancelled_row_leaves_the_others_as_they_were(llama, early):
    rig = Rig("llama", early=early)
    rows = [row(length, prompt(length), max_tokens=14) for length in (4, 9, 20, 33)]
    batch = started(rig, *rows)
    rig.step(batch, 5)
    batch.leave([rows[1], rows[3]])
    rig.step(batch, 3)
    batch.leave([rows[0]])
    rig.run(batch)
    assert rig.tokens[20] == llama[20][0]
    assert [len(rig.tokens[length]) for length in (4, 9, 33)] == [7, 4, 4]
    assert all(rig.tokens[length] == llama[length][0][: len(rig.tokens[length])] for length in (4, 9, 33))


def test_a_batch_that_all_rows_left_at_once_takes_new_rows(llama, early):
    rig = Rig("llama", early=early)
    rows = [row(length, prompt(length), max_tokens=14, logprobs=2) for length in (4, 9)]
    batch = started(rig, *rows)
    rig.step(batch, 4)
    batch.leave(rows)
    assert len(batch) == 0
    assert batch.caches == []
    rig.join(batch, *rig.read(row(20, prompt(20), max_tokens=14), row(1, prompt(1), max_tokens=14)))
    rig.run(batch)
    assert rig.tokens[20] == llama[20][0]
    assert rig.tokens[1] == llama[1][0]


def test_rows_that_leave_before_their_first_step_can_join_elsewhere(llama):
    rig = Rig("llama")
    rows = [row(length, prompt(length), max_tokens=14, logprobs=0) for length in (1, 4, 9)]
    first, second = started(rig, *rows), rig.batch()
    first.leave([rows[0], rows[1]], keep_caches=True)
    rig.join(second, rows[1], rows[0])
    rig.run(first, second)
    for length in (1, 4, 9):
        assert rig.tokens[length] == llama[length][0]
        assert len(rig.logprobs[length]) == 14


def test_no_forward_pass_runs_for_tokens_beyond_every_limit(llama, early):
    rig = Rig("llama", early=early)
    rig.run(started(rig, row(4, prompt(4), max_tokens=5), row(9, prompt(9), max_tokens=5)))
    assert len(rig.model.logits[4]) == 5


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_what_is_said_to_be_held_is_what_the_caches_hold(family):
    """A row's end may leave its newest token out of the caches, and a kept prefix must know."""
    rig = Rig(family)
    fourth = rig.alone(row(0, prompt(9), max_tokens=4))[0][3]
    rows = {"stop": row(0, prompt(9), max_tokens=30, stop_ids=[fourth]), "length": row(0, prompt(9), max_tokens=4)}
    for one in rows.values():
        batch = started(rig, one, row(1, prompt(30), max_tokens=one.sequence.max_tokens))
        while not (ended := batch.step().ended):
            pass
        assert one in [gone for gone, _ in ended]
        held = batch.held_tokens(one)
        assert held == one.tokens[: len(held)]
        caches = batch.single_caches(0)
        token = mx.array([[77]])
        fresh = rig.read(row(2, [*held, 77]))[0].caches
        apart = rig.raw(token, cache=caches) - rig.raw(token, cache=fresh)
        assert mx.max(mx.abs(apart)).item() < 1e-3


def test_a_long_run_keeps_no_list_that_grows_and_a_join_has_little_to_do():
    rig = Rig("llama")
    batch = started(rig, row(0, prompt(4), max_tokens=600))
    longest = 0
    while len(batch):
        rig.step(batch, 50)
        longest = max(longest, len(batch._history))
    assert longest <= 256
    assert (len(rig.tokens[0]), rig.finish[0]) == (600, "length")


# ---------------------------------------------------------------- logprobs
def assert_logprobs(rig, one, logits, tokens):
    reported = rig.logprobs[one.seq]
    assert len(reported) == len(tokens)
    for entry, values, token in zip(reported, logits, tokens, strict=True):
        plain = np.float64(values) - np.logaddexp.reduce(np.float64(values))
        assert entry.logprob == pytest.approx(plain[token], abs=1e-3)
        assert len(entry.top) == one.sequence.logprobs
        best = np.sort(plain)[::-1][: len(entry.top)]
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx([plain[i] for i, _ in entry.top], abs=1e-3)


def test_logprobs_can_be_those_of_named_tokens_beside_mates_who_want_the_likeliest():
    rig = Rig("llama")
    rows = [
        row(0, prompt(4), max_tokens=8, logprobs=2),
        row(1, prompt(9), max_tokens=8, logprobs=0, scored=[900, 7, 31]),
        row(2, prompt(5), max_tokens=8, logprobs=5, scored=[11]),
    ]
    alone = [rig.alone(one) for one in rows]
    batch = rig.batch()
    rig.join(batch, *rig.read(*rows))
    rig.run(batch)
    assert_logprobs(rig, rows[0], alone[0][1], alone[0][0])
    for one, (tokens, logits) in zip(rows[1:], alone[1:], strict=True):
        assert rig.tokens[one.seq] == tokens
        for entry, values in zip(rig.logprobs[one.seq], logits, strict=True):
            plain = np.float64(values) - np.logaddexp.reduce(np.float64(values))
            wanted = sorted(one.sequence.scored, key=lambda token: -plain[token])
            assert [token for token, _ in entry.top] == wanted
            assert [value for _, value in entry.top] == pytest.approx(plain[wanted].tolist(), abs=1e-3)


def test_logprobs_are_those_of_the_drawn_tokens_through_joins_leaves_and_moves(early):
    rig = Rig("llama", early=early)
    drawn = {"temperature": 1.2, "seed": 3}
    rows = [
        row(0, prompt(4), max_tokens=12, logprobs=3),
        row(1, prompt(9), max_tokens=17, **drawn),
        row(2, prompt(20), max_tokens=20, logprobs=0, **drawn),
        row(3, prompt(33), max_tokens=9, logprobs=20, presence_penalty=1.0, logit_bias={7: 5.0}, **drawn),
        row(4, prompt(1), max_tokens=6, logprobs=1),
    ]
    first, second, third = rig.batch(), rig.batch(), rig.batch()
    rig.join(first, *rig.read(rows[0], rows[1], rows[2]))
    rig.step(first, 4)
    first.leave([rows[0], rows[2]], keep_caches=True)
    rig.join(second, rows[2], rows[0])
    second.leave([rows[2]], keep_caches=True)  # again, before it was stepped
    rig.join(third, rows[2])
    rig.step(first, 2)
    rig.join(second, *rig.read(rows[3], rows[4]))
    rig.run(second, third, first)
    for one in (rows[0], rows[2], rows[4]):
        tokens, logits = rig.alone(row(9, one.sequence.prompt, max_tokens=one.sequence.max_tokens,
                                       **({"temperature": 1.2, "seed": 3} if one is rows[2] else {})))  # fmt: skip
        assert rig.tokens[one.seq] == tokens
        assert_logprobs(rig, one, logits, tokens)
    assert not rig.logprobs[1]
    own = [np.array(values) for values in rig.model.logits[3]]
    assert_logprobs(rig, rows[3], own, rig.tokens[3])


# ---------------------------------------------------------------- constraints
class Only:
    """Allows certain ids, and gives up at a certain one or after so many masks."""

    def __init__(self, allowed, *, refuses=None, masks=10**6):
        self.allowed, self.refuses, self.masks = allowed, refuses, masks
        self.accepted = []

    def accept(self, token):
        self.accepted.append(token)
        if token == self.refuses:
            raise ValueError("no")

    def mask(self):
        self.masks -= 1
        if self.masks < 0:
            raise RuntimeError("too complex")
        bits = np.zeros(2048, dtype=np.uint8)
        bits[list(self.allowed)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("mates", [(), (4,), (4, 33)])
def test_constrained_rows_draw_what_their_masks_allow_and_their_logprobs_are_the_models_own(llama, mates, early):
    rig = Rig("llama", early=early)
    one = row(0, prompt(9), max_tokens=10, logprobs=2)
    one.constraint = Only(range(100, 130))
    other = row(1, prompt(20), max_tokens=10, temperature=1.0)
    other.constraint = Only([1, 2047, 64])
    batch = started(rig, one, other, *(row(length, prompt(length), max_tokens=14) for length in mates))
    rig.run(batch)
    assert set(rig.tokens[0]) <= set(range(100, 130))
    assert set(rig.tokens[1]) <= {1, 2047, 64}
    assert one.constraint.accepted[:9] == rig.tokens[0][:9], "accepted once, in order"
    assert len(one.constraint.accepted) <= 10
    assert_logprobs(rig, one, [np.array(v) for v in rig.model.logits[0]][:10], rig.tokens[0])
    for length in mates:
        assert rig.tokens[length] == llama[length][0]


def test_a_constrained_row_that_moves_accepts_each_token_once(early):
    rig = Rig("llama", early=early)
    one = row(0, prompt(9), max_tokens=10)
    one.constraint = Only(range(100, 130))
    first, second = started(rig, one, row(1, prompt(4), max_tokens=10)), rig.batch()
    rig.step(first, 4)
    first.leave([one], keep_caches=True)
    rig.join(second, one, *rig.read(row(2, prompt(33), max_tokens=4)))
    rig.run(first, second)
    assert one.constraint.accepted[:9] == rig.tokens[0][:9]
    assert len(one.constraint.accepted) <= 10


def test_a_grammar_that_gives_up_fails_its_own_row_only(llama, early):
    rig = Rig("llama", early=early)
    rows = {seq: row(seq, prompt(5, seq), max_tokens=8) for seq in range(4)}
    rows[0].constraint = Only([55], refuses=55)
    rows[1].constraint = Only([66], masks=3)
    rows[2].constraint = Only([77], masks=0)
    rows[3].constraint = Only([88])
    batch = started(rig, *rows.values(), row(20, prompt(20), max_tokens=14))
    rig.run(batch)
    assert set(rig.failed) == {0, 1, 2}
    assert "too complex" in rig.failed[1]
    assert rig.tokens[3] == [88] * 8
    assert rig.tokens[20] == llama[20][0]


def test_a_row_that_ends_and_fails_at_once_has_ended(llama, early):
    rig = Rig("llama", early=early)
    one = row(0, prompt(9), max_tokens=2)
    one.constraint = Only([5], masks=2)
    rig.run(started(rig, one, row(20, prompt(20), max_tokens=14)))
    assert (rig.finish[0], rig.failed) == ("length", {})
