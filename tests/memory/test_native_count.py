"""The counter of our own: built where there is a compiler, believed once it has counted right, exact from then on."""

import json
import os
import stat
import subprocess
import sys

import mlx.core as mx
import pytest

from server.errors import StartupError
from server.memory import native_count
from server.memory.allocator import CountUnavailable
from server.memory.native_count import NativeCount, build, find_compiler, open_count
from server.memory.residency import open_source
from server.settings import load


def compiler_or_skip():
    try:
        return find_compiler()
    except CountUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    compiler_or_skip()
    return tmp_path_factory.mktemp("native")


@pytest.fixture
def counter(folder):
    count = open_count(folder, None)
    yield count
    count.remove()


def test_live_buffers_are_counted_exactly(counter):
    before = counter.settled()
    made = [mx.array([0.0] * 8) for _ in range(1000)]
    assert counter.settled() - before == 1000
    del made[:400]
    assert counter.settled() - before == 600


def test_a_chain_that_is_never_evaluated_holds_one_buffer_a_link(counter):
    x = mx.array([0])
    before = counter.raw()
    for _ in range(500):
        x = x - 1
    assert counter.raw() - before == 500
    mx.eval(x)
    assert counter.raw() - before <= 1


def test_arrays_that_wait_in_the_pool_are_not_live(counter):
    before = counter.raw()
    made = [mx.zeros(300_000) for _ in range(5)]
    mx.eval(made)
    mx.synchronize()
    assert counter.raw() - before >= 5
    del made
    assert counter.raw() - before <= 0


def test_the_limit_is_metals_unless_another_is_asked_for(folder):
    for asked, limit in ((None, 499_000), (20_000, 20_000)):
        count = open_count(folder, asked)
        count.remove()
        assert (count.limit, count.name, count.reason) == (limit, "native", "")


def test_two_counters_at_a_time_are_refused(counter, folder):
    with pytest.raises(CountUnavailable, match="already counting"):
        open_count(folder, None)
    before = counter.raw()
    kept = mx.array([1])
    assert counter.raw() == before + 1
    del kept


def test_after_removal_nothing_is_counted(folder):
    count = open_count(folder, None)
    count.remove()
    before = count.difference()
    kept = [mx.array([1]) for _ in range(10)]
    assert count.difference() == before
    del kept


def test_it_is_built_once(folder, monkeypatch):
    path = build(folder)
    monkeypatch.setattr(native_count, "compile_library", lambda *_: pytest.fail("built again"))
    assert build(folder) == path


@pytest.mark.parametrize("change", ["source", "mlx"])
def test_another_source_or_mlx_is_another_build(folder, tmp_path, monkeypatch, change):
    before = build(folder)
    if change == "source":
        other = tmp_path / "other.cpp"
        other.write_text(native_count.SOURCE.read_text() + "\n")
        monkeypatch.setattr(native_count, "SOURCE", other)
    else:
        monkeypatch.setattr(native_count, "version", lambda name: "0.99")
    made = []
    monkeypatch.setattr(
        native_count, "compile_library", lambda compiler, target: made.append(target) or target.write_bytes(b"")
    )
    assert build(tmp_path) != before
    assert len(made) == 1


def test_a_build_that_breaks_off_leaves_nothing(folder, tmp_path, monkeypatch):
    def breaks(compiler, target):
        target.write_bytes(b"half")
        raise CountUnavailable("killed")

    monkeypatch.setattr(native_count, "compile_library", breaks)
    with pytest.raises(CountUnavailable, match="killed"):
        build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_compiler_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CountUnavailable, match=r"no C\+\+ compiler found"):
        build(tmp_path / "cache")
    with pytest.raises(StartupError, match=r"--live-buffers native: no C\+\+ compiler found"):
        open_source(load({"live_buffers": "native", "cache_dir": tmp_path}))


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_compiler_that_fails_is_a_reason_in_one_line(tmp_path, monkeypatch):
    broken = script(tmp_path / "broken", "echo 'live_count.cpp:1: error: no such header' >&2; echo more >&2; exit 1")
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(CountUnavailable, match=r"broken failed: live_count.cpp:1: error: no such header$"):
        build(tmp_path / "cache")


def test_a_compiler_that_hangs_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(script(tmp_path / "slow", "exec sleep 20")))
    monkeypatch.setattr(native_count, "BUILD_SECONDS", 0.2)
    with pytest.raises(CountUnavailable, match=r"slow took longer than 0.2 seconds"):
        build(tmp_path / "cache")


def test_a_folder_that_can_not_be_written_is_a_reason(tmp_path):
    compiler_or_skip()
    (tmp_path / "file").write_text("")
    with pytest.raises(CountUnavailable, match="can't be built in"):
        build(tmp_path / "file" / "cache")


def test_a_library_that_can_not_be_loaded_is_a_reason(tmp_path, monkeypatch):
    compiler_or_skip()
    monkeypatch.setattr(native_count, "compile_library", lambda compiler, target: target.write_bytes(b"no library"))
    with pytest.raises(CountUnavailable, match="can't be loaded"):
        open_count(tmp_path, None)


@pytest.mark.parametrize("wrong", [lambda n: n // 2, lambda n: -n, lambda n: 0], ids=["half", "reversed", "still"])
def test_a_count_that_is_wrong_is_refused_and_removed(folder, monkeypatch, wrong):
    """As where the device's own allocations go past the interface."""
    real = NativeCount.difference
    monkeypatch.setattr(NativeCount, "difference", lambda self: wrong(real(self)))
    with pytest.raises(CountUnavailable, match="doesn't allocate through its interface"):
        open_count(folder, None)
    monkeypatch.undo()
    open_count(folder, None).remove()  # refused as "already counting" if the first were still there


FRESH = """
import json, sys
from pathlib import Path
from server.memory.residency import open_source
from server.settings import load
source = open_source(load({"live_buffers": "native", "cache_dir": Path(sys.argv[1]), "buffer_limit": 777}))
import mlx.core as mx
from mlx import nn
start = source.settled()
model = nn.Linear(8, 8)
mx.eval(model.parameters())
print(json.dumps([source.name, source.limit, start, source.settled()]))
"""


def test_weights_that_load_after_it_are_counted(folder):
    run = subprocess.run(
        [sys.executable, "-c", FRESH, str(folder.parent)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(native_count.SOURCE.parent.parent)},
    )
    assert json.loads(run.stdout) == ["native", 777, 0, 3]  # weight, bias, and the state of mlx's random numbers
