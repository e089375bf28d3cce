"""A draw follows the distribution that was asked for, whatever rows share the batch."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.compute import sampling
from server.compute.sampling import Sampler, is_greedy, stream_key, top_candidates, uniforms
from server.ipc.sequence import Sampling

DRAWS = 4096


def asked(**values):
    return Sampling(seed=0, **values)


def expected(logits, sampling):
    """Probabilities [V] by the definition: temperature, top-k, top-p, min-p, each on what the one before left."""
    if is_greedy(sampling):
        return np.eye(len(logits))[np.argmax(logits)]
    scaled = np.float64(logits) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.lexsort((np.arange(len(weights)), -weights))  # best first, ties by id
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    if sampling.top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= sampling.top_p * weights.sum()]] = 0
    weights[weights < sampling.min_p * weights.max()] = 0
    return weights / weights.sum()


def some_logits(vocab, seed=1, spread=2.0):
    return np.float32(np.random.default_rng(seed).standard_normal(vocab) * spread)


def draw_many(logits, sampling, draws=DRAWS):
    """`draws` draws from the same logits, one row each, every row with a seed of its own."""
    rows = [(Sampling(**{f: getattr(sampling, f) for f in sampling.__struct_fields__} | {"seed": i}), 0)
            for i in range(draws)]  # fmt: skip
    batch = mx.broadcast_to(mx.array(logits), (draws, len(logits)))
    return np.array(Sampler(rows)(batch, np.zeros(draws, dtype=np.int64)))


def assert_drawn_from(tokens, probabilities):
    """Chi-square over the tokens with at least 5 expected draws, the others in one bin; nothing impossible drawn."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    wanted = probabilities * len(tokens)
    often = wanted >= 5
    bins = [*zip(counts[often], wanted[often], strict=True)]
    if wanted[~often].sum() >= 5:
        bins.append((counts[~often].sum(), wanted[~often].sum()))
    statistic = sum((count - want) ** 2 / want for count, want in bins)
    freedom = max(1, len(bins) - 1)
    # Wilson and Hilferty's approximation of the quantile at 5 standard deviations: one false alarm in three million.
    bound = freedom * (1 - 2 / (9 * freedom) + 5 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic <= bound, (statistic, bound, freedom)


LANES = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 4.0},
    "top_k": {"top_k": 7},
    "top_k of all": {"top_k": 5000},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "top_k, top_p": {"top_k": 20, "top_p": 0.8, "temperature": 1.5},
    "top_k, min_p": {"top_k": 30, "min_p": 0.05},
    "top_p, min_p": {"top_p": 0.9, "min_p": 0.02, "temperature": 2.0},
    "all": {"top_k": 40, "top_p": 0.95, "min_p": 0.02, "temperature": 1.3},
}


@pytest.mark.parametrize("vocab", [97, 700])
@pytest.mark.parametrize("lane", LANES)
def test_draws_follow_the_distribution_that_was_asked_for(lane, vocab):
    logits = some_logits(vocab)
    assert_drawn_from(draw_many(logits, asked(**LANES[lane])), expected(logits, asked(**LANES[lane])))


def test_a_top_k_wider_than_the_candidates_road_is_kept_exactly(monkeypatch):
    monkeypatch.setattr(sampling, "MAX_TOP_K", 8)
    logits = some_logits(300)
    assert_drawn_from(draw_many(logits, asked(top_k=100)), expected(logits, asked(top_k=100)))
    wish = asked(top_k=100, top_p=0.8)
    assert_drawn_from(draw_many(logits, wish), expected(logits, wish))


def test_the_draws_of_one_row_over_its_positions_follow_the_distribution_too():
    logits, wish = some_logits(60), asked(top_k=20)
    sampler = Sampler([(wish, 3)])
    keys = np.full(DRAWS, stream_key(0, 3), dtype=np.uint64)
    assert np.abs(np.corrcoef(uniforms(keys, np.arange(DRAWS))[:-1], uniforms(keys, np.arange(DRAWS))[1:])[0, 1]) < 0.05
    tokens = [sampler(mx.array(logits[None]), np.array([i])).item() for i in range(500)]
    assert_drawn_from(np.array(tokens), expected(logits, wish))


def test_uniforms_lie_in_the_unit_interval_and_fill_it_evenly():
    u = uniforms(np.arange(200_000, dtype=np.uint64), np.zeros(200_000, dtype=np.int64))
    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    counts, _ = np.histogram(u, bins=64, range=(0, 1))
    assert np.abs(counts / len(u) * 64 - 1).max() < 0.1


def test_seed_choice_and_position_each_change_the_draw_and_nothing_else_does():
    keys = {stream_key(seed, choice) for seed in range(100) for choice in range(100)}
    assert len(keys) == 10_000
    a = uniforms(np.array([stream_key(5, 0)], dtype=np.uint64), np.array([7]))
    assert a == uniforms(np.array([stream_key(5, 0)], dtype=np.uint64), np.array([7]))
    others = [(6, 0, 7), (5, 1, 7), (5, 0, 8), (2**64 - 1, 0, 7), (2**63, 2**20, 2**30)]
    drawn = [uniforms(np.array([stream_key(s, c)], dtype=np.uint64), np.array([p]))[0] for s, c, p in others]
    assert len({float(a[0]), *map(float, drawn)}) == len(others) + 1


# ---------------------------------------------------------------- batch mates
wishes = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 8, 9, 40, 100, 300, 2000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-6, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(wishes, st.integers(0, 5), st.integers(0, 10**6)), min_size=1, max_size=9),
    vocab=st.sampled_from([5, 63, 64, 65, 1000, 1337]),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
    coarse=st.booleans(),
)
def test_a_row_draws_the_same_beside_any_batch_mates(rows, vocab, dtype, coarse):
    """With coarse logits nearly every border of top-k and top-p is a tie."""
    values = np.random.default_rng(vocab).standard_normal((len(rows), vocab)) * 2
    logits = mx.array(np.float32(np.round(values) if coarse else values)).astype(dtype)
    positions = np.array([position for _, _, position in rows])
    together = Sampler([(wish, choice) for wish, choice, _ in rows])(logits, positions).tolist()
    alone = [
        Sampler([(wish, choice)])(logits[i : i + 1], positions[i : i + 1]).item()
        for i, (wish, choice, _) in enumerate(rows)
    ]
    assert together == alone


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("vocab", [3, 64, 100, 1000, 4099])
def test_candidates_are_the_best_in_order_with_ties_by_id(vocab, dtype):
    logits = mx.array(np.round(some_logits(3 * vocab).reshape(3, vocab) * 2)).astype(dtype)
    for width in (1, 2, 8, 64, 1024):
        width = min(width, vocab)
        values, ids = top_candidates(logits, width)
        plain = np.array(logits.astype(mx.float32))
        for row in range(3):
            order = np.lexsort((np.arange(vocab), -plain[row]))[:width]
            assert np.array(ids)[row].tolist() == order.tolist()
            assert np.array(values)[row].tolist() == plain[row][order].tolist()


def test_candidates_of_a_masked_row_never_name_an_id_beyond_the_vocabulary():
    logits = mx.full((1, 130), -mx.inf)
    logits[0, 129] = 1.0
    values, ids = top_candidates(logits, 8)
    assert ids[0, 0].item() == 129
    assert np.array(ids).max() < 130
    assert len(set(np.array(ids)[0].tolist())) == 8
    assert np.isneginf(np.array(values)[0, 1:]).all()


# ---------------------------------------------------------------- edges
@pytest.mark.parametrize(
    "wish",
    [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-4}],
    ids=str,
)
def test_each_way_to_ask_for_the_best_token_gives_it(wish):
    logits = np.stack([some_logits(501, seed) for seed in range(50)])
    rows = [(Sampling(seed=seed, **wish), 0) for seed in range(50)]
    drawn = np.array(Sampler(rows)(mx.array(logits), np.zeros(50, dtype=np.int64)))
    assert drawn.tolist() == logits.argmax(axis=1).tolist()


def test_equal_logits_are_drawn_evenly_where_the_limit_keeps_them():
    logits = np.zeros(16, dtype=np.float32)
    for wish in ({}, {"top_p": 0.99}, {"top_k": 16}, {"min_p": 0.9}):
        assert_drawn_from(draw_many(logits, asked(**wish)), np.full(16, 1 / 16))
    assert set(draw_many(logits, asked(top_k=4), 500)) == {0, 1, 2, 3}


def test_a_blocked_or_masked_token_is_never_drawn():
    logits = some_logits(700)
    logits[::2] = -np.inf
    logits[1::4] = -1e30
    for wish in LANES.values():
        drawn = draw_many(logits, asked(**wish), 2000)
        assert (drawn % 4 == 3).all(), wish


def test_one_allowed_token_is_drawn_by_every_lane():
    logits = np.full(700, -np.inf, dtype=np.float32)
    logits[321] = -3.0
    for wish in [*LANES.values(), {"temperature": 0.0}, {"temperature": 1e-5}]:
        assert set(draw_many(logits, asked(**wish), 64)) == {321}


def test_a_vocabulary_of_one_and_huge_parameters_do_no_harm():
    assert Sampler([(asked(top_k=5), 0)])(mx.array([[2.0]]), np.array([0])).item() == 0
    drawn = draw_many(some_logits(10), asked(temperature=1e6), 4000)
    assert_drawn_from(drawn, np.full(10, 0.1))


def test_bfloat16_logits_are_drawn_from_as_they_are():
    logits = mx.array(some_logits(2048)).astype(mx.bfloat16)
    wish = asked(top_k=50, top_p=0.9)
    rows = [(Sampling(seed=i, top_k=50, top_p=0.9), 0) for i in range(DRAWS)]
    tokens = Sampler(rows)(mx.broadcast_to(logits, (DRAWS, 2048)), np.zeros(DRAWS, dtype=np.int64))
    assert_drawn_from(np.array(tokens), expected(np.array(logits.astype(mx.float32)), wish))
