"""Arguments that are written nearly as JSON has them."""

from __future__ import annotations

import importlib
import itertools
import json
from typing import Any

import pytest
from calling import function
from hypothesis import given, settings
from hypothesis import strategies as st
from spelling import Spelled, answer, state, tool_format

from server.text.calls.json_object import JsonObject
from server.text.detokenizer import Answer

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def read_answer(parser: str, parts: list[str]) -> Answer:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    tokenizer = Spelled(None, tool_format(parser, module.tool_call_start, module.tool_call_end))
    text = state(tokenizer, tools=[function("f", {"type": "object"})])
    pieces = itertools.chain(*(text.feed([token]) for token in tokenizer.tokens(parts)))
    return answer([*pieces, *text.finish(cut=False)])


def read(*parts: str) -> tuple[str, bool]:
    """What is handed out, and whether the object ended with the last part."""
    made = JsonObject()
    pieces = []
    for part in parts:
        text, taken = made.read(part)
        pieces.append(text)
        assert taken == len(part)
    return "".join([*pieces, made.rest()]), made.complete


MENDED = [
    ('{"a": "x\ny\tz\r\x00"}', {"a": "x\ny\tz\r\x00"}),
    (r'{"a": "C:\users\new\\dir \d+ it\'s \"q\" \u00e9\u12"}', {"a": 'C:\\users\new\\dir \\d+ it\'s "q" é\\u12'}),
    ('{"a": "line\\\nnext"}', {"a": "line\\\nnext"}),
    ('{"on": True, "off":False,"x":[None,None]}', {"on": True, "off": False, "x": [None, None]}),
    ('{"a": "True, None]", "True": "x"}', {"a": "True, None]", "True": "x"}),
    ('{"a": [1, 2, ], "b": {"c": 1e5,},\n}', {"a": [1, 2], "b": {"c": 1e5}}),
    (r'{"a": "\u12\"}"}', {"a": '\\u12"}'}),
    (r'{"a": "\u\u00e9"}', {"a": "\\ué"}),
    ('{"a": NaN, "b": [Infinity, -Infinity], "c": nan}', {"a": "NaN", "b": ["Infinity", "-Infinity"], "c": "nan"}),
    ('{"a": undefined, "b": paris, "c": 2026-01-15}', {"a": "undefined", "b": "paris", "c": "2026-01-15"}),
    (
        '{"a": +1, "b": [.5, -.5, 5., 1.e3], "c": 0x1F, "d": 007}',
        {"a": 1, "b": [0.5, -0.5, 5.0, 1000.0], "c": "0x1F", "d": "007"},
    ),
    (
        '{city: "Oslo", größe : 1, NaN: 2, 3: None, x-y: {True: true}}',
        {"city": "Oslo", "größe": 1, "NaN": 2, "3": None, "x-y": {"True": True}},
    ),
    ('{"a": NaN,}', {"a": "NaN"}),
    ("{'a': 'x', 'b': [\"y\", 'z'], \"c\": True}", {"a": "x", "b": ["y", "z"], "c": True}),
    (r"""{'a': 'say "hi", it\'s \u00e9 \"q\"', 'b': '', "c": "it's"}""",
     {"a": 'say "hi", it\'s é "q"', "b": "", "c": "it's"}),
    ('{"a": 1, // the first, {"x": "y"}\n "b": /* ** / "c" */ "// no /* remark */", /**/ }',
     {"a": 1, "b": "// no /* remark */"}),
    ('{"a": "say "hi" now", "b": "he said "hi"", "c": ""hi", he said", "d": ["a "b" c", ""], "e": ""}',
     {"a": 'say "hi" now', "b": 'he said "hi"', "c": '"hi", he said', "d": ['a "b" c', ""], "e": ""}),
    ('{"a": "<b class="x">if (y == "z") {</b>" , b: "k": v"}',
     {"a": '<b class="x">if (y == "z") {</b>', "b": 'k": v'}),
    ("{'a': 'it's fine', 'b': \"it's\"}", {"a": "it's fine", "b": "it's"}),
    ('{// one\n"a"/* two */:/***/5/* three */}', {"a": 5}),
]  # fmt: skip


@pytest.mark.parametrize(("written", "meant"), MENDED)
def test_what_has_one_meaning_only_is_mended(written: str, meant: dict[str, Any]) -> None:
    for parts in ([written], list(written), [written[:9], written[9:]]):
        text, complete = read(*parts)
        assert complete
        assert json.loads(text) == meant


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), VALUES), st.booleans(), st.sampled_from([None, 1]), st.data())
def test_json_stays_as_it_is(value: dict[str, Any], ascii_only: bool, indent: int | None, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    cut = data.draw(st.integers(0, len(text)))
    assert read(text[:cut], text[cut:]) == (text, True)


@pytest.mark.parametrize("text", ['{"a": "x" "b": 1}', '{"a": "x", "b", "c": 1}', '{"a" "x"}', '{"a": ["x" "y"]}'])
def test_what_may_mean_two_things_stays_as_it_is(text: str) -> None:
    assert read(text) == read(*text) == (text, True)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "x"',
        '{"a": "x" ',
        '{"a": "x", ',
        '{"a": "x", tru',
        '{"a": tru',
        '{"a": "x\\',
        '{"a": "\\u00',
        '{"a": 1, ',
        "{",
    ],
)
def test_nothing_of_a_cut_object_is_lost(text: str) -> None:
    assert read(text) == read(*text) == (text, False)


WORDS = st.text("ab é.;<", min_size=1).filter(lambda text: text.strip())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(WORDS, min_size=3).filter(lambda words: len(words) % 2), min_size=1, max_size=3), st.data())
def test_quotation_marks_around_words_are_part_of_a_string(texts: list[list[str]], data: st.DataObject) -> None:
    meant = {f"k{n}": '"'.join(words) for n, words in enumerate(texts)}
    written = "{" + ", ".join(f'"{key}": "{text}"' for key, text in meant.items()) + "}"
    cut = data.draw(st.integers(0, len(written)))
    text, complete = read(written[:cut], written[cut:])
    assert complete
    assert json.loads(text) == meant
    assert read(*written) == (text, True)


@pytest.mark.parametrize("parser", ["json_tools", "kimi_k2", "mistral"])
def test_arguments_are_json_where_a_model_writes_line_breaks_in_strings(parser: str) -> None:
    arguments = '{"text": "a\n\\d", "on": True,}'
    before, behind = {
        "json_tools": ('<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"),
        "kimi_k2": (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
        "mistral": ("[TOOL_CALLS]f[ARGS]", ""),
    }[parser]
    text = before + arguments + behind
    for parts in ([text], list(text)):
        [call] = read_answer(parser, parts).calls
        assert json.loads(call.arguments) == {"text": "a\n\\d", "on": True}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"a": 5', {"a": 5}),
        ('{"a": "x"\n', {"a": "x"}),
        ('{"a": [1, {"b": True', {"a": [1, {"b": True}]}),
        ('{"a": [1, ', {"a": [1]}),
        ('{"a": "x" // and so on', {"a": "x"}),
        ("{", {}),
    ],
)
def test_brackets_that_are_missing_before_a_closing_tag_are_closed(written: str, meant: dict[str, Any]) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {written}</tool_call>'
    for parts in ([text], list(text)):
        [call] = read_answer("json_tools", parts).calls
        assert json.loads(call.arguments) == meant
    [cut] = read_answer("json_tools", [text.removesuffix("</tool_call>")]).calls
    assert not cut.arguments.endswith("}"), "what the model may have wanted to go on with isn't complete"


def test_a_string_that_doesnt_end_is_never_closed() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "half of it}}\n</tool_call>'
    for parts in ([text], list(text)):
        [call] = read_answer("json_tools", parts).calls
        with pytest.raises(ValueError, match="Unterminated"):
            json.loads(call.arguments)


@pytest.mark.parametrize("parser", ["json_tools", "mistral", "qwen3_coder", "glm47", "pythonic"])
@pytest.mark.parametrize(
    "call",
    [
        *('{"name": "f", "' + word + '": {"a": 5}}' for word in ("args", "input", "params", "parameters")),
        *('{"' + word + '": {"a": 5}, "name": "f"}' for word in ("args", "input", "params", "arguments")),
        *('{"name": "f", "a": 5}', '{"a": 5, "name": "f", "id": "x"}', '{"name": "f", "args": "{\\"a\\": 5}"}'),
        '{"type": "function", "function": {"name": "f", "a": 5}}',
    ],
)
def test_arguments_are_found_whatever_they_are_called(parser: str, call: str) -> None:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    text = module.tool_call_start + call + module.tool_call_end
    for parts in ([text], list(text)):
        [found] = read_answer(parser, parts).calls
        assert (found.name, json.loads(found.arguments)) == ("f", {"a": 5})


@pytest.mark.parametrize("parser", ["json_tools", "mistral"])
@pytest.mark.parametrize(("written", "meant"), MENDED)
def test_arguments_are_mended_wherever_they_stand_in_their_call(
    parser: str, written: str, meant: dict[str, Any]
) -> None:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    for call in (
        f'{{"arguments": {written}, "name": "f"}}',
        f'{{"id": "x", "name": "f", "parameters": {written}}}',
        f'{{"arguments": {written}, "id": "x", "name": "f"}}',
        f'{{"type": "function", "function": {{"name": "f", "arguments": {written}}}}}',
    ):
        block = module.tool_call_start + call + module.tool_call_end
        text = block + (f"\n{block}\nDone." if module.tool_call_end else "")
        for parts in ([text], list(text)):
            found = read_answer(parser, parts)
            assert [(one.name, json.loads(one.arguments)) for one in found.calls] == [("f", meant)] * text.count(block)
            assert found.content.strip() == ("Done." if module.tool_call_end else "")


def refused(constant: str) -> None:
    raise AssertionError(constant)


@pytest.mark.parametrize("stand_in", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "arguments": {"x": [%s, 1.0]}}',
        '{"arguments": {"x": [%s, 1.0]}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"x\\": [%s, 1.0]}"}',
        '{"name": "f", "parameters": {"x": [%s, 1.0]}}',
        '```json\n{"name": "f", "arguments": {"x": [%s, 1.0]}}\n```',
    ],
)
def test_what_json_has_no_word_for_is_text_in_a_call(text: str, stand_in: str) -> None:
    block = f"<tool_call>\n{text % stand_in}\n</tool_call>"
    for parts in ([block], list(block)):
        [call] = read_answer("json_tools", parts).calls
        assert json.loads(call.arguments, parse_constant=refused) == {"x": [stand_in, 1.0]}


def test_a_number_beyond_all_doubles_loses_no_call() -> None:
    for text in ('{"name": "f", "arguments": {"x": 1e400}}', '{"arguments": {"x": 1e400}, "name": "f"}'):
        block = f"<tool_call>\n{text}\n</tool_call>"
        for parts in ([block], list(block)):
            [call] = read_answer("json_tools", parts).calls
            assert json.loads(call.arguments, parse_constant=refused, parse_float=str)["x"] == "1e400"


@pytest.mark.parametrize(
    "text",
    [
        "{'name': 'f', 'arguments': {'text': 'it\\'s', 'on': True}}",
        '{"function": "f", "arguments": {"text": "it\'s", "on": true}}',
        '```json\n{"name": "f", "arguments": {"text": "it\'s", "on": true}}\n```',
        '[{"arguments": {"text": "it\'s", "on": true}, "name": "f"}]',
    ],
)
def test_a_call_is_found_in_the_ways_in_which_small_models_write_it(text: str) -> None:
    block = f"<tool_call>\n{text}\n</tool_call>"
    for parts in ([block], list(block)):
        answer = read_answer("json_tools", parts)
        [call] = answer.calls
        assert (call.name, json.loads(call.arguments)) == ("f", {"text": "it's", "on": True})
        assert not answer.content


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ('{"n": 1', {"n": 1}),
        ('{"a": {"b": [1, 2', {"a": {"b": [1, 2]}}),
        ('{"a": "x"', {"a": "x"}),
        ('{"a": "x",', {"a": "x"}),
        ('{"a": "x < y", "b": tru', {"a": "x < y", "b": "tru"}),
        ("{", {}),
    ],
)
def test_a_call_that_its_end_tag_cuts_is_closed_and_the_next_one_is_read(arguments: str, meant: dict[str, Any]) -> None:
    begin, end = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", "<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{begin}{arguments}{end}{begin}{{}}{end}<|tool_calls_section_end|>"
    for parts in ([text], list(text)):
        found = read_answer("kimi_k2", parts)
        assert [json.loads(call.arguments) for call in found.calls] == [meant, {}]
        assert found.content == ""
