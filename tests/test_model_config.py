"""What a model's files say is read once, and the same in the server and in the engine."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers as small
from mlx_lm.models.cache import KVCache

from server.engine import model
from server.ipc.probe import GROWTH, LayerCost, Probe
from server.model_files import model_config
from server.text.tokenizer import Tokenizer

SPELLINGS = [
    "max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length", "max_sequence_length",
    "max_context_length", "context_length", "seq_length", "n_ctx", "model_max_length",
]  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_context_is_read_by_each_of_its_names(name: str) -> None:
    assert model_config.context_length({name: 8192}, {"model_max_length": 100}) == 8192


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config"])
def test_the_context_is_read_from_the_language_models_part(part: str) -> None:
    assert model_config.context_length({part: {"n_ctx": 88}}, {}) == 88
    assert model_config.context_length({"thinker_config": {part: {"n_ctx": 88}}}, {}) == 88
    assert model_config.context_length({"seq_length": 99, part: {"n_ctx": 88}}, {}) == 99


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "linear", "factor": 8.0}, 4096),  # counted in already
        ({"rope_type": "yarn", "original_max_position_embeddings": 4096}, 4096),
        (None, 4096),
        ("none", 4096),
    ],
)
def test_a_scaling_that_names_the_original_number_of_positions_lengthens(scaling: Any, context: int) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        config = {"max_position_embeddings": 4096, name: scaling}
        assert model_config.context_length(config, {}) == context
        assert model_config.context_length({"text_config": config}, {}) == context


@pytest.mark.parametrize("nothing", [None, 0, -1, True, "4096", 1e30, int(1e30), float("inf"), float("nan"), [4096]])
def test_what_is_no_number_of_positions_is_passed_over(nothing: Any) -> None:
    assert model_config.context_length({"max_position_embeddings": nothing}, {"model_max_length": 512}) == 512
    assert model_config.context_length({"text_config": nothing}, {"model_max_length": nothing}) == 32768


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"seq_length": 8192}, None),
        ({"n_ctx": 700}, None),
        ({"llm_config": {"max_position_embeddings": 900}}, None),
        ({}, 600),
        ({}, int(1e30)),
        ({"n_positions": 512, "rope_scaling": YARN}, 600),
    ],
)
def test_server_and_engine_read_the_same_context(tiny: Any, tmp_path: Path, config: Any, limit: int | None) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama"), folder)
    whole = json.loads((folder / "config.json").read_text())
    for name in SPELLINGS:
        whole.pop(name, None)
    small.write(tmp_path / "text", small.byte_level, eos_token="<|im_end|>", model_max_length=limit)
    for file in (tmp_path / "text").iterdir():
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(whole | config))
    probe = Probe(2048, "batched", [LayerCost(0, 1)], 0, 0)
    engine = model.load(folder, trust_remote_code=False, probe=probe, on_stage=lambda stage: None)
    server = Tokenizer.load(folder, trust_remote_code=False)
    assert engine.context == server.context == model_config.context_of(folder)


def test_end_ids_are_read_from_every_file_and_part() -> None:
    config = {"eos_token_id": 5, "text_config": {"eos_token_id": [6, None, True, -1]}}
    assert model_config.eos_ids(config, {"eos_token_id": [7, 5]}, {}) == [5, 6, 7]
    assert model_config.eos_ids({"eos_token_id": None}) == []


def test_files_that_are_missing_or_broken_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    assert [model_config.read(tmp_path, name) for name in ("none.json", "broken.json", "list.json")] == [{}, {}, {}]


def test_caches_grow_by_the_step_that_is_planned_with() -> None:
    assert KVCache.step == GROWTH == LayerCost(0, 1).step
