"""What a client sends doesn't stop the streams of others, and the program that measures it would notice."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from loadtests.pauses import __main__ as pauses
from loadtests.pauses.observed_server import SIZE, Note, watch
from loadtests.pauses.worst_requests import worst
from loadtests.zoo.models import obtain

pytestmark = pytest.mark.slow

SHARE = 0.015
GENEROUS = 0.25  # seconds of the server process's own work; what it takes at full size is a tenth of that
KINDS = ("members", "gzip in gzip", "4 × lists")


@pytest.fixture
def note(tmp_path: Path) -> Note:
    (tmp_path / "note").write_bytes(bytes(SIZE))
    return Note(tmp_path / "note")


async def test_a_hold_of_the_event_loop_is_noticed(note: Note) -> None:
    watching = asyncio.create_task(watch(note))
    await asyncio.sleep(0.02)
    note.write(0.0, 0.0)
    deadline = time.process_time() + 0.1
    while time.process_time() < deadline:
        pass
    await asyncio.sleep(0.02)
    watching.cancel()
    late, held = note.read()
    assert late >= held >= 0.09


async def test_a_wait_for_the_processor_isnt_taken_for_a_hold(note: Note) -> None:
    watching = asyncio.create_task(watch(note))
    await asyncio.sleep(0.02)
    note.write(0.0, 0.0)
    time.sleep(0.2)
    await asyncio.sleep(0.02)
    watching.cancel()
    late, held = note.read()
    assert late > 0.15
    assert held < 0.1


def test_no_kind_of_request_holds_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "REST_SECONDS", 0.05)
    chosen = [one for one in worst(SHARE) if one.name.startswith(KINDS)]
    assert len(chosen) == len(KINDS)
    with pauses.observed(obtain(pauses.MODEL, tmp_path), tmp_path, spare_engine=False) as site:
        idle = site.beside(lambda: time.sleep(0.2))
        for request, found in pauses.measure(site, chosen, idle):
            assert found.held < GENEROUS, request.name
