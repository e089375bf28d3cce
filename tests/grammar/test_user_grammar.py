"""What a user's grammar is refused for before any work, and what it may ask for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers as small
from tokenizers import AddedToken
from walking import Walker

from server.errors import InvalidValue
from server.text.tokenizer import Tokenizer

ROWS_LACKING = 2  # the last ids of the tokenizer have no logits


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walker]:
    added = [AddedToken(text, special=True, normalized=False) for text in ("<mark>", "<far>", "<farther>")]
    plain = [AddedToken("<table>", special=False, normalized=False)]
    folder = small.write(
        tmp_path_factory.mktemp("model"), lambda: small.byte_level(*plain, *added), eos_token="<|im_end|>"
    )
    tokenizer = Tokenizer.load(Path(folder), trust_remote_code=False)
    made = Walker(tokenizer, tokenizer.vocab_size - ROWS_LACKING)
    yield made
    made.close()


def fields(form: str, value: Any) -> dict[str, Any]:
    if form == "completion":
        return {"prompt": "a", "structured_outputs": {"grammar": value}}
    return {form: value} if form in ("grammar", "guided_regex") else {"structured_outputs": {form: value}}


def refusal(walker: Walker, asked: dict[str, Any]) -> InvalidValue:
    with pytest.raises(InvalidValue) as caught:
        walker.prepare(**asked)
    return caught.value


NEVER = [
    r"/[^\s\S]/",
    r"/b[^\x00-\U0010FFFF]/",
    r"/[a&&b]/",
    r"/[a--a]/",
    r"/(x|[^\w\W])[^\d\D]/i",
]


@pytest.mark.parametrize("terminal", NEVER)
@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" {}',
        'start: "a" X\nX: {}',
        'start: "a" X | "c"\nX: "b" Y "c"\nY: {}',
        'start: "a" b # X: "b"\nb: "c"\n  | (X "d"){{2}}\nX: "x" | "y"\n_Z: {}\nc: "c"\nd: _Z'.replace("(X", "(d"),
        'start: "a" b\nb[suffix="c"]: {}',
        'start: "a" b\nb[max_tokens=3]: X\nX: {}',
        'start: "a" b\nb[capture="x"]: {}',
        'start: "a" b\nb: %lark {{\n  start: "b" X\n  X: {}\n}}',
        '%import common.INT\nstart: INT "a".."c" {} -> end',
        '?start: "a" {}',
    ],
)
def test_a_terminal_that_no_text_matches_is_refused_wherever_it_stands(
    walker: Walker, grammar: str, terminal: str
) -> None:
    caught = refusal(walker, fields("grammar", grammar.format(terminal)))
    assert (caught.status, caught.param) == (400, "grammar")
    assert "no text matches the terminal" in str(caught)


@pytest.mark.parametrize("grammar", ['start: "a" X\nX: /a/ & /b/', 'start: "a" X "b" | "c"\nX: "x" & ~/(?s:.*)/'])
@pytest.mark.parametrize("form", ["grammar", "completion"])
def test_terminals_that_have_nothing_in_common_are_refused(walker: Walker, form: str, grammar: str) -> None:
    caught = refusal(walker, fields(form, grammar))
    assert caught.param in ("grammar", "structured_outputs.grammar")
    assert "no text matches the terminal 'X'" in str(caught)


@pytest.mark.parametrize(
    "grammar", ['root ::= "a" [^\\x00-\\U0010FFFF]', 'root ::= "a" never\nnever ::= [^\\u0000-\\U0010FFFF] "x"']
)
def test_a_class_without_a_character_is_refused_in_llama_cpps_form(walker: Walker, grammar: str) -> None:
    assert "no text matches the terminal" in str(refusal(walker, fields("grammar", grammar)))


@pytest.mark.parametrize("pattern", [r"a[^\s\S]", "a(?=b)", "(?<!a)b", r"\bword\b", r"(a)\1", "a$b", "a(?!b)c"])
@pytest.mark.parametrize("form", ["regex", "guided_regex"])
def test_a_pattern_that_never_matches_or_looks_around_is_refused(walker: Walker, form: str, pattern: str) -> None:
    caught = refusal(walker, fields(form, pattern))
    assert caught.status == 400
    assert caught.param in ("structured_outputs.regex", "guided_regex")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#"}, ""),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ".properties.a"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ""),
        (
            {"properties": {"a": {"type": "null", "unevaluatedItems": 1}}, "x-guidance": {"lenient": True}},
            ".properties.a",
        ),
        ({"properties": {"a": {"type": "string", "pattern": "a(?=b)"}}}, ".properties.a"),
        ({"type": "string", "pattern": r"[^\s\S]"}, ""),
        ({"enum": []}, ""),
        (False, ""),
        ({"type": "integer", "multipleOf": 1_000_003}, ""),
    ],
)
@pytest.mark.parametrize(
    "grammar",
    ['start: "a" %json {}', 'start: x\nx: "b" | %json {}\n  | "c"', 'start: "a" %lark {{\nstart: %json {}\n}}'],
)
def test_a_schema_in_a_grammar_is_checked_like_every_other(
    walker: Walker, grammar: str, schema: Any, place: str
) -> None:
    caught = refusal(walker, fields("grammar", grammar.format(json.dumps(schema, indent=1))))
    assert (caught.status, caught.param) == (400, "grammar")
    assert str(caught).startswith(f"grammar: %json{place}: ")


def test_white_space_of_a_schema_in_a_grammar_does_not_go_on_for_ever(walker: Walker) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    for walk in walker.walks(16, grammar="start: %json " + json.dumps(schema)):
        assert walk.finish == "stop"
        assert json.loads(walk.answer.content) == {"a": 1}


def test_an_author_may_choose_the_white_space_of_a_schema(walker: Walker) -> None:
    schema = {"const": {"a": [1, 2]}, "x-guidance": {"whitespace_flexible": False}}
    assert {walk.answer.content for walk in walker.walks(9, grammar="start: %json " + json.dumps(schema))} == {
        '{"a":[1,2]}'
    }


@pytest.mark.parametrize(
    "token", ["<|nothing|>", "<far>", "<[{far}]>", "<[0-{far}]>", "<[^{far}]>", "<[99999999999999999999999]>"]
)
def test_a_token_that_the_model_cannot_draw_is_refused(walker: Walker, token: str) -> None:
    text = token.format(far=walker.tokenizer.vocab_size - ROWS_LACKING)
    for grammar in (f'start: "a" {text}', f'start: "a" %lark {{\nstart: "b" | {text}\n}}'):
        caught = refusal(walker, fields("grammar", grammar))
        assert (caught.status, caught.param) == (400, "grammar")
        assert text in str(caught)


def test_a_token_is_known_by_its_name(walker: Walker) -> None:
    for name in ("<mark>", "<table>"):
        token = walker.tokenizer.added_id(name)
        for walk in walker.walks(2, grammar=f'start: "a" {name} "b"'):
            assert token in walk.ids
            assert walk.finish == "stop"


def test_bytes_that_are_no_text_are_refused(walker: Walker) -> None:
    grammar = '%llguidance {"allow_invalid_utf8": true}\nstart: "a" /(?-u:\\xff)/'
    assert "an answer is text" in str(refusal(walker, fields("grammar", grammar)))


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        ('start: X? "b"\nX: /[^\\s\\S]/', {"b"}),
        ('start: "a"\nunused: X\nX: /[^\\s\\S]/', {"a"}),
        ('start: "[^" "&&" /[^b]{0}/', {"[^&&"}),
        ('start: X # "a" /[^\\s\\S]/\nX: /[^b-z]/ & /[a-c]/', {"a"}),
        ("start[temperature=0.5]: /a/", {"a"}),
        ('?start: "a"', {"a"}),
        ('root ::= "{," "a"{,1} "b"', {"{,b", "{,ab"}),
        ('root ::= start\nstart ::= "a"', {"a"}),
        ('root ::= "\\u00e9" [\\U0001F389] "\\u0041\\\\u" [\\u4e00-\\u4e00]', {"é🎉A\\u一"}),
        ('start: "%json" %json {"const": "}"}', {'%json"}"'}),
        ('start: "a" %lark {\nstart: "}" b{2}\nb: "c"\n}', {"a}cc"}),
    ],
)
def test_what_only_looks_barren_is_answered(walker: Walker, grammar: str, texts: set[str]) -> None:
    assert {walk.answer.content for walk in walker.walks(9, grammar=grammar)} == texts


def test_the_search_for_terminals_ends_soon(walker: Walker) -> None:
    count = 1500
    lines = [f"X{n}: /[^{n}-\\uffff]{{3}}/ X{n + 1}" for n in range(count)]
    rules = [f'  | "r{n}" X{n}' for n in range(count)]
    began = time.monotonic()
    walker.prepare(grammar="\n".join(['start: "a"', *rules, *lines, f'X{count}: "x"']))
    assert time.monotonic() - began < 8
