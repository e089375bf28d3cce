"""Grammars in GBNF mean what llama.cpp takes them for."""

from __future__ import annotations

import pytest
from accepting import accepts

from server.grammar import gbnf


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= Foo foo FOO\nFoo ::= "a"\nfoo ::= "b"\nFOO ::= "c"', "abc", "aaa"),
        ('root ::= Item item?\nItem ::= "(" item ")"\nitem ::= "x" | Item', "((x))x", "x"),
        ('root ::= a-b a_b\na-b ::= "x"\na_b ::= "y"', "xy", "xx"),
        ('root ::= start-rule start\nstart ::= "q"\nstart-rule ::= "r"', "rq", "qr"),
        ('root ::= Root\nRoot ::= "a" ROOT?\nROOT ::= "b"', "ab", "b"),
        ('root ::= foo foo-2 Foo\nfoo ::= "1"\nfoo-2 ::= "2"\nFoo ::= "3"', "123", "113"),
        ('root ::= 1st größe\n1st ::= "a"\ngröße ::= "b"{,3}', "abbb", "abbbb"),
        ('root ::= a A # a and A\na ::= "A" [Aa]\nA ::= "a-A"', "AAa-A", "aAa-A"),
    ],
)
def test_names_differ_by_case_and_dashes(grammar: str, right: str, wrong: str) -> None:
    lark = gbnf.as_lark(grammar)
    assert accepts(lark, right)
    assert not accepts(lark, wrong)


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        ('root ::= word "ing"\nword ::= [a-z]+', ["going", "inging"]),
        (
            'root ::= word list\nword ::= [a-z ]+\nlist ::= "and" [0-9] root? | "or" list',
            ["this and1", "a orand2b and3"],
        ),
        ('root ::= line+\nline ::= "- " item "\\n"\nitem ::= [^\\n]+', ["- a\n- b\n"]),
        ("root ::= .* [0-9]", ["a1", "12", "1"]),
        ('root ::= text "END"\ntext ::= (. | "\\n")*', ["a\nEND", "END", "ENDEND"]),
    ],
)
def test_what_repeats_may_be_followed_by_what_it_matches(grammar: str, texts: list[str]) -> None:
    lark = gbnf.as_lark(grammar)
    for text in texts:
        assert accepts(lark, text), text
    assert not accepts(lark, "")
