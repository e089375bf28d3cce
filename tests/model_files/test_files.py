"""What a model's smaller files say: chat templates wherever they are kept, and recommended sampling values."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le
from prometheus_client import CollectorRegistry
from serving import TOKENIZER, USER, engine, run_server

from server.api.input.schema import ChatRequest
from server.app import assemble
from server.metrics import Metrics
from server.model_files import generation_config
from server.model_files.locate import ModelLocation
from server.settings import load
from server.supervision.supervisor import Supervisor
from server.text.tokenizer import Tokenizer

MESSAGES: Any = [{"role": "user", "content": "hi"}]
ONE = "{% for m in messages %}ONE {{ m.content }}{% endfor %}"
TWO = "{% for m in messages %}TWO {{ m.content }}{% endfor %}"
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def folder(tmp_path: Path, config: Any = None, **files: str) -> Path:
    """A tokenizer whose template, if any, is where `config` (in tokenizer_config.json) and `files` put it."""
    for file in TOKENIZER.iterdir():
        if file.suffix == ".json":
            shutil.copyfile(file, tmp_path / file.name)
    own = json.loads((tmp_path / "tokenizer_config.json").read_text())
    own.pop("chat_template", None)
    own |= {} if config is None else {"chat_template": config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    for name, text in files.items():
        file = tmp_path / name.replace("__", "/").replace("_json", ".json").replace("_jinja", ".jinja")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


def rendered(path: Path, tools: Any = None) -> str:
    tokenizer = Tokenizer.load(path, trust_remote_code=False)
    return tokenizer.decode(tokenizer.chat(MESSAGES, tools=tools).ids, special=True)


def kept(value: Any) -> str:
    return json.dumps({"chat_template": value})


@pytest.mark.parametrize(
    ("config", "files"),
    [
        (ONE, {}),
        ([{"name": "default", "template": ONE}, {"name": "rag", "template": TWO}], {}),
        ([{"name": "rag", "template": ONE}], {}),
        (None, {"chat_template_json": kept(ONE)}),
        (None, {"chat_template_json": json.dumps(ONE)}),
        (None, {"chat_template_json": kept([{"name": "default", "template": ONE}, {"name": "x", "template": TWO}])}),
        (None, {"chat_template_json": kept({"default": ONE, "x": TWO})}),
        (None, {"processor_config_json": kept(ONE)}),
        (None, {"chat_template_json": kept(ONE), "processor_config_json": kept(TWO)}),
        (None, {"chat_template_json": "{", "processor_config_json": kept(ONE)}),
        (None, {"chat_template_jinja": ONE}),
        (TWO, {"chat_template_jinja": ONE}),
        (ONE, {"chat_template_json": kept(TWO)}),
        (None, {"chat_template_jinja": ONE, "chat_template_json": kept(TWO)}),
        (None, {"chat_template_jinja": " \n", "chat_template_json": kept(ONE)}),
        ("", {"chat_template_json": kept(ONE)}),
        (None, {"additional_chat_templates__default_jinja": ONE, "additional_chat_templates__rag_jinja": TWO}),
        (None, {"additional_chat_templates__rag_jinja": TWO, "chat_template_jinja": ONE}),
        (None, {"additional_chat_templates__rag_jinja": TWO, "chat_template_json": kept(ONE)}),
        (ONE, {"additional_chat_templates__rag_jinja": TWO}),
        (None, {"additional_chat_templates__rag_jinja": ONE}),
    ],
)
def test_a_template_is_found_wherever_it_is_kept(tmp_path: Path, config: Any, files: dict[str, str]) -> None:
    assert rendered(folder(tmp_path, config, **files)) == "ONE hi"


@pytest.mark.parametrize("place", ["config", "chat_template_json", "additional_chat_templates__tool_use_jinja"])
def test_a_template_for_tools_is_used_for_tools(tmp_path: Path, place: str) -> None:
    both = {"default": ONE, "tool_use": "{% if tools %}" + TWO + "{% endif %}"}
    if place == "config":
        path = folder(tmp_path, [{"name": name, "template": source} for name, source in both.items()])
    elif place == "chat_template_json":
        path = folder(tmp_path, **{place: kept(both)})
    else:
        path = folder(tmp_path, ONE, **{place: both["tool_use"]})
    assert (rendered(path), rendered(path, TOOLS)) == ("ONE hi", "TWO hi")


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", kept(None), kept(5), kept([5]), kept(""), kept({"a": 5})])
async def test_a_model_without_any_template_says_so(tmp_path: Path, content: str | None) -> None:
    path = folder(tmp_path, **({} if content is None else {"chat_template_json": content}))
    tokenizer = Tokenizer.load(path, trust_remote_code=False)
    assert not tokenizer.has_template
    async with run_server(engine(), tokens=tokenizer) as site:
        answer = await site.chat()
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]


@pytest.mark.parametrize("source", ["{% if false %}x{% endif %}", "{# nothing #}", "{{ messages[0].content }}"])
async def test_a_template_that_makes_nothing_of_a_conversation_refuses_it_on_every_route(
    tmp_path: Path, source: str
) -> None:
    tokenizer = Tokenizer.load(folder(tmp_path, source), trust_remote_code=False)
    said = [{"role": "user", "content": ""}]
    async with run_server(engine(), tokens=tokenizer) as site:
        for path, field, more in (
            ("/v1/chat/completions", "messages", {}),
            ("/v1/responses", "input", {}),
            ("/v1/messages", "messages", {"max_tokens": 5}),
        ):
            answer = await site.post(path, {field: said, **more})
            assert answer.status_code == 400, answer.text
            assert "an empty prompt" in answer.json()["error"]["message"]
        assert not site.fake.submits


async def test_a_template_of_a_json_file_serves_chats(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder(tmp_path, chat_template_json=kept(ONE)), trust_remote_code=False)
    async with run_server(engine(), tokens=tokenizer) as site:
        assert (await site.post("/apply-template", {"messages": USER})).json()["prompt"] == "ONE Say hello."
        assert (await site.chat()).status_code == 200
        assert (await site.client.get("/tokenizer_info")).json()["chat_template"] == ONE


# ---------------------------------------------------------------- generation_config.json
def test_the_ranges_are_those_of_requests() -> None:
    for name, (lowest, highest) in generation_config.RANGES.items():
        for bound in ChatRequest.model_fields[name].metadata:
            if isinstance(bound, Ge):
                assert bound.ge == lowest
            if isinstance(bound, Gt):
                assert 0 < lowest - bound.gt < 1e-3  # type: ignore[operator]
            if isinstance(bound, Le):
                assert bound.le == highest


@pytest.mark.parametrize(
    ("name", "given", "used"),
    [
        ("temperature", 0.6, 0.6), ("temperature", 0, 0), ("temperature", 2, 2), ("temperature", 5.0, 2),
        ("temperature", 1e300, 2), ("temperature", math.inf, 2), ("temperature", -0.5, None),
        ("temperature", math.nan, None), ("temperature", -math.inf, None), ("temperature", "0.7", None),
        ("temperature", [0.7], None), ("temperature", {}, None), ("temperature", True, None),
        ("top_p", 0.9, 0.9), ("top_p", 1.5, 1), ("top_p", -1, None), ("top_p", "x", None), ("top_p", math.nan, None),
        ("top_k", 40, 40), ("top_k", 40.0, 40), ("top_k", -1, -1), ("top_k", -2, None), ("top_k", 2.5, None),
        ("top_k", 10**400, 1 << 31), ("top_k", math.nan, None), ("top_k", [1], None),
        ("min_p", 0.05, 0.05), ("min_p", 3, 1), ("min_p", -0.1, None),
        ("repetition_penalty", 1.1, 1.1), ("repetition_penalty", 0, None), ("repetition_penalty", -1, None),
        ("repetition_penalty", 50, 10), ("repetition_penalty", "1", None),
    ],
)  # fmt: skip
def test_values_out_of_range_are_bounded_or_ignored_with_a_line(
    name: str, given: Any, used: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = generation_config.defaults({name: given, "max_length": "x"})
    assert found == ({} if used is None else {name: used})
    lines = [record.getMessage() for record in caplog.records]
    if used is not None and used == given:
        assert not lines
    else:
        assert len(lines) == 1
        assert f"generation_config.json: {name} " in lines[0]


def test_what_is_null_or_absent_is_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    assert generation_config.defaults({"temperature": None, "eos_token_id": 5}) == {}
    assert not caplog.records


async def test_values_out_of_range_are_never_in_force(tmp_path: Path) -> None:
    path = folder(tmp_path, ONE)
    wild = '{"temperature": 9, "top_p": NaN, "top_k": "a", "min_p": -1, "repetition_penalty": Infinity}'
    (path / "generation_config.json").write_text(wild)
    fake = engine()
    async with run_server(fake, tokens=Tokenizer.load(path, trust_remote_code=False)) as site:
        assert (await site.chat()).status_code == (await site.complete()).status_code == 200
        for submit in fake.submits:
            draws = submit.sequence.sampling
            assert (draws.temperature, draws.top_p, draws.top_k, draws.min_p) == (2, 1, 0, 0)
            assert draws.repetition_penalty == 10


@pytest.mark.parametrize("content", ['{"eos_token_id": "x"}', '{"eos_token_id": [null, "x", true]}'])
def test_end_tokens_that_are_none_keep_no_model_from_being_served(tmp_path: Path, content: str) -> None:
    path = folder(tmp_path, ONE)
    (path / "generation_config.json").write_text(content)
    tokenizer = Tokenizer.load(path, trust_remote_code=False)
    assert tokenizer.defaults == {}
    assert all(type(token) is int for token in tokenizer.eos_ids)


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b'"x"', b"7", b"null", b'{"temperature": 1, "_": "\xe9"}'])
def test_a_broken_generation_config_is_one_line_and_the_usual_defaults(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder(tmp_path, ONE)
    (path / "config.json").write_text('{"model_type": "llama"}')
    sound = Tokenizer.load(path, trust_remote_code=False)
    (path / "generation_config.json").write_bytes(content)
    caplog.clear()
    tokenizer = Tokenizer.load(path, trust_remote_code=False)
    assert tokenizer.defaults == {}
    assert tokenizer.eos_ids == sound.eos_ids
    assert tokenizer.folder == path
    [line] = [record.getMessage() for record in caplog.records]
    assert "generation_config.json is ignored" in line


# ---------------------------------------------------------------- context
@pytest.mark.parametrize(("asked", "said"), [(None, 0), (64, 0), (128, 0), (129, 1), (10**6, 1)])
def test_a_context_beyond_the_models_own_is_said_with_the_one_that_is_used(
    tmp_path: Path, asked: int | None, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder(tmp_path, ONE)
    (path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 128}')
    settings = load({"context": asked} if asked else {})
    metrics = Metrics(CollectorRegistry())
    served = assemble(settings, ModelLocation(path, "m"), metrics, Supervisor(settings, path, metrics))
    served.close()
    lines = [record.getMessage() for record in caplog.records if "--context" in record.getMessage()]
    assert lines == [f"--context {asked} is more than the model was made for; 128 are used"] * said
    assert served.context == min(asked or 128, 128)
