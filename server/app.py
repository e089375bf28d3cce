"""The composition root of the HTTP side.

Owns which routes there are, the order of what every request passes, and the conversion of every failure into one error
body. Runs on the event loop. Everything it needs is an argument; it makes nothing but the application.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

import server
from server.api import (
    chat,
    chat_store,
    completions,
    health,
    messages,
    models,
    openapi,
    response_store,
    responses,
    status,
    tokenize,
)
from server.api.context import AppContext
from server.api.input import generic_tools
from server.api.middleware.access import Access, Heads, refusal
from server.api.middleware.security import Cors, Keys, Names, any_port, read_keys
from server.api.stored.answers import StoredAnswers
from server.errors import InvalidValue, MethodError, RequestError, UnknownUrl
from server.metrics import Metrics
from server.model_files.locate import ModelLocation, locate
from server.settings import Settings, is_loopback
from server.supervision.caffeinate import while_busy
from server.supervision.supervisor import Supervisor
from server.text.tokenizer import Tokenizer

METHODS = {"GET": "GET", "HEAD": "GET", "POST": "POST", "DELETE": "DELETE"}  # → that of the route that answers

log = logging.getLogger("marathon")


def create_app(served: AppContext) -> FastAPI:
    """The application that serves `served`. Raises StartupError for a key file that gives no key."""
    answers = StoredAnswers(served, {"response": responses.prepare, "chat": chat.prepare})
    app = FastAPI(
        title="Marathon",
        version=server.__version__,
        description="OpenAI-compatible text generation whose generations do not die.",
        lifespan=lifespan(served, answers),
        openapi_url=None,  # `openapi.routes` has it
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.openapi = lambda: openapi.document(app)  # type: ignore[method-assign]
    for prefix in ("/v1", ""):  # the latter for clients whose base URL lacks it
        for routes in (completions.routes, messages.routes, models.routes):
            app.include_router(routes(served, prefix), include_in_schema=bool(prefix))
        # The last two take any word behind the others' paths for an id.
        for kept in (tokenize.counting, chat.routes, responses.routes, response_store.routes, chat_store.routes):
            app.include_router(kept(served, answers, prefix), include_in_schema=bool(prefix))
    app.include_router(tokenize.routes(served))
    app.include_router(health.routes(served))
    app.include_router(status.routes(served))
    app.include_router(openapi.routes(app))
    _add_handlers(app)
    _add_middleware(app, served)
    return app


def serving(settings: Settings) -> AppContext:
    """All that serves the model of the settings. Raises StartupError when there is none or its files are broken."""
    model = locate(settings)
    metrics = Metrics(CollectorRegistry())
    return assemble(settings, model, metrics, Supervisor(settings, model.path, metrics))


def assemble(settings: Settings, model: ModelLocation, metrics: Metrics, supervisor: Supervisor) -> AppContext:
    """The same of parts that are there already."""
    tokenizer = Tokenizer.load(model.path, trust_remote_code=settings.trust_remote_code)
    if settings.context and settings.context > tokenizer.context:
        log.warning(
            "--context %d is more than the model was made for; %d are used", settings.context, tokenizer.context
        )
    created = int((model.path / "config.json").stat().st_mtime)
    return AppContext(settings, model.name, created, generic_tools.with_format(tokenizer), supervisor, metrics)


def lifespan(served: AppContext, answers: StoredAnswers) -> Callable[[FastAPI], Any]:
    """Engine, journal and worker threads live as long as the application."""

    @asynccontextmanager
    async def alive(app: FastAPI) -> AsyncIterator[None]:
        served.metrics.watch(served.supervisor, served.name)
        served.metrics.journal.view = served.journal
        supervisor = served.supervisor
        await supervisor.start()
        supervisor.learn(await asyncio.to_thread(served.tokenizer.token_table))
        await served.journal.open()
        await answers.resume()
        feed = asyncio.create_task(served.feed.run())
        try:
            # What waits counts too: during an engine's replacement nothing runs and everything waits.
            async with while_busy(served.settings.keep_awake, lambda: supervisor.running + supervisor.waiting > 0):
                yield
        finally:
            feed.cancel()
            await supervisor.stop(supervisor.clock())
            await answers.close()
            await served.journal.close()
            served.close()

    return alive


# ---------------------------------------------------------------- what every request passes
def _add_middleware(app: FastAPI, served: AppContext) -> None:
    """From the inside out: HEAD, keys, CORS (so that browsers may read a 401), names, the record of the request."""
    settings = served.settings
    app.add_middleware(Heads)
    app.add_middleware(Keys, keys=read_keys(settings), metrics_open=is_loopback(settings.host))
    if settings.cors_origins:
        app.add_middleware(
            Cors,
            allow_origins=settings.cors_origins,
            allow_origin_regex=any_port(settings.cors_origins),
            allow_methods=list(METHODS),
            allow_credentials="*" not in settings.cors_origins,  # cookies of a proxy before us: only for named pages
            allow_headers=["*"],  # answered with the names that were asked for: `*` alone wouldn't cover Authorization
            allow_private_network=True,
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
    app.add_middleware(Names, settings=settings)
    app.add_middleware(Access, counts=served.metrics, lines=settings.access_log)


# ---------------------------------------------------------------- failures
def _add_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return refusal(request.scope, error)

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: HTTPException) -> Response:
        """Starlette's own: no such route, no such method."""
        path = request.url.path[:200]
        method = request.method
        if error.status_code == 405:
            allowed = {"Allow": ", ".join(_methods_of(app, request.scope))}
            return refusal(request.scope, MethodError(f"{path} doesn't take {method}"), allowed)
        if error.status_code == 404:
            return refusal(request.scope, UnknownUrl(f"There is no {path} here"))
        return refusal(request.scope, InvalidValue(str(error.detail)))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return refusal(request.scope, InvalidValue(str(first["msg"]), param=str(first["loc"][-1])))


def _methods_of(app: FastAPI, scope: Scope) -> list[str]:
    """What a path takes. Starlette names the methods of the first of the path's routes alone, and there is one a
    method."""
    return [method for method, routed in METHODS.items() if _is_routed(app, {**scope, "method": routed})]


def _is_routed(app: FastAPI, scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)
