"""Forms and forced calls through HTTP and a real engine, where tags aren't flagged and some ids have no logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest
import small_tokenizers as small

from loadtests import harness, zoo

pytestmark = pytest.mark.slow

ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<table>"]
SEEDS = range(3)
WITHOUT_LOGITS = 1  # the last of them
TEXTS = ["<|im_end|>", *ADDED, "e\u0301"]
POINT = {
    "type": "object",
    "properties": {"<think>": {"enum": TEXTS}},
    "required": ["<think>"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
TOOL = {"type": "function", "function": {"name": "mark", "parameters": POINT}}
QUESTIONS: dict[str, dict[str, Any]] = {
    "json_schema": {"response_format": FORM},
    "choice": {"structured_outputs": {"choice": TEXTS}},
    "required": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "mark"}}},
    "tools and a form": {"tools": [TOOL], "response_format": FORM},
}


@pytest.fixture(scope="module")
def end_of_thought() -> int:
    return 2048 + ADDED.index("</think>")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("unflagged")
    tokens = json.loads((zoo.TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    flags = dict.fromkeys(["special", "single_word", "lstrip", "rstrip", "normalized"], False)
    tokens["added_tokens"] += [{"id": 2048 + n, "content": text, **flags} for n, text in enumerate(ADDED)]
    shown = json.loads((zoo.TOKENIZER / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokens").mkdir()
    (folder / "tokens" / "tokenizer.json").write_text(json.dumps(tokens))
    (folder / "tokens" / "tokenizer_config.json").write_text(json.dumps(shown | {"chat_template": small.THINKING}))
    rows = 2048 + len(ADDED) - WITHOUT_LOGITS
    model = zoo.write("llama", folder / "model", tokenizer=folder / "tokens", vocab=rows)
    with harness.marathon(model, folder / "log", spare_engine=False) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60, trust_env=False, verify=False) as client:
        yield client


def answered(client: httpx.Client, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """Finish, content, reasoning and calls, however they came."""
    if not stream:
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return {"finish": choice["finish_reason"], "calls": calls} | {
            name: message.get(name) or "" for name in ("content", "reasoning")
        }
    answer: dict[str, Any] = {"finish": None, "content": "", "reasoning": "", "calls": []}
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                _add(answer, json.loads(line[6:]))
    return answer


def _add(answer: dict[str, Any], chunk: dict[str, Any]) -> None:
    assert "error" not in chunk, chunk
    for choice in chunk["choices"]:
        delta, answer["finish"] = choice["delta"], choice["finish_reason"] or answer["finish"]
        for name in ("content", "reasoning"):
            answer[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or []:
            if call["function"].get("name"):
                answer["calls"].append({"name": call["function"]["name"], "arguments": ""})
            answer["calls"][-1]["arguments"] += call["function"].get("arguments") or ""


@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "not thinking"])
@pytest.mark.parametrize("name", QUESTIONS)
def test_the_form_holds_streamed_and_plain(client: httpx.Client, end_of_thought: int, name: str, thinks: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "Go on."}],
        "chat_template_kwargs": {"enable_thinking": thinks},
        "logit_bias": {str(end_of_thought): 8},  # the model is random: it would think for ever
        "max_tokens": 200,
        **QUESTIONS[name],
    }

    def ask(seed: int, stream: bool) -> dict[str, Any]:
        return answered(client, body | {"seed": seed}, stream=stream)

    with ThreadPoolExecutor(2 * len(SEEDS)) as pool:  # rows of one batch
        asked = [[pool.submit(ask, seed, stream) for stream in (False, True)] for seed in SEEDS]
    for plain, streamed in ([one.result() for one in pair] for pair in asked):
        assert plain == streamed
        assert thinks or not plain["reasoning"]
        assert plain["finish"] == ("tool_calls" if plain["calls"] else "stop"), "reasoning ends, and so does the form"
        if name == "choice":
            assert plain["content"] in TEXTS
            continue
        assert plain["calls"] or name not in ("required", "named")
        text = plain["calls"][0]["arguments"] if plain["calls"] else plain["content"]
        jsonschema.validate(json.loads(text), POINT)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_leads_only_to_itself_is_refused_before_the_answer(client: httpx.Client, stream: bool) -> None:
    loop = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "loop", "schema": loop}}
    tool = {"type": "function", "function": {"name": "loop", "parameters": loop}}
    for asked, place in (
        ({"response_format": form}, "response_format.json_schema.schema.properties.a"),
        ({"tools": [tool], "tool_choice": "required"}, "tools[0].function.parameters.properties.a"),
    ):
        body = {"messages": [{"role": "user", "content": "Mark."}], "stream": stream} | asked
        refused = client.post("/v1/chat/completions", json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, place), error
