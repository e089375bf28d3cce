"""Forms that compile and soon allow more than llguidance follows are refused before the request is queued."""

from __future__ import annotations

import json
from typing import Any

import pytest
from driving import knowing
from llguidance import LLMatcher
from messaging import PATH as MESSAGES
from messaging import body as message
from responding import PATH as RESPONSES
from serving import MODEL, USER, engine, run_server, tokenizer

from server.errors import InvalidValue
from server.grammar import build, checker, walk
from server.ipc.sequence import Sampling, TokenSequence

WORD = {"type": "string"}


def wide(count: int, prefix: str = "property_") -> dict[str, Any]:
    return {"type": "object", "properties": {f"{prefix}{n:06}": WORD for n in range(count)}}


def optional(count: int, *, behind: int) -> dict[str, Any]:
    """An object whose optional properties come after some that each answer has."""
    first = {f"needed_{n}_{'x' * 40}": {"type": "string", "minLength": 20} for n in range(behind)}
    return {"type": "object", "properties": first | wide(count)["properties"], "required": list(first)}


def inside(schema: dict[str, Any], *names: str) -> dict[str, Any]:
    for name in reversed(names):
        others = {f"other_{n}": WORD for n in range(40)}
        schema = {"type": "object", "properties": {**others, name: schema}}
    return schema


MANY = wide(600)
SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    "an object": (MANY, ""),
    "the worst of the load tests": (wide(1300), ""),
    "one that takes other names": (MANY | {"additionalProperties": False}, ""),
    "below a property": (inside(MANY, "a"), ".properties.a"),
    "far below": (inside(MANY, "a", "b", "c", "d"), ".properties.a.properties.b.properties.c.properties.d"),
    "in an array": ({"type": "array", "items": MANY}, ".items"),
    "in an array below a property": (inside({"type": "array", "items": MANY}, "a"), ".properties.a.items"),
    "one of a tuple": ({"type": "array", "prefixItems": [WORD, WORD, MANY]}, ".prefixItems[2]"),
    "behind required properties": (optional(600, behind=30), ""),
    "behind required properties, below": (inside(optional(600, behind=30), "a"), ".properties.a"),
    "an alternative": (inside({"anyOf": [WORD, MANY]}, "a"), ".properties.a.anyOf[1]"),
    "together": (inside({"allOf": [wide(300, f"{n}_") for n in range(2)]}, "a"), ".properties.a"),
    "alternatives that begin alike": (inside({"anyOf": [wide(60, f"{n}_") for n in range(12)]}, "a"), ".properties.a"),
    "a reference": (
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/many"}}, "$defs": {"many": MANY}},
        ".$defs.many",
    ),
    "references that begin alike": (
        inside({"anyOf": [{"$ref": f"#/$defs/{n}"} for n in range(8)]}, "a")
        | {"$defs": {str(n): wide(90, f"{n}_") for n in range(8)}},
        ".properties.a",
    ),
}  # fmt: skip
ALTERNATIVES = " | ".join(f'"k{n}" X?' for n in range(2500))
TEXTS: dict[str, tuple[str, Any]] = {
    "rules": ("grammar", f'start: "x" big\nbig: {ALTERNATIVES}\nX: "x"'),
    "rules behind much text": ("grammar", f"start: TEXT big\nTEXT: /[a-z ]{{400}}/\nbig: {ALTERNATIVES}\nX: /x/"),
    "rules in a grammar in it": (
        "grammar",
        f"start: TEXT inner\nTEXT: /[a-z]{{400}}/\ninner: %lark {{\nstart: {ALTERNATIVES}\nX: /x/\n}}",
    ),
    "GBNF": ("grammar", "root ::= [a-z]{400} big\nbig ::= " + " | ".join(f'"k{n}" root?' for n in range(2500))),
    "a schema in Lark": ("grammar", f"start: TEXT inner\nTEXT: /[a-z]{{400}}/\ninner: %json {json.dumps(MANY)}"),
    "a schema far inside one in Lark": ("grammar", f"start: %json {json.dumps(inside(MANY, 'a', 'b'))}"),
}


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "wide", "schema": schema}}


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "wide", "parameters": schema}}


NAMED = {"type": "function", "function": {"name": "wide"}}


@pytest.mark.parametrize("name", SCHEMAS)
async def test_a_schema_with_too_many_optional_properties_is_refused_by_its_place(name: str) -> None:
    schema, place = SCHEMAS[name]
    fake = engine()
    async with run_server(fake) as site:
        for stream in (False, True):
            refused = await site.chat(response_format=form(schema), stream=stream)
            error = refused.json()["error"]
            assert (refused.status_code, error["type"], error["code"]) == (
                400,
                "invalid_request_error",
                "invalid_value",
            )
            assert error["param"] == f"response_format.json_schema.schema{place}"
            assert "too complex" in error["message"]
    assert not fake.submits


@pytest.mark.parametrize("name", TEXTS)
async def test_a_grammar_with_too_many_alternatives_is_refused(name: str) -> None:
    param, grammar = TEXTS[name]
    fake = engine()
    async with run_server(fake) as site:
        refused = await site.chat(**{param: grammar})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, param, "invalid_value"), error
        assert "too complex" in error["message"]
    assert not fake.submits


async def test_every_route_and_every_field_refuses_it() -> None:
    schema = inside(MANY, "a")
    tools = [tool(schema)]
    flat = {"type": "function", "name": "wide", "parameters": schema}
    anthropic = {"name": "wide", "input_schema": schema | {"type": "object"}}
    chats: list[tuple[dict[str, Any], str]] = [
        ({"tools": tools, "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": tools, "tool_choice": NAMED}, "tools[0].function.parameters"),
        ({"tools": tools, "response_format": form(WORD)}, "tools[0].function.parameters"),
        ({"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        ({"guided_json": schema}, "guided_json"),
        ({"response_format": {"type": "json_object", "schema": schema}}, "response_format.schema"),
        ({"json_schema": schema}, "json_schema"),
    ]
    posts: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {"model": MODEL, "messages": USER} | asked, param) for asked, param in chats
    ]
    posts += [
        ("/v1/completions", {"model": MODEL, "prompt": "Say", "json_schema": schema}, "json_schema"),
        (
            RESPONSES,
            {
                "model": MODEL,
                "input": "Say",
                "text": {"format": {"type": "json_schema", "name": "w", "schema": schema}},
            },
            "text.format.schema",
        ),
        (
            RESPONSES,
            {"model": MODEL, "input": "Say", "tools": [flat], "tool_choice": "required"},
            "tools[0].parameters",
        ),
        (MESSAGES, message(tools=[anthropic], tool_choice={"type": "any"}), "tools[0].input_schema"),
        (MESSAGES, message(tools=[anthropic], tool_choice={"type": "tool", "name": "wide"}), "tools[0].input_schema"),
        (
            MESSAGES,
            message(output_config={"format": {"type": "json_schema", "schema": schema}}),
            "output_config.format.schema",
        ),
    ]
    fake = engine()
    async with run_server(fake) as site:
        for path, asked, param in posts:
            refused = await site.post(path, asked)
            error = refused.json()["error"]
            assert refused.status_code == 400, (path, param, refused.text)
            assert error["type"] == "invalid_request_error"
            assert f"{param}.properties.a" in (error.get("param") or error["message"])
        assert not fake.submits
        free = await site.chat(tools=tools)
        assert free.json()["error"]["code"] == "context_length_exceeded", "a call that isn't forced has no grammar"


@pytest.fixture(scope="module")
def grammars():
    made = knowing(tokenizer().token_table())
    made.rows = tokenizer().vocab_size
    yield made
    made.close()


@pytest.mark.parametrize(
    "schema",
    [
        wide(100),
        wide(300),
        wide(480),
        inside(wide(300), "a"),
        {"type": "array", "items": optional(300, behind=30)},
        wide(1500) | {"required": list(wide(1500)["properties"])},
        {"anyOf": [wide(60, f"{n}_") for n in range(7)]},
        {"enum": [f"value {n}" for n in range(3000)]},
    ],
    ids=range(8),
)
def test_an_ordinary_schema_is_taken_and_can_be_followed(grammars: Any, schema: dict[str, Any]) -> None:
    made = build.answer(schema, param="schema")
    sequence = TokenSequence(prompt=[1], sampling=Sampling(seed=0), max_tokens=9, grammar=made, stop_ids=[2])
    matcher = grammars.compile(sequence, []).result()
    drawn = LLMatcher(walk.tokenizer("")[0], made.text, log_level=0)
    for _ in range(400):  # an answer that the grammar allows, over bytes
        allowed = [n for n in range(256) if drawn.compute_bitmask()[n >> 3] >> (n & 7) & 1]
        if not allowed:
            break
        byte = next((ord(one) for one in '{[,:"' if ord(one) in allowed), allowed[0])
        drawn.consume_token(byte)
        assert not drawn.get_error()
        matcher.mask()
        matcher.accept(tokenizer().encode(chr(byte), special=False, bos=False)[-1])


async def test_a_limit_that_only_a_long_answer_meets_ends_it_with_an_error_that_says_so() -> None:
    async with run_server(engine(step_seconds=0.05)) as site:
        for path, asked, code in (
            ("/v1/chat/completions", {"messages": USER}, ("grammar_failed", "grammar_failed")),
            (RESPONSES, {"input": "Say"}, ("grammar_failed", "invalid_prompt")),
            (MESSAGES, message(), ("invalid_request_error", "invalid_request_error")),
        ):
            for stream in (False, True):
                said = await _fails_midway(site, path, {"model": MODEL, **asked, "stream": stream})
                assert "Current row" in said
                assert code[stream] in said
                assert "server_error" not in said
                assert "internal" not in said


async def _fails_midway(site: Any, path: str, asked: dict[str, Any]) -> str:
    import asyncio

    answer = asyncio.create_task(site.post(path, asked))
    await site.until(lambda: any(row.generated for row in site.fake.rows.values()))
    [seq] = site.fake.rows
    site.fake.fail_row(seq, "grammar", "the grammar can't go on: Current row has 4013 items; max is 4000")
    response = await answer
    assert response.status_code == (200 if asked["stream"] else 400)
    return response.text


@pytest.mark.parametrize("name", ["an object", "far below", "alternatives that begin alike"])
def test_the_check_says_the_same_in_this_process(name: str) -> None:
    with pytest.raises(InvalidValue, match="too complex"):
        build.check(SCHEMAS[name][0], "schema", checker.fault)
