"""/live, /ready, /health, /metrics, /debug/*, /version and /.

Owns what operators and their machines are told. Runs on the event loop; reads what the supervisor knows and never
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
from server.metrics import CONTENT_TYPE


def routes(served: AppContext) -> APIRouter:
    router = APIRouter(tags=["health"])
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

    @router.get("/health", responses=errors())
    async def health() -> Response:
        """The state of the engine, as far as the server knows it."""
        return json(report(served))

    @router.get("/metrics", response_class=Response, responses=errors())
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(served.metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    @router.get("/debug/guard", responses=errors())
    async def guard() -> Response:
        """What the cache guard found pending, and every automatic act of both processes."""
        snapshot = supervisor.snapshot
        found = snapshot.actions if snapshot else []
        actions = sorted([*found, *supervisor.actions], key=lambda action: action.time)
        return json(
            {
                "pending": snapshot.pending if snapshot else 0,
                "findings": snapshot.findings if snapshot else [],
                "actions": actions,
            }
        )

    @router.get("/debug/batches", responses=errors())
    async def batches() -> Response:
        """The decode groups at the time of the last snapshot, what waits, and how far the prompts are being read."""
        snapshot = supervisor.snapshot
        return json(
            {
                "running": supervisor.running,
                "waiting": supervisor.waiting,
                "prefilling": snapshot.prefilling if snapshot else 0,
                "prompts": snapshot.prompts if snapshot else [],
                "groups": snapshot.groups if snapshot else [],
                "step_seconds": snapshot.step_seconds if snapshot else {},
            }
        )

    @router.get("/version", responses=errors())
    async def version() -> dict[str, str]:
        """The version of this server."""
        return {"version": server.__version__}

    @router.get("/", responses=errors())
    async def index() -> dict[str, Any]:
        """What this is."""
        return {"name": "Marathon", "version": server.__version__, "model": served.name, "api": "/openapi.json"}

    return router


def report(served: AppContext) -> dict[str, Any]:
    """Body of /health."""
    supervisor = served.supervisor
    snapshot = served.supervisor.snapshot
    known = served.supervisor.known
    status = "ok" if supervisor.is_ready else "draining" if supervisor.draining else "not ready"
    return {
        "status": status,
        "reason": supervisor.down_reason,
        "model": served.name,
        "version": server.__version__,
        "engine": {
            "pid": supervisor.pid,
            "epoch": supervisor.epoch,
            "up": supervisor.is_up,
            "last_step_age_seconds": supervisor.last_step_age_seconds,
            "restarts": supervisor.restarts,
        },
        "pressure": snapshot.pressure if snapshot else None,
        "live_buffers": {
            "source": known.live_source if known else "off",
            "count": snapshot.live_settled if snapshot else None,
            "limit": known.buffer_limit if known else None,
            "reason": (known.live_reason or None) if known else "the engine is starting",
        },
        "batching": known.batching if known else None,
        "draining": supervisor.draining,
    }


def json(value: Any) -> Response:
    """Messages and all; what is no JSON number (an infinite reading) becomes null."""
    return Response(encode(value), media_type="application/json")
