"""Grammars of users with a rule that leads only to itself, and those that only look so."""

from __future__ import annotations

import time

import pytest

from server.api.input import response_format
from server.api.input.schema import ChatRequest
from server.errors import InvalidValue
from server.grammar import checker, user_grammar
from server.settings import load

TOKENS = user_grammar.Tokens(lambda text: None, 100)


def check(grammar: str) -> str:
    """What llguidance is given."""
    fields = {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"grammar": grammar}}
    form = response_format.read(ChatRequest.model_validate(fields), load({}))
    assert form is not None
    return user_grammar.checked(form.lark, form.param, TOKENS, checker.fault)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start',
        "start: a\na: a",
        'start: "x" a\na: "b" b\nb: "c" a',
        'start: "x" a\na: b\nb: a',
        'start: "x" a+\na: a "y"',
        'start: "x" a\na: "y" a | "z" a',
        'start: "x" | a\na: "y" a',
        'start: a{2,}\na: "b" a',
        'start: a~2..3\na: "q" a',
        'start: (("x" | a) "y") a\n?a: "q" (a | a "z")',
        'start: a\n%ignore /x/\na: "q" a\n  | "r" a',
        'start: a\na: "q" a // a: "q"',
        'start: a # "q"\na: "q" a # | "b"',
        'start: "a".."z" a -> end\na: "q" a',
        'start: "x" a\na[capture="y"]: "q" a',
        'start: %lark {\nstart: "b" start\n}',
        'start: %json {"type": "null"} a\na: "q" a',
        'root ::= "a" root',
        'root ::= item\nitem ::= "x" item | "y" item',
    ],
)
def test_a_rule_that_always_leads_back_to_itself_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidValue, match="leads back to itself") as caught:
        check(grammar)
    assert caught.value.param == "structured_outputs.grammar"


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start?',
        'start: ("a" start)*',
        'start: "a" start | "b"',
        'start: "a" start |',
        'start: "x" a{0,3}\na: "b" [a]',
        'start: "x"\na: a',
        'start: a\na: "x"\n  | b\nb: a | "(" a ")"',
        'start: "{" [pair ("," pair)*] "}"\npair: TEXT ":" value\n?value: start | TEXT\nTEXT: /"[^"]*"/',
        'start: text\ntext[suffix="a: a"]: /(?s:.*)/',
        'start: "start: start" a\na: "\\"" /a: a\\//',
        'start: %json {"title": "a: a"}',
        'root ::= "[" (root ("," root)*)? "]"',
    ],
)
def test_a_grammar_that_comes_to_an_end_is_not_refused(grammar: str) -> None:
    assert check(grammar)


@pytest.mark.parametrize(
    "lark", ["start: " + "(" * 50_000, 'start: "', "start: %lark {", "start:", "start", "", "%json"]
)
def test_what_is_no_grammar_is_left_to_llguidance(lark: str) -> None:
    assert user_grammar.checked(lark, "grammar", TOKENS, checker.fault) == lark


def test_the_search_takes_time_that_grows_with_the_grammar() -> None:
    began = time.process_time()
    count = 8000
    rules = "start: r0\n" + "".join(f'r{n}: "a" r{n + 1} | r{n * 7 % count}\n' for n in range(count))
    assert user_grammar.checked(rules, "grammar", TOKENS, checker.fault) == rules
    assert time.process_time() - began < 5
