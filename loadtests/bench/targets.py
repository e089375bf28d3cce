"""Who is measured: Marathon, mlx-lm's server, and mlx-lm called directly, behind one face.

Owns the running targets of one model and what is read off them around a load. Runs in the load test's own process;
the work is done by the processes that `loadtests.harness` starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from time import sleep
from typing import Any, Protocol

from loadtests import harness, process_tree
from loadtests.bench.workload import (
    LoadRequest,
    Order,
    Stream,
    chunks_a_token,
    first_p50,
    to_line,
    to_streams,
    tokens_a_second,
)
from loadtests.harness import HarnessError, Server, Worker

MARATHON, RAW, REFERENCE = "marathon", "raw", "mlx_lm.server"
EARLIER = "earlier"  # Marathon of another checkout
NAMES = (MARATHON, RAW, REFERENCE)
REPORT_SECONDS = 1.1  # Marathon's engine reports each second


class Target(Protocol):
    """What every target can do."""

    name: str

    def run(self, requests: Sequence[LoadRequest], *, in_turn: bool = False) -> list[Stream]:
        """Together, or as turns of one conversation. Raises HarnessError when any stream fails."""

    def cpu_seconds(self) -> float: ...

    def memory_bytes(self) -> int: ...

    def host_seconds(self) -> dict[str, float]:
        """Seconds by part of its loop and the count `steps`, as far as it reports them; waits until it has."""


class HttpTarget:
    """Behind HTTP; `client` makes the requests."""

    def __init__(self, server: Server, client: Worker, fields: dict[str, Any], *, exact: bool) -> None:
        """`exact`: whether it can ignore end tokens, so that every stream has the length asked for."""
        self.name, self._server, self._client = server.name, server, client
        self._fields, self._exact = fields, exact

    def run(self, requests: Sequence[LoadRequest], *, in_turn: bool = False) -> list[Stream]:
        line = to_line(Order(list(requests), self._server.port, self._fields, in_turn))
        return checked(self.name, requests, to_streams(self._client.ask(line)), exact=self._exact)

    def cpu_seconds(self) -> float:
        return self._server.cpu_seconds()

    def memory_bytes(self) -> int:
        return self._server.memory_bytes()

    def host_seconds(self) -> dict[str, float]:
        if self.name != MARATHON:
            return {}
        sleep(REPORT_SECONDS)
        parts = self._server.metric("marathon_step_seconds_total")
        steps = self._server.metric("marathon_batch_size_count")
        return {label.split('"')[1]: value for label, value in parts.items()} | {"steps": sum(steps.values())}


class DirectTarget:
    """mlx-lm's BatchGenerator, called directly in a child process."""

    def __init__(self, worker: Worker) -> None:
        self.name, self._worker = RAW, worker

    def run(self, requests: Sequence[LoadRequest], *, in_turn: bool = False) -> list[Stream]:
        line = to_line(Order(list(requests), reuse=in_turn))
        return checked(self.name, requests, to_streams(self._worker.ask(line)), exact=True)

    def cpu_seconds(self) -> float:
        return process_tree.cpu_seconds(self._worker.pid)

    def memory_bytes(self) -> int:
        return process_tree.memory_bytes(self._worker.pid)

    def host_seconds(self) -> dict[str, float]:
        return {}


def checked(name: str, requests: Sequence[LoadRequest], streams: list[Stream], *, exact: bool) -> list[Stream]:
    """The streams, if each came to its end; a figure from half a load is none."""
    for i, (ask, stream) in enumerate(zip(requests, streams, strict=True)):
        if stream.error:
            raise HarnessError(f"{name}: stream {i}: {stream.error}")
        if not stream.tokens or (exact and stream.tokens != ask.max_tokens):
            raise HarnessError(f"{name}: stream {i} has {stream.tokens} tokens instead of {ask.max_tokens}")
    return streams


def measured(target: Target, requests: Sequence[LoadRequest], *, profile: bool = False) -> dict[str, float]:
    """Run a load and take what can be read of any load; with `profile` also where the target's time went."""
    host = target.host_seconds() if profile else {}
    cpu = target.cpu_seconds()
    streams = target.run(requests)
    cpu = target.cpu_seconds() - cpu
    figures = {
        "tok_s": tokens_a_second(streams),
        "ttft_p50": first_p50(streams),
        "ttft_mean": mean(stream.first for stream in streams),
        "stall": max(stream.longest_gap() for stream in streams),
        "cpu_s_per_1k": 1000 * cpu / sum(stream.tokens for stream in streams),
        "chunks_per_token": chunks_a_token(streams),
        "shortest": min(stream.tokens for stream in streams),
    }
    return figures | (_a_step(host, target.host_seconds()) if profile else {})


def _a_step(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Host milliseconds a decode step, by part."""
    steps = after.get("steps", 0.0) - before.get("steps", 0.0)
    if steps <= 0:
        return {}
    return {f"ms_{part}": 1000 * (after[part] - before.get(part, 0.0)) / steps for part in after if part != "steps"}


@contextlib.contextmanager
def opened(
    model: Path, names: Sequence[str], logs: Path, *, rows: int = 32, earlier: Path = harness.ROOT
) -> Iterator[dict[str, Target]]:
    """The named targets on one model, started in this order, ready to work on `rows` sequences at once; `earlier` is
    EARLIER's checkout.

    All processes of each are there: one that starts later would take its time from what is measured, and count in some
    readings of the memory and not in others.
    """
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Worker("loadtests.bench.client", log=logs / "client.log"))

        def raw() -> Target:
            arguments = ("--model", str(model), "--rows", str(rows))
            worker = Worker("loadtests.bench.raw", *arguments, log=logs / f"raw-{model.name}.log")
            return DirectTarget(stack.enter_context(worker))

        def served(root: Path, name: str) -> Target:
            log = logs / f"{name}-{model.name}.log"
            serving = harness.marathon if root == harness.ROOT else partial(harness.earlier, root)
            server = stack.enter_context(serving(model, log, max_rows=rows))
            server.wait_whole()
            return HttpTarget(server, client, {"model": "default", "ignore_eos": True}, exact=True)

        def reference() -> Target:
            log = logs / f"mlx_lm-{model.name}.log"
            server = stack.enter_context(harness.reference(model, log, decode_concurrency=rows))
            return HttpTarget(server, client, {"model": "default_model"}, exact=False)

        starts: dict[str, Callable[[], Target]] = {
            RAW: raw,
            MARATHON: partial(served, harness.ROOT, "marathon"),
            EARLIER: partial(served, earlier, "earlier"),
            REFERENCE: reference,
        }
        yield {name: starts[name]() for name in names}
