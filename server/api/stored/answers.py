"""All stored answers of a server: those that are being made, and those that the journal has.

Owns the table of runs, what may be asked of an answer by its id, and how the work of an earlier server is taken up.
Event-loop thread only. Every id is looked up together with its owner: another's answer isn't there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from server.api.context import AppContext
from server.api.input.identity import AnswerIdentity
from server.api.input.sequences import Bounds
from server.api.output.respond import PreparedRequest
from server.api.output.responses import ResponsesForm
from server.api.output.sse import encode
from server.api.stored.event_log import split
from server.api.stored.run import AnswerRun
from server.api.stored.transcript import Transcript, replay, restored_events
from server.api.stored.transcript_pair import TranscriptPair
from server.errors import AnotherModel, AnswerNotFound, Draining, InternalError, NotReady, RequestError
from server.journal.journal import Journal
from server.journal.record import Kind, NewTokens, Record
from server.model_files.fingerprint import answer_fingerprint
from server.supervision.generation import GenerationHandle, TokenLog

RETRY_SECONDS = 1.0  # between two looks for an engine, for the work of an earlier server
LOST = "The server ended while it made this answer, and only its client waited for it."
NOUNS: Mapping[Kind, str] = {"response": "Response", "chat": "Chat completion"}

Preparation = Callable[..., PreparedRequest]  # of a model, a body, bounds and the answer's identity

log = logging.getLogger("marathon.api")


class StoredAnswers:
    """Owned by the application. `preparations`: how a body is understood, by the kind of a record.

    Attributes:
        has_kept_chats: a chat completion was stored since the server began.
    """

    def __init__(self, served: AppContext, preparations: Mapping[Kind, Preparation]) -> None:
        self._served = served
        self._preparations = preparations
        self._runs: dict[str, AnswerRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._fingerprint = ""
        self.has_kept_chats = False

    @property
    def journal(self) -> Journal:
        return self._served.journal

    # ---------------------------------------------------------------- a new answer
    async def create(self, prepared: PreparedRequest, record: Record) -> AnswerRun:
        """Begins and stores an answer. Raises what `Supervisor.open` raises before anything is stored, and
        JournalUnavailable."""
        record.fingerprint = await self._known_fingerprint()
        record.sequences = prepared.sequences
        record.cached = [None] * len(prepared.sequences)
        record.finishes = [None] * len(prepared.sequences)
        live = self._served.supervisor.open(
            record.sequences,
            endpoint=record.endpoint,
            log=self.journal.tokens(record.id),
            background=record.background,
        )
        try:
            await self.journal.add(record)
        except BaseException:
            live.close()
            raise
        self.has_kept_chats = self.has_kept_chats or record.kind == "chat"
        transcripts = TranscriptPair(prepared, record.sequences, self._served.tokenizer, streams=record.stream)
        run = self._runs[record.id] = AnswerRun(record, self.journal, transcripts)
        run.log.add(transcripts.begin())
        self._start(run, run.make(transcripts, live, range(len(record.sequences))))
        return run

    def _start(self, run: AnswerRun, work: Awaitable[object]) -> None:
        task = asyncio.ensure_future(self._kept(run, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _kept(self, run: AnswerRun, work: Awaitable[object]) -> None:
        """The run is in the table for as long as it works."""
        try:
            await work
        finally:
            self._runs.pop(run.record.id, None)

    # ---------------------------------------------------------------- by id
    def run(self, id: str, owner: str) -> AnswerRun | None:
        """The run of an answer that is being made."""
        run = self._runs.get(id)
        if run is None or run.record.owner != owner:
            return None
        return run

    async def find(self, id: str, owner: str, kind: Kind) -> Record:
        """Raises AnswerNotFound, JournalUnavailable."""
        record = None
        if self.journal.path is not None:
            record = await self.journal.get(id, owner)
        if record is None or record.kind != kind:
            raise AnswerNotFound(f"{NOUNS[kind]} with id {id[:100]!r} not found.", param="id")
        return record

    async def cancel(self, run: AnswerRun) -> None:
        """Returns once it has ended, in whatever way."""
        run.cancel()
        if not run.is_generated:
            await run.abandon()
        await run.ended.wait()

    async def delete(self, id: str, owner: str, kind: Kind) -> None:
        """Raises AnswerNotFound, JournalUnavailable."""
        record = await self.find(id, owner, kind)
        if (run := self.run(id, owner)) is not None:
            await self.cancel(run)
        await self.journal.delete(record.id, owner)

    # ---------------------------------------------------------------- from the journal
    async def events(self, record: Record, after: int) -> AsyncGenerator[bytes, None]:
        """Events of a response that has ended, with larger numbers than `after`. Raises AnotherModel before the first
        of them."""
        transcript = await self._transcript(record, streams=True)
        return self._later(transcript, record, after)

    async def _later(self, transcript: Transcript, record: Record, after: int) -> AsyncGenerator[bytes, None]:
        number = 0
        with self.journal.hold(record.id):
            async for data in replay(transcript, record, await self.journal.ids(record.id)):
                events = split(data)
                wanted = events[max(0, after + 1 - number) :]
                number += len(events)
                if wanted:
                    yield b"".join(wanted)

    async def answer(self, record: Record) -> bytes:
        """The object of an answer, as far as the journal has it. Raises AnotherModel where it would have to be made
        from its tokens by another model."""
        if record.answer is not None:
            return record.answer
        if record.kind == "chat":
            return encode(await self._chat(record))
        return encode(await self._response(record))

    async def _response(self, record: Record) -> dict[str, Any]:
        transcript = await self._transcript(record, streams=True)
        form = cast(ResponsesForm, transcript.form)
        stored = await self.journal.ids(record.id)
        if record.is_final:
            async for _ in replay(transcript, record, stored):
                pass
            return form.final
        async for _ in restored_events(transcript, stored, record.finishes):
            pass
        return form.snapshot(transcript.choices, record.status)

    async def _chat(self, record: Record) -> dict[str, Any]:
        transcript = await self._transcript(record, streams=False)
        async for _ in restored_events(transcript, await self.journal.ids(record.id), record.finishes):
            pass
        return transcript.whole()

    async def _transcript(self, record: Record, *, streams: bool) -> Transcript:
        prepared = await self._prepared(record)
        transcript = Transcript(prepared, record.sequences, streams=streams)
        transcript.know_cached(record.cached)
        return transcript

    async def _prepared(self, record: Record) -> PreparedRequest:
        """What the request was, once more. Raises AnotherModel: what other tokens say isn't known here."""
        if record.fingerprint != await self._known_fingerprint():
            raise AnotherModel(
                f"{record.id} was begun by the model {record.model!r}, which isn't served; {self._served.name!r} is"
            )
        bounds = Bounds.of(await self._served.known(), self._served.settings)
        identity = AnswerIdentity(record.id, int(record.created), record.model)
        return await self._served.prepare(self._preparations[record.kind], record.body, bounds, identity)

    async def _known_fingerprint(self) -> str:
        """Of the served model, as it was when this was asked first, at the start: its files may be replaced later."""
        if not self._fingerprint:
            self._fingerprint = await asyncio.to_thread(answer_fingerprint, self._served.tokenizer.folder)
        return self._fingerprint

    # ---------------------------------------------------------------- the server's start and end
    async def resume(self) -> None:
        """At the start: takes up the work that an earlier server left, the oldest first. Where only a client waited,
        it has failed."""
        if not self.journal.is_on:
            return
        with contextlib.suppress(OSError):  # it is asked for again where it is needed
            await self._known_fingerprint()
        try:
            await self.journal.fail_foreground(LOST)
            records = await self.journal.unfinished()
        except RequestError as error:
            log.error("the work of an earlier server can't be taken up: %s", error)
            return
        runs = [AnswerRun(record, self.journal) for record in records]
        self._runs |= {run.record.id: run for run in runs}
        task = asyncio.create_task(self._resume(runs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _resume(self, runs: list[AnswerRun]) -> None:
        try:
            await self._engine()
        except RequestError as error:  # the server ends before it could: the next one finds them unfinished
            log.info("the work of an earlier server is left for the next one: %s", error)
            return
        for run in runs:
            try:
                work: Awaitable[object] = await self._taken_up(run)
            except Draining:
                return
            except RequestError as error:
                work = run.fail(error)
            except Exception:
                log.exception("%s can't be taken up", run.record.id)
                work = run.fail(InternalError("The server made a mistake; its log knows more."))
            self._start(run, work)

    async def _taken_up(self, run: AnswerRun) -> Awaitable[object]:
        """What there is left to do for an answer of an earlier server. Raises why it can't go on."""
        record = run.record
        if run.ended.is_set():
            return run.ended.wait()
        prepared = await self._prepared(record)
        transcripts = TranscriptPair(prepared, record.sequences, self._served.tokenizer, streams=record.stream)
        transcripts.know_cached(record.cached)
        stored = await self.journal.ids(record.id)
        run.log.add(transcripts.begin())
        async for data in transcripts.restored_events(stored, record.finishes):
            run.log.add(data)
        run.transcripts = transcripts
        indices = transcripts.unfinished
        if not indices:
            return run.decide()
        live = await self._opened(record, indices, [choice.tokens for choice in stored])
        log.info("%s goes on after %d tokens", record.id, transcripts.usage["completion_tokens"])
        return run.make(transcripts, live, indices)

    async def _opened(self, record: Record, indices: list[int], generated: list[list[int]]) -> GenerationHandle:
        """The generation of the choices `indices`, which go on after the ids that they have."""
        tokens = ChoiceTokens(self.journal.tokens(record.id, generated), indices)
        while True:
            try:
                return self._served.supervisor.open(
                    [record.sequences[index] for index in indices],
                    endpoint=record.endpoint,
                    log=tokens,
                    generated=[generated[index] for index in indices],
                    background=True,
                )
            except NotReady:
                await self._engine()

    async def _engine(self) -> None:
        """Waits for as long as no engine can be started."""
        while True:
            try:
                await self._served.known()
            except NotReady as error:
                log.debug("the work of an earlier server waits: %s", error)
            else:
                if not self._served.supervisor.hopeless:
                    return
            await asyncio.sleep(RETRY_SECONDS)

    async def close(self) -> None:
        """At the end, before the journal's: what is in the background stays for the next server."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ChoiceTokens:
    """The journal of some of an answer's choices: their places among those that go on → their places in the answer."""

    def __init__(self, whole: TokenLog, indices: list[int]) -> None:
        self._whole = whole
        self._indices = indices

    def append(self, news: NewTokens, then: Callable[[], None]) -> None:
        """Store news of a choice under its place in the answer."""
        self._whole.append(replace(news, choice=self._indices[news.choice]), then)
