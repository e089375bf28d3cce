"""Grammars whose terminals go on through whatever follows come to their end, or are refused before the answer."""

from __future__ import annotations

import json

import pytest
from accepting import accepts
from serving import engine, run_server

from server.grammar import checker, greedy


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('start: /.*/ "b"', ["b", "ab", "abab"], ["", "ba"]),
        ('start: /.*/ "b" "c"', ["bc", "abcbc"], ["b", "bcb"]),
        ('start: /.*/ "b"+ /[cd]/ "e"', ["abbce"], ["ab", "abe"]),
        ('start: text "b"\ntext: /.*/', ["ab"], ["a"]),
        ('start: text "b"\ntext: TEXT\nTEXT: /[a-z]+/', ["ab"], ["b"]),
        ('start: TEXT "ing" "!"\nTEXT: /[a-z]+/', ["going!"], ["ing!", "go!"]),
        ('start: "x" | /[^0]{3,}/ END\nEND: "en" D\nD: "d"', ["x", "abcend"], ["abend"]),
        ('start: ("<" /[a-z]*/ "e" ">")+', ["<e><ae>"], ["<>"]),
        ('start: "go" inner\ninner: %lark {\nstart: /(?s:.*)/ /[0-9]/\n}', ["go1", "go\n\n2"], ["gox"]),
    ],
)
def test_a_terminal_that_swallows_the_next_one_becomes_one_with_it(
    grammar: str, right: list[str], wrong: list[str]
) -> None:
    for text in right:
        assert accepts(grammar, text), text
    for text in wrong:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(
    "grammar",
    [
        'start: /[a-z]+/ "1"',
        'start: /.*/ /\\n/ "x"',
        'start: /[ab]*c?/ "a"',
        'start: /.*/ "b"*',
        'start: "b" /.*/',
        'start: /"[^"]*"/ ":" /[0-9]+/',
        'start: text "b"\ntext[lazy]: /.*/',
        'start: text "b"\ntext[suffix="b"]: /.*/',
        'start: /.*/ "b"\n%ignore /\\n/',
        'start: TEXT item | TEXT\nTEXT: /[a-z]+/\nitem: "b" start | "c"',
        "start: /.*/ <[300]>",
    ],
)
def test_a_terminal_that_comes_to_an_end_stays_as_it_is(grammar: str) -> None:
    assert greedy.joined(grammar, checker.fault) == (grammar, "")


@pytest.mark.parametrize(
    "grammar",
    [
        'start: TEXT item\nTEXT: /[a-z]+/\nitem: "b" item | "c" item | "d"',
        "start: /(?s:.*)/ object\nobject: %json " + json.dumps({"type": "object"}),
        "start: /(?s:.+)/ %json " + json.dumps({"type": "object"}),
        'start: "so: " text end\ntext: /.*/\nend: "the end" start?',
    ],
)
async def test_one_that_can_not_be_mended_is_refused_by_its_name(grammar: str) -> None:
    fake = engine()
    async with run_server(fake) as site:
        refused = await site.chat(grammar=grammar)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, "grammar", "invalid_value"), error
        assert "goes on through what follows it" in error["message"]
    assert not fake.submits
