"""The live-buffer count stays flat in the engine's loop, and mlx-lm's own loop still leaks as it did."""

import socket
import subprocess
import sys
import time
from dataclasses import replace

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from loadtests import flat, soak
from server.certify.replay import BufferSample, Gauge, Plan, Run, caches_in_words, play, play_mlx_lm
from server.engine import model
from server.ipc import framing, messages
from server.ipc.sequence import Sampling, TokenSequence
from server.ipc.snapshot import Finding
from server.memory.allocator import CountUnavailable
from server.memory.native_count import open_count
from server.settings import load

pytestmark = pytest.mark.slow

FAMILIES = ["llama", "qwen3_5", "smollm3", "nemotron_h"]
STEPS = 320  # eight readings
FLAT = pytest.approx(0, abs=flat.FLAT)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    try:
        count = open_count(tmp_path_factory.mktemp("native"), None)
    except CountUnavailable as reason:
        pytest.skip(str(reason))
    yield count
    count.remove()


@pytest.fixture(scope="module")
def loaded(tiny):
    known = {}

    def load_family(family):
        if family not in known:
            known[family] = model.load(tiny(family), trust_remote_code=False, probe=None, on_stage=lambda stage: None)
        return known[family]

    return load_family


@pytest.fixture(scope="module")
def played(source, loaded):
    """One run of each kind for each family, played when first asked for."""
    known = {}

    def run(family, arm):
        if (family, arm) not in known:
            stage = play_mlx_lm if arm == "mlx_lm" else play
            values = {} if arm == "mlx_lm" else {"guard": arm == "guard", "census_steps": 64}
            known[family, arm] = stage(Plan(STEPS), loaded(family), Gauge(source), **values)
        return known[family, arm]

    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engines_loop_is_flat(played, family):
    run = played(family, "guard")
    fit = run.fit()
    assert (fit.slope, fit.slope - fit.half_width, fit.slope + fit.half_width) == (FLAT, FLAT, FLAT)
    assert run.growing == run.snapshot.findings == []
    assert run.snapshot.leaks == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lms_batch_generator_still_leaks(played, family):
    # If this fails with a lower rate, a release of mlx-lm has mended it: see whether the pin can move.
    assert played(family, "mlx_lm").fit().slope == pytest.approx(flat.rate(family), rel=flat.WITHIN, abs=flat.FLAT)


def test_without_the_guard_the_engines_loop_leaks_and_says_where(played):
    run = played("smollm3", "off")
    assert run.fit().slope > 1.9
    assert {(f.layer, f.cache, f.field) for f in run.growing} == {
        (3, "BatchKVCache", "offset"),
        (7, "BatchKVCache", "offset"),
    }
    assert run.snapshot.leaks["BatchKVCache.offset"] >= 4


def test_a_family_without_batch_metadata_is_flat_even_without_the_guard(played):
    fit = played("llama", "off").fit()
    assert fit.slope == FLAT


@pytest.mark.parametrize("family", ["qwen3_5", "smollm3", "nemotron_h"])
def test_the_guard_changes_no_text(played, family):
    guarded, unguarded = played(family, "guard"), played(family, "off")
    assert len(guarded.texts) > 12
    assert flat.same_text(family, guarded, unguarded) == []


def test_rows_come_and_go_as_planned(played):
    texts = played("qwen3_5", "guard").texts
    plan = Plan(STEPS)
    assert [len(texts[number]) for number in (1, 2, 3, 4)] == [44, 46, 44, 46]
    assert len(texts[0]) >= STEPS
    assert plan.prompt(1) != plan.prompt(2)
    assert set(texts) == set(played("qwen3_5", "mlx_lm").texts)


# ---------------------------------------------------------------- a cache of an unknown class
class Clocked(KVCache):
    """Chains an array and keeps it out of `state`."""

    def __init__(self):
        super().__init__()
        self.clock = mx.array([0])

    def update_and_fetch(self, keys, values):
        self.clock = self.clock + 1
        return super().update_and_fetch(keys, values)


@pytest.fixture(scope="module")
def clocked(loaded):
    """A model whose third layer keeps such a cache; its rows run alone, for it has no batch form."""
    llama = loaded("llama")

    class Model:
        def make_cache(self):
            caches = [KVCache() for _ in llama.model.layers]
            caches[2] = Clocked()
            return caches

        def __call__(self, inputs, cache=None):
            return llama.model(inputs, cache=cache)

    probe = msgspec.structs.replace(llama.probe, batching="Clocked has no batch form")
    return replace(llama, model=Model(), probe=probe)


def test_an_array_hidden_from_state_stays_flat_with_the_guard(source, clocked):
    run = play(Plan(STEPS, rows=2), clocked, Gauge(source), census_steps=64)
    assert run.fit().slope == FLAT
    assert run.snapshot.findings == []


def test_without_the_guard_it_is_named_within_one_census_and_counted(source, clocked):
    run = play(Plan(STEPS, rows=2), clocked, Gauge(source), guard=False, census_steps=64)
    assert run.fit().slope == pytest.approx(1, rel=0.05)
    assert {(f.layer, f.cache, f.field) for f in run.snapshot.findings} == {(2, "Clocked", "clock")}
    assert run.snapshot.leaks == {"Clocked.clock": STEPS // 64}


# ---------------------------------------------------------------- the arithmetic of a run
def test_a_run_knows_its_slope_its_baseline_and_when_it_reached_a_count():
    run = Run()
    run.readings = [BufferSample(step, 100 + 3 * step, 7 * step) for step in range(15, 400, 40)]
    assert run.fit().slope == pytest.approx(3)
    assert run.fit(320).slope == pytest.approx(3)
    assert run.fit_bytes().slope == pytest.approx(7)
    assert run.baseline() == pytest.approx(100)
    assert run.reached(700) == pytest.approx(200)
    assert run.reached(10_000) is None


def test_what_grew_is_what_counts():
    run = Run()
    early = [Finding(0, "A", "x", 3), Finding(1, "A", "y", 3)]
    run.readings = [BufferSample(15, 0, 0)] * 2
    Gauge.compare(run, early)
    run.readings = [BufferSample(15, 0, 0)] * 4
    Gauge.compare(run, [Finding(0, "A", "x", 3), Finding(1, "A", "y", 9), Finding(2, "A", "z", 1)])
    assert [(f.layer, f.field) for f in run.growing] == [(1, "y"), (2, "z")]


def test_caches_are_described_in_words(loaded):
    assert caches_in_words(make_prompt_cache(loaded("qwen3_5").model)) == "3 ArraysCache, 1 KVCache"


# ---------------------------------------------------------------- a leak of the test's own, in a real engine
class Engine:
    """A real engine process on a socketpair."""

    def __init__(self, folder, **values):
        ours, theirs = socket.socketpair()
        settings = load(values)
        command = [sys.executable, "-P", "-m", "server.engine", "--fd", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL)
        theirs.close()
        ours.settimeout(60)
        self._socket, self._frames = ours, framing.Frames()
        self.send(messages.Start(1, str(folder), settings.model_dump_json()))

    def send(self, command):
        self._socket.sendall(framing.pack(command))

    def events(self):
        while data := self._socket.recv(1 << 18):
            yield from map(framing.unpack_event, self._frames.feed(data))

    def stop(self):
        self.send(messages.Drain(1))
        self._socket.shutdown(socket.SHUT_RD)
        self.process.wait(30)
        self._socket.close()


def test_three_leaked_buffers_a_step_show_as_three_and_predict_the_end(source, tiny, tmp_path):
    limit = 100_000
    engine = Engine(
        tiny("llama"),
        faults="leak:3",
        live_buffers="native",
        buffer_limit=limit,
        cache_dir=str(tmp_path),
        prefix_cache=0,
    )
    try:
        seen = predicted(engine)
    finally:
        engine.stop()
    assert seen.buffers_per_token == pytest.approx(3, rel=0.05)
    expected = (limit - seen.live_settled) / 3
    assert seen.tokens_to_exhaustion["buffers"] == pytest.approx(expected, rel=0.05)
    assert seen.seconds_to_exhaustion["buffers"] > 0
    assert seen.pending == 0  # nothing hangs behind a cache: it is no leak that the guard could stop


def predicted(engine):
    """The first snapshot with a slope over at least 1,000 tokens."""
    deadline = time.monotonic() + 60
    for event in engine.events():
        if isinstance(event, messages.Ready):
            asked = TokenSequence([5, 6, 7, 8], Sampling(seed=1, temperature=0), 1 << 20)
            engine.send(messages.Submit(1, 1, asked))
        snapshot = getattr(event, "snapshot", None)
        if snapshot is not None and snapshot.buffers_per_token is not None and snapshot.generated_tokens >= 1000:
            return snapshot
        assert time.monotonic() < deadline, "no slope in time"
    raise AssertionError("the engine ended")


# ---------------------------------------------------------------- how the long runs are judged
def a_run(slope, growing=(), failed=""):
    readings = [BufferSample(step, round(100 + slope * step), 0) for step in range(15, 2000, 40)]
    return Run(readings=readings, growing=list(growing), failed=failed)


@pytest.mark.parametrize(
    ("family", "arm", "slope", "passes"),
    [
        ("smollm3", "guard", 0, True),
        ("smollm3", "guard", 0.02, False),
        ("smollm3", "guard", -0.02, False),
        ("smollm3", "mlx_lm", 2.25, True),
        ("smollm3", "mlx_lm", 2.1, False),
        ("smollm3", "mlx_lm", 0, False),
        ("smollm3", "off", 2.15, True),
        ("smollm3", "off", 0, False),
        ("llama", "mlx_lm", 0, True),
        ("llama", "mlx_lm", 0.1, False),
        ("llama", "off", 0, True),
        ("rwkv7", "mlx_lm", 0.4, True),
        ("rwkv7", "mlx_lm", 0.3, False),
    ],
)
def test_a_run_passes_only_with_the_rate_that_is_expected_of_it(family, arm, slope, passes):
    assert flat.judge(family, arm, a_run(slope), alone=False).passed is passes


def test_a_run_that_broke_off_passes_only_where_mlx_lm_can_not_batch():
    broken = a_run(0, failed="no merge")
    assert flat.judge("llama4", "mlx_lm", broken, alone=True).passed
    assert not flat.judge("llama", "mlx_lm", broken, alone=False).passed
    assert not flat.judge("llama4", "guard", broken, alone=True).passed


def test_what_can_not_leak_is_said_to_be_flat_by_construction():
    assert flat.judge("llama", "off", a_run(0), alone=False).note == "flat by construction"
    assert flat.judge("nemotron_h", "off", a_run(2), alone=False).note == "rises"
    assert "alone" in flat.judge("minimax_m3_vl", "off", a_run(0), alone=True).note


def test_too_few_readings_prove_nothing():
    short = Run(readings=a_run(0).readings[:20])
    assert not flat.judge("llama", "guard", short, alone=False).passed


METRICS = """\
# TYPE marathon_live_buffers gauge
marathon_live_buffers{reading="raw"} 130.0
marathon_live_buffers{reading="settled"} 120.0
marathon_mlx_active_memory_bytes 5000.0
marathon_kv_bytes{state="active"} 700.0
marathon_kv_bytes{state="cached"} 300.0
marathon_pending_cache_arrays 0.0
"""


def test_a_soak_reads_what_it_needs_and_waits_for_the_first_count():
    assert soak.read(METRICS) == {"live": 120, "active": 5000, "kv": 1000, "pending": 0}
    assert soak.read("marathon_mlx_active_memory_bytes 5000.0\n") is None


@pytest.mark.parametrize(
    ("live", "active", "usage", "passes"),
    [(0, 1.0, 3000, True), (0.02, 1.0, 3000, False), (0, 1.1, 3000, False), (0, 1.0, 2999, False)],
)
def test_a_soak_passes_only_if_count_memory_and_length_are_right(live, active, usage, passes):
    found = soak.Soak(tokens=3000, usage=usage)
    found.samples = [
        {"tokens": t, "live": 100 + live * t, "kv": 512.0 * t, "active": 9e6 + active * 512 * t}
        for t in range(0, 3000, 60)
    ]
    assert soak.judge("llama", found, 3000)[1] is passes
