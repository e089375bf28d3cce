"""What is kept of a prompt serves later ones, says nothing wrong, costs what it is charged at, and is never harmed."""

import mlx.core as mx
import numpy as np
import pytest
from driving import Rig, prompt, row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import Lane
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, make_prompt_cache

from server.cache_guard import cache_arrays, pinned_bytes
from server.engine.prefix_cache import MOST_ENTRIES, WORTH_KEEPING, PrefixCache, can_trim, shared_ids
from server.ipc.snapshot import Snapshot

FAMILIES = ["llama", "gemma3_text", "qwen3_5"]
WINDOW = 32
AMPLE = 1 << 30


class Served:
    """Rows one after the other as the engine runs them, with a prefix cache."""

    def __init__(self, rig, budget=AMPLE):
        self.rig, self.snapshot = rig, Snapshot()
        self.prefix = PrefixCache(budget, self.snapshot)
        self.lane = Lane(rig.raw, rig.guard, on_begin=self._begin, on_mark=self._mark)
        self.seq = 0

    def _begin(self, one):
        one.caches, one.cached = self.prefix.lookup(one.tokens) or (make_prompt_cache(self.rig.raw), 0)
        return one.cached, [*one.sequence.marks, len(one.tokens) - 1]

    def _mark(self, one, length):
        if (
            not can_trim(one.caches) or length % 2
        ):  # the engine keeps trimmable ones only if another prompt waits for them
            self.prefix.insert_copy(one.tokens[:length], one.caches)

    def run(self, tokens, *, marks=(), max_tokens=3):
        """(row, its output)."""
        self.seq += 1
        one = row(self.seq, tokens, max_tokens=max_tokens, marks=list(marks))
        self.lane.insert(one)
        batch = self.rig.batch()
        batch.join(self.lane.run(None, 1))
        while len(batch):
            self.rig.model.rows = list(batch.seqs)
            news = batch.step()
            self.rig.model.rows = None
            self.rig.take(news)
            if news.ended:
                self.prefix.insert(batch.held_tokens(one), batch.single_caches(0))
                batch.leave([one])
        return one, self.rig.tokens[one.seq]


def fingerprints(prefix):
    """Every array of every entry, as it is now."""
    return {entry: [np.array(a) for a in cache_arrays(entry.caches)] for entry in prefix.entries.values()}


def assert_honest(prefix, budget):
    """Bytes are charged at what is really pinned, which is hardly more than what is held."""
    assert prefix.pinned_bytes == sum(pinned for pinned, _ in prefix.pinned()) <= budget
    for entry in prefix.entries.values():
        arrays = cache_arrays(entry.caches)
        assert entry.pinned == pinned_bytes(arrays)
        assert entry.pinned <= 1.1 * sum(array.nbytes for array in arrays)


BLOCKS = [prompt(length, 77) for length in (12, 17, 23, 31, 36, 40)]
turns = st.lists(
    st.tuples(
        st.sampled_from(["continue", "continue", "fork", "shorten", "again", "new"]),
        st.integers(0, 100),
        st.sampled_from(range(len(BLOCKS))),
    ),
    min_size=2,
    max_size=7,
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=turns, tight=st.booleans())
def test_random_conversations_say_the_same_with_and_without_kept_prefixes(family, turns, tight):
    """They share, fork, repeat and shorten what was said before; with a tight budget entries come and go."""
    rig = Rig(family)
    budget = 400_000 if tight else AMPLE
    served = Served(rig, budget)
    said, known = [BLOCKS[0] + BLOCKS[3]], {}
    for act, at, block in turns:
        base = said[at % len(said)]
        tokens, mark = {
            "continue": (base + BLOCKS[block], len(base)),
            "fork": (base[: at % len(base)] + BLOCKS[block], at % len(base)),
            "shorten": (base[: 1 + at % len(base)], 1),
            "again": (base, len(base) - 1),
            "new": (BLOCKS[block] + BLOCKS[at % len(BLOCKS)], len(BLOCKS[block])),
        }[act]
        one, output = served.run(tokens, marks=[mark])
        rig.assert_as_alone(one, rig.alone(row(0, tokens, max_tokens=3)))
        said.append(tokens + output)
        assert_honest(served.prefix, budget)
        for entry, arrays in fingerprints(served.prefix).items():
            for before, now in zip(known.setdefault(entry, arrays), arrays, strict=True):
                assert np.array_equal(before, now), "a row has written to an entry"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_reads_only_what_each_turn_adds(family):
    served = Served(Rig(family))
    tokens, held = prompt(60), 0
    for turn in range(6):
        one, output = served.run(tokens, marks=[len(tokens) - 5])
        assert one.cached >= held
        held = len(tokens) - 1
        tokens = tokens + output + prompt(20, turn)
    assert served.snapshot.prefix_lookups == {"miss": 1, "partial": 5}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_prompt_again_reads_nothing(family):
    served = Served(Rig(family))
    first, output = served.run(prompt(70))
    again, same = served.run(prompt(70))
    assert first.cached == 0
    assert again.cached == 69
    assert output == same
    assert served.snapshot.prefix_lookups == {"miss": 1, "hit": 1}


def test_a_trimmable_entry_serves_any_common_prefix_and_others_only_whole():
    plain, hybrid = Served(Rig("llama")), Served(Rig("qwen3_5"))
    for served in (plain, hybrid):
        served.run(prompt(90))
    assert plain.run(prompt(90)[:50] + prompt(30, 5))[0].cached == 50
    assert hybrid.run(prompt(90)[:50] + prompt(30, 5))[0].cached == 0
    assert hybrid.run(prompt(90)[:89] + prompt(30, 5))[0].cached == 89


def test_a_window_that_has_turned_over_is_not_trimmed():
    served = Served(Rig("gemma3_text"))
    assert WINDOW < 90
    served.run(prompt(90))
    assert served.run(prompt(90)[:50] + prompt(30, 5))[0].cached == 0


def test_rows_that_start_from_one_entry_do_not_disturb_each_other():
    rig = Rig("llama")
    served = Served(rig)
    served.run(prompt(64))
    rows = [row(seq, prompt(64)[:50] + prompt(10, seq), max_tokens=8) for seq in (100, 101, 102)]
    for one in rows:
        served.lane.insert(one)
    before = fingerprints(served.prefix)
    batch = rig.batch()
    batch.join(served.lane.run(None, 10))
    assert [one.cached for one in rows] == [50, 50, 50]
    rig.run(batch)
    for one in rows:
        rig.assert_as_alone(one, rig.alone(row(0, one.sequence.prompt, max_tokens=8)))
    after = fingerprints(served.prefix)
    assert all(np.array_equal(a, b) for entry in before for a, b in zip(before[entry], after[entry], strict=True))


# ---------------------------------------------------------------- the entries
def kv(length, layers=2, spare=0):
    caches = [KVCache() for _ in range(layers)]
    for layer in caches:
        layer.keys, layer.values = mx.ones((1, 2, length + spare, 8)), mx.ones((1, 2, length + spare, 8))
        layer.offset = length
    mx.eval(cache_arrays(caches))
    return caches


def state(size=64):
    cache = ArraysCache(1)
    cache[0] = mx.ones((1, size))
    mx.eval(cache[0])
    return [cache]


def kept(prefix):
    return sorted(len(entry.tokens) for entry in prefix.entries.values())


def test_off_means_off():
    prefix = PrefixCache(0, Snapshot())
    prefix.insert(prompt(100), kv(100))
    assert (len(prefix), prefix.enabled, prefix.lookup(prompt(100))) == (0, False, None)


def test_short_prefixes_are_not_worth_it():
    prefix = PrefixCache(AMPLE, Snapshot())
    prefix.insert(prompt(100)[: WORTH_KEEPING - 1], kv(WORTH_KEEPING - 1))
    assert len(prefix) == 0
    prefix.insert(prompt(100), kv(100))
    assert prefix.lookup([*prompt(100)[: WORTH_KEEPING - 1], 1, 2, 3]) is None
    assert prefix.lookup([*prompt(100)[:WORTH_KEEPING], 1, 2, 3])[1] == WORTH_KEEPING


def test_one_token_at_least_is_left_to_read():
    prefix = PrefixCache(AMPLE, Snapshot())
    prefix.insert(prompt(100), kv(100))
    caches, length = prefix.lookup(prompt(100))
    assert length == 99
    assert {layer.offset for layer in caches} == {99}
    assert prefix.lookup(prompt(100)[:60])[1] == 59


def test_an_entry_needs_no_room_for_tokens_to_come():
    prefix = PrefixCache(AMPLE, Snapshot())
    prefix.insert(prompt(100), kv(100, spare=156))
    pinned, own = prefix.pinned()[0]
    assert own == 2 * 2 * 100 * 2 * 8 * 4
    assert pinned <= 1.1 * own


def test_of_entries_that_can_be_trimmed_only_the_longest_stays():
    prefix = PrefixCache(AMPLE, Snapshot())
    prefix.insert(prompt(200)[:100], kv(100))
    prefix.insert(prompt(200), kv(200))
    assert kept(prefix) == [200]
    prefix.insert(prompt(200)[:150], kv(150))
    assert kept(prefix) == [200]
    prefix.insert([*prompt(200)[:150], 1, 2, 3], kv(153))
    assert kept(prefix) == [153, 200]


def test_snapshots_of_states_stay_side_by_side():
    prefix = PrefixCache(AMPLE, Snapshot())
    for length in (200, 100, 150):
        prefix.insert(prompt(200)[:length], state())
    assert kept(prefix) == [100, 150, 200]
    assert prefix.lookup(prompt(200)[:170])[1] == 150


def test_the_least_recently_used_entry_goes_first_and_the_budget_holds():
    snapshot = Snapshot()
    one = pinned_bytes(cache_arrays(kv(100)))
    prefix = PrefixCache(3 * one + one // 2, snapshot)
    for seed in range(3):
        prefix.insert(prompt(100, seed), kv(100))
    assert prefix.lookup(prompt(100, 0)) is not None
    prefix.insert(prompt(100, 3), kv(100))
    assert prefix.lookup(prompt(100, 1)) is None
    assert prefix.lookup(prompt(100, 0)) is not None
    assert snapshot.prefix_evictions == {"bytes": 1}
    assert snapshot.prefix_entries == 3
    assert snapshot.kv_cached_bytes == prefix.pinned_bytes <= 3 * one + one // 2
    assert snapshot.kv_cached_tokens == 300


def test_many_small_entries_level_off_long_before_their_bytes_do():
    snapshot = Snapshot()
    prefix = PrefixCache(AMPLE, snapshot)
    for seed in range(MOST_ENTRIES + 5):
        prefix.insert(prompt(40, seed), kv(40))
    assert len(prefix) == snapshot.prefix_entries == MOST_ENTRIES
    assert snapshot.prefix_evictions == {"size": 5}
    assert prefix.lookup(prompt(40, 4)) is None
    assert prefix.lookup(prompt(40, 5)) is not None


def test_an_entry_larger_than_the_budget_evicts_no_other():
    one = pinned_bytes(cache_arrays(kv(100)))
    prefix = PrefixCache(2 * one, Snapshot())
    prefix.insert(prompt(100), kv(100))
    prefix.insert(prompt(900, 1), kv(900))
    assert kept(prefix) == [100]


def test_under_pressure_the_least_used_go_until_enough_is_given_back():
    snapshot = Snapshot()
    prefix = PrefixCache(AMPLE, snapshot)
    for seed in range(5):
        prefix.insert(prompt(100, seed), kv(100))
    one = snapshot.kv_cached_bytes // 5
    assert (snapshot.kv_cached_buffers, len(prefix)) == (5 * len(cache_arrays(kv(100))), 5)
    prefix.lookup(prompt(100, 0))
    assert prefix.evict("guard", 0, 0) == 0
    assert prefix.evict("guard", one + 1, 0) == 2
    assert prefix.lookup(prompt(100, 0)) is not None
    assert prefix.evict("guard", 0, 1) == 1
    assert prefix.evict("guard", 10**9, 10**9) == 2
    assert (len(prefix), snapshot.kv_cached_bytes, snapshot.kv_cached_buffers) == (0, 0, 0)
    assert snapshot.prefix_evictions == {"guard": 5}


def test_a_kept_copy_leaves_the_row_its_own_caches():
    prefix = PrefixCache(AMPLE, Snapshot())
    caches = kv(100, spare=156)
    prefix.insert_copy(prompt(100), caches)
    assert caches[0].keys.shape[2] == 256
    for layer in caches:
        layer.update_and_fetch(mx.zeros((1, 2, 1, 8)), mx.zeros((1, 2, 1, 8)))
    mx.eval(cache_arrays(caches))
    assert caches[0].offset == 101
    found, length = prefix.lookup([*prompt(100), 5])
    assert length == 100
    assert mx.all(found[0].keys == 1).item()


def test_a_chunked_cache_that_has_lost_its_front_serves_whole_only():
    cache = ChunkedKVCache(50)
    cache.update_and_fetch(mx.ones((1, 2, 40, 8)), mx.ones((1, 2, 40, 8)))
    assert can_trim([cache])
    cache.update_and_fetch(mx.ones((1, 2, 40, 8)), mx.ones((1, 2, 40, 8)))
    cache.maybe_trim_front()
    assert not can_trim([cache])


@given(a=st.lists(st.integers(0, 2), max_size=12), b=st.lists(st.integers(0, 2), max_size=12))
def test_the_common_prefix_is_as_long_as_it_is(a, b):
    size = shared_ids(a, b)
    assert a[:size] == b[:size]
    assert size == min(len(a), len(b)) or a[size] != b[size]
