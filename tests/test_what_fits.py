"""The table of what fits a Mac: up to date, and its counts those of models that exist."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PUBLISHED = {"Llama 3.1 8B": 8.03e9, "Qwen3 14B": 14.8e9, "gpt-oss 20B": 20.9e9, "Gemma 3 27B": 27.0e9}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fits_table", ROOT / "scripts" / "fits_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_up_to_date(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0
    copy = tmp_path / "page.md"
    copy.write_text(script.PAGE.read_text("utf-8").replace("| whole |", "| 1k |", 1), "utf-8")
    assert script.main(["--check"], copy) == 1
    assert "fits_table.py" in capsys.readouterr().err
    assert script.main([], copy) == 0
    assert copy.read_text("utf-8") == script.PAGE.read_text("utf-8")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_oss"])
def test_weights_are_counted_as_a_model_of_the_family_has_them(
    family: str, script: ModuleType, tiny: Callable[[str], Path]
) -> None:
    folder = tiny(family)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    with (folder / "model.safetensors").open("rb") as file:
        head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    matrices = [entry["shape"] for name, entry in head.items() if name.endswith("weight") and len(entry["shape"]) > 1]
    assert script.parameters({"tie_word_embeddings": False} | config) == sum(map(prod, matrices))


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_as_many_as_the_authors_say(name: str, script: ModuleType) -> None:
    assert script.parameters(script.MODELS[name]) == pytest.approx(PUBLISHED[name], rel=0.005)


def test_a_larger_mac_never_holds_less(script: ModuleType) -> None:
    for config in script.MODELS.values():
        for bits in script.BITS.values():
            lengths = [positions(script.cell(config, bits, memory)) for memory in script.MACS]
            assert lengths == sorted(lengths)


def positions(cell: str) -> int:
    known = {"–": 0, "whole": 10**9}
    if cell in known:
        return known[cell]
    return int(cell.removesuffix("k"))
