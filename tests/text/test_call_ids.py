"""Ids of tool calls: no two calls of a conversation share one, and each has the form that its model needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from calling import answers, function, serving
from hypothesis import given
from hypothesis import strategies as st

from server.text.calls.call_ids import CallIds

TOOLS = [function("f"), function("g")]


def kimi(*ids: str) -> str:
    calls = (f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for id in ids)
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def history(*ids: str) -> list[dict[str, Any]]:
    """A conversation in which calls have these ids, one turn each."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for id in ids:
        call = {"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
        turns.append({"role": "tool", "tool_call_id": id, "content": "done"})
    return turns


@pytest.mark.parametrize(
    ("earlier", "written", "given"),
    [
        ([], ["functions.f:0", "functions.g:1"], ["functions.f:0", "functions.g:1"]),
        ([], ["functions.f:0", "functions.f:0"], ["functions.f:0", "functions.f:1"]),
        (["functions.f:0"], ["functions.f:0"], ["functions.f:1"]),
        (["functions.f:0"], ["functions.g:0", "functions.f:1"], ["functions.g:1", "functions.f:2"]),
        (["functions.f:4", "functions.g:2"], ["functions.f:0"], ["functions.f:5"]),
        (["functions.f:0"], ["functions.f:1"], ["functions.f:1"]),
        (["functions.f:0"], ["functions.f:7", "functions.f:3"], ["functions.f:7", "functions.f:8"]),
        (["call_a", "x:y"], ["functions.f:0"], ["functions.f:0"]),
        (["f:0"], ["f:0"], ["f:1"]),
        (["functions.f:" + "9" * 5000], ["functions.f:0"], ["functions.f:0"]),
    ],
)
def test_kimi_counts_on_from_the_highest_id_of_the_conversation(
    earlier: list[str], written: list[str], given: list[str]
) -> None:
    ids = CallIds("kimi_k2", earlier)
    assert [ids.take("f", id) for id in written] == given


def test_a_call_of_kimis_without_an_id_gets_one_of_its_form() -> None:
    ids = CallIds("kimi_k2", ["functions.f:0"])
    assert [ids.take("g"), ids.take("g", "functions.g")] == ["functions.g:1", "functions.g:2"]


@given(
    st.sampled_from(["kimi_k2", "mistral", "json_tools"]),
    st.lists(st.sampled_from(["functions.f:0", "functions.f:1", "f:3", "call_1", "abcdefgh9"]) | st.text(max_size=4)),
    st.lists(
        st.sampled_from([None, 3, "", "functions.f:0", "functions.f:1", "f:3", "call_1", "abcdefgh9"]), max_size=8
    ),
)
def test_no_two_calls_of_a_conversation_share_an_id(parser: str, earlier: list[str], written: list[object]) -> None:
    ids = CallIds(parser, earlier)
    made = [ids.take("f", id) for id in written]
    assert all(made)
    assert len({*made, *earlier}) == len(made) + len(set(earlier))


def test_ids_for_mistral_have_nine_letters_and_digits() -> None:
    ids = CallIds("mistral", ["abcdefgh9"])
    made = [ids.take("f", id) for id in ("123456789", "123456789", "abcdefgh9", "short", None)]
    assert made[0] == "123456789"
    assert len(set(made)) == 5
    assert all(len(id) == 9 and id.isalnum() and id.isascii() for id in made)


async def test_kimis_ids_go_on_through_a_conversation(tmp_path: Path) -> None:
    async with serving("kimi_k2", kimi("functions.f:0", "functions.g:1"), tmp_path) as site:
        for earlier, wanted in [
            ([], ["functions.f:0", "functions.g:1"]),
            (["functions.f:0", "functions.f:1"], ["functions.f:2", "functions.g:3"]),
            (["functions.f:8"], ["functions.f:9", "functions.g:10"]),
            (["call_1"], ["functions.f:0", "functions.g:1"]),
        ]:
            message = await answers(site, messages=history(*earlier), tools=TOOLS)
            assert [call["id"] for call in message["tool_calls"]] == wanted


async def test_a_model_that_writes_the_same_id_again_doesnt_get_it(tmp_path: Path) -> None:
    script = '<tool_call>{"id": "call_1", "arguments": {}, "name": "f"}</tool_call>'
    async with serving("json_tools", script * 2, tmp_path) as site:
        for earlier in ([], ["call_1"]):
            message = await answers(site, messages=history(*earlier), tools=TOOLS)
            ids = [call["id"] for call in message["tool_calls"]]
            assert len({*ids, *earlier}) == 2 + len(earlier)
            assert all(isinstance(id, str) and id for id in ids)
