"""/metrics: names, labels, pre-created series, totals over engines, and what stays out when it isn't known."""

import importlib.util
import itertools
import json
import math
import re
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import prometheus_client
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from server import errors, metrics
from server.ipc.messages import Ready
from server.ipc.probe import Probe
from server.ipc.snapshot import GroupState, Snapshot
from server.journal import measures
from server.journal.record import FINAL, STATUSES
from server.journal.state import JournalState
from server.kv_store.files.record import DAMAGES
from server.metrics import CONTENT_TYPE, Metrics
from server.telemetry.engine_status import EngineStatus

ROOT = Path(__file__).parent.parent
FIRST_TOKEN = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160]
INTER_TOKEN = [0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10]
DURATION = [0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800]
RESUME_GAP = [float(bound) for bound in metrics.RESUME_GAP]
TOKENS = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144]
REASONS = {"crash", "stall", "rotation", "preemption", "restart"}
OPEN = None  # a label whose values are not listed here

# name → type, {label: closed set of values}, buckets
CONTRACT: dict[str, tuple[str, dict[str, set[str] | None], list[float]]] = {
    "marathon_build_info": ("gauge", {"version": OPEN, "mlx": OPEN, "mlx_lm": OPEN}, []),
    "marathon_model_info": ("gauge", {"model": OPEN, "quantization": OPEN}, []),
    "marathon_http_requests_total": ("counter", {"route": OPEN, "method": OPEN, "status": OPEN}, []),
    "marathon_requests_total": (
        "counter",
        {"endpoint": OPEN, "outcome": {"stop", "length", "tool_calls", "cancelled", "error"}},
        [],
    ),
    "marathon_requests_rejected_total": (
        "counter",
        {
            "endpoint": OPEN,
            "reason": {
                *("invalid", "unsupported", "context_length", "queue_full", "memory_guard"),
                *("buffer_guard", "not_ready", "auth", "body_too_large", "shutdown", "journal"),
            },
        },
        [],
    ),
    "marathon_unknown_request_fields_total": ("counter", {"endpoint": OPEN}, []),
    "marathon_requests_running": ("gauge", {}, []),
    "marathon_requests_waiting": ("gauge", {}, []),
    "marathon_queue_limit": ("gauge", {}, []),
    "marathon_batch_limit": ("gauge", {}, []),
    "marathon_batch_size": ("histogram", {}, [1, 2, 4, 8, 16, 32, 64]),
    "marathon_time_to_first_token_seconds": ("histogram", {"endpoint": OPEN}, FIRST_TOKEN),
    "marathon_inter_token_latency_seconds": ("histogram", {}, INTER_TOKEN),
    "marathon_queue_time_seconds": ("histogram", {}, DURATION),
    "marathon_prefill_time_seconds": ("histogram", {}, DURATION),
    "marathon_decode_time_seconds": ("histogram", {}, DURATION),
    "marathon_request_duration_seconds": ("histogram", {"endpoint": OPEN}, DURATION),
    "marathon_prompt_tokens_total": ("counter", {}, []),
    "marathon_generation_tokens_total": ("counter", {}, []),
    "marathon_cached_prompt_tokens_total": ("counter", {}, []),
    "marathon_request_prompt_tokens": ("histogram", {}, TOKENS),
    "marathon_request_generation_tokens": ("histogram", {}, TOKENS),
    "marathon_journal_commit_seconds": ("histogram", {}, list(measures.COMMIT)),
    "marathon_journal_writable": ("gauge", {}, []),
    "marathon_journal_bytes": ("gauge", {}, []),
    "marathon_journal_limit_bytes": ("gauge", {}, []),
    "marathon_stored_answers": ("gauge", {"status": set(STATUSES)}, []),
    "marathon_stored_answer_readers": ("gauge", {}, []),
    "marathon_stored_answers_ended_total": ("counter", {"status": set(FINAL)}, []),
    "marathon_kv_disk_bytes": ("gauge", {}, []),
    "marathon_kv_disk_files": ("gauge", {}, []),
    "marathon_kv_disk_checkpoint_age_seconds": ("gauge", {}, []),
    "marathon_kv_disk_dropped_files_total": ("counter", {"reason": set(DAMAGES)}, []),
    "marathon_kv_disk_evicted_files_total": ("counter", {}, []),
    "marathon_kv_disk_skipped_checkpoints_total": ("counter", {"reason": {"queue", "hour", "disk"}}, []),
    "marathon_kv_disk_transfer_bytes_total": ("counter", {"operation": {"read", "write"}}, []),
    "marathon_kv_disk_transfer_seconds_total": ("counter", {"operation": {"read", "write"}}, []),
    "marathon_kv_lookup_tokens_total": ("counter", {"tier": {"memory", "disk", "none"}}, []),
    "marathon_kv_lookups_total": ("counter", {"tier": {"memory", "disk", "none"}}, []),
    "marathon_journal_failures_total": ("counter", {}, []),
    "marathon_journal_unsaved_tokens_total": ("counter", {}, []),
    "marathon_decode_tokens_per_second": ("gauge", {}, []),
    "marathon_kv_tokens": ("gauge", {"state": {"active", "cached"}}, []),
    "marathon_kv_capacity_tokens": ("gauge", {}, []),
    "marathon_kv_bytes": ("gauge", {"state": {"active", "cached"}}, []),
    "marathon_decode_groups": ("gauge", {}, []),
    "marathon_decode_group_kv_bytes": ("gauge", {"part": {"rows", "padding"}}, []),
    "marathon_prompt_cache_entries": ("gauge", {}, []),
    "marathon_prompt_cache_lookups_total": ("counter", {"result": {"hit", "partial", "miss"}}, []),
    "marathon_prompt_cache_evictions_total": ("counter", {"reason": {"size", "bytes", "guard"}}, []),
    "marathon_mlx_active_memory_bytes": ("gauge", {}, []),
    "marathon_mlx_cache_memory_bytes": ("gauge", {}, []),
    "marathon_mlx_peak_memory_bytes": ("gauge", {}, []),
    "marathon_mlx_memory_limit_bytes": ("gauge", {}, []),
    "marathon_mlx_cache_limit_bytes": ("gauge", {}, []),
    "marathon_device_memory_bytes": ("gauge", {}, []),
    "marathon_engine_footprint_bytes": ("gauge", {}, []),
    "marathon_process_resident_bytes": ("gauge", {}, []),
    "marathon_start_time_seconds": ("gauge", {}, []),
    "marathon_live_buffers": ("gauge", {"reading": {"settled", "raw"}}, []),
    "marathon_buffer_limit": ("gauge", {}, []),
    "marathon_buffer_headroom_ratio": ("gauge", {}, []),
    "marathon_live_buffer_source_info": ("gauge", {"source": OPEN}, []),
    "marathon_pending_cache_arrays": ("gauge", {}, []),
    "marathon_cache_leaks_total": ("counter", {"model_type": OPEN, "cache": OPEN, "field": OPEN}, []),
    "marathon_buffers_per_token": ("gauge", {}, []),
    "marathon_unexplained_bytes_per_token": ("gauge", {}, []),
    "marathon_tokens_to_exhaustion": ("gauge", {"resource": {"buffers", "bytes"}}, []),
    "marathon_seconds_to_exhaustion": ("gauge", {"resource": {"buffers", "bytes"}}, []),
    "marathon_guard_actions_total": (
        "counter",
        {
            "action": {
                *("flush", "clear_pool", "evict_prefix", "hold"),
                *("preempt", "rotate", "quarantine", "kill_stalled"),
            }
        },
        [],
    ),
    "marathon_pressure": ("gauge", {"state": {"calm", "reclaim", "hold", "rotate"}}, []),
    "marathon_engine_up": ("gauge", {}, []),
    "marathon_engine_restarts_total": ("counter", {"reason": REASONS - {"preemption", "restart"}}, []),
    "marathon_engine_last_step_timestamp_seconds": ("gauge", {}, []),
    "marathon_recomputed_tokens_total": ("counter", {"reason": REASONS}, []),
    "marathon_resumed_generations_total": ("counter", {"reason": REASONS}, []),
    "marathon_resume_wait_seconds": (
        "histogram",
        {"part": {"engine", "load", "admission", "read"}},
        [float(bound) for bound in metrics.RESUME_WAIT],
    ),
    "marathon_resume_seconds": ("histogram", {"reason": REASONS}, RESUME_GAP),
    "marathon_guard_step_seconds_total": ("counter", {}, []),
    "marathon_step_seconds_total": (
        "counter",
        {"part": {"forward", "sample", "guard", "read", "publish", "prefill"}},
        [],
    ),
    "marathon_client_disconnects_total": ("counter", {"phase": {"queued", "prefill", "decode"}}, []),
}


@dataclass
class View:
    """What a supervisor would show."""

    snapshot: Snapshot | None = None
    ready: Ready | None = None
    known: Ready | None = None
    last_step_age: float | None = None
    running: int = 0
    waiting: int = 0
    queue_limit: int = 256
    batch_limit: int = 32
    on_engine_gone: list[Callable[[Snapshot], None]] = field(default_factory=list)

    @property
    def engine(self) -> EngineStatus:
        return EngineStatus(
            ready=self.ready,
            known=self.known,
            snapshot=self.snapshot,
            is_up=self.ready is not None,
            last_step_age_seconds=self.last_step_age,
        )

    def engine_dies(self) -> None:
        snapshot, self.snapshot, self.ready = self.snapshot, None, None
        for call in self.on_engine_gone:
            call(snapshot)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def a_ready(**changes: object) -> Ready:
    facts = {
        "epoch": 1, "pid": 2, "probe": Probe(8, "batched", [], 0, 0), "context": 64, "weights_bytes": 9,
        "model_type": "smollm3", "quantization": "q4", "device": "gpu", "mlx": "0", "mlx_lm": "0",
        "load_seconds": 1.0, "live_source": "metal", "buffer_limit": 1000, "device_memory": 64,
    }  # fmt: skip
    return Ready(**(facts | changes))


def a_snapshot(**changes: object) -> Snapshot:
    facts = {
        "batch_sizes": {1: 5, 3: 2, 100: 1},
        "step_seconds": {"forward": 3.0, "guard": 0.5},
        "groups": [GroupState(2, 100, 1000, 900), GroupState(1, 9, 50, 50)],
        "active_bytes": 11, "pool_bytes": 12, "peak_bytes": 13, "footprint_bytes": 14,
        "memory_limit_bytes": 15, "pool_limit_bytes": 16,
        "prefix_lookups": {"hit": 2}, "prefix_evictions": {"bytes": 1},
        "leaks": {"ArraysCache.left_padding": 2}, "action_counts": {"flush": 4},
        "kv_disk_files": 3, "kv_disk_bytes": 30, "kv_disk_checkpoint_age": 1.5, "kv_disk_dropped": {"checksum": 2},
        "live_settled": 250, "live_raw": 300, "buffers_per_token": 0.0, "unexplained_bytes_per_token": 1.5,
        "tokens_to_exhaustion": {"buffers": math.inf, "bytes": 4000.0},
        "seconds_to_exhaustion": {"buffers": math.inf, "bytes": 40.0},
    }  # fmt: skip
    return Snapshot(**(facts | changes))


@dataclass
class Kept:
    """A journal, as far as a scrape looks."""

    state: JournalState


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counted(clock: Clock) -> Metrics:
    return Metrics(CollectorRegistry(), clock=clock)


@pytest.fixture
def view(counted: Metrics) -> View:
    """A living engine with a live-buffer source, watched by `counted`."""
    ready = a_ready()
    view = View(a_snapshot(), ready, ready, last_step_age=77.0, running=3, waiting=2)
    counted.watch(view, "tiny")
    counted.journal.view = Kept(JournalState("on", None, "journal.db", 4096, 2**20, {"completed": 2}, 1))
    counted.http_request("/v1/chat/completions", "POST", 200)
    return view


@dataclass(frozen=True)
class Scrape:
    """One exposition, parsed by the client library."""

    text: str

    def families(self) -> Iterator[tuple[str, str, str, list]]:
        for f in text_string_to_metric_families(self.text):
            yield f.name + ("_total" if f.type == "counter" else ""), f.type, f.documentation, f.samples

    @cached_property
    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {(s.name, frozenset(s.labels.items())): s.value for *_, all_ in self.families() for s in all_}

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.samples.get((name, frozenset(labels.items())))

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for n, labels in self.samples if n == name]


def scrape(counted: Metrics) -> Scrape:
    return Scrape(counted.exposition().decode())


# ---------------------------------------------------------------- names
def test_every_family_of_the_contract_is_declared_with_its_type_labels_and_buckets(counted):
    declared = {f.name: (f.type, list(f.labels), list(f.buckets)) for f in counted.families()}
    assert declared == {name: (kind, list(labels), b) for name, (kind, labels, b) in CONTRACT.items()}


def test_with_an_engine_every_family_is_exposed_as_declared(counted, view):
    exposed = {name: (kind, samples) for name, kind, _, samples in scrape(counted).families()}
    assert {name for name in exposed if name.startswith("marathon")} == set(CONTRACT)
    for name, (kind, labels, buckets) in CONTRACT.items():
        assert exposed[name][0] == kind
        bounds = {float(s.labels["le"]) for s in exposed[name][1] if "le" in s.labels}
        assert bounds == {*buckets, *([math.inf] if buckets else [])}
        assert all(set(s.labels) - {"le"} == set(labels) for s in exposed[name][1])


def test_closed_label_sets_exist_in_full_from_the_start_and_stay_closed(counted, view):
    seen = scrape(counted)
    for name, (kind, labels, _) in CONTRACT.items():
        for label, values in labels.items():
            if values is not OPEN:
                rows = seen.labels(name + ("_count" if kind == "histogram" else ""))
                assert {row[label] for row in rows} == values, name


def test_each_endpoint_can_be_rejected_for_each_reason_from_the_start(counted):
    rows = scrape(counted).labels("marathon_requests_rejected_total")
    assert len(rows) == len(metrics.ENDPOINTS) * len(metrics.REJECTIONS)
    assert {row["endpoint"] for row in rows} >= {"chat", "completions"}


def test_every_refusal_has_a_reason_of_the_closed_set():
    def tree(kind: type[errors.RequestError]) -> Iterator[type[errors.RequestError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from tree(child)

    assert {kind.reason for kind in tree(errors.RequestError)} <= set(metrics.REJECTIONS)


ABBREVIATIONS = {"ms", "us", "ns", "s", "sec", "secs", "mb", "kb", "gb", "kib", "mib", "gib", "pct", "tok", "toks"}
NOT_BASE = {"milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "kilobytes", "megabytes",
            "gigabytes", "bits", "percent", "percentage"}  # fmt: skip
TYPE_WORDS = {"gauge", "counter", "histogram", "summary"}


def complaints(name: str, kind: str, help: str, samples: list) -> Iterator[str]:
    """The naming rules, after promtool's."""
    words = set(name.split("_"))
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        yield "is not in snake case"
    if not help.strip():
        yield "has no help"
    if (kind == "counter") != name.endswith("_total"):
        yield "_total is for counters"
    if name.endswith(("_count", "_sum", "_bucket")):
        yield "ends like a part of a histogram"
    if words & ABBREVIATIONS or words & NOT_BASE:
        yield "has a unit that is abbreviated or not a base unit"
    if words & TYPE_WORDS:
        yield "names its type"
    if kind != "histogram" and any({"le", "quantile"} & set(s.labels) for s in samples):
        yield "has a histogram's label"
    if name.endswith("_info") and any(s.value != 1 for s in samples):
        yield "is an info that isn't 1"


def test_the_exposition_passes_the_naming_rules(counted, view):
    found = [(f[0], c) for f in scrape(counted).families() if f[0].startswith("marathon") for c in complaints(*f)]
    assert found == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("marathon_step_ms", "gauge"),
        ("marathon_tokens", "counter"),
        ("marathon_rows_total", "gauge"),
        ("marathon_rows_count", "gauge"),
        ("marathon:rows", "gauge"),
        ("marathon_row_counter", "gauge"),
        ("marathon_wait_minutes", "gauge"),
    ],
)
def test_the_naming_rules_object_to(name, kind):
    assert list(complaints(name, kind, "Words.", []))


def test_no_family_or_sample_comes_twice(counted, view):
    lines = counted.exposition().decode().splitlines()
    keys = [line if line.startswith("#") else line.rsplit(" ", 1)[0] for line in lines]
    assert len(keys) == len(set(keys))
    assert not [key for key in keys if "_created" in key]


def test_the_global_registry_stays_untouched(counted, view):
    assert not [f.name for f in REGISTRY.collect() if f.name.startswith("marathon")]


def test_two_servers_in_one_process_count_apart(counted):
    other = Metrics(CollectorRegistry())
    counted.generated(5)
    assert scrape(counted)("marathon_generation_tokens_total") == 5
    assert scrape(other)("marathon_generation_tokens_total") == 0


def test_the_content_type_names_the_text_format_and_its_version():
    assert CONTENT_TYPE == prometheus_client.exposition.CONTENT_TYPE_PLAIN_0_0_4


def test_process_and_collector_series_of_the_client_library_are_there(counted):
    names = {name for name, *_ in scrape(counted).families()}
    assert "python_gc_collections_total" in names
    assert ("process_cpu_seconds_total" in names) == Path("/proc/self/stat").exists()


# ---------------------------------------------------------------- what the server counts
def test_a_request_is_counted_once_at_its_end_with_its_tokens_and_duration(counted):
    counted.finished("chat", "length", 3.0, prompt_tokens=10, generated_tokens=300)
    s = scrape(counted)
    assert s("marathon_requests_total", endpoint="chat", outcome="length") == 1
    assert s("marathon_requests_total", endpoint="chat", outcome="stop") == 0
    assert s("marathon_request_duration_seconds_bucket", endpoint="chat", le="2.5") == 0
    assert s("marathon_request_duration_seconds_bucket", endpoint="chat", le="5.0") == 1
    assert s("marathon_request_prompt_tokens_sum") == 10
    assert s("marathon_request_generation_tokens_bucket", le="256.0") == 0
    assert s("marathon_request_generation_tokens_bucket", le="1024.0") == 1


def test_an_observation_on_a_bound_belongs_to_that_bound(counted):
    counted.first_token("completions", 0.25)
    s = scrape(counted)
    assert s("marathon_time_to_first_token_seconds_bucket", endpoint="completions", le="0.1") == 0
    assert s("marathon_time_to_first_token_seconds_bucket", endpoint="completions", le="0.25") == 1
    assert s("marathon_time_to_first_token_seconds_count", endpoint="completions") == 1


def test_rows_of_one_step_are_observed_together(counted):
    counted.inter_token(0.02, 32)
    counted.inter_token(99.0, 1)
    s = scrape(counted)
    assert s("marathon_inter_token_latency_seconds_bucket", le="0.015") == 0
    assert s("marathon_inter_token_latency_seconds_bucket", le="0.02") == 32
    assert s("marathon_inter_token_latency_seconds_bucket", le="10.0") == 32
    assert s("marathon_inter_token_latency_seconds_bucket", le="+Inf") == 33
    assert s("marathon_inter_token_latency_seconds_sum") == pytest.approx(99.64)


def test_an_inter_token_observation_is_cheaper_than_the_client_librarys(counted):
    library = prometheus_client.Histogram("x_seconds", "x", registry=None, buckets=INTER_TOKEN)
    own = min(timeit.repeat(lambda: counted.inter_token(0.02, 32), number=5000, repeat=5))
    assert own < min(timeit.repeat(lambda: library.observe(0.02), number=5000, repeat=5))


def test_a_clock_that_steps_back_counts_as_no_time(counted):
    counted.queue_time(-5.0)
    s = scrape(counted)
    assert s("marathon_queue_time_seconds_sum") == 0
    assert s("marathon_queue_time_seconds_count") == 1


def test_the_other_verbs_reach_their_series(counted):
    counted.prefill_time(0.3)
    counted.decode_time(7.0)
    counted.prompt(100, 40)
    counted.disconnected("prefill")
    counted.rejected("other", "auth")
    counted.unknown_fields("chat", 2)
    counted.engine_restarted("crash")
    counted.resumed("rotation", 1.5)
    counted.recomputed("preemption", 120)
    counted.resume_waited("load", 2.5)
    s = scrape(counted)
    assert s("marathon_prefill_time_seconds_sum") == 0.3
    assert s("marathon_decode_time_seconds_sum") == 7
    assert s("marathon_prompt_tokens_total") == 100
    assert s("marathon_cached_prompt_tokens_total") == 40
    assert s("marathon_client_disconnects_total", phase="prefill") == 1
    assert s("marathon_requests_rejected_total", endpoint="other", reason="auth") == 1
    assert s("marathon_unknown_request_fields_total", endpoint="chat") == 2
    assert s("marathon_engine_restarts_total", reason="crash") == 1
    assert s("marathon_resumed_generations_total", reason="rotation") == 1
    assert s("marathon_resume_seconds_sum", reason="rotation") == 1.5
    assert s("marathon_recomputed_tokens_total", reason="preemption") == 120
    assert s("marathon_resume_wait_seconds_sum", part="load") == 2.5


def test_what_clients_invent_ends_in_other(counted):
    counted.http_request(None, "BREW", 404)
    assert scrape(counted).labels("marathon_http_requests_total") == [
        {"route": "other", "method": "other", "status": "404"}
    ]


def test_a_client_that_left_before_the_answer_has_the_status_499(counted):
    counted.http_request("/v1/completions", "POST", 0)
    assert scrape(counted)("marathon_http_requests_total", route="/v1/completions", method="POST", status="499") == 1


def test_a_name_that_was_not_declared_is_counted_and_raises_nothing(counted):
    counted.finished("embeddings", "stop", 1.0, 1, 1)
    s = scrape(counted)
    assert s("marathon_requests_total", endpoint="embeddings", outcome="stop") == 1
    assert s("marathon_request_duration_seconds_count", endpoint="embeddings") == 1


# ---------------------------------------------------------------- the rate
def test_the_decode_rate_is_that_of_the_last_seconds_and_0_when_idle(counted, clock):
    assert scrape(counted)("marathon_decode_tokens_per_second") == 0
    for _ in range(1000):  # 10 s, 4 tokens each 10 ms
        clock.now += 0.01
        counted.generated(4)
    assert scrape(counted)("marathon_decode_tokens_per_second") == pytest.approx(400, rel=0.02)
    clock.now += 2.5
    assert 100 < scrape(counted)("marathon_decode_tokens_per_second") < 300
    clock.now += 3
    assert scrape(counted)("marathon_decode_tokens_per_second") == 0


def test_a_single_token_is_no_high_rate(counted, clock):
    counted.generated(1)
    clock.now += 0.001
    assert scrape(counted)("marathon_decode_tokens_per_second") == 1


# ---------------------------------------------------------------- what the engine's snapshot says
def test_a_server_without_an_engine_says_so_and_keeps_its_counters(counted, view):
    view.engine_dies()
    s = scrape(counted)
    assert s("marathon_engine_up") == 0
    assert s("marathon_requests_running") == 3
    assert s("marathon_engine_last_step_timestamp_seconds") == pytest.approx(time.time() - 77, abs=2)
    assert s("marathon_step_seconds_total", part="forward") == 3
    assert s("marathon_cache_leaks_total", model_type="smollm3", cache="ArraysCache", field="left_padding") == 2
    assert s("marathon_mlx_active_memory_bytes") is None
    assert s.labels("marathon_pressure") == []


def test_counters_of_dead_engines_are_added_to_those_of_the_living_one(counted, view):
    view.engine_dies()
    view.ready = a_ready(epoch=2)
    view.snapshot = Snapshot(
        step_seconds={"guard": 0.25},
        batch_sizes={3: 1},
        leaks={"ArraysCache.left_padding": 1},
        action_counts={"flush": 1},
        prefix_lookups={"miss": 1},
    )
    s = scrape(counted)
    assert s("marathon_guard_step_seconds_total") == 0.75
    assert s("marathon_step_seconds_total", part="guard") == 0.75
    assert s("marathon_batch_size_count") == 9
    assert s("marathon_batch_size_sum") == 5 + 3 * 3 + 100
    assert s("marathon_cache_leaks_total", model_type="smollm3", cache="ArraysCache", field="left_padding") == 3
    assert s("marathon_guard_actions_total", action="flush") == 5
    assert s("marathon_prompt_cache_lookups_total", result="hit") == 2
    assert s("marathon_prompt_cache_lookups_total", result="miss") == 1


def test_each_decode_step_is_in_the_bucket_of_its_rows(counted, view):
    s = scrape(counted)
    got = [s("marathon_batch_size_bucket", le=le) for le in ("1.0", "2.0", "4.0", "64.0", "+Inf")]
    assert got == [5, 5, 7, 7, 8]


STEP = st.one_of(
    st.none(),  # the engine dies
    st.dictionaries(st.sampled_from(["forward", "guard"]), st.floats(0, 10), max_size=2),
)


@settings(deadline=None, max_examples=40)
@given(st.lists(STEP, max_size=12))
def test_no_counter_of_an_engine_ever_goes_down(steps):
    counted, view = Metrics(CollectorRegistry()), View()
    counted.watch(view, "tiny")
    last: dict = {}
    for grown in steps:
        if grown is None:
            if view.snapshot:
                view.engine_dies()
        else:
            before = view.snapshot or Snapshot()
            seconds = {p: before.step_seconds.get(p, 0) + grown.get(p, 0) for p in {*before.step_seconds, *grown}}
            sizes = {**before.batch_sizes, len(grown): before.batch_sizes.get(len(grown), 0) + 1}
            view.snapshot, view.ready = Snapshot(step_seconds=seconds, batch_sizes=sizes), a_ready()
        counters = ("marathon_step_seconds_total", "marathon_batch_size_bucket", "marathon_batch_size_count")
        now = {key: value for key, value in scrape(counted).samples.items() if key[0] in counters}
        assert all(now[key] >= value - 1e-9 for key, value in last.items())
        last = now
    assert sum(v for k, v in last.items() if k[0] == "marathon_batch_size_count") == sum(s is not None for s in steps)


def test_an_act_of_the_server_is_counted_once_even_if_the_engine_reports_it_too(counted, view):
    view.snapshot = a_snapshot(action_counts={"rotate": 1, "hold": 2})
    counted.action("rotate")
    counted.action("kill_stalled")
    s = scrape(counted)
    assert s("marathon_guard_actions_total", action="rotate") == 1
    assert s("marathon_guard_actions_total", action="kill_stalled") == 1
    assert s("marathon_guard_actions_total", action="hold") == 2


@pytest.mark.parametrize("level", ["calm", "reclaim", "hold", "rotate"])
def test_pressure_is_one_hot(counted, view, level):
    view.snapshot = a_snapshot(pressure=level)
    s = scrape(counted)
    assert {row["state"]: s("marathon_pressure", **row) for row in s.labels("marathon_pressure")} == {
        state: float(state == level) for state in ("calm", "reclaim", "hold", "rotate")
    }


def test_headroom_is_what_the_settled_reading_leaves_of_the_limit(counted, view):
    s = scrape(counted)
    assert s("marathon_live_buffers", reading="settled") == 250
    assert s("marathon_live_buffers", reading="raw") == 300
    assert s("marathon_buffer_limit") == 1000
    assert s("marathon_buffer_headroom_ratio") == 0.75
    assert s("marathon_live_buffer_source_info", source="metal") == 1


def test_without_a_source_there_is_no_live_buffer_series_at_all(counted, view):
    view.ready = a_ready(live_source="off")
    view.snapshot = a_snapshot(
        live_settled=None, live_raw=None, buffers_per_token=None, unexplained_bytes_per_token=None,
        tokens_to_exhaustion={"bytes": 5.0}, seconds_to_exhaustion={"bytes": 1.0},
    )  # fmt: skip
    text = scrape(counted).text
    assert "live_buffer" not in text
    assert "buffer_limit" not in text
    assert "headroom" not in text
    assert 'resource="buffers"' not in text
    assert "marathon_buffers_per_token" not in text


def test_before_the_first_settled_reading_only_what_is_known_is_shown(counted, view):
    view.snapshot = a_snapshot(live_settled=None)
    s = scrape(counted)
    assert s.labels("marathon_live_buffers") == [{"reading": "raw"}]
    assert s("marathon_buffer_headroom_ratio") is None
    assert s("marathon_buffer_limit") == 1000


def test_a_flat_slope_never_exhausts_anything(counted, view):
    s = scrape(counted)
    assert s("marathon_tokens_to_exhaustion", resource="buffers") == math.inf
    assert s("marathon_seconds_to_exhaustion", resource="bytes") == 40
    assert 'marathon_seconds_to_exhaustion{resource="buffers"} +Inf' in s.text


def test_padding_of_decode_groups_is_what_they_hold_beyond_their_rows(counted, view):
    s = scrape(counted)
    assert s("marathon_decode_groups") == 2
    assert s("marathon_decode_group_kv_bytes", part="rows") == 950
    assert s("marathon_decode_group_kv_bytes", part="padding") == 100


def test_a_scrape_reads_the_snapshot_once(counted):
    class Once(View):
        reads = 0

        def __getattribute__(self, name: str) -> object:
            if name == "engine":
                Once.reads += 1
            return super().__getattribute__(name)

    counted.watch(Once(a_snapshot(), a_ready(), a_ready()), "tiny")
    Once.reads = 0
    scrape(counted)
    assert Once.reads == 1


# ---------------------------------------------------------------- memory of the server itself
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux only")
def test_the_servers_own_memory_is_what_the_system_says(counted):
    kib = int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    assert scrape(counted)("marathon_process_resident_bytes") == pytest.approx(kib * 1024, rel=0.2)


def test_memory_that_the_system_does_not_report_is_left_out(counted, monkeypatch):
    monkeypatch.setattr(metrics, "footprint", lambda: 0)
    assert scrape(counted)("marathon_process_resident_bytes") is None


# ---------------------------------------------------------------- what is built on the names
def selectors(expression: str) -> Iterator[tuple[str, str]]:
    """`name{matchers}` of every marathon metric in a query."""
    yield from re.findall(r"\b(marathon_\w+)(?:\{([^}]*)\})?", expression)


def check_query(expression: str, seen: Scrape) -> None:
    """Every metric, label and label value of a query exists."""
    found = list(selectors(expression))
    assert found or re.search(r"\b(?:up|process_start_time_seconds)\{", expression), expression
    for name, matchers in found:
        rows = seen.labels(name)
        assert rows, f"{name} doesn't exist: {expression}"
        for label, operator, pattern in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers):
            if label in ("job", "instance") or pattern.startswith("$"):
                continue
            values = {row[label] for row in rows}
            wanted = pattern.split("|") if "~" in operator else [pattern]
            assert set(wanted) <= values, f"{label} of {name} is never {pattern}"
    for grouping in re.findall(r"\b(?:by|without|ignoring|on) ?\(([^)]*)\)", expression):
        known = {label for name, _ in found for row in seen.labels(name) for label in row}
        assert {g.strip() for g in grouping.split(",")} <= known | {"job", "instance"}, expression
    assert expression.count("(") == expression.count(")")


def test_every_alert_asks_for_series_that_exist(counted, view):
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    seen = scrape(counted)
    for rule in rules:
        check_query(rule["expr"], seen)
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert len({rule["alert"] for rule in rules}) == len(rules)


@pytest.mark.parametrize(
    "wrong",
    [
        "marathon_no_such_total > 0",
        'marathon_pressure{state="panic"} == 1',
        "sum by (flavour) (marathon_requests_running)",
    ],
)
def test_a_query_for_what_does_not_exist_is_noticed(counted, view, wrong):
    with pytest.raises((AssertionError, KeyError)):
        check_query(wrong, scrape(counted))


def test_the_example_configuration_loads_the_alerts_and_scrapes_the_default_port():
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert [(ROOT / "deploy/prometheus" / name).is_file() for name in config["rule_files"]] == [True]
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == ["127.0.0.1:8080"]


def panels(dashboard: dict) -> Iterator[dict]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panels(panel) if "panels" in panel else ()


@pytest.fixture(scope="module")
def dashboard() -> dict:
    return json.loads((ROOT / "deploy/grafana/marathon.json").read_text())


def test_every_panel_of_the_dashboard_asks_for_series_that_exist(counted, view, dashboard):
    seen = scrape(counted)
    drawn = [panel for panel in panels(dashboard) if panel["type"] != "row"]
    for panel in drawn:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            check_query(target["expr"], seen)
            known = {label for name, _ in selectors(target["expr"]) for row in seen.labels(name) for label in row}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known | {"instance"}, target
    for annotation in dashboard["annotations"]["list"]:
        check_query(annotation["expr"], seen)
    assert len({panel["id"] for panel in panels(dashboard)}) == len(list(panels(dashboard)))


def test_the_dashboard_shows_every_family_but_the_ones_for_joins_and_debugging(dashboard):
    asked = " ".join(target["expr"] for panel in panels(dashboard) for target in panel.get("targets", ()))
    missing = {name for name in CONTRACT if name not in asked}
    assert missing == {
        "marathon_live_buffer_source_info",
        "marathon_unknown_request_fields_total",
    }


def test_every_panel_says_what_it_shows_and_every_legend_its_mean_max_and_last(dashboard):
    for panel in panels(dashboard):
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
        if panel["type"] == "timeseries":
            assert panel["options"]["legend"]["calcs"] == ["mean", "max", "lastNotNull"], panel["title"]


def test_no_panel_lies_on_another_and_the_verdict_comes_first(dashboard):
    cells = Counter()
    for panel in panels(dashboard):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
    assert max(cells.values()) == 1
    assert [panel["title"] for panel in panels(dashboard)][:2] == ["Verdict", "Verdict"]
    assert [panel["title"] for panel in panels(dashboard) if panel["type"] == "row"][1] == "Survival"


def unit(query: str) -> str:
    """What a query measures, by the name of its metric and by whether it is a rate."""
    name = re.search(r"marathon_\w+", query)[0]
    thing = next((word for word in name.split("_") if word in ("bytes", "seconds", "ratio")), "count")
    if "rate(" in query and "histogram_quantile" not in query and "/" not in query:
        return f"{thing} a second"
    return thing


def right_axis(panel: dict) -> set[str]:
    """Queries of a panel, by their letters, whose axis is the right one."""
    return {
        override["matcher"]["options"]
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"]["id"] == "byFrameRefID"
        and {"id": "custom.axisPlacement", "value": "right"} in override["properties"]
    }


def test_each_axis_of_a_panel_has_one_unit(dashboard):
    for panel in panels(dashboard):
        if panel["type"] != "timeseries":
            continue
        right = right_axis(panel)
        for axis in (True, False):
            units = {unit(target["expr"]) for target in panel["targets"] if (target["refId"] in right) == axis}
            assert len(units) <= 1, panel["title"]


def test_a_start_is_known_by_its_time_so_that_restarts_show_on_every_system(counted):
    began = scrape(counted)("marathon_start_time_seconds")
    assert began == pytest.approx(time.time(), abs=60)
    assert scrape(counted)("marathon_start_time_seconds") == began


def test_what_is_not_well_is_never_green(dashboard):
    for panel in panels(dashboard):
        for override in panel.get("fieldConfig", {}).get("overrides", []):
            if re.search("hold|rotate|crash|error", override["matcher"]["options"]):
                assert "green" not in json.dumps(override), panel["title"]


def test_the_dashboard_names_no_data_source_of_its_own(dashboard):
    assert dashboard["templating"]["list"][0]["type"] == "datasource"
    used = re.findall(r'"uid": "([^"]+)"', json.dumps(dashboard))
    assert set(used) == {"${datasource}", "marathon"}


def test_the_table_in_the_documentation_is_up_to_date(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("metrics_table", ROOT / "scripts/metrics_table.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main(["--check"]) == 0
    copy = tmp_path / "metrics.md"
    copy.write_text(script.PAGE.read_text().replace("| gauge |", "| counter |", 1))
    assert script.main(["--check"], copy) == 1
    assert "metrics_table.py" in capsys.readouterr().err
    assert script.main([], copy) == 0
    assert copy.read_text() == script.PAGE.read_text()


def test_the_gap_of_a_resume_is_measured_within_a_third():
    """A gap of 11 seconds showed as 20 while the buckets stood at 10 and 30."""
    usual = [bound for bound in metrics.RESUME_GAP if 1 <= bound <= 40]
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(usual))
    assert all(later - earlier <= 5 for earlier, later in itertools.pairwise(usual) if later <= 30)
