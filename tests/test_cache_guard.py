"""The walk finds what it should, what it finds becomes concrete, and the census names what was left."""

import functools
import logging
import types
from collections import OrderedDict, deque, namedtuple
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, KVCache

from server import cache_guard
from server.cache_guard import Guard, cache_arrays, census, compact, is_pending, pending_leaves, settle
from server.ipc.snapshot import Finding, Snapshot


class Hidden:
    """A cache that mlx-lm has never heard of: it chains an array that its `state` doesn't show."""

    def __init__(self):
        self.keys = mx.zeros((1, 1, 4, 2))
        self.meta = types.SimpleNamespace(clock=mx.array([0]))

    @property
    def state(self):
        return [self.keys]

    def step(self, n=1):
        for _ in range(n):
            self.meta.clock = self.meta.clock + 1


class Slotted:
    __slots__ = ("__private", "never_set", "shown")

    def __init__(self):
        self.shown, self.__private = mx.array([1]), mx.array([2])


class SlottedChild(Slotted):
    __slots__ = ("own",)

    def __init__(self):
        super().__init__()
        self.own = mx.array([3])


class KeyedCache(OrderedDict):
    def __init__(self):
        super().__init__(k=mx.array([1]))
        self.extra = mx.array([2])


def about(size):
    """A pooled buffer that is reused may be a bit larger than what asks for it."""
    return pytest.approx(size, rel=0.5)


Pair = namedtuple("Pair", "left right")


class Bag:
    """Anything that a cache may be: members of any name."""

    a: Any
    b: Any
    late: Any
    me: Any
    ring: Any
    row: Any
    slotted: Any

    def __init__(self, **parts):
        vars(self).update(parts)


def ids(arrays):
    return {id(array) for array in arrays}


def holder(kind):
    array = mx.array([7])
    return array, {
        "attribute": lambda: Bag(a=array),
        "list": lambda: Bag(a=[1, [None, array]]),
        "tuple": lambda: Bag(a=("x", (array,))),
        "set": lambda: Bag(a={array}),
        "frozenset": lambda: Bag(a=frozenset([array])),
        "deque": lambda: Bag(a=deque([array])),
        "dict": lambda: Bag(a={"k": {"l": array}}),
        "named tuple": lambda: Bag(a=Pair(array, None)),
        "nested object": lambda: Bag(a=Bag(b=Bag(c=array))),
        "partial": lambda: Bag(a=functools.partial(print, array)),
        "mapping proxy of its own": lambda: Bag(a=OrderedDict(k=array)),
    }[kind]()


KINDS = [
    "attribute",
    "list",
    "tuple",
    "set",
    "frozenset",
    "deque",
    "dict",
    "named tuple",
    "nested object",
    "partial",
    "mapping proxy of its own",
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_is_found_wherever_a_cache_keeps_it(kind):
    array, cache = holder(kind)
    assert ids(cache_arrays([cache])) == {id(array)}


def test_slots_are_walked_inherited_and_private_ones_too():
    assert sorted(array.item() for array in cache_arrays([SlottedChild()])) == [1, 2, 3]


def test_a_container_with_attributes_is_walked_both_ways():
    assert sorted(array.item() for array in cache_arrays([KeyedCache()])) == [1, 2]


def test_an_attribute_that_appears_later_is_found():
    cache = Bag(a=None)
    assert cache_arrays([cache]) == []
    cache.late = mx.array([1])
    assert ids(cache_arrays([cache])) == {id(cache.late)}


def test_cycles_end():
    cache, ring = Bag(a=mx.array([1])), []
    cache.me, cache.ring = cache, ring
    ring.append(ring)
    assert ids(cache_arrays([cache, cache])) == {id(cache.a)}


def test_weights_classes_and_modules_are_not_walked():
    class Odd:
        shared = mx.array([1])

    cache = Bag(layer=nn.Linear(2, 2), layers=[nn.Linear(2, 2)], cls=Odd, module=mx, call=lambda: None)
    assert cache_arrays([cache]) == []


def test_every_array_that_mlx_lms_caches_show_is_found():
    batch = BatchKVCache([0, 2])
    batch.update_and_fetch(mx.zeros((2, 1, 3, 2)), mx.zeros((2, 1, 3, 2)))
    state = ArraysCache(2, [0, 2])
    state.cache = [mx.zeros(2), None]
    caches = [CacheList(batch, state), state]
    shown = {id(v) for v in (batch.keys, batch.values, batch.offset, batch.left_padding, *state.cache[:1])}
    assert ids(cache_arrays(caches)) == shown | {id(state.left_padding)}


def test_a_step_takes_along_whatever_the_caches_reach():
    cache = Hidden()
    cache.step(5)
    mx.async_eval(mx.ones(3) * 2, Guard(True, 8, Snapshot()).reach([cache]))
    assert not is_pending(cache_arrays([cache]))
    assert cache.meta.clock.item() == 5


def test_settling_evaluates_every_layer():
    caches = [Hidden(), Hidden()]
    for cache in caches:
        cache.step(3)
    settle(caches)
    assert not is_pending(cache_arrays(caches))


def test_work_that_was_submitted_is_not_pending():
    a = mx.random.normal((600, 600))
    b = a
    for _ in range(8):
        b = b @ a
    assert is_pending([b])
    mx.async_eval(b)
    assert not is_pending([b])


def test_leaves_are_counted_and_a_graph_without_any_counts_as_one():
    cache = Hidden()
    settle([cache])
    assert pending_leaves(cache_arrays([cache])) == 0
    cache.step(50)
    assert pending_leaves(cache_arrays([cache])) == 51
    assert pending_leaves([mx.arange(4)]) == 1


def test_an_older_mlx_finds_and_counts_the_same(monkeypatch):
    monkeypatch.delattr(mx, "get_array_buffer_size")
    cache = Hidden()
    settle([cache])
    assert not is_pending([])
    assert not is_pending(cache_arrays([cache]))
    cache.step(50)
    assert is_pending(cache_arrays([cache]))
    assert census([cache]) == [Finding(0, "Hidden", "meta.clock", 51)]
    assert is_pending([mx.arange(4)])


def test_the_census_names_layer_class_and_field():
    caches: list[Any] = [KVCache(), ArraysCache(1, [0]), CacheList(KVCache(), ArraysCache(1, [0])), Hidden()]
    settle(caches)
    assert census(caches) == []
    for _ in range(10):
        caches[1].advance(1)
        caches[2][1].advance(1)
        caches[3].step()
    assert census(caches) == [
        Finding(1, "ArraysCache", "left_padding", 11),
        Finding(2, "ArraysCache", "left_padding", 11),
        Finding(3, "Hidden", "meta.clock", 11),
    ]


def test_a_clean_census_looks_at_no_field(monkeypatch):
    cache = Hidden()
    settle([cache])
    monkeypatch.setattr(cache_guard, "_fields", lambda layer: pytest.fail("looked"))
    assert census([cache]) == []


def test_a_chain_too_long_to_count_keeps_its_count(monkeypatch):
    cache = Hidden()
    cache.step(20)
    key = (0, "Hidden", "meta.clock")
    fresh = {finding.field: finding.count for finding in census([cache], {key: cache_guard.DEEP - 1})}
    kept = {finding.field: finding.count for finding in census([cache], {key: cache_guard.DEEP})}
    assert (fresh["meta.clock"], kept["meta.clock"]) == (21, cache_guard.DEEP)


def test_a_census_is_due_at_every_so_many_steps():
    cache, guard = Hidden(), Guard(False, 4, Snapshot())
    settle([cache])
    reported = []
    for _ in range(9):
        cache.step()
        reported.append(bool(guard.census([cache])))
    assert reported == [False, False, False, True, False, False, False, True, False]


def test_all_groups_belong_to_one_census():
    one, other, snapshot = Hidden(), Hidden(), Snapshot()
    settle([one, other])
    one.step(3)
    other.step(5)
    Guard(False, 1, snapshot).census([one], [other])
    assert snapshot.pending == 10


def test_a_guard_keeps_an_unknown_cache_flat_and_finds_nothing():
    cache, snapshot = Hidden(), Snapshot()
    guard = Guard(True, 8, snapshot)
    guard.settle([cache])
    for _ in range(40):
        cache.step()
        mx.async_eval(mx.ones(3) * 2, guard.reach([cache]))
        assert guard.census([cache]) == []
    assert snapshot == Snapshot()


def test_a_guard_that_is_off_logs_once_counts_and_changes_nothing(caplog):
    cache, snapshot = Hidden(), Snapshot()
    settle([cache])
    guard = Guard(False, 8, snapshot)
    with caplog.at_level(logging.WARNING):
        for _ in range(24):
            cache.step()
            assert guard.reach([cache]) == []
            guard.settle([cache])
            guard.census([cache])
    assert snapshot.pending == 25
    assert snapshot.findings == [Finding(0, "Hidden", "meta.clock", 25)]
    assert snapshot.leaks == {"Hidden.meta.clock": 3}
    assert snapshot.actions == []
    assert [record.getMessage() for record in caplog.records] == [
        "cache guard: Hidden.meta.clock is left pending by a step, in layers 0"
    ]


def test_what_a_guard_still_finds_it_evaluates_and_keeps_in_view():
    cache, snapshot = Hidden(), Snapshot()
    settle([cache])
    guard = Guard(True, 1, snapshot)
    cache.step(6)
    guard.census([cache])
    assert not is_pending(cache_arrays([cache]))
    assert (snapshot.pending, snapshot.action_counts) == (7, {"flush": 1})
    guard.census([cache])
    assert (snapshot.pending, snapshot.findings) == (0, [Finding(0, "Hidden", "meta.clock", 7)])
    assert snapshot.leaks == {"Hidden.meta.clock": 1}


def test_only_the_newest_hundred_actions_are_kept():
    snapshot = Snapshot()
    for reading in range(120):
        snapshot.record("flush", reading, 0)
    assert [action.reading for action in snapshot.actions] == list(range(20, 120))
    assert snapshot.action_counts == {"flush": 120}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "partial"])
def test_compacting_replaces_a_view_wherever_a_cache_keeps_it(kind):
    _, cache = holder(kind)
    settle([cache])
    before = cache_arrays([cache])
    compact([cache])
    after = cache_arrays([cache])
    assert len(after) == 1
    assert after[0].tolist() == [7]
    assert ids(after).isdisjoint(ids(before))


def test_what_can_not_be_replaced_is_still_evaluated_and_charged():
    big = mx.zeros((64, 4096))
    cache = Bag(a=functools.partial(print, big[:1]))
    assert compact([cache]) == about(big.nbytes)
    assert not is_pending(cache_arrays([cache]))


def test_compacting_lets_go_of_the_buffer_that_a_view_pinned():
    big = mx.zeros((64, 4096))
    cache = Bag(row=big[:1], slotted=SlottedChild())
    settle([cache])
    assert mx.get_array_buffer_size(cache.row) == about(big.nbytes)
    assert compact([cache]) < 2 * cache.row.nbytes
    assert sorted(array.item() for array in cache_arrays([cache.slotted])) == [1, 2, 3]


def test_compacting_keeps_shared_arrays_shared_and_ends_at_cycles():
    shared = mx.zeros(3)
    cache = Bag(a=shared, b=[shared])
    cache.me = cache
    compact([cache])
    assert cache.a is cache.b[0]
    assert cache.me is cache


def test_an_extracted_row_owns_its_bytes():
    batch = ArraysCache(1)
    batch.cache = [mx.random.normal((64, 4096))]
    settle([batch])
    row = batch.extract(3)
    settle([row])
    assert mx.get_array_buffer_size(row.cache) == about(64 * 4096 * 4)
    want = batch.cache[0][3:4]
    assert compact([row]) == about(4096 * 4)
    assert mx.array_equal(row.cache[0], want)
