"""Prometheus families, and the verbs that count.

Owns every `marathon_*` family: what the server counts itself, here and in `journal/measures`, and what is read from the
engine's snapshot (`engine_metrics`). The registry is an argument; the global one is never touched. Runs on the server's
event loop only, so the route that serves `exposition` must be `async`. No verb raises, waits or keeps a request's text;
label values are the server's own names, never a client's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import Metric

import server
from server.ipc.snapshot import Snapshot
from server.journal.measures import JournalMetrics
from server.telemetry import engine_metrics
from server.telemetry.engine_metrics import EngineMetrics, EngineView
from server.telemetry.footprint import footprint
from server.telemetry.series import Counter, Family, Histogram, Rate, metric

__all__ = ["CONTENT_TYPE", "ENDPOINTS", "REJECTIONS", "EngineView", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

OTHER = "other"
GENERATING = ("chat", "completions", "responses", "messages")
ENDPOINTS = (*GENERATING, OTHER)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
CLIENT_GONE = 499
OUTCOMES = ("stop", "length", "tool_calls", "cancelled", "error")
REJECTIONS = (
    "invalid",
    "unsupported",
    "context_length",
    "queue_full",
    "memory_guard",
    "buffer_guard",
    "not_ready",
    "auth",
    "body_too_large",
    "shutdown",
    "journal",
)
PHASES = ("queued", "prefill", "decode")
RESTARTS = ("crash", "stall", "rotation")
RESUMES = (*RESTARTS, "preemption", "restart")
RESUME_PARTS = ("engine", "load", "admission", "read")

FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
INTER_TOKEN = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
DURATION = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
# Finer where an engine's start, and with it the gap, usually lies.
RESUME_GAP = (0.1, 0.25, 0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 60, 90, 120, 300, 600)
RESUME_WAIT = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 12, 20, 40, 60, 120, 300, 600)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

BUILD_INFO = Family("marathon_build_info", "Versions that run.", "gauge", ("version", "mlx", "mlx_lm"))
MODEL_INFO = Family("marathon_model_info", "The model that is served.", "gauge", ("model", "quantization"))
DECODE_RATE = Family(
    "marathon_decode_tokens_per_second", "Tokens generated a second over the last seconds; 0 when idle.", "gauge"
)
STARTED = Family(
    "marathon_start_time_seconds", "When the server process began to serve, in seconds since the epoch.", "gauge"
)
RESIDENT = Family(
    "marathon_process_resident_bytes",
    "Memory of the server process: its resident size, on macOS its footprint.",
    "gauge",
)


class Metrics:
    """All families on one registry. `watch` names the engine to read from; before it there are the server's counts."""

    def __init__(self, registry: CollectorRegistry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry
        self.journal = JournalMetrics()
        self._model: str | None = None
        self._started = time.time()
        self._engine = EngineMetrics()
        self._rate = Rate(clock)
        self._build = (server.__version__, _installed("mlx"), _installed("mlx-lm"))
        self._add_requests()
        self._add_times()
        self._add_tokens()
        self._add_resumes()
        self._counted = tuple(value for value in vars(self).values() if isinstance(value, Counter | Histogram))

        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        registry.register(self)

    def _add_requests(self) -> None:
        """Add what is counted once a request."""
        self._http = Counter(
            "marathon_http_requests_total",
            "HTTP requests, by route template (other: no such route); status 499: the client left before the answer.",
            route=(),
            method=(),
            status=(),
        )
        self._requests = Counter(
            "marathon_requests_total",
            "Requests for a generation that have ended, by how.",
            endpoint=GENERATING,
            outcome=OUTCOMES,
        )
        self._rejected = Counter(
            "marathon_requests_rejected_total",
            "Requests refused before the first byte, by why.",
            endpoint=ENDPOINTS,
            reason=REJECTIONS,
        )
        self._unknown_fields = Counter(
            "marathon_unknown_request_fields_total", "Request fields that were ignored as unknown.", endpoint=ENDPOINTS
        )
        self._disconnects = Counter(
            "marathon_client_disconnects_total", "Clients that left before the end, by phase.", phase=PHASES
        )

    def _add_times(self) -> None:
        """Add what is measured of each request: times, and tokens by request."""
        self._first_token = Histogram(
            "marathon_time_to_first_token_seconds",
            "From a request's arrival to its first token, time in the queue included.",
            FIRST_TOKEN,
            endpoint=GENERATING,
        )
        self._inter_token = Histogram(
            "marathon_inter_token_latency_seconds", "From one token of a sequence to its next.", INTER_TOKEN
        )
        self._queue_time = Histogram(
            "marathon_queue_time_seconds", "From a sequence's arrival to the engine's taking it.", DURATION
        )
        self._prefill_time = Histogram(
            "marathon_prefill_time_seconds", "From the engine's taking a sequence to its first token.", DURATION
        )
        self._decode_time = Histogram(
            "marathon_decode_time_seconds", "From a sequence's first token to its end.", DURATION
        )
        self._duration = Histogram(
            "marathon_request_duration_seconds",
            "From a request's arrival to its end.",
            DURATION,
            endpoint=GENERATING,
        )
        self._request_prompt = Histogram("marathon_request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._request_generation = Histogram(
            "marathon_request_generation_tokens", "Tokens generated for a request.", TOKENS
        )

    def _add_tokens(self) -> None:
        """Add what is counted once a token."""
        self._prompt = Counter("marathon_prompt_tokens_total", "Prompt tokens of the sequences begun.")
        self._cached = Counter(
            "marathon_cached_prompt_tokens_total", "Prompt tokens that were taken from earlier prompts' caches."
        )
        self._generation = Counter(
            "marathon_generation_tokens_total", "Tokens generated, each once, however often it was recomputed."
        )

    def _add_resumes(self) -> None:
        """Add what is counted when an engine ends and its generations go on in another one."""
        self._restarts = Counter(
            "marathon_engine_restarts_total", "Engines replaced by new ones, by why.", reason=RESTARTS
        )
        self._resumed = Counter(
            "marathon_resumed_generations_total", "Generations continued elsewhere, by why.", reason=RESUMES
        )
        self._resume_gap = Histogram(
            "marathon_resume_seconds",
            "Between two tokens of a generation that was continued: the gap that its client saw.",
            RESUME_GAP,
            reason=RESUMES,
        )
        self._resume_wait = Histogram(
            "marathon_resume_wait_seconds",
            "What continued generations waited for: the end of the old engine, a new process and its imports (engine), "
            "the weights (load), their turn (admission), their KV and the first token (read).",
            RESUME_WAIT,
            part=RESUME_PARTS,
        )
        self._recomputed = Counter(
            "marathon_recomputed_tokens_total", "Tokens whose prefill was repeated to continue.", reason=RESUMES
        )

    # ---------------------------------------------------------------- a scrape
    def watch(self, view: EngineView, model: str) -> None:
        """Reads the engine from `view` from now on; `model` is the name under which it is served."""
        self._model = model
        self._engine.view = view
        view.on_engine_gone.append(self.epoch_ended)

    def epoch_ended(self, snapshot: Snapshot) -> None:
        """An engine is gone, with its last snapshot; its counters stay in the totals."""
        self._engine.epoch_ended(snapshot)

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated a second over the last seconds."""
        return self._rate.read()

    @property
    def restarts(self) -> dict[str, int]:
        """Engines replaced so far, by cause."""
        return self._restarts.read()

    @property
    def resumes(self) -> dict[str, int]:
        """Generations continued so far, by cause."""
        return self._resumed.read()

    @property
    def first_tokens(self) -> tuple[int, float]:
        """Requests that have had their first token, and the seconds that they waited for it in all."""
        return self._first_token.read()

    def exposition(self) -> bytes:
        """The whole registry as text of type `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def families(self) -> list[Family]:
        """Every family, whether it has samples now or not."""
        own = [counted.family for counted in self._counted]
        parts = [*self.journal.families(), *engine_metrics.families()]
        return [BUILD_INFO, MODEL_INFO, DECODE_RATE, STARTED, RESIDENT, *own, *parts]

    def collect(self) -> Iterator[Metric]:
        """For the registry; families without a sample are left out."""
        yield metric(BUILD_INFO, {self._build: 1})
        engine = self._engine.view.engine if self._engine.view else None
        if self._model is not None and engine and engine.known:
            yield metric(MODEL_INFO, {(self._model, engine.known.quantization): 1})
        yield metric(DECODE_RATE, {(): self._rate.read()})
        yield metric(STARTED, {(): self._started})
        if resident := footprint():
            yield metric(RESIDENT, {(): resident})
        yield from (counted.collect() for counted in self._counted if counted)
        yield from self.journal.collect()
        yield from self._engine.collect(engine)

    # ---------------------------------------------------------------- each Steps message
    def generated(self, count: int) -> None:
        """Tokens delivered by one message."""
        self._generation.add(count)
        self._rate.add(count)

    def inter_token(self, seconds: float, count: int) -> None:
        """`count` rows that each waited `seconds` for their next token."""
        self._inter_token.observe(seconds, count=count)

    # ---------------------------------------------------------------- once a sequence
    def queue_time(self, seconds: float) -> None:
        self._queue_time.observe(seconds)

    def prefill_time(self, seconds: float) -> None:
        self._prefill_time.observe(seconds)

    def decode_time(self, seconds: float) -> None:
        self._decode_time.observe(seconds)

    def prompt(self, tokens: int, cached: int) -> None:
        """A sequence has begun; `cached` of its prompt tokens needed no prefill."""
        self._prompt.add(tokens)
        self._cached.add(cached)

    # ---------------------------------------------------------------- once a request
    def first_token(self, endpoint: str, seconds: float) -> None:
        self._first_token.observe(seconds, endpoint)

    def finished(self, endpoint: str, outcome: str, seconds: float, prompt_tokens: int, generated_tokens: int) -> None:
        """A request has ended, in whatever way; tokens are summed over its choices."""
        self._requests.add(1, endpoint, outcome)
        self._duration.observe(seconds, endpoint)
        self._request_prompt.observe(prompt_tokens)
        self._request_generation.observe(generated_tokens)

    def disconnected(self, phase: str) -> None:
        self._disconnects.add(1, phase)

    def rejected(self, endpoint: str, reason: str) -> None:
        """`reason` is the error's own, see `errors.RequestError`."""
        self._rejected.add(1, endpoint, reason)

    def unknown_fields(self, endpoint: str, count: int) -> None:
        self._unknown_fields.add(count, endpoint)

    def http_request(self, route: str | None, method: str, status: int) -> None:
        """`route` is the template of the route that matched, or None; `status` is 0 if there was no answer."""
        self._http.add(1, route or OTHER, method if method in METHODS else OTHER, str(status or CLIENT_GONE))

    # ---------------------------------------------------------------- the engine's life
    def engine_restarted(self, reason: str) -> None:
        self._restarts.add(1, reason)

    def resumed(self, reason: str, seconds: float) -> None:
        """The first token after a resume has arrived, `seconds` after the one before."""
        self._resumed.add(1, reason)
        self._resume_gap.observe(seconds, reason)

    def resume_waited(self, part: str, seconds: float) -> None:
        """A part of that gap; one of `RESUME_PARTS`."""
        self._resume_wait.observe(seconds, part)

    def recomputed(self, reason: str, tokens: int) -> None:
        self._recomputed.add(tokens, reason)

    def action(self, name: str) -> None:
        """An automatic act of the server's own; the engine's come with its snapshot."""
        self._engine.acted(name)


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
