"""Constrained answers through a real server: `python -m loadtests.schemas [--count 200] [--starter] [--mates]`.

By default random JSON schemas are asked of a tiny model with random weights, which writes anything that its grammar
allows: every finished answer must validate, and no answer may fail. `--starter` asks the starter model for one nested
schema, greedy and sampled. `--mates` measures how fast rows without a grammar run beside one that has one. The exit
code is 0 when all that was asked for holds. It never imports MLX.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from loadtests import harness
from loadtests.zoo.models import obtain
from server.config.cache_folder import cache_folder
from server.model_files.starter import ensure_starter

ROWS = 16  # requests at a time
MAX_TOKENS = 600
MATES_BAR = 0.8
REFUSED_AT_MOST = 0.2  # else the schemas say little
Schema = dict[str, Any]

NESTED: Schema = {
    "type": "object",
    "properties": {
        "naïve_name": {"type": "string", "minLength": 1, "maxLength": 24},
        "mood": {"enum": ["heureux 😀", "traurig", "спокойный"]},
        "tags": {"type": "array", "items": {"enum": ["größe", "色", "küche"]}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {
                "stadt": {"enum": ["Köln", "Málaga", "東京"]},
                "rooms": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 4},
            },
            "required": ["stadt", "rooms"],
            "additionalProperties": False,
        },
    },
    "required": ["naïve_name", "mood", "tags", "home"],
    "additionalProperties": False,
}
# An answer that goes on for as long as it is measured.
ENDLESS: Schema = {"type": "array", "items": {"enum": ["one", "two", "three"]}, "minItems": 100_000}


# ---------------------------------------------------------------- random schemas
def _text(longest: int) -> st.SearchStrategy[str]:
    return st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=longest)


def _range(low: str, high: str, most: int) -> st.SearchStrategy[Schema]:
    return st.tuples(st.integers(0, most), st.integers(0, most)).map(lambda pair: {low: min(pair), high: max(pair)})


def _leaves() -> st.SearchStrategy[Schema]:
    values = st.one_of(_text(6), st.integers(-99, 99), st.booleans(), st.none())
    strings = st.one_of(
        _range("minLength", "maxLength", 12),
        st.sampled_from(["^[a-z]{2,5}$", "^\\d{3}-\\d{4}$", "^(ja|nein)+x?$", "é{1,3}"]).map(
            lambda pattern: {"pattern": pattern, "maxLength": 12}
        ),
        st.sampled_from(["date", "time", "uuid", "ipv4", "email"]).map(lambda name: {"format": name}),
    )
    numbers = _range("minimum", "maximum", 1000)
    return st.one_of(
        strings.map(lambda rest: {"type": "string", **rest}),
        numbers.map(lambda rest: {"type": "integer", **rest}),
        numbers.map(lambda rest: {"type": "number", **rest}),
        st.lists(values, min_size=1, max_size=4, unique_by=repr).map(lambda options: {"enum": options}),
        values.map(lambda value: {"const": value}),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"], "maximum": 50}]),
    )


def _arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    lists = st.tuples(inner, _range("minItems", "maxItems", 3)).map(
        lambda drawn: {"type": "array", "items": drawn[0], **drawn[1]}
    )
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )
    return lists | tuples


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_text(8), inner, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    more = draw(st.sampled_from([False, False, False, {"type": "boolean"}]))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


def _any_of(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})


@st.composite
def random_schemas(draw: st.DrawFn) -> Schema:
    """Schemas a few levels deep, some with a shared definition."""
    nodes = st.recursive(_leaves(), lambda inner: _objects(inner) | _arrays(inner) | _any_of(inner), max_leaves=6)
    if not draw(st.booleans()):
        return draw(_objects(nodes) | nodes)
    shared = st.just({"$ref": "#/$defs/shared"})
    return draw(_objects(shared | _leaves())) | {"$defs": {"shared": draw(nodes)}}


def draw_schemas(count: int, number: int) -> list[Schema]:
    """`count` different schemas, the same ones for the same number."""
    found: dict[str, Schema] = {}

    @seed(number)
    @settings(
        max_examples=4 * count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(random_schemas())
    def collect(schema: Schema) -> None:
        found.setdefault(json.dumps(schema, sort_keys=True), schema)

    collect()
    if len(found) < count:
        raise harness.HarnessError(f"only {len(found)} different schemas were drawn")
    return list(found.values())[:count]


# ---------------------------------------------------------------- asking
@dataclass(slots=True)
class SchemaTally:
    """What came of the questions; mutable, owned by one run."""

    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, kind: str, fault: str = "") -> None:
        self.kinds[kind] += 1
        if fault:
            self.faults.append(f"{kind}: {fault}")

    def __str__(self) -> str:
        return "\n".join(
            [", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items())), *self.faults[:10]]
        )


def body(schema: Schema, prompt: str, **fields: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    return {"messages": [{"role": "user", "content": prompt}], "response_format": form, **fields}


async def ask(client: httpx.AsyncClient, schema: Schema, asked: dict[str, Any], tally: SchemaTally) -> None:
    response = await client.post("/v1/chat/completions", json=asked)
    answer = response.json()
    if response.status_code == 400 and answer["error"]["param"].startswith("response_format.json_schema.schema"):
        tally.add("refused by place")
    elif response.status_code != 200:
        tally.add("failed", f"{json.dumps(schema)}: {answer}")
    elif answer["choices"][0]["finish_reason"] == "length":
        tally.add("cut")
    else:
        tally.add(*judge(answer["choices"][0]["message"]["content"], schema))


def judge(text: str, schema: Schema) -> tuple[str, str]:
    try:
        fault = next(Draft202012Validator(schema).iter_errors(json.loads(text)), None)
    except ValueError as error:
        return "no JSON", f"{error}: {text[:200]}"
    if fault is not None:
        return "invalid", f"{fault.message[:200]}; {json.dumps(schema)[:500]}"
    return "valid", ""


async def ask_all(url: str, questions: Sequence[tuple[Schema, dict[str, Any]]], rows: int = ROWS) -> SchemaTally:
    tally, places = SchemaTally(), asyncio.Semaphore(rows)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:

        async def one(schema: Schema, asked: dict[str, Any]) -> None:
            async with places:
                await ask(client, schema, asked, tally)

        await asyncio.gather(*[one(*question) for question in questions])
    return tally


def random_questions(count: int, number: int, max_tokens: int = MAX_TOKENS) -> list[tuple[Schema, dict[str, Any]]]:
    return [
        (schema, body(schema, f"Question {i}.", seed=i, max_tokens=max_tokens, temperature=(0.0, 1.0, 1.5)[i % 3]))
        for i, schema in enumerate(draw_schemas(count, number))
    ]


def random_holds(tally: SchemaTally, count: int) -> bool:
    """Most are asked and finish, and those that finish are valid."""
    answered = count - tally.kinds["refused by place"]
    return not tally.faults and answered >= (1 - REFUSED_AT_MOST) * count and tally.kinds["valid"] >= 0.5 * count


def starter_questions(count: int) -> list[tuple[Schema, dict[str, Any]]]:
    """Half of them greedy, each about another person."""
    people = ("a cook", "a sailor", "a child", "a doctor", "a painter")
    return [
        (
            NESTED,
            body(
                NESTED,
                f"Describe {people[i % len(people)]} as JSON. Number {i}.",
                temperature=i % 2,
                seed=i,
                max_tokens=300,
            ),
        )
        for i in range(count)
    ]


# ---------------------------------------------------------------- batch mates
async def mates_speed(url: str, mates: int, tokens: int, schema: Schema | None) -> float:
    """Tokens a second of `mates` free rows beside one more row, which has the schema or is free as well."""
    free = {"messages": [{"role": "user", "content": "Go on."}], "ignore_eos": True}
    beside = (body(schema, "Go on.") if schema else free) | {"max_tokens": 20 * tokens, "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        async with client.stream("POST", "/v1/chat/completions", json=beside) as extra:
            lines = extra.aiter_lines()
            for _ in range(20):  # it runs, and its grammar is compiled
                await anext(lines)
            reading = asyncio.create_task(_drain(lines))
            began = monotonic()
            asked = free | {"max_tokens": tokens}
            answers = await asyncio.gather(*[client.post("/v1/chat/completions", json=asked) for _ in range(mates)])
            seconds = monotonic() - began
            if reading.done():
                raise harness.HarnessError("the row beside ended too early")
            reading.cancel()
        tokens_read: int = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
        return tokens_read / seconds


async def _drain(lines: Any) -> None:
    async for _ in lines:
        pass


def measure_mates(url: str, rounds: int, tokens: int, mates: int = 7) -> float:
    """Median of (beside a grammar) ÷ (beside a free row), after a round that warms up."""
    ratios = []
    for number in range(rounds + 1):
        order = [None, ENDLESS] if number % 2 else [ENDLESS, None]
        speeds = {schema is not None: asyncio.run(mates_speed(url, mates, tokens, schema)) for schema in order}
        if number:
            ratios.append(speeds[True] / speeds[False])
            print(
                f"round {number}: {speeds[False]:.0f} tok/s beside a free row, {speeds[True]:.0f} beside a grammar",
                flush=True,
            )
    return statistics.median(ratios)


# ---------------------------------------------------------------- command line
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="schemas, or answers of the starter model; default: 200 and 20")
    parser.add_argument("--seed", type=int, default=0, help="of the schemas")
    parser.add_argument("--starter", action="store_true", help="one nested schema on the starter model")
    parser.add_argument("--mates", action="store_true", help="speed of rows beside one with a grammar")
    parser.add_argument("--rounds", type=int, default=7, help="of --mates")
    parser.add_argument("--tokens", type=int, default=200, help="of each row of --mates")
    parser.add_argument("--models", type=Path, help="folder of the random models; default: a temporary one")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        models = asked.models or Path(folder)
        model = (
            ensure_starter(cache_folder(), print)
            if asked.starter
            else obtain("wide" if asked.mates else "cheap", models)
        )
        with harness.marathon(model, Path(folder) / "marathon.log") as server:
            holds = run(asked, f"http://127.0.0.1:{server.port}")
    print("holds" if holds else "FAILED")
    return 0 if holds else 1


def run(asked: argparse.Namespace, url: str) -> bool:
    if asked.mates:
        share = measure_mates(url, asked.rounds, asked.tokens)
        print(f"beside a grammar rows keep {share:.2f} of their speed (bar {MATES_BAR})")
        return share >= MATES_BAR
    count = asked.count or (20 if asked.starter else 200)
    questions = starter_questions(count) if asked.starter else random_questions(count, asked.seed)
    began = monotonic()
    tally = asyncio.run(ask_all(url, questions))
    print(f"{count} questions in {monotonic() - began:.0f} s: {tally}")
    return tally.kinds["valid"] == count if asked.starter else random_holds(tally, count)


if __name__ == "__main__":
    sys.exit(main())
