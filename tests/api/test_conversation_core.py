"""The core that every protocol of conversations shares: which tools are listed, found and forced; where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from scripted_site import scripted_server
from serving import MODEL, USER, run_server, says, settings, tokenizer

from loadtests import harness
from server.api.context import ServedModel
from server.api.input.conversation import Conversation
from server.api.input.schema import GenerationRequest
from server.api.input.sequences import Bounds
from server.api.input.tools import CallChoice, OfferedTool, options
from server.api.output.respond import PreparedRequest
from server.api.output.sse import DataEvents
from server.api.prepare import prepared
from server.errors import InvalidValue, RequestError
from server.ipc.sequence import TokenSequence
from server.text.calls.tool_calls import CallArguments, CallBegin
from server.text.detokenizer import Piece

CALL = '<tool_call>\n{"name": "later", "arguments": {"key": 1}}\n</tool_call>'
NOW = OfferedTool({"name": "now", "parameters": {"type": "object"}}, "tools[0].parameters")
LATER = OfferedTool({"name": "later", "parameters": {"type": "object"}}, "tools[1].parameters", deferred=True)


class Nothing(DataEvents):
    """A form of no answer."""

    def chunks(self, choice: object, pieces: list[Piece]) -> bytes:
        return b""

    def last(self, choices: object, usage: dict[str, Any]) -> bytes:
        return b""

    def whole(self, choices: object, usage: dict[str, Any]) -> dict[str, Any]:
        return {}


def served() -> ServedModel:
    return ServedModel(settings(), MODEL, 0, tokenizer())


def asked(wish: CallChoice | None = None, **fields: Any) -> PreparedRequest:
    model = served()
    sampling = GenerationRequest.model_validate(fields)
    talk = Conversation(USER, sampling, options([NOW, LATER], wish or CallChoice()), param="input")
    try:
        return prepared(model, talk, Bounds(tokenizer().vocab_size, 4096), Nothing(), [])
    finally:
        model.checker.close()


def said(request: PreparedRequest, text: str) -> list[Piece]:
    say = says(text)
    [sequence] = request.sequences
    [state] = request.texts
    tokens = [say(sequence, place) for place in range(len(tokenizer().encode(text, special=True, bos=False)))]
    return [*state.feed(tokens), *state.finish()]


def test_a_deferred_tool_is_not_listed_but_its_calls_are_found() -> None:
    request = asked()
    prompt = tokenizer().decode(request.sequences[0].prompt, special=True)
    assert ('"now"' in prompt, '"later"' in prompt) == (True, False)
    pieces = said(request, CALL)
    assert [piece.name for piece in pieces if isinstance(piece, CallBegin)] == ["later"]
    assert "".join(piece.text for piece in pieces if isinstance(piece, CallArguments)) == '{"key": 1}'


def test_a_deferred_tool_can_be_forced() -> None:
    [sequence] = asked(CallChoice("required", {"later"})).sequences
    assert isinstance(sequence, TokenSequence)
    assert sequence.grammar is not None


UNIQUE = {"type": "object", "properties": {"names": {"type": "array", "uniqueItems": True}}}
FLAT = {"type": "function", "name": "now", "parameters": UNIQUE}


def chat_tool(**strict: Any) -> dict[str, Any]:
    function = {"name": "now", "parameters": UNIQUE, **strict}
    return {"messages": USER, "tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def response_tool(**strict: Any) -> dict[str, Any]:
    return {"input": "x", "tools": [FLAT | strict], "tool_choice": "required"}


def message_tool(**strict: Any) -> dict[str, Any]:
    tool = {"name": "now", "input_schema": UNIQUE, **strict}
    return {"messages": USER, "max_tokens": 4, "tools": [tool], "tool_choice": {"type": "any"}}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/chat/completions", chat_tool, "tools[0].function.parameters.properties.names"),
        ("/v1/responses", response_tool, "tools[0].parameters.properties.names"),
        ("/v1/messages", message_tool, "tools[0].input_schema.properties.names"),
    ],
)
async def test_only_a_strict_tool_is_refused_for_a_keyword_that_cannot_be_enforced(
    path: str, body: Callable[..., dict[str, Any]], place: str
) -> None:
    async with run_server() as site:
        for strict in ({}, {"strict": None}, {"strict": False}):
            assert (await site.post(path, body(**strict))).status_code == 200
        refused = await site.post(path, body(strict=True))
        assert refused.status_code == 400
        assert f"{place}: " in refused.json()["error"]["message"]
        assert len(site.fake.submits) == 3


def test_a_choice_among_tools_that_are_not_there_is_refused_where_it_stands() -> None:
    with pytest.raises(InvalidValue) as refused:
        options([NOW], CallChoice(names={"then"}, param="tool_choice.tools"))
    assert refused.value.param == "tool_choice.tools"
    with pytest.raises(InvalidValue):
        options([], CallChoice("required"))
    assert options([], CallChoice("auto")).offered == []


def test_an_answer_knows_which_stop_string_ended_it() -> None:
    request = asked(stop=["never", "how"])
    said(request, "Hello there, how are you?")
    assert (request.texts[0].stopped, request.texts[0].stop) == (True, "how")


def test_a_refused_template_names_the_protocols_own_field() -> None:
    sampling = GenerationRequest.model_validate({})
    part = [{"role": "user", "content": [{"type": "video"}]}]
    with pytest.raises(RequestError) as refused:
        prepared(served(), Conversation(part, sampling, param="input"), Bounds(2048, 4096), Nothing(), [])
    assert refused.value.param == "input"


# ---------------------------------------------------------------- a model that says a script
@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.Server]:
    with scripted_server(tmp_path_factory.mktemp("scripted")) as running:
        yield running


def test_a_scripted_model_says_its_turns_and_the_template_that_wants_one_system_message_gets_one(
    server: harness.Server,
) -> None:
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    said: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "SCRIPT:ab Where?"},
        {"role": "system", "content": "It rains."},
    ]

    def ask() -> tuple[dict[str, Any], dict[str, Any]]:
        body = {"messages": said, "tools": [tool], "tool_choice": "auto"}
        answer = httpx.post(url, json=body, timeout=60, trust_env=False).json()
        return answer["choices"][0]["message"], answer["usage"]

    first, before = ask()
    assert (first["reasoning_content"], first["content"]) == ("I look it up.", "One moment.")
    [call] = first["tool_calls"]
    assert call["function"] == {"name": "look_up", "arguments": '{"key": "oslo"}'}
    said += [first, {"role": "tool", "tool_call_id": call["id"], "content": "Oslo"}, said[-1] | {"content": "Still."}]
    second, after = ask()
    assert (second["reasoning_content"], second["content"]) == ("I have it now.", "It is Oslo.")
    assert after["prompt_tokens_details"]["cached_tokens"] >= before["prompt_tokens"]
