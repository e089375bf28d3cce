"""The search for Metal's count and its proof, against made-up allocators; on a Mac also against the real one."""

import ctypes
import gc
import sys

import mlx.core as mx
import pytest

from server.memory import metal_count
from server.memory.allocator import CountUnavailable
from server.memory.metal_count import CountProbe, MetalCount, locate, open_count

LIMIT = 499_000
# The order of the words in mlx's wheels for macOS, and where the first one stands.
ORDER = ("block limit", "gc limit", "active", "peak", "pool limit", "wired", "count", "limit")
FIRST = 0x98 // 8
SIZE = 0x118


class Allocator:
    """A heap object that counts as Metal's allocator does, or wrongly in one way."""

    def __init__(self, order=ORDER, first=FIRST, limit=LIMIT, decoys=(), noise=0, frozen=False, sticky=False):
        self.memory = (ctypes.c_uint64 * (SIZE // 8))()
        self.places = {name: first + i for i, name in enumerate(order)}
        self.noise, self.frozen, self.sticky, self.pooled = noise, frozen, sticky, 0
        for place, value in decoys:
            self.memory[place] = value
        self["block limit"], self["gc limit"], self["pool limit"] = 100 << 30, 90 << 30, 100 << 30
        self["active"], self["peak"], self["count"], self["limit"] = 7_000_001, 9_000_003, 2100, limit

    def __getitem__(self, name):
        return self.memory[self.places[name]]

    def __setitem__(self, name, value):
        self.memory[self.places[name]] = value

    @property
    def address(self):
        return ctypes.addressof(self.memory)

    def allocate(self, count):
        reused = min(self.pooled, count)
        self.pooled -= reused
        if not self.frozen:
            self["count"] += count - reused + self.noise
        self["active"] += 4096 * count
        self["peak"] = max(self["peak"], self["active"])
        return count

    def release(self, count):
        if self.sticky:
            self.pooled += count
        elif not self.frozen:
            self["count"] -= count
        self["active"] -= 4096 * count

    def facts(self):
        return {"memory limit": self["block limit"], "active memory": self["active"], "peak memory": self["peak"]}

    def locate(self, block=SIZE, facts=None):
        return locate(
            self.address, block, LIMIT, CountProbe(facts or self.facts, self.allocate, self.release, lambda: None)
        )


def test_the_count_is_found_and_read():
    allocator = Allocator()
    offset = allocator.locate()
    assert offset == 0xC8
    count = MetalCount(allocator.address, offset, LIMIT)
    assert count.raw() == 2100
    allocator.allocate(5)
    assert (count.raw(), count.settled(), count.limit, count.where) == (2105, 2105, LIMIT, "allocator()+0xc8")


def test_no_offset_is_taken_for_granted():
    assert Allocator(first=9).locate() == (9 + 6) * 8


def test_a_decoy_beside_the_count_does_not_win():
    assert Allocator(decoys=[(3, LIMIT), (2, 17)]).locate() == 0xC8


def test_a_second_word_that_moves_too_is_refused():
    allocator = Allocator(decoys=[(3, LIMIT), (2, 17)])
    allocate, release = allocator.allocate, allocator.release

    def twice(count, sign=1):
        allocator.memory[2] += sign * count
        return allocate(count) if sign > 0 else release(count)

    probe = CountProbe(allocator.facts, twice, lambda count: twice(count, -1), lambda: None)
    with pytest.raises(CountUnavailable, match="more than one word moved"):
        locate(allocator.address, SIZE, LIMIT, probe)


def test_a_word_that_only_rises_is_refused():
    allocator = Allocator()
    probe = CountProbe(allocator.facts, allocator.allocate, lambda count: None, lambda: None)
    with pytest.raises(CountUnavailable, match="no word moved"):
        locate(allocator.address, SIZE, LIMIT, probe)


def test_a_word_that_moved_right_only_once_is_refused():
    allocator, rounds = Allocator(), []

    def allocate(count):
        rounds.append(count)
        return allocator.allocate(rounds[0])

    with pytest.raises(CountUnavailable, match="no word moved"):
        locate(allocator.address, SIZE, LIMIT, CountProbe(allocator.facts, allocate, allocator.release, lambda: None))
    assert len(rounds) == 2


SWAPPED = ("block limit", "gc limit", "active", "peak", "count", "pool limit", "wired", "limit")


@pytest.mark.parametrize(
    ("allocator", "reason"),
    [
        pytest.param({"limit": 5}, "no word of the allocator equals the resource limit", id="missing limit"),
        pytest.param({"limit": 5, "decoys": [(3, LIMIT), (2, 17)]}, "no word moved", id="only a decoy"),
        pytest.param({"order": SWAPPED}, "no word moved", id="changed order"),
        pytest.param({"frozen": True}, "no word moved", id="frozen word"),
        pytest.param({"sticky": True}, "no word moved", id="pool not empty"),
        pytest.param({"noise": 3}, "no word moved", id="another thread"),
        pytest.param({"noise": -3}, "no word moved", id="another thread that frees"),
    ],
)
def test_an_allocator_that_does_not_fit_is_refused(allocator, reason):
    with pytest.raises(CountUnavailable, match=reason):
        Allocator(**allocator).locate()


@pytest.mark.parametrize(
    ("block", "reason"), [(0xC0, "equals the resource limit"), (0, "isn't a heap block of known size")]
)
def test_nothing_beyond_the_heap_block_is_read(block, reason):
    with pytest.raises(CountUnavailable, match=reason):
        Allocator().locate(block=block)


def test_an_address_that_can_not_be_an_object_is_refused():
    probe = CountProbe(dict, lambda count: None, lambda made: None, lambda: None)
    for address in (0, 4097):
        with pytest.raises(CountUnavailable, match="heap block"):
            locate(address, SIZE, LIMIT, probe)


def test_another_object_is_refused():
    with pytest.raises(CountUnavailable, match="doesn't hold the memory limit"):
        Allocator().locate(facts=lambda: {"memory limit": 123_456_789})


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_a_machine_without_metal_says_so():
    with pytest.raises(CountUnavailable, match="no Metal on this machine"):
        open_count(None)


class Info:
    """mlx on a Mac, as far as `open_count` looks."""

    def __init__(self, monkeypatch, allocator, resource_limit=LIMIT, block=SIZE):
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        monkeypatch.setattr(mx, "device_info", lambda device: {"resource_limit": resource_limit})
        monkeypatch.setattr(metal_count.allocator, "address", lambda: allocator.address)
        monkeypatch.setattr(metal_count, "block_size", lambda address: block)
        probe = CountProbe(allocator.facts, allocator.allocate, allocator.release, lambda: None)
        monkeypatch.setattr(metal_count, "MLX", probe)


@pytest.mark.parametrize(("own", "limit"), [(None, LIMIT), (20_000, 20_000), (10**9, LIMIT)])
def test_a_limit_of_ones_own_can_only_be_tighter(monkeypatch, own, limit):
    Info(monkeypatch, Allocator())
    assert open_count(own).limit == limit


def test_a_device_that_names_no_limit_is_refused(monkeypatch):
    Info(monkeypatch, Allocator(), resource_limit=0)
    with pytest.raises(CountUnavailable, match="names no resource limit"):
        open_count(None)


def test_a_library_that_hides_its_allocator_is_refused(monkeypatch):
    monkeypatch.setattr(metal_count.allocator, "ACCESSOR", "_ZN3mlx4core9allocator6hiddenEv")
    with pytest.raises(CountUnavailable, match="doesn't export its allocator"):
        metal_count.allocator.address()


def test_a_library_that_is_elsewhere_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(metal_count.allocator, "package", lambda: tmp_path)
    with pytest.raises(CountUnavailable, match="isn't beside mlx"):
        metal_count.allocator.address()


def test_each_probe_of_the_real_mlx_makes_one_buffer_and_gives_it_back():
    gc.collect()
    metal_count.MLX.settle()
    before = mx.get_active_memory()
    made = metal_count.MLX.allocate(11)
    assert len(made) == 11
    assert mx.get_active_memory() - before >= 11 * 4096
    metal_count.MLX.release(made)
    metal_count.MLX.settle()
    assert mx.get_active_memory() == before
    assert set(metal_count.MLX.facts()) == {"memory limit", "active memory", "peak memory"}


@pytest.mark.metal
@pytest.mark.skipif(sys.platform != "darwin" or not mx.metal.is_available(), reason="needs Metal")
def test_metals_own_count_follows_the_buffers_that_are_made():
    count = open_count(None)
    before = count.settled()
    made = [mx.array([0.0] * 1024) for _ in range(100)]
    assert count.settled() - before == 100
    made.clear()
    assert count.settled() == before
    assert count.limit == mx.device_info(mx.Device(mx.gpu))["resource_limit"]
