"""The ways in which clients ask for an answer's form, and the grammars that come of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from driving import knowing
from serving import TOKENIZER, engine, run_server, settings, tokenizer
from tokenizers import Tokenizer

from server.api.input import body, response_format
from server.api.input.response_format import AnswerForm
from server.api.input.schema import ChatRequest, CompletionRequest
from server.engine.constraints import Grammars
from server.errors import InvalidValue
from server.grammar import build
from server.ipc.sequence import Sampling, TokenSequence

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
GBNF = 'root ::= "a"{5,5} tail\ntail ::= "b" | "é"'
ENUM = ["yes", 'a "b"\n/c']


def chat(**fields: Any) -> AnswerForm | None:
    request = body.validate(ChatRequest, json.dumps({"messages": USER, **fields}).encode())
    return response_format.read(request, settings())


@pytest.fixture(scope="module")
def grammars():
    made = knowing(tokenizer().token_table())
    made.rows = 2048
    yield made
    made.close()


def accepts(grammars: Grammars, form: AnswerForm | None, text: str) -> bool:
    """Whether the engine lets a row write exactly this."""
    assert form is not None
    made = build.answer(form.schema, rule=form.rule, param=form.param)
    sequence = TokenSequence(prompt=[1], sampling=Sampling(seed=0), max_tokens=9, grammar=made, stop_ids=[2])
    ids = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    try:
        grammars.compile(sequence, [*ids, 2]).result()
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"b":2}', "[]"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a":1}', '{"b":2}'),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, '{"a":1}', '{"b":2}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, '{"a":1}', "{}"),
        ({"structured_outputs": {"json": SCHEMA}}, '{"a":1}', "{}"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a":1}', "{}"),
        ({"structured_outputs": {"json_object": True}}, '{"b":2}', "3"),
        ({"structured_outputs": {"regex": "[0-9]{2}/x\n"}}, "12/x\n", "12/x"),
        ({"structured_outputs": {"choice": ENUM}}, ENUM[1], "no"),
        ({"structured_outputs": {"grammar": GBNF}}, "aaaaaé", "aaaaa"),
        ({"structured_outputs": {"regex": r"\d[^\w]"}}, "7-", "٣-"),
        ({"guided_json": SCHEMA}, '{"a":1}', "{}"),
        ({"guided_regex": "a|bc"}, "bc", "c"),
        ({"guided_choice": ENUM}, "yes", "ye"),
        ({"guided_grammar": 'start: "x"+'}, "xxx", "y"),
        ({"json_schema": SCHEMA}, '{"a":1}', "{}"),
        ({"grammar": GBNF}, "aaaaab", "ab"),
        ({"regex": "a|bc"}, "bc", "c"),
        ({"ebnf": GBNF}, "aaaaab", "ab"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_each_way_to_ask_for_a_form_is_enforced(grammars, fields: dict[str, Any], right: str, wrong: str) -> None:
    assert accepts(grammars, chat(**fields), right)
    assert not accepts(grammars, chat(**fields), wrong)


@pytest.mark.parametrize(
    ("pattern", "same"),
    [
        (r"\d{2}\.\\d", r"[0-9]{2}\.\\d"),
        (r"[\w.-]+@\w", "[[A-Za-z0-9_].-]+@[A-Za-z0-9_]"),
        (r"[^\d]\d\[\d", r"[^\d][0-9]\[[0-9]"),
        (r"\D\W\S", r"\D\W\S"),
        ("\\", "\\"),
        ("]\\d\n", "][0-9]\n"),
        ("", ""),
    ],
)
def test_only_wide_character_classes_become_narrow(pattern: str, same: str) -> None:
    assert response_format.ascii_classes(pattern) == same


def test_no_wish_is_no_form() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"grammar": ""}):
        assert chat(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}, "response_format.schema"),
        ({"structured_outputs": {"regex": "[.*"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= nowhere"}}, "structured_outputs.grammar"),
        ({"grammar": "nonsense(("}, "grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"json_schema": {"properties": {"a": {"type": 5}}}}, "json_schema.properties.a"),
        ({"json_schema": SCHEMA, "grammar": GBNF}, "grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"regex": {"1": "a"}}}, "structured_outputs.regex"),
    ],
    ids=str,
)
async def test_a_form_that_makes_no_sense_is_refused_by_its_place(fields: dict[str, Any], param: str) -> None:
    async with run_server() as site:
        for answer in (await site.chat(**fields), await site.complete(**fields)):
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param


def test_a_schema_beyond_the_limit_is_refused() -> None:
    large = {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 100]}}}
    request = ChatRequest.model_validate({"messages": USER, "response_format": large})
    with pytest.raises(InvalidValue, match="at most 80"):
        response_format.read(request, settings(max_schema_bytes=80))


async def test_the_engine_gets_the_grammar_of_chats_and_of_text_completions() -> None:
    fake = engine()
    async with run_server(fake) as site:
        await site.chat(grammar=GBNF)
        await site.complete(structured_outputs={"choice": ["a"]})
        await site.complete()
    assert [one.sequence.grammar is not None for one in fake.submits] == [True, True, False]


def test_a_completion_knows_the_same_fields() -> None:
    request = CompletionRequest.model_validate({"prompt": "x", "guided_regex": "a"})
    assert response_format.read(request, settings()) == AnswerForm("guided_regex", rule="/a/")
