"""Journals in a test's folder, and records to put into them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from supervising import Recorded, sequence

from server.ipc.sequence import TokenLogprobs
from server.journal.journal import Journal, RecordTokens
from server.journal.record import NewTokens, Record
from server.settings import load


@asynccontextmanager
async def opened(path: Path | str, counts: Any = None, **settings: Any) -> AsyncIterator[Journal]:
    journal = Journal(load({"journal": str(path), **settings}), counts or Recorded())
    await journal.open()
    try:
        yield journal
    finally:
        await journal.close()


def record(id: str = "resp_1", *, choices: int = 1, **fields: Any) -> Record:
    given: dict[str, Any] = {
        "kind": "response",
        "owner": "",
        "model": "tiny",
        "fingerprint": "f",
        "created": 1_700_000_000.25,
        "background": True,
        "stream": True,
        "endpoint": "responses",
        "body": b'{"input":"hello"}',
        "own_input": b"[]",
        "sequences": [sequence(1, 2, choice=i) for i in range(choices)],
    }
    return Record(id=id, **(given | fields))


async def append(
    log: RecordTokens,
    tokens: list[int],
    *,
    index: int = 0,
    logprobs: list[TokenLogprobs] | None = None,
    finish: Any = None,
    cached: int | None = None,
) -> None:
    """Returns once the journal says that they may be shown."""
    done = asyncio.Event()
    log.append(NewTokens(index, tokens, logprobs or [], finish, cached), done.set)
    await asyncio.wait_for(done.wait(), 10)
