"""/live, /ready, /health, /metrics, /debug/* and /version.

Owns the answers for operators and their machines. Runs on the event loop; reads what the supervisor knows and never
asks the engine, so that the answers come while it is busy, stuck or gone.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

import server
from server.api.context import AppContext
from server.api.openapi import errors
from server.api.output.sse import encode
from server.errors import Draining, NotReady
from server.ipc.messages import Ready
from server.ipc.snapshot import Snapshot
from server.journal.record import UNFINISHED
from server.journal.state import JournalState
from server.metrics import CONTENT_TYPE
from server.supervision.supervisor import Supervisor


def routes(served: AppContext) -> APIRouter:
    router = APIRouter(tags=["health"])
    for add in (_add_probes, _add_reports, _add_debug, _add_version):
        add(router, served)
    return router


def _add_probes(router: APIRouter, served: AppContext) -> None:
    """Add /live and /ready, which orchestrators ask."""
    supervisor = served.supervisor

    @router.get("/live", responses=errors())
    async def live() -> dict[str, str]:
        """The server process answers."""
        return {"status": "live"}

    @router.get("/ready", responses=errors(503))
    async def ready() -> dict[str, str]:
        """New work would start now."""
        if supervisor.draining:
            raise Draining("The server is shutting down")
        if not supervisor.is_ready:
            raise NotReady(f"No engine is ready: {supervisor.down_reason}", retry_after=2)
        return {"status": "ready"}


def _add_reports(router: APIRouter, served: AppContext) -> None:
    """Add /health and /metrics, which people and Prometheus read."""

    @router.get("/health", responses=errors())
    async def health() -> Response:
        """The state of the engine, as far as the server knows it."""
        return json(report(served))

    @router.get("/metrics", response_class=Response, responses=errors())
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(served.metrics.exposition(), headers={"content-type": CONTENT_TYPE})


def _add_debug(router: APIRouter, served: AppContext) -> None:
    """Add /debug/*: what lies behind the figures."""
    supervisor = served.supervisor

    @router.get("/debug/guard", responses=errors())
    async def guard() -> Response:
        """What the cache guard found pending, and every automatic act of both processes."""
        engine = supervisor.engine
        snapshot = engine.snapshot or Snapshot()
        actions = sorted([*snapshot.actions, *engine.actions], key=lambda action: action.time)
        return json({"pending": snapshot.pending, "findings": snapshot.findings, "actions": actions})

    @router.get("/debug/batches", responses=errors())
    async def batches() -> Response:
        """The decode groups at the time of the last snapshot, what waits, and how far the prompts are being read."""
        snapshot = supervisor.engine.snapshot or Snapshot()
        return json(
            {
                "running": supervisor.running,
                "waiting": supervisor.waiting,
                "prefilling": snapshot.prefilling,
                "prompts": snapshot.prompts,
                "groups": snapshot.groups,
                "step_seconds": snapshot.step_seconds,
            }
        )


def _add_version(router: APIRouter, served: AppContext) -> None:
    """Add /version."""

    @router.get("/version", responses=errors())
    async def version() -> dict[str, str]:
        """The version of this server."""
        return {"version": server.__version__}


def report(served: AppContext) -> dict[str, Any]:
    """Body of /health."""
    supervisor = served.supervisor
    engine = supervisor.engine
    snapshot = engine.snapshot
    known = engine.known
    return {
        "status": _status(supervisor),
        "reason": supervisor.down_reason,
        "model": served.name,
        "version": server.__version__,
        "engine": {
            "pid": engine.pid,
            "epoch": engine.epoch,
            "up": engine.is_up,
            "last_step_age_seconds": engine.last_step_age_seconds,
            "restarts": engine.restarts,
        },
        "pressure": snapshot.pressure if snapshot else None,
        "live_buffers": _live_buffers(known, snapshot or Snapshot()),
        "batching": known.batching if known else None,
        "draining": supervisor.draining,
        "journal": _journal(served.journal.state),
    }


def _status(supervisor: Supervisor) -> str:
    if supervisor.is_ready:
        return "ok"
    if supervisor.draining:
        return "draining"
    return "not ready"


def _journal(state: JournalState) -> dict[str, Any]:
    """Report whether answers can be stored. /health is open to all, so that the file's place isn't in it."""
    unfinished = sum(state.stored.get(status, 0) for status in UNFINISHED)
    return {"condition": state.condition, "reason": state.reason, "bytes": state.bytes, "unfinished": unfinished}


def _live_buffers(known: Ready | None, snapshot: Snapshot) -> dict[str, Any]:
    """Report MLX's live buffers, as counted by the engine, against the device's limit."""
    if known is None:
        return {"source": "off", "count": snapshot.live_settled, "limit": None, "reason": "the engine is starting"}
    return {
        "source": known.live_source,
        "count": snapshot.live_settled,
        "limit": known.buffer_limit,
        "reason": known.live_reason or None,
    }


def json(value: Any) -> Response:
    """Messages and all; what is no JSON number (an infinite reading) becomes null."""
    return Response(encode(value), media_type="application/json")
