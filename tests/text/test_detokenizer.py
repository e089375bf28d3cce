"""The text of a choice: what a client reads never depends on how it was cut into tokens."""

from __future__ import annotations

import importlib
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
import small_tokenizers as small
from hypothesis import given, settings
from hypothesis import strategies as st
from spelling import REPLACED, THINK, TOOLS, Spelled, answer, cuts, read_answer, state, stream, tool_format
from tokenizers import AddedToken

from server.text.detokenizer import Answer, Call, CallArguments, CallBegin, Content, Reasoning, TextState
from server.text.tokenizer import Tokenizer, ToolFormat


# ---------------------------------------------------------------- bytes → text
def test_characters_arrive_whole() -> None:
    tokenizer = Spelled()
    tokens = tokenizer.tokens(bytes([byte]) for byte in ("🎉" * 10).encode())
    pieces = stream(state(tokenizer), tokens)
    assert pieces[:-1] == [[], [], [], [Content("🎉")]] * 10


def test_half_a_character_at_the_end_is_dropped() -> None:
    tokenizer = Spelled()
    tokens = tokenizer.tokens(["a", "🎉".encode()[:3]])
    assert stream(state(tokenizer), tokens) == [[Content("a")], [], []]


@pytest.mark.parametrize("data", [b"a\xffb", b"\xe2\x82a", b"\xf0\x9f\xf0\x9f\x8e\x89", b"\xc3\x28"])
def test_bytes_that_are_no_text_are_replaced_as_python_does(data: bytes) -> None:
    parts = [bytes([byte]) for byte in data]
    assert read_answer(parts).content == read_answer([data]).content == data.decode("utf-8", "replace")


def test_the_leading_space_is_kept() -> None:
    assert read_answer([" 9", ", 10"]).content == " 9, 10"


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    tokenizer = Spelled()
    tokens = [*tokenizer.tokens(["a"]), *tokenizer.tokens(["<|x|>"], special=True), *tokenizer.tokens(["b"])]
    assert answer(state(tokenizer).feed(tokens)).content == "ab"
    assert answer(state(tokenizer, show_special=True).feed(tokens)).content == "a<|x|>b"


def test_a_hidden_token_inside_a_character_doesnt_break_it() -> None:
    tokenizer = Spelled()
    first, last = tokenizer.tokens(["é".encode()[:1], "é".encode()[1:]])
    (hidden,) = tokenizer.tokens(["<|x|>"], special=True)
    assert answer(state(tokenizer).feed([first, hidden, last])).content == "é"


def test_the_token_that_ends_an_answer_is_no_part_of_it() -> None:
    tokenizer = Spelled()
    tokens = tokenizer.tokens(["a", "END"])
    text = state(tokenizer, stop_ids=[tokens[1]])
    assert stream(text, tokens) == [[Content("a")], [], []]
    assert text.tokens == 2


@pytest.mark.parametrize("kind", ["bytes", "pieces", "words"])
def test_a_stream_reads_as_the_library_decodes_the_whole(real: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = real[kind]

    @settings(max_examples=120, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12))
    def check(ids: list[int]) -> None:
        known = [token for token in ids if token < tokenizer.vocab_size]
        theirs = tokenizer.hf.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        ours = answer(itertools.chain(*stream(state(tokenizer, chat=False), ids))).content
        if REPLACED not in theirs:
            assert ours in (theirs, " " + theirs)

    check()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("real")
    end = AddedToken("<|tool_end|>", special=True, normalized=False)
    folders = {
        "bytes": small.write(root / "bytes", small.byte_level(end), small.THINKING, eos_token="<|im_end|>"),
        "pieces": small.write(root / "pieces", small.pieces, None, eos_token="</s>", unk_token="<unk>"),
        "words": small.write(root / "words", small.whole_words, None, unk_token="[UNK]", eos_token="[END]"),
    }
    return {name: Tokenizer.load(folder, trust_remote_code=False) for name, folder in folders.items()}


# ---------------------------------------------------------------- stop strings
@pytest.mark.parametrize(
    ("parts", "stops", "left"),
    [
        (["hello wor", "ld, you"], ["world"], "hello "),
        (["abcSTOPdef"], ["STOP"], "abc"),
        (["a", "b", "c", "d"], ["bcd", "cd"], "a"),
        (["a", "b", "c", "d"], ["cd", "xyz"], "ab"),
        (["x ab", "ab", "ac"], ["abac"], "x ab"),
        (["🎉🎉", "🎈"], ["🎈"], "🎉🎉"),
        (["STOP"], ["STOP"], ""),
        (["one\n", "\ntwo"], ["\n\n"], "one"),
        (["one", "two"], [""], "onetwo"),
        (["aaab"], ["aab"], "a"),
        (["ab"], ["b", "ab"], ""),
    ],
)
def test_an_answer_ends_before_the_first_stop_string(parts: list[str], stops: list[str], left: str) -> None:
    assert read_answer(parts, stops=stops).content == left
    assert read_answer(["".join(parts)], stops=stops).content == left


def test_a_stop_string_is_known_at_once() -> None:
    tokenizer = Spelled()
    text = state(tokenizer, stops=["STOP"])
    tokens = tokenizer.tokens(["a", "ST", "OP and", " more"])
    assert [text.feed([token]) for token in tokens[:2]] == [[Content("a")], []]
    assert not text.stopped
    assert text.feed(tokens[2:]) == []
    assert text.stopped
    assert text.tokens == 3, "what comes behind the stop string isn't part of the answer"
    assert text.finish() == []


def test_text_is_held_only_while_it_may_begin_a_stop_string() -> None:
    tokenizer = Spelled()
    pieces = stream(
        state(tokenizer, stops=["STOP", "TOAST"]), tokenizer.tokens(["a S", "T", "O", "A", "S", "-", "STO"])
    )
    assert pieces == [[Content("a ")], [], [], [Content("S")], [], [Content("TOAS-")], [], [Content("STO")]]


def naive_stop(text: str, stops: Sequence[str]) -> str:
    for end in range(len(text) + 1):
        if met := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, met))]
    return text


LETTERS = st.text(st.sampled_from("ab🎉"), max_size=30)


@settings(max_examples=200, deadline=None)
@given(LETTERS, st.lists(st.text(st.sampled_from("ab🎉"), min_size=1, max_size=5), max_size=4), st.data())
def test_no_part_of_a_stop_string_is_ever_shown(text: str, stops: list[str], data: st.DataObject) -> None:
    sizes = iter(lambda: data.draw(st.integers(1, 6)), 0)
    tokenizer = Spelled(think=None)
    pieces = stream(state(tokenizer, stops=stops), tokenizer.tokens(cuts(text.encode(), sizes)))
    shown = "".join(piece.text for news in pieces for piece in news if isinstance(piece, Content))
    assert shown == naive_stop(text, stops)


def test_a_stop_string_ends_reasoning_too() -> None:
    tokenizer = Spelled()
    text = state(tokenizer, stops=["END"], reasoning=True)
    ended = answer(itertools.chain(*stream(text, tokenizer.tokens(["hmm\n", "EN", "D</think>", "yes"]))))
    assert (ended.reasoning, ended.content, text.stopped) == ("hmm\n", "", True)


# ---------------------------------------------------------------- reasoning
@pytest.mark.parametrize(
    "parts", [["<think>", "I see.", "</think>", "Yes."], ["<th", "ink>I s", "ee.</", "think>Yes."]]
)
@pytest.mark.parametrize("special", [False, True])
def test_reasoning_is_kept_apart(parts: list[str], special: bool) -> None:
    tokenizer = Spelled()
    made = [tokenizer.tokens([p], special=special and p in THINK) for p in parts]
    assert answer(state(tokenizer).feed(itertools.chain(*made))) == Answer("Yes.", "I see.")


def test_reasoning_that_the_prompt_opened_goes_on() -> None:
    assert read_answer(["I see.", "</think>", "Yes."], reasoning=True) == Answer("Yes.", "I see.")
    assert read_answer(["I see."], reasoning=True) == Answer("", "I see.")


def test_line_breaks_around_reasoning_are_layout() -> None:
    parts = ["<think>\n", "One.\n", "\nTwo.", "\n", "</think>", "\n", "\n", "Yes.\n"]
    assert read_answer(parts) == Answer("Yes.\n", "One.\n\nTwo.")
    assert read_answer(["<think>\n\n</think>\n\n", " Yes."]) == Answer(" Yes.", "")


def test_a_closing_tag_without_an_opening_one_isnt_shown() -> None:
    assert read_answer(["Well", "</think>", " yes"]) == Answer("Well yes", "")


def test_no_piece_shows_a_tag_or_a_part_of_one() -> None:
    text = "<think>a < b <thin</think>c </thin d"
    tokenizer = Spelled()
    pieces = stream(state(tokenizer), tokenizer.tokens(text))
    assert answer(itertools.chain(*pieces)) == Answer("c </thin d", "a < b <thin")
    for news in pieces:
        assert all(piece.text for piece in news if isinstance(piece, Content | Reasoning)), "no empty pieces"


def test_tokens_of_reasoning_are_counted() -> None:
    tokenizer = Spelled()
    text = state(tokenizer)
    stream(text, tokenizer.tokens(["<think>", "a", "b", "</think>", "c", "d"]))
    assert (text.tokens, text.reasoning_tokens) == (6, 3)


def test_tags_are_text_outside_a_chat() -> None:
    assert read_answer(["<think>a</think>b"], chat=False) == Answer("<think>a</think>b")


# ---------------------------------------------------------------- tool calls
ARGUMENTS = '{"city": "Os\\"lo {", "at": [1, {"x": null}]}'
CALL = '<tool_call>\n{"name": "get_time", "arguments": ' + ARGUMENTS + "}\n</tool_call>"


def json_tools(think: tuple[str, str] | None = THINK) -> Spelled:
    return Spelled(think, tool_format())


def test_a_call_streams_its_name_and_then_its_arguments() -> None:
    tokenizer = json_tools()
    parts = [
        "<tool_call>",
        '\n{"name": "get',
        '_time", "argu',
        'ments": ',
        '{"ci',
        'ty": "Oslo',
        '"}',
        "}\n",
        "</tool_call>",
    ]
    pieces = stream(state(tokenizer, tools=TOOLS), tokenizer.tokens(parts))
    begin = CallBegin(0, "call_0", "get_time")
    assert pieces[:4] == [[], [], [], []]
    assert pieces[4] == [begin, CallArguments(0, '{"ci')]
    assert pieces[5:7] == [[CallArguments(0, 'ty": "Oslo')], [CallArguments(0, '"}')]]
    assert not any(pieces[7:])


def test_arguments_are_exactly_what_the_model_wrote() -> None:
    for size in (1, 3, 1000):
        parts = [CALL[n : n + size] for n in range(0, len(CALL), size)]
        assert read_answer(parts, json_tools(), tools=TOOLS).calls == [Call("call_0", "get_time", ARGUMENTS)]


def test_parallel_calls_have_rising_indices_and_nothing_between() -> None:
    tokenizer = json_tools()
    text = state(tokenizer, tools=TOOLS)
    pieces = [piece for news in stream(text, tokenizer.tokens("Let me look.\n" + CALL + "\n" + CALL)) for piece in news]
    assert [piece.index for piece in pieces if isinstance(piece, CallBegin)] == [0, 1]
    assert answer(pieces).content == "Let me look.\n"
    assert [call.arguments for call in answer(pieces).calls] == [ARGUMENTS, ARGUMENTS]
    assert text.calls == 2


def test_content_goes_on_behind_a_call() -> None:
    assert read_answer([CALL, "\n\nDone."], json_tools(), tools=TOOLS).content == "Done."


@pytest.mark.parametrize(
    "block",
    ["{broken", "", "[]", "3", '{"name": 3, "arguments": {}}', '{"arguments": {}}', '{"name": "f", "arguments": "{x"}'],
)
def test_a_call_that_doesnt_parse_becomes_content(block: str) -> None:
    text = f"Well: <tool_call>{block}</tool_call> so"
    for parts in ([text], list(text)):
        assert read_answer(parts, json_tools(), tools=TOOLS) == Answer(text)


@pytest.mark.parametrize(
    ("block", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', {"a": 1}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ('{"name": "f", "arguments": {}}}', {}),
    ],
)
def test_a_call_in_an_unusual_shape_is_still_a_call(block: str, arguments: dict[str, Any]) -> None:
    for parts in ([f"<tool_call>{block}</tool_call>"], list(f"<tool_call>{block}</tool_call>")):
        collected = read_answer(parts, json_tools(), tools=TOOLS)
        assert [(call.name, json.loads(call.arguments)) for call in collected.calls] == [("f", arguments)]
        assert collected.content == ""


def test_a_call_cut_short_gives_what_there_is() -> None:
    for end in range(len(CALL)):
        collected = read_answer(list(CALL[:end]), json_tools(), tools=TOOLS)
        if collected.calls:
            assert collected.calls[0].name == "get_time"
            assert ARGUMENTS.startswith(collected.calls[0].arguments)
            assert collected.content == ""
        else:
            assert collected.content == CALL[:end]


def test_a_call_needs_no_closing_tag_at_the_end() -> None:
    collected = read_answer([CALL.removesuffix("</tool_call>")], json_tools(), tools=TOOLS)
    assert collected == Answer(calls=[Call("call_0", "get_time", ARGUMENTS)])


def test_without_tools_in_the_request_a_call_is_text() -> None:
    for tools in (None, []):
        assert read_answer(list(CALL), json_tools(), tools=tools) == Answer(CALL)


def test_a_call_ends_reasoning_and_broken_ones_stay_in_it() -> None:
    collected = read_answer(list("<think>hm\n" + CALL + "\nDone."), json_tools(), tools=TOOLS)
    assert (collected.reasoning, len(collected.calls), collected.content) == ("hm", 1, "Done.")
    text = "maybe <tool_call> or\n<tool_call>x</tool_call>"
    assert read_answer(list(f"<think>{text} so</think>Yes."), json_tools(), tools=TOOLS) == Answer("Yes.", text + " so")


def test_stop_strings_inside_a_call_dont_cut_it() -> None:
    assert read_answer(list(CALL), json_tools(), tools=TOOLS, stops=["\n", "Os", "}"]).calls[0].arguments == ARGUMENTS


def test_half_a_character_before_a_special_tag_doesnt_break_the_call() -> None:
    tokenizer = json_tools()
    half = tokenizer.tokens(["a", "🎉".encode()[:2]])
    tag = tokenizer.tokens(["<tool_call>"], special=True)
    rest = tokenizer.tokens([CALL.removeprefix("<tool_call>")])
    assert len(answer(state(tokenizer, tools=TOOLS).feed([*half, *tag, *rest])).calls) == 1


OTHERS = {
    "pythonic": ('<|tool_call_start|>[f(a=1), g(b="x")]<|tool_call_end|>', [("f", {"a": 1}), ("g", {"b": "x"})]),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        [("f", {"a": "1"})],
    ),
    "mistral": ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', [("f", {"a": 1}), ("g", {})]),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        [("f", {"a": 1}), ("g", {})],
    ),
    "gemma4": ('<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>', [("f", {"a": "x"})]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_are_read_by_their_own_parsers(name: str) -> None:
    text, wanted = OTHERS[name]
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    form = tool_format(name, parser.tool_call_start, parser.tool_call_end)
    for parts in ([text], list(text), [text[n : n + 7] for n in range(0, len(text), 7)]):
        collected = read_answer(["Well. ", *parts], Spelled(None, form), tools=TOOLS)
        assert [(call.name, json.loads(call.arguments)) for call in collected.calls] == wanted
        assert collected.content == "Well. "


def test_a_list_of_mistral_calls_streams() -> None:
    tokenizer = Spelled(None, tool_format("mistral", "[TOOL_CALLS]", ""))
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    pieces = stream(state(tokenizer, tools=TOOLS), tokenizer.tokens(text))
    assert not pieces[-1], "nothing had to wait for the end"
    assert [(c.name, c.arguments) for c in answer(itertools.chain(*pieces)).calls] == [("f", '{"a": 1}'), ("g", "{}")]


def test_a_calls_own_id_is_kept() -> None:
    text, _ = OTHERS["kimi_k2"]
    form = tool_format("kimi_k2", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    assert [call.id for call in read_answer([text], Spelled(None, form), tools=TOOLS).calls] == [
        "functions.f:0",
        "functions.g:1",
    ]


# ---------------------------------------------------------------- answers with a structure of their own
def harmony() -> Spelled:
    def parse(text: str, tools: Any) -> Any:
        raise ValueError(text)

    tokenizer = Spelled(None, ToolFormat("harmony", " to=functions.", "<|call|>", False, parse))
    tokenizer.speaks_harmony = True
    return tokenizer


def test_harmony_channels_are_kept_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_time "
        '<|constrain|>json<|message|>{"city": "Oslo"}',
    )
    assert read_answer(list(text[0]), harmony()) == Answer("Yes.", "Hm.")
    collected = read_answer(list(text[1]), harmony(), tools=TOOLS)
    assert collected == Answer("", "Hm.", [Call("call_0", "get_time", '{"city": "Oslo"}')])


def test_states_that_mlx_lm_names_are_followed() -> None:
    tokenizer = Spelled(None, tool_format("muse_spark", "<atem:function_calls>", "</atem:function_calls>"))
    tokenizer.first_state = "header"
    tokenizer.transitions = {
        "header": (
            ("to=self<|message|>", "reasoning"),
            ("to=user<|message|>", "normal"),
            ("<atem:function_calls>", "tool"),
        ),
        "reasoning": (("<|eom|>", "header"),),
        "normal": (("<|eom|>", "header"),),
    }
    text = "to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.<|eom|>x"
    assert read_answer(list(text), tokenizer) == Answer("Yes.", "Hm.")
    calls = ' to=f<|message|><atem:function_calls><atem:invoke name="f"></atem:invoke></atem:function_calls>'
    assert [call.name for call in read_answer(list(calls), tokenizer, tools=TOOLS).calls] == ["f"]


# ---------------------------------------------------------------- streamed equals plain
FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", CALL, '{"name": "f", "arguments": {"x": "é"}}', "{}"),
    *("STOP", "ST", "OP", "<th", "ink>", "\n", " ", "a", "🎉", "<", "</", '"', "}", '{"name": "g", "argum'),
]


@settings(max_examples=250, deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14).map("".join),
    st.lists(st.sampled_from(["STOP", "\n\n", "TO", "🎉a", "a"]) | st.text(min_size=1, max_size=2), max_size=3),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_streamed_equals_plain_however_the_text_is_cut(
    text: str, stops: list[str], tools: bool, reasoning: bool, data: st.DataObject
) -> None:
    wishes = {"stops": stops, "tools": TOOLS if tools else None, "reasoning": reasoning}
    plain = read_answer([text], json_tools(), **wishes)
    sizes = iter(lambda: data.draw(st.integers(1, 9)), 0)
    cut = read_answer(list(cuts(text.encode(), sizes)), json_tools(), **wishes)
    assert cut == plain
    assert read_answer([bytes([byte]) for byte in text.encode()], json_tools(), **wishes) == plain
    assert not any(stop in plain.content for stop in stops)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join), st.lists(st.integers(1, 5), min_size=1))
def test_how_many_tokens_come_at_once_doesnt_matter(real: dict[str, Tokenizer], text: str, sizes: list[int]) -> None:
    tokenizer = real["bytes"]
    ids = tokenizer.encode(text, special=True, bos=False)
    one, many = (state(tokenizer, tools=TOOLS, stops=["STOP"]) for _ in range(2))
    singly = answer(itertools.chain(*stream(one, ids)))
    bundled, rest = Answer(), list(ids)
    for size in itertools.cycle(sizes):
        bundled.add(many.feed(rest[:size]))
        rest = rest[size:]
        if not rest:
            break
    bundled.add(many.finish())
    assert bundled == singly
    assert (many.tokens, many.reasoning_tokens, many.calls) == (one.tokens, one.reasoning_tokens, one.calls)


# ---------------------------------------------------------------- cost
def test_a_token_of_whole_characters_is_looked_up_once_however_often_it_comes() -> None:
    tokenizer = json_tools()
    tokens = tokenizer.tokens(["word ", "é"]) * 1000
    said = state(tokenizer, tools=TOOLS, stops=["never", "w" * 9])
    assert answer(itertools.chain(*stream(said, tokens))).content == "word é" * 1000
    assert tokenizer.lookups == 2


def test_half_a_character_is_looked_up_each_time_and_kept_for_no_other_place() -> None:
    tokenizer = json_tools()
    half, other, word = tokenizer.tokens([b"\xc3", b"\xa9", "a"])
    said = state(tokenizer)
    assert answer(itertools.chain(*stream(said, [half, other, word, half, word, half, other]))).content == "éa\ufffdaé"


@pytest.mark.parametrize("text", ["a", "<tool_call>", '<tool_call>{"name": "f", "arguments": {', "<think>\n", "{" * 9])
def test_a_token_costs_the_same_at_the_end_as_at_the_beginning(text: str) -> None:
    tokenizer = json_tools()
    begin, word = tokenizer.tokens([text, "aaaaaaa\n"])
    choice = state(tokenizer, tools=TOOLS, stops=["a" * 1000 + "b", "b"])
    choice.feed([begin])

    def seconds() -> float:
        started = time.perf_counter()
        for _ in range(3000):
            choice.feed([word])
        return time.perf_counter() - started

    first, *_, last = (seconds() for _ in range(5))
    assert last < 6 * first + 0.05


def test_pieces_are_values() -> None:
    with pytest.raises(AttributeError):
        Content("a").text = "b"  # type: ignore[misc]
    assert {Content("a"), Content("a"), Reasoning("a")} == {Content("a"), Reasoning("a")}


def test_call_ids_are_unique() -> None:
    tokenizer = json_tools()
    ids = {call.id for call in answer(TextState(tokenizer, tools=TOOLS).feed(tokenizer.tokens([CALL * 20]))).calls}  # type: ignore[arg-type]
    assert len(ids) == 20
    assert all(id_.startswith("call_") for id_ in ids)
