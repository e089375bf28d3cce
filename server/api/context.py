"""What every route needs: the settings, the model's names, and the parts below.

Owns the choice where a body is parsed, checked, templated and tokenised: the shortest ones on the event loop, most in
one worker thread, so that the loop goes on reading the channel, those with schemas in other threads, since checking one
may take seconds, and large ones in a process of their own, since a thread would hold the interpreter. `AppContext` runs
on the event loop, `ServedModel` in all these places.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from server.api.input.large_requests import LARGE_BYTES, LargeRequests
from server.errors import InvalidValue, ModelNotFound, NotReady, StartupError
from server.grammar.checker import Checker
from server.ipc.messages import Ready
from server.journal.journal import Journal
from server.metrics import Metrics
from server.settings import Settings
from server.status.feed import Feed
from server.supervision.supervisor import Supervisor
from server.text.tokenizer import Tokenizer

PARTS = ("mlx-marathon", "mlx", "mlx-lm")  # what an answer's text can depend on besides the model
LIGHT_BYTES = 4096  # of a body that takes a millisecond or two
SCHEMA_THREADS = 2  # each waits most of its time; more would make the event loop wait for the interpreter
HEAVY = (  # may take more
    b"response_format", b"structured_outputs", b"guided_", b"json_schema", b"grammar", b"regex", b"ebnf", b"tools",
    b"logit_bias", b"\\u",  # any of the words may be spelled with escapes
)  # fmt: skip
MAX_NOTED = 200  # names of unknown fields come from clients

log = logging.getLogger("marathon.api")
Result = TypeVar("Result")


def build() -> str:
    """The same for the same versions."""
    versions = [f"{part} {version(part)}" for part in PARTS]
    return "b" + hashlib.sha256("\n".join(versions).encode()).hexdigest()[:10]


def within_depth(work: Callable[..., Result], *arguments: object) -> Result:
    """`work(*arguments)`. What is nested so deeply that Python can't walk through it was sent so."""
    try:
        return work(*arguments)
    except RecursionError:
        raise InvalidValue("The body is nested too deeply") from None


@dataclass(frozen=True, slots=True)
class Recipe:
    """How another process makes the same `ServedModel`."""

    settings: str  # as JSON, without the API keys
    name: str
    created: int
    folder: Path  # the tokenizer's


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model, and what it takes to understand requests for it."""

    settings: Settings
    name: str  # the model's id
    created: int
    tokenizer: Tokenizer
    checker: Checker = field(default_factory=Checker, kw_only=True)
    build: str = field(default_factory=lambda: build(), kw_only=True)  # distinguishes answers of different versions

    @property
    def names(self) -> set[str]:
        """Every name under which the model answers; only its id and the aliases are listed."""
        given = set()
        if self.settings.model:
            given = {self.settings.model}
        return {self.name, "default", *self.settings.model_alias, *given}

    @property
    def recipe(self) -> Recipe:
        shown = self.settings.for_a_process()
        return Recipe(shown, self.name, self.created, self.tokenizer.folder)

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound for a name that isn't ours; none at all means the served model."""
        if name is not None and name not in self.names:
            raise ModelNotFound(f"The model {name[:200]!r} isn't served here; {self.name!r} is", param="model")


@dataclass(frozen=True, slots=True)
class AppContext(ServedModel):
    """The served model and all that serves it."""

    supervisor: Supervisor
    metrics: Metrics
    worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="text"))
    schema_workers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(SCHEMA_THREADS, thread_name_prefix="schemas")
    )
    noted: set[str] = field(default_factory=set)  # unknown fields that the log has named
    large: LargeRequests = field(init=False)
    feed: Feed = field(init=False)
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "large", LargeRequests(self.recipe, self.tokenizer))
        object.__setattr__(self, "feed", Feed(self.supervisor, self.metrics, self.name))
        object.__setattr__(self, "journal", Journal(self.settings, self.metrics.journal))

    @property
    def context(self) -> int:
        """Positions a sequence may have. The engine reads them from the model's folder by the same rule, so that the
        number stays once the engine is up."""
        ready = self.supervisor.engine.known
        if ready is None:
            return self.settings.allowed_context(self.tokenizer.context)
        return self.settings.allowed_context(ready.context)

    async def known(self) -> Ready:
        """Facts of the loaded model; waits while the first engine loads it. Raises NotReady when there can be none."""
        try:
            return await self.supervisor.wait_known()
        except StartupError as error:
            raise NotReady(f"The model can't be loaded: {error}") from error

    async def prepare(self, work: Callable[..., Result], content: bytes, *more: object) -> Result:
        """`work(self, content, *more)`: what a request's body asks for. `work` is a function of a module, and gets a
        `ServedModel`; it and what it gives must be fit to be pickled.

        Handing a body to the worker thread costs more than a short text takes; a schema may take long, however short
        it is.
        """
        if len(content) > LARGE_BYTES:
            return await self.large.prepare(work, content, *more)
        if any(word in content for word in HEAVY):
            return await self._think(self.schema_workers, work, self, content, *more)
        if len(content) <= LIGHT_BYTES:
            return within_depth(work, self, content, *more)
        return await self._think(self.worker, work, self, content, *more)

    async def _think(self, threads: ThreadPoolExecutor, work: Callable[..., Result], *arguments: object) -> Result:
        """`work(*arguments)` in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(threads, within_depth, work, *arguments)

    def close(self) -> None:
        """Ends the threads and processes that prepare requests."""
        self.large.close()
        self.checker.close()
        self.worker.shutdown(cancel_futures=True)
        self.schema_workers.shutdown(cancel_futures=True)

    def note_unknown(self, endpoint: str, fields: list[str]) -> None:
        """Count fields that the schema doesn't have; each name is logged once."""
        if not fields:
            return
        self.metrics.unknown_fields(endpoint, len(fields))
        for name in fields[:MAX_NOTED]:
            if name not in self.noted and len(self.noted) < MAX_NOTED:
                self.noted.add(name)
                log.warning("a request has the unknown field %r; it is ignored", name[:100])
