"""What becomes of the work of an earlier server where this one ends before it can take it up."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from journaling import opened, record

from server.api.stored.answers import StoredAnswers
from server.errors import Draining


@pytest.mark.parametrize("ends", [True, False], ids=["refused", "cancelled"])
async def test_a_server_that_ends_while_it_loads_leaves_earlier_work_to_the_next(
    ends: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its log says so in a line, and has no traceback of a forgotten task."""
    forgotten: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context))

    async def known() -> None:
        if ends:
            raise Draining("The server is shutting down")
        await asyncio.Event().wait()

    async with opened(tmp_path / "journal.db") as journal:
        await journal.add(record())
        tokenizer = SimpleNamespace(folder=tmp_path)
        stored = StoredAnswers(cast(Any, SimpleNamespace(journal=journal, known=known, tokenizer=tokenizer)), {})
        await stored.resume()
        await asyncio.sleep(0.05)
        await stored.close()
        gc.collect()
        await asyncio.sleep(0)
        assert len(await journal.unfinished()) == 1
    assert forgotten == []
    assert "Traceback" not in caplog.text
