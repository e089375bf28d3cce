"""How the run over the OpenAPI document calls schemathesis."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FIXED = (3, 12, 2)  # 3.11.8 has it, too


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("openapi_script", ROOT / "scripts" / "openapi.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_asks_with_one_thread_while_pythons_are_taken_whose_parser_fails_in_two(script: ModuleType) -> None:
    made = script.command(Path("schemathesis"), "http://127.0.0.1:1", script.parse(["--path", "/v1/models"]))
    asked = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert asked is not None
    oldest = tuple(map(int, asked[1].split(".")))
    assert oldest >= FIXED or made[made.index("--workers") + 1] == "1"
    assert made[made.index("--include-path") + 1] == "/v1/models"
