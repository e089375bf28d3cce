"""GET /v1/models and /v1/models/{id}.

Owns what is said about the served model. Runs on the event loop; never asks the network or the disk. The model is
listed from the first moment on: requests wait until it has been loaded.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from server.api.context import AppContext
from server.api.openapi import errors
from server.api.output.schema import ModelCard, ModelList


def routes(served: AppContext, prefix: str) -> APIRouter:
    router = APIRouter(prefix=prefix, tags=["models"])

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "marathon",
            "root": served.name,
            "max_model_len": served.context,
        }

    @router.get("/models", response_model=ModelList, responses=errors())
    async def list_models() -> Any:
        """The served model and its aliases."""
        return {"object": "list", "data": [card(name) for name in [served.name, *served.settings.model_alias]]}

    @router.get("/models/{id:path}", response_model=ModelCard, responses=errors(404))
    async def get_model(id: str) -> Any:
        """One model, by any name under which it answers; names may contain slashes."""
        served.check_model(id)
        return card(served.name if id not in served.settings.model_alias else id)

    return router
