"""Tool calls in every format: none is lost, arguments follow the schema, and it doesn't matter how the text is cut."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from call_writers import AMBIGUOUS, WRITERS, Call, json_tools, qwen, strings
from calling import answers, calls_of, function, serving
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from spelling import Spelled, answer, cuts, state, tool_format

from server.text.calls.tool_calls import CallBegin
from server.text.detokenizer import Answer

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
PROPERTIES = {"text": STRING, "count": INTEGER, "on": {"type": "boolean"}, "items": {"type": "array"}}
PROPERTIES |= {"options": {"type": "object"}, "maybe": {"anyOf": [INTEGER, {"type": "null"}]}}
TOOLS = [function(name, {"type": "object", "properties": PROPERTIES}) for name in ("f", "get-time")]


IN_JSON = {"json_tools", "mistral", "kimi_k2"}
CALLS: list[Call] = [
    ("f", {"text": "plain", "count": -5, "on": False, "items": ["a", 1.5]}),
    ("f", {"text": '  {"a": 1}, </parameter> it\'s\n  null', "count": 5, "on": True, "items": [1, "2", {"k": None}]}),
    ("f", {}),
    ("f", {"maybe": None, "options": {"a": {"b": "c } ] ) , x"}}, "text": "é🎉 <b> & &lt; 007"}),
]


def spelled(parser: str) -> Spelled:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    return Spelled(None, tool_format(parser, module.tool_call_start, module.tool_call_end))


def read_answer(parser: str, parts: list[str] | list[bytes], *, cut: bool = False) -> Answer:
    tokenizer = spelled(parser)
    text = state(tokenizer, tools=TOOLS)
    pieces = list(itertools.chain(*(text.feed([token]) for token in tokenizer.tokens(parts))))
    return answer([*pieces, *text.finish(cut=cut)])


def read(found: Answer) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


def whole_and_in_pieces(parser: str, text: str) -> Answer:
    one, many = read_answer(parser, [text]), read_answer(parser, list(text))
    assert one == many
    return one


def test_every_parser_of_mlx_lms_is_tried_here() -> None:
    folder = Path(importlib.import_module("mlx_lm.tool_parsers").__file__ or "").parent
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == set(WRITERS)


# ---------------------------------------------------------------- no call is lost
@pytest.mark.parametrize("parser", WRITERS)
def test_calls_come_as_they_were_meant_and_text_around_them_stays(parser: str) -> None:
    found = whole_and_in_pieces(parser, "Let me look.\n" + WRITERS[parser](CALLS))
    assert read(found) == CALLS
    assert found.content == "Let me look.\n"


@pytest.mark.parametrize("parser", [name for name in WRITERS if name != "mistral"])
def test_blocks_may_follow_each_other_with_text_between(parser: str) -> None:
    one = WRITERS[parser](CALLS[:1])
    found = whole_and_in_pieces(parser, f"{one}\n\nAnd once more: {one}{one}\n")
    assert read(found) == CALLS[:1] * 3
    assert found.content == "And once more: "


@pytest.mark.parametrize("parser", WRITERS)
def test_a_cut_answer_delivers_what_can_be_read_or_its_text(parser: str) -> None:
    calls = [CALLS[0], *CALLS[2:]]
    text = WRITERS[parser](calls)
    for end in range(len(text)):
        found = read_answer(parser, [text[:end]], cut=True)
        if not found.calls:
            assert found.content == text[:end]
            continue
        edge = " \n,["
        assert text[:end].rstrip(edge).endswith(found.content.strip(edge)), "at most the beginning of the next call"
        for call, (name, arguments) in zip(found.calls, calls, strict=False):
            assert call.name == name
            if parser in IN_JSON:
                assert json.dumps(arguments).startswith(call.arguments)
            else:
                whole = {key: arguments[key] for key in json.loads(call.arguments)}
                assert json.loads(call.arguments) == whole


@pytest.mark.parametrize("parser", WRITERS)
def test_what_is_no_call_is_content(parser: str) -> None:
    form = spelled(parser).tool_format
    assert form is not None
    for inner in ("nonsense", "{", "<function", "call:", "3", '{"a": 1}', "<parameter=a>\n1\n</parameter>", "é"):
        text = f"Well: {form.start}{inner}{form.end}"
        assert whole_and_in_pieces(parser, text) == Answer(text)


CHARACTERS = st.text(max_size=4)
SNIPPETS = st.sampled_from([
    *("</parameter>", "</tool_call>", "x</function>", "</arg_value>", "</param>", "</invoke", "<|tool_call_end|>"),
    *("null", "\n", "  ", '"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", "=", "a", "5", "&lt;", "é🎉"),
])  # fmt: skip
TEXTS = st.lists(SNIPPETS | CHARACTERS, max_size=5).map("".join)
SCALARS = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | TEXTS
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": st.integers(-(10**20), 10**20),
        "on": st.booleans(),
        "items": st.lists(SCALARS, max_size=3),
        "options": st.dictionaries(st.from_regex(r"\A[a-z]{1,4}\Z"), SCALARS, max_size=3),
        "maybe": st.none() | st.integers(),
    },
)
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(WRITERS)),
    st.lists(st.tuples(st.sampled_from(["f", "get-time"]), ARGUMENTS), min_size=1, max_size=3),
    SIZES,
    st.floats(0, 1),
)
def test_arguments_are_the_same_however_the_text_is_cut(
    parser: str, calls: list[Call], sizes: list[int], share: float
) -> None:
    calls = [("f", arguments) for _, arguments in calls] if parser == "pythonic" else calls
    written = [text for _, arguments in calls for text in strings(arguments)]
    assume(not any("\r" in text or AMBIGUOUS.get(parser, lambda _: False)(text) for text in written))
    text = WRITERS[parser](calls)
    plain = read_answer(parser, [text])
    assert read(plain) == calls
    assert plain.content == ""
    assert read_answer(parser, list(cuts(text.encode(), itertools.cycle(sizes)))) == plain
    end = int(len(text) * share)
    assert read_answer(parser, [text[:end]], cut=True) == read_answer(parser, list(text[:end]), cut=True)


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=text>", "</parameter>", "\n", "x"),
    *("f", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "text", "(", ")", "=", "{", "}", '"', "call:f{"),
    *('{"name": "f", "arguments": {', "<|tool_call>", "<tool_call|>", '<|"|>', ":", ",", "<think>", "</think>", "é"),
    *("<|tool_call_start|>[f(", ")]<|tool_call_end|>", "text='", "[TOOL_CALLS]", "[ARGS]", "<function=nobody>"),
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(WRITERS)), st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.booleans(), SIZES)
def test_whatever_a_model_writes_streamed_and_plain_are_equal(
    parser: str, fragments: list[str], cut: bool, sizes: list[int]
) -> None:
    text = "".join(fragments)
    plain = read_answer(parser, [text], cut=cut)
    assert read_answer(parser, list(cuts(text.encode(), itertools.cycle(sizes))), cut=cut) == plain
    assert read_answer(parser, list(text), cut=cut) == plain
    if not plain.calls and "think>" not in text:
        assert plain.content == text


# ---------------------------------------------------------------- models' own ways
def qwen_call(inner: str) -> str:
    return f"<tool_call>\n<function=f>\n{inner}\n</function>\n</tool_call>"


NESTED = qwen_call("<parameter=a>\n1\n</parameter>")


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        ("qwen3_coder", qwen_call("<parameter=text>\n\n  x\n\n</parameter>"), {"text": "\n  x\n"}),
        ("qwen3_coder", qwen_call("<parameter=text>x</parameter>"), {"text": "x"}),
        ("qwen3_coder", qwen_call("<parameter=text>\r\nx\r\n</parameter>"), {"text": "x"}),
        ("qwen3_coder", qwen_call('<parameter="text">\nx\n</parameter>'), {"text": "x"}),
        ("qwen3_coder", qwen_call("<parameter=count>\n5\n<parameter=text>\nx"), {"count": 5, "text": "x"}),
        ("qwen3_coder", qwen_call("<parameter=text>\nuse <parameter=text> so\n</parameter>"), None),
        ("qwen3_coder", qwen_call('{"count": 5}'), {"count": 5}),
        ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {"count": 5}}</tool_call>', {"count": 5}),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=text>\nx\n</tool_call>", {"text": "x"}),
        ("qwen3_coder", qwen_call(f"<parameter=text>\n{NESTED}\n</parameter>"), {"text": NESTED}),
        ("minimax_m2", "<minimax:tool_call><invoke name='f'><parameter name=text>\nx\n</parameter></invoke>"
         "</minimax:tool_call>", {"text": "x"}),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="text">x\n</parameter></invoke>'
         "</minimax:tool_call>", {"text": "x\n"}),
        ("minicpm5", '<function name="f"><param name="text"><![CDATA[<b> </param></function> &]]></param></function>',
         {"text": "<b> </param></function> &"}),
        ("minicpm5", '<function name="f"><param name="text"><![CDATA[a]]]]><![CDATA[>b]]></param></function>',
         {"text": "a]]>b"}),
        ("glm47", "<tool_call>f</tool_call>", {}),
        ("glm47", '<tool_call>f\n{"text": "x"}</tool_call>', {"text": "x"}),
        ("glm47", "<tool_call>f count=5</tool_call>", {"count": 5}),
        ("glm47", '<tool_call>{"name": "f", "arguments": {"text": "5"}}</tool_call>', {"text": "5"}),
        ("longcat", '<longcat_tool_call>{"name": "f", "arguments": {"text": "5"}}</longcat_tool_call>', {"text": "5"}),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call index="1" tool="f"<|sep|><|open|>json type="object"<|sep|>'
         '{"count": 5}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>', {"count": 5}),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|open|>argument type="number" key="text"<|sep|>'
         "007<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>", {"text": "007"}),
        ("gemma4", "<|tool_call>call:f{text:it's Oslo,count:5}<tool_call|>", {"text": "it's Oslo", "count": 5}),
        ("gemma4", '<|tool_call>call:f{count:<|"|>5<|"|>,text:007}<tool_call|>', {"count": 5, "text": "007"}),
        ("function_gemma", "<start_function_call>call:f{items:[<escape>a,b<escape>,2]}<end_function_call>",
         {"items": ["a,b", 2]}),
        ("pythonic", '<|tool_call_start|>[f(text="a" , items=[true, null, {"k": (1, 2)}],)]<|tool_call_end|>',
         {"text": "a", "items": [True, None, {"k": [1, 2]}]}),
        ("pythonic", "<|tool_call_start|>[f(text=02134, count='5')]<|tool_call_end|>", {"text": "02134", "count": 5}),
        ("pythonic", '<|tool_call_start|>[f(text="""x\n"y" ) \\d""")]<|tool_call_end|>', {"text": 'x\n"y" ) \\d'}),
        ("json_tools", '<tool_call>{"function": {"name": "f", "arguments": {"count": 5}}}</tool_call>', {"count": 5}),
        ("json_tools", '<tool_call>{"arguments": {"text": "</tool_call> {\\"name\\": 1}"}, "name": "f"}</tool_call>',
         {"text": '</tool_call> {"name": 1}'}),
        ("json_tools", '<tool_call>{"name": "f", "arguments": {"text": "\\ud83d"}}</tool_call>', {"text": "\ud83d"}),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"count": 5}', {"count": 5}),
        ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{"count": 5}'
         "<|tool_call_end|><|tool_calls_section_end|>", {"count": 5}),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_a_call_is_read_as_it_was_meant(parser: str, text: str, arguments: dict[str, Any] | None) -> None:
    found = whole_and_in_pieces(parser, text)
    wanted = {"text": "use <parameter=text> so"} if arguments is None else arguments
    assert read(found) == [("f", wanted)]
    assert found.content == ""


def test_text_between_the_calls_of_a_block_is_content() -> None:
    call = "<function=f>\n</function>\n"
    found = whole_and_in_pieces("qwen3_coder", f"<tool_call>\n{call}and then\n{call}</tool_call>")
    assert (len(found.calls), found.content) == (2, "\nand then\n")
    one = '{"name": "f", "arguments": {}}'
    found = whole_and_in_pieces(
        "json_tools", f'<tool_call>{one} and then {{"arguments": {{}}, "name": "f"}}</tool_call>'
    )
    assert (len(found.calls), found.content) == (2, " and then ")


def test_a_closing_tag_inside_an_argument_is_part_of_it_unless_another_block_follows() -> None:
    inside = qwen([("f", {"text": "a</tool_call>b"})])
    assert read(whole_and_in_pieces("qwen3_coder", inside)) == [("f", {"text": "a</tool_call>b"})]
    broken = "<tool_call>\n<function=f>\n<parameter=text>\nx\n</tool_call>\n"
    found = whole_and_in_pieces("qwen3_coder", broken + qwen([("f", {"count": 5})]))
    assert read(found) == [("f", {"text": "x"}), ("f", {"count": 5})]
    found = whole_and_in_pieces("qwen3_coder", broken + "Done.")
    assert (read(found), found.content) == ([("f", {"text": "x"})], "\nDone.")
    broken = '<tool_call>{"name": "f", "arguments": {"text": "x</tool_call>\n'
    found = whole_and_in_pieces("json_tools", broken + json_tools([("f", {})]))
    assert [call.arguments for call in found.calls] == ['{"text": "x', "{}"]


@pytest.mark.parametrize("parser", WRITERS)
def test_an_argument_may_quote_whole_blocks_of_calls(parser: str) -> None:
    """As what an agent writes into a file about tool calls does."""
    one = WRITERS[parser]([("f", {"count": 5})])
    form = spelled(parser).tool_format
    assert form is not None
    texts = [one, f"{one}\n{one}", f"First: {one}\nthen: {one} {one}.", f"{form.start}{form.end}{form.start}{form.end}"]
    for text in texts:
        if AMBIGUOUS.get(parser, lambda _: False)(text) or text.startswith("\n"):
            continue
        calls: list[Call] = [("f", {"text": text, "count": 5}), ("get-time", {"text": text})]
        if parser == "pythonic":
            calls = calls[:1]
        found = whole_and_in_pieces(parser, WRITERS[parser](calls) + ("" if parser == "mistral" else "\nDone."))
        assert read(found) == calls
        assert found.content == ("" if parser == "mistral" else "Done.")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[TOOL_CALLS]get-time", [("get-time", {})]),
        ("[TOOL_CALLS]get-time[ARGS]", [("get-time", {})]),
        ('[TOOL_CALLS]f{"text": "x"}', [("f", {"text": "x"})]),
        ('[TOOL_CALLS]f{"text": "x"}[TOOL_CALLS]get-time{}\n', [("f", {"text": "x"}), ("get-time", {})]),
        ('[TOOL_CALLS]f[ARGS]{"text": "x"}[TOOL_CALLS]get-time[ARGS]', [("f", {"text": "x"}), ("get-time", {})]),
        ('[TOOL_CALLS]f[CALL_ID]abcdefgh1{"text": "x"}', [("f", {"text": "x"})]),
        ('[TOOL_CALLS]maps.v2/find-all[ARGS]{"text": "x"}', [("maps.v2/find-all", {"text": "x"})]),
        ("[TOOL_CALLS]find[ARGS]", []),
    ],
)
def test_a_call_of_mistrals_may_lack_a_tag_or_arguments(text: str, calls: list[Call]) -> None:
    found = whole_and_in_pieces("mistral", text)
    assert read(found) == calls
    assert found.content == ("" if calls else text)


@pytest.mark.parametrize("parser", ["glm47", "laguna", "longcat", "gemma4", "function_gemma"])
def test_a_call_without_arguments_may_be_a_tools_name(parser: str) -> None:
    form = spelled(parser).tool_format
    assert form is not None
    before = "call:" if "gemma" in parser else ""
    assert read(whole_and_in_pieces(parser, f"{form.start}{before}get-time\n{form.end}")) == [("get-time", {})]
    other = f"{form.start}{before}nothing{form.end}"
    assert whole_and_in_pieces(parser, other) == Answer(other)


FORGETTING = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=text>\nx\n",
    "glm47": "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>\nx\n",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">\nx\n',
}


@pytest.mark.parametrize("parser", FORGETTING)
def test_a_call_behind_one_that_was_never_closed_is_not_lost(parser: str) -> None:
    broken = FORGETTING[parser]
    following = WRITERS[parser]([("f", {"text": "y"}), ("get-time", {})])
    for behind in ("", "\nDone."):
        found = whole_and_in_pieces(parser, broken + following + behind)
        assert [name for name, _ in read(found)] == ["f", "f", "get-time"]
        assert [arguments.get("text", "").strip() for _, arguments in read(found)] == ["x", "y", ""]
        assert found.content.strip() == behind.strip()


def test_a_call_of_qwen3_coders_needs_no_tag_around_it() -> None:
    call = qwen([("f", {"text": "x"})]).removeprefix("<tool_call>\n")
    for text in (call, call.removesuffix("</tool_call>")):
        found = whole_and_in_pieces("qwen3_coder", "Well.\n" + text)
        assert (read(found), found.content) == ([("f", {"text": "x"})], "Well.\n")
    for text in ("Write `<function=name>` and so on.", "Begin with <function="):
        assert whole_and_in_pieces("qwen3_coder", text) == Answer(text)


@pytest.mark.parametrize("parser", WRITERS)
def test_long_arguments_are_read_in_time_that_grows_with_them(parser: str) -> None:
    """Where reading took time with the square of the length, this would take half a minute."""
    tags = ("</tool_call>", "</tool_call>a", "<tool_call>a", "<![CDATA[")
    for unit in ("x", "<", "x </", "{", "'", "f(", "é\n", ", ", *tags):
        text = WRITERS[parser]([("f", {"text": unit * 6_000})])
        assert [call.name for call in read_answer(parser, [text]).calls] == ["f"]
        form = spelled(parser).tool_format
        assert form is not None
        read_answer(parser, [form.start + unit * 6_000 + form.end])


def test_a_call_is_emitted_when_its_block_ends() -> None:
    tokenizer = spelled("qwen3_coder")
    text = state(tokenizer, tools=TOOLS)
    pieces = text.feed(tokenizer.tokens([qwen(CALLS)]))
    assert [piece.name for piece in pieces if isinstance(piece, CallBegin)] == ["f"] * 4
    assert text.calls == 4


# ---------------------------------------------------------------- what mlx-lm's parsers make of it
@pytest.mark.parametrize(
    ("parser", "inner", "calls"),
    [
        ("qwen3_coder", "<function=f>\n</function>\n<function=f>\n</function>", [("f", {}), ("f", {})]),
        (
            "qwen3_coder",
            "<function=f>\n<parameter=count>\n2026-01-15\n</parameter>\n</function>",
            [("f", {"count": "2026-01-15"})],
        ),
        ("glm47", "f<arg_key>text</arg_key><arg_value> x</arg_value>", [("f", {"text": " x"})]),
        (
            "longcat",
            "f<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>5</longcat_arg_value>",
            [("f", {"a": "5"})],
        ),
        (
            "minimax_m2",
            '<invoke name="f"><parameter name="text"> x</parameter></invoke>',
            [("f", {"text": " x"})],
        ),
        ("minicpm5", '"f"><param name="text"> x</param>', [("f", {"text": " x"})]),
        (
            "muse_spark",
            '<atem:invoke name="f"><atem:parameter name="text">5</atem:parameter></atem:invoke>',
            [("f", {"text": "5"})],
        ),
        (
            "kimi_k3",
            '<|open|>call tool="f"<|sep|><|open|>argument key="text" type="number"<|sep|>5<|close|>argument<|sep|>'
            "<|close|>call<|sep|>",
            [("f", {"text": "5"})],
        ),
        ("gemma4", "call:f{text:5}", [("f", {"text": "5"})]),
        ("function_gemma", "call:f{text:<escape>a}b<escape>}", [("f", {"text": "a}b"})]),
        ("pythonic", "[f(text=5)]", [("f", {"text": "5"})]),
    ],
)
def test_mlx_lms_parsers_still_need_the_readers_here(parser: str, inner: str, calls: list[Call]) -> None:
    """Where this fails the parser reads what ours stands in for, and the reader here may go."""
    form = spelled(parser).tool_format
    assert form is not None
    assert read(read_answer(parser, [form.start + inner + form.end])) == calls
    try:
        made = form.parse(inner, TOOLS)
    except ValueError:
        return
    found = [(call["name"], call["arguments"]) for call in (made if isinstance(made, list) else [made])]
    assert found != calls


# ---------------------------------------------------------------- over HTTP
TABLE: list[tuple[Any, str, Any]] = [
    ({"type": ["string", "null"]}, '{"name": "demo"}', '{"name": "demo"}'),
    ({"type": ["string", "null"]}, "123", "123"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
    ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "true", True),
    ({"type": "string"}, "null", "null"),
    ({"type": "integer"}, "2026-01-15", "2026-01-15"),
    ({"$ref": "#/$defs/Size"}, "2", 2),
    ({"type": "object"}, "{'a': [True, None]}", {"a": [True, None]}),
]


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm47", "minimax_m2", "minicpm5", "longcat"])
async def test_arguments_follow_the_schema_over_http(parser: str, tmp_path: Path) -> None:
    properties = {f"p{n}": schema for n, (schema, _, _) in enumerate(TABLE)}
    parameters = {"type": "object", "properties": properties, "$defs": {"Size": {"enum": [1, 2]}}}
    calls: list[Call] = [("f", {f"p{n}": text for n, (_, text, _) in enumerate(TABLE)}), ("g", {"unknown": "5"})]
    async with serving(parser, WRITERS[parser](calls), tmp_path) as site:
        message = await answers(site, tools=[function("f", parameters), function("g")])
        assert calls_of(message) == [
            ("f", {f"p{n}": value for n, (_, _, value) in enumerate(TABLE)}),
            ("g", {"unknown": "5"}),
        ]
        assert message["content"] is None
        assert message["finish_reason"] == "tool_calls"


async def test_a_call_cut_by_max_tokens_is_delivered_as_far_as_it_goes(tmp_path: Path) -> None:
    script = qwen([("f", {"count": 5, "text": "a rather long text"})])
    async with serving("qwen3_coder", script, tmp_path) as site:
        whole = len(site.served.tokenizer.encode(script, special=True, bos=False))
        found = []
        for most in range(1, whole, 7):
            message = await answers(site, tools=TOOLS, max_tokens=most)
            assert message["finish_reason"] == "length"
            found.append(calls_of(message) or message["content"])
        assert [one for one in found if isinstance(one, list)] == sorted(
            (one for one in found if isinstance(one, list)), key=lambda calls: len(calls[0][1])
        )
        assert script.startswith(found[0])
        assert found[-1] == [("f", {"count": 5, "text": "a rather long text"})]
