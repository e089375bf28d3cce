"""Calls without tags, as Llama 3 writes them: found where they are meant, and text everywhere else."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers as small
from calling import answers, calls_of, function
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import run_server, says
from spelling import Spelled, answer, cuts, state
from tokenizers import AddedToken

from server.text.calls.tool_calls import CallBegin
from server.text.detokenizer import Answer, Content
from server.text.tokenizer import BARE, Tokenizer, ToolFormat

CODE = "<|python_tag|>"
TOOLS = [function("f"), function("get-time"), function("für")]


def no_parser(text: str, tools: Any) -> Any:
    raise ValueError("no parser of mlx-lm's reads this format")


def spelled() -> Spelled:
    return Spelled(None, ToolFormat(BARE, CODE, "", False, no_parser))


def read_parts(parts: list[str] | list[bytes], *, cut: bool = False, **wishes: Any) -> Answer:
    tokenizer = spelled()
    text = state(tokenizer, tools=TOOLS, **wishes)
    pieces = list(itertools.chain(*(text.feed([token]) for token in tokenizer.tokens(parts))))
    found = answer([*pieces, *text.finish(cut=cut)])
    assert text.calls == len(found.calls)
    return found


def read(text: str, *, cut: bool = False, **wishes: Any) -> Answer:
    one, many = read_parts([text], cut=cut, **wishes), read_parts(list(text), cut=cut, **wishes)
    assert one == many
    return one


def calls(found: Answer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


ONE = '{"name": "f", "parameters": {"a": "x;{\\"b\\"}", "n": 5}}'
ARGUMENTS = {"a": 'x;{"b"}', "n": 5}


@pytest.mark.parametrize(
    "text",
    [
        ONE,
        CODE + ONE,
        f"\n\n  {ONE}\n",
        ONE.replace("parameters", "arguments"),
        ONE.replace(": ", ":").replace(", ", ","),
        ONE.replace(": ", " :\n ").replace('{"n', '{\n  "n'),
        '{"type": "function", ' + ONE[1:],
        '{"type": "function", "function": ' + ONE[len('{"name": ') :],
        '{"function": ' + ONE + "}",
        '{"type": "function", "function": ' + ONE + "}",
        '{"parameters": {"a": "x;{\\"b\\"}", "n": 5}, "name": "f"}',
        json.dumps({"name": "f", "parameters": json.dumps(ARGUMENTS)}),
        ONE[:-1] + ', "id": "call_1"}',
        ONE[:-1],
        ONE[:-2],
        ONE + "}",
        ONE + ";",
    ],
)
def test_a_call_is_found_in_every_way_of_writing_it(text: str) -> None:
    found = read(text)
    assert calls(found) == [("f", ARGUMENTS)]
    assert found.content.strip() == ""


@pytest.mark.parametrize("between", ["; ", ";", "\n", ", ", "", CODE, "\n\n", "; " + CODE])
def test_several_calls_may_follow_each_other(between: str) -> None:
    second = '{"name": "get-time", "parameters": {}}'
    found = read(ONE + between + second + between + ONE)
    assert calls(found) == [("f", ARGUMENTS), ("get-time", {}), ("f", ARGUMENTS)]
    assert found.content == ""


def test_a_call_may_begin_a_line_and_text_around_it_stays() -> None:
    found = read(f"Let me look.\n{ONE}\nThat was it.")
    assert calls(found) == [("f", ARGUMENTS)]
    assert found.content == "Let me look.\nThat was it."


def test_names_that_json_escapes_are_known() -> None:
    assert calls(read('{"name": "f\\u00fcr", "parameters": {}}')) == [("für", {})]
    assert calls(read('{"name": "für", "parameters": {}}')) == [("für", {})]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "other", "parameters": {}}',
        '{"name": "f"}',
        '{"name": "f", "age": 5}',
        '{"name": "f", "age": 5, "parameters": [1]}',
        '{"name": "f", "parameters": 5}',
        '{"name": "f", "parameters": "text"}',
        '{"name": "ff", "parameters": {}}',
        '{"name": ["f"], "parameters": {}}',
        '{"parameters": {"a": 1}}',
        '{"parameters": {"a": 1}, "name": "other"}',
        '{"parameters": {"name": "f", "parameters": {}}, "x": 1}',
        f"As in `{ONE}`, which is a call.",
        f'{{"calls": [\n  {ONE}\n]}}',
        f"[{ONE}]",
        "int main()\n{\n    return 0;\n}\n",
        "{",
        '{"name',
        '{"name": "f", "par',
        '{"name": "f", "note": "never ends',
        "; }, ",
        " \n\n ",
        "{{{{",
        "",
        'f({"name": "f", "parameters": {}})',
    ],
)
def test_what_is_no_call_of_an_offered_tool_is_content(text: str) -> None:
    assert read(text) == Answer(text)
    assert read(text, cut=True) == Answer(text)


def test_text_is_held_back_only_while_it_can_become_a_call() -> None:
    tokenizer = spelled()
    text = state(tokenizer, tools=TOOLS)
    for part in ("{", '"na', 'me": ', '"'):
        assert text.feed(tokenizer.tokens([part])) == []
    assert text.feed(tokenizer.tokens(["Alice"])) == [Content('{"name": "Alice')]
    assert text.feed(tokenizer.tokens(['"'])) == [Content('"')]


def test_a_call_is_streamed_while_it_forms() -> None:
    tokenizer = spelled()
    text = state(tokenizer, tools=TOOLS)
    [begin, arguments] = text.feed(tokenizer.tokens(['{"name": "f", "parameters": {"a": "x']))
    assert isinstance(begin, CallBegin)
    assert begin.name == "f"
    assert arguments.text == '{"a": "x'  # type: ignore[union-attr]


def test_without_tools_an_answer_is_text() -> None:
    tokenizer = spelled()
    text = state(tokenizer)
    assert answer([*text.feed(tokenizer.tokens([ONE])), *text.finish()]) == Answer(ONE)


def test_a_cut_call_has_the_arguments_so_far() -> None:
    for end in range(len(ONE)):
        found = read(ONE[:end], cut=True)
        if found.calls:
            assert ONE[ONE.index('{"a"') :].startswith(found.calls[0].arguments)
            assert found.content == ""
        else:
            assert found.content == ONE[:end]


FRAGMENTS = [
    *(
        "{",
        "}",
        '"',
        "name",
        '"name": "f"',
        '"name": "g"',
        ", ",
        '"parameters": {',
        '"arguments"',
        ":",
        "\n",
        "; ",
        " ",
    ),
    *('"type": "function", ', '"function": ', "x", "é", "\\", "'", ONE, '{"name": "f", "parameters": {}}', "[", "]"),
    *(CODE, '{"name": "für", ', '{"parameters": {"a": 1}, ', "//", "/*", "null", "-0", "```json\n", '{"function": {'),
]
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.booleans(), SIZES, st.booleans())
def test_however_the_text_is_cut_nothing_differs_and_nothing_is_lost(
    fragments: list[str], cut: bool, sizes: list[int], follows: bool
) -> None:
    text = "".join(fragments)
    plain = read_parts([text], cut=cut, follows=follows)
    assert read_parts(list(text), cut=cut, follows=follows) == plain
    assert read_parts(list(cuts(text.encode(), itertools.cycle(sizes))), cut=cut, follows=follows) == plain
    if not plain.calls:
        assert plain.content == (text if follows else text.replace(CODE, ""))


# Without the tag, which this tokenizer knows by its spelling alone: it is one in a string, too.
WORDS = st.text().filter(lambda word: CODE not in word)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["f", "get-time", "für"]), st.dictionaries(WORDS, VALUES, max_size=3))),
    st.sampled_from(["; ", "\n", ";\n"]),
    st.booleans(),
    st.sampled_from([None, 2]),
    SIZES,
)
def test_arguments_come_as_they_were_meant(
    meant: list[tuple[str, Any]], between: str, plain: bool, indent: int | None, sizes: list[int]
) -> None:
    text = between.join(
        json.dumps({"name": name, "parameters": arguments}, ensure_ascii=plain, indent=indent)
        for name, arguments in meant
    ).encode()
    found = read_parts(list(cuts(text, itertools.cycle(sizes))))
    if meant:
        assert found.content == ""
    assert calls(found) == meant


# ---------------------------------------------------------------- the model's files
@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("llama")
    code = AddedToken(CODE, special=True, normalized=False)
    small.write(folder, lambda: small.byte_level(code), small.BARE)
    return Tokenizer.load(folder, trust_remote_code=False)


def test_the_format_is_known_by_what_the_template_says(llama: Tokenizer, tmp_path: Path) -> None:
    assert llama.tool_format is not None
    assert llama.tool_format.is_bare
    said = '{{ "{\\"name\\": function name, \\"parameters\\": …}" if tools }}'
    for before, name in (("{# tool_call.name #}" + said, "json_tools"), ("{#" + said + "#}", "")):
        small.write(tmp_path, small.byte_level, before + small.CHATML)
        other = Tokenizer.load(tmp_path, trust_remote_code=False).tool_format
        assert (other.name if other else "") == name


def test_the_history_is_what_the_template_makes_of_it(llama: Tokenizer) -> None:
    made = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "f", "arguments": f'{{"n": {n}}}'}} for n in (1, 2)
    ]
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"r{n}"} for n in (1, 2)]
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": made}, *results]
    text = llama.decode(llama.chat(messages, tools=TOOLS).ids, special=True)
    for n in (1, 2):
        assert f'<|im_start|>assistant\n{{"name": "f", "parameters": {{"n": {n}}}}}<|im_end|>' in text


def test_a_control_token_before_a_call_is_no_text(llama: Tokenizer) -> None:
    text = state(llama, tools=TOOLS)
    tokens = llama.encode(CODE + ONE + "; " + ONE, special=True, bos=False)
    found = answer([*text.feed(tokens), *text.finish()])
    assert calls(found) == [("f", ARGUMENTS)] * 2
    assert found.content == ""


async def test_a_client_gets_the_call_streamed_or_not(llama: Tokenizer) -> None:
    fake = FakeEngine(vocab_size=llama.vocab_size, say=says(f"One moment.\n{ONE}; {ONE}", tokens=llama))
    async with run_server(fake, tokens=llama) as site:
        message = await answers(site, tools=TOOLS[:2])
        assert calls_of(message) == [("f", ARGUMENTS)] * 2
        assert message["content"] == "One moment.\n"
        assert message["finish_reason"] == "tool_calls"
        other = await answers(site, tools=[function("other")])
        assert other["content"] == f"One moment.\n{ONE}; {ONE}"


def test_a_call_at_the_beginning_is_shown_where_tools_take_the_place_of_the_first_message(tmp_path: Path) -> None:
    taking = "{%- if tools %}{{ messages[0].content + '\n' }}{% set messages = messages[1:] %}{% endif %}"
    small.write(tmp_path, small.byte_level, taking + small.BARE)
    llama = Tokenizer.load(tmp_path, trust_remote_code=False)
    made = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": made},
        {"role": "tool", "tool_call_id": "call_1", "content": "r"},
    ]
    assert '{"name": "f", "parameters": {"n": 1}}' in llama.decode(llama.chat(messages, tools=TOOLS).ids)
