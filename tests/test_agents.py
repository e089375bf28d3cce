"""`marathon agents`: the lines that agents need, with the right address and context."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from serving import TOKENIZER

from server import cli
from server.agents.configuration import claude_code, codex, codex_model, opencode
from server.commands import remote


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, str]:
    """The sections by their titles."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["agents", *options])
    assert ended.value.code == 0
    found = re.findall(r"^# (.*)\n((?:(?!# ).*\n?)*)", capsys.readouterr().out, re.MULTILINE)
    return {title: lines.strip() for title, lines in found}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of which the tokenizer and the configuration can be read."""
    model = tmp_path / "model"
    model.mkdir()
    for file in TOKENIZER.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 65536, "model_type": "llama"}), "utf-8")
    (model / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return model


def test_each_agent_gets_the_address_and_the_context(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    sections = printed(capsys, "--model", str(model), "--port", "8123", "--context", "40000")
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:8123\n" in sections["Claude Code (environment)"]
    assert "MAX_CONTEXT_TOKENS=40000" in sections["Claude Code (environment)"]
    config = tomllib.loads(sections["Codex CLI (~/.codex/config.toml)"])
    assert config["model_providers"]["marathon"]["base_url"] == "http://127.0.0.1:8123/v1"
    catalog = json.loads(sections[f"Codex CLI (~/.codex/{config['model_catalog_json']})"])
    assert [entry["context_window"] for entry in catalog["models"]] == [40000]
    provider = json.loads(sections["opencode (opencode.json)"])["provider"]["marathon"]
    assert provider["options"]["baseURL"] == "http://127.0.0.1:8123/v1"
    assert provider["models"]["default"]["limit"]["context"] == 40000


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8123"),
        ("0.0.0.0", "http://127.0.0.1:8123"),
        ("::1", "http://[::1]:8123"),
        ("::", "http://[::1]:8123"),
        ("box.local", "http://box.local:8123"),
    ],
)
def test_agents_and_commands_have_the_address_at_which_the_server_is_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, host: str, url: str
) -> None:
    monkeypatch.setenv("MARATHON_HOST", host)
    monkeypatch.setenv("MARATHON_PORT", "8123")
    monkeypatch.setenv("MARATHON_API_KEY", "secret-1")
    assert remote.find(None, None).url == url
    assert f"ANTHROPIC_BASE_URL={url}\n" in printed(capsys, "--model", str(model))["Claude Code (environment)"]


def test_the_page_shows_what_the_command_prints() -> None:
    page = (Path(__file__).parents[1] / "docs" / "agents.md").read_text("utf-8")
    url = "http://127.0.0.1:8080"
    for lines in (claude_code(url, 65536, "none"), codex(url, 65536), opencode(url, 65536, "none")):
        assert lines in page
    assert codex_model(65536)["context_window"] == 65536
