"""Random JSON schemas through a real server and a real engine; `python -m loadtests.schemas` asks many more."""

from __future__ import annotations

import asyncio
from pathlib import Path

from loadtests import harness, schemas
from loadtests.schemas import SchemaTally, ask_all, draw_schemas, judge, random_holds, random_questions

COUNT = 4


def test_random_schemas_are_followed_to_the_end(tiny, tmp_path: Path) -> None:
    with harness.marathon(tiny("llama"), tmp_path / "log", spare_engine=False) as server:
        tally = asyncio.run(ask_all(f"http://127.0.0.1:{server.port}", random_questions(COUNT, 7, max_tokens=200)))
    assert random_holds(tally, COUNT), tally


def test_the_same_number_draws_the_same_schemas() -> None:
    assert draw_schemas(5, 1) == draw_schemas(5, 1)
    assert draw_schemas(5, 1) != draw_schemas(5, 2)


def test_an_answer_that_breaks_its_schema_is_a_fault() -> None:
    assert judge('{"a": 1}', {"type": "object"}) == ("valid", "")
    assert judge("[1", {})[0] == "no JSON"
    kind, why = judge("[]", schemas.NESTED)
    assert kind == "invalid"
    assert "object" in why


def test_a_run_with_faults_or_with_many_refusals_does_not_hold() -> None:
    tally = SchemaTally()
    for _ in range(10):
        tally.add("valid")
    assert random_holds(tally, 10)
    assert not random_holds(tally, 21)
    tally.add("failed", "why")
    assert not random_holds(tally, 10)
