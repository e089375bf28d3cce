"""Exactly the files that belong to a model are loaded, and what is wrong with them is said in one line, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from server.check import fits
from server.engine import model
from server.errors import StartupError, one_line
from server.ipc.probe import Probe
from server.model_files.weights import INDEX, only_weights, weight_files

PROBE = Probe(vocab_size=1, batching="batched", row_cost=[], chunk_peak_bytes=0, group_bytes=0)


def shard(number: int, total: int = 3) -> str:
    return f"model-{number:05}-of-{total:05}.safetensors"


@pytest.fixture
def sharded(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """The tiny llama in three shards with an index."""
    folder, source = tmp_path / "sharded", tiny("llama")
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    weights = list(mx.load(str(source / "model.safetensors")).items())
    parts = {shard(number): dict(weights[number - 1 :: 3]) for number in (1, 2, 3)}
    for name, part in parts.items():
        mx.save_safetensors(str(folder / name), part)
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def loaded(folder: Path) -> dict[str, mx.array]:
    made = model.load(folder, trust_remote_code=False, probe=PROBE, on_stage=lambda stage: None)
    return dict(tree_flatten(made.model.parameters()))


def refused(folder: Path) -> str:
    with pytest.raises(StartupError, match="can't load the model in ") as caught:
        loaded(folder)
    line = str(caught.value)
    assert "\n" not in line
    assert not line.rstrip().endswith(":")
    assert str(folder) in line
    assert fits(folder, 10**12).startswith("no: ") or "parameters" in line
    return line


def zeros(folder: Path, source: str, name: str) -> None:
    """A file with the keys of another and no values in it."""
    found = mx.load(str(folder / source))
    mx.save_safetensors(str(folder / name), {key: mx.zeros_like(value) for key, value in found.items()})


# ---------------------------------------------------------------- which files
@pytest.mark.parametrize("stray", ["model-00000.safetensors", "model.safetensors", "model-zzz.safetensors",
                                   "model-00001-of-00002.safetensors", "model-old.safetensors"])  # fmt: skip
def test_a_stray_file_beside_the_index_is_not_loaded(sharded: Path, tiny: Callable[..., Path], stray: str) -> None:
    zeros(sharded, shard(1), stray)
    wanted, found = loaded(tiny("llama")), loaded(sharded)
    assert wanted.keys() == found.keys()
    assert all(mx.array_equal(wanted[key], found[key]).item() for key in wanted)
    assert {file.name for file in weight_files(sharded)} == {shard(number) for number in (1, 2, 3)}


def test_a_stray_file_that_is_no_weights_harms_nothing(sharded: Path) -> None:
    (sharded / "model-broken.safetensors").write_bytes(b"nothing")
    (sharded / "model-gone.safetensors").symlink_to(sharded / "nowhere")
    assert loaded(sharded)


def test_files_of_any_name_are_loaded_if_the_index_names_them(sharded: Path, tiny: Callable[..., Path]) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    (sharded / "parts").mkdir()
    for number, name in ((1, "weights.one.safetensors"), (2, "parts/two.safetensors")):
        (sharded / shard(number)).rename(sharded / name)
        index = {key: name if file == shard(number) else file for key, file in index.items()}
    (sharded / INDEX).write_text(json.dumps({"weight_map": index}))
    wanted, found = loaded(tiny("llama")), loaded(sharded)
    assert all(mx.array_equal(wanted[key], found[key]).item() for key in wanted)


def test_a_model_whose_files_are_all_its_own_is_loaded_where_it_lies(sharded: Path) -> None:
    with only_weights(sharded) as folder:
        assert folder == sharded
    zeros(sharded, shard(1), "model-old.safetensors")
    with only_weights(sharded) as folder:
        assert folder != sharded
        assert (folder / "config.json").read_text() == (sharded / "config.json").read_text()
    assert not folder.exists()


def test_an_index_of_other_weights_is_set_aside(sharded: Path, tiny: Callable[..., Path], caplog: Any) -> None:
    for number in (1, 2, 3):
        (sharded / shard(number)).unlink()
    shutil.copyfile(tiny("llama") / "model.safetensors", sharded / "model.safetensors")
    assert loaded(sharded)
    assert "names none of the weights beside it" in caplog.text


# ---------------------------------------------------------------- what is missing
@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("gone", [[2], [1, 3], [3]])
def test_missing_shards_are_named(sharded: Path, gone: list[int], has_index: bool) -> None:
    for number in gone:
        (sharded / shard(number)).unlink()
    if not has_index:
        (sharded / INDEX).unlink()
    line = refused(sharded)
    assert all(shard(number) in line for number in gone)
    assert "missing" in line


def test_of_many_missing_shards_a_few_are_named(sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {f"w{n}": shard(n, 50) for n in range(1, 51)}}))
    (sharded / shard(1)).rename(sharded / shard(1, 50))
    assert f"{shard(4, 50)} and 46 more are missing" in refused(sharded)


def test_a_link_to_nothing_is_missing(sharded: Path) -> None:
    (sharded / shard(2)).unlink()
    (sharded / shard(2)).symlink_to(sharded / "blobs" / "gone")
    assert f"{shard(2)} is missing" in refused(sharded)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda data: data[:-10], "is cut off after"),
        (lambda data: data[:100], "is cut off"),
        (lambda data: b"", "is cut off, or no safetensors file (0 bytes)"),
        (lambda data: b"\xff" * 100, "no safetensors file"),
        (lambda data: (9).to_bytes(8, "little") + b"{}       ", "missing"),
        (lambda data: (9).to_bytes(8, "little") + b"[1, 2, 3]", "no safetensors file"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (lambda data: b"<html>Not found</html>" * 10, "no safetensors file"),
    ],
    ids=["the end", "the head", "empty", "garbage", "no tensors", "a list", "a pointer", "a page"],
)
def test_a_file_that_is_not_whole_is_named(sharded: Path, content: Callable[[bytes], bytes], words: str) -> None:
    file = sharded / shard(2)
    file.write_bytes(content(file.read_bytes()))
    line = refused(sharded)
    assert words in line.lower() or words in line
    assert shard(2) in line or "parameters" in line


@pytest.mark.parametrize(
    "index",
    ["{", "[]", "{}", '{"weight_map": []}']
    + [json.dumps({"weight_map": {"a": name}}) for name in (5, "../x.safetensors", "/x.safetensors", "x.py")],
)
def test_an_index_that_is_none_is_named(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index)
    line = refused(sharded)
    assert f"{INDEX} is no index: " in line
    assert not any(word in line for word in ("indices", "attribute", "supported", "'weight_map'"))


def test_a_folder_without_weights_says_what_it_has_instead(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    for number in (1, 2, 3):
        (sharded / shard(number)).unlink()
    assert "no weights" in refused(sharded)
    for name in ("weights.npz", "pytorch_model.bin", "model-Q4_K_M.gguf", "weights.safetensors"):
        (sharded / name).write_bytes(b"x")
        assert f"mlx-lm doesn't read {name}" in refused(sharded)
    (sharded / "adapters.safetensors").write_bytes(b"x")
    assert "adapters.safetensors holds an adapter" in refused(sharded)


def test_parameters_that_are_missing_or_too_many_are_named_on_one_line(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    for number in (2, 3):
        (sharded / shard(number)).unlink()
    (sharded / shard(1)).rename(sharded / "model.safetensors")
    line = refused(sharded)
    assert "parameters: " in line
    assert "model." in line.partition("parameters: ")[2]
    assert len(line) < 500


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"hidden_size": None, "vocab_size": None}, "config.json lacks hidden_size, vocab_size"),
        ({"quantization": {"bits": 4}}, "KeyError: 'group_size'"),
        ({"quantization": "4bit"}, "TypeError"),
        ({"model_type": "nonsense"}, "Model type nonsense not supported."),
        ({"model_file": "own.py"}, "--trust-remote-code"),
    ],
)
def test_a_config_that_mlx_lm_stumbles_over_is_said_in_words(sharded: Path, change: dict[str, Any], words: str) -> None:
    config = json.loads((sharded / "config.json").read_text()) | change
    (sharded / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    (sharded / "own.py").write_text("")
    with pytest.raises(StartupError, match="can't load the model in ") as caught:
        loaded(sharded)
    line = str(caught.value)
    assert words in line
    assert "missing 1 required" not in line
    assert "trust_remote_code=True" not in line
    assert "\n" not in line


def test_an_error_is_one_line_however_many_it_has() -> None:
    assert one_line(ValueError("Missing 2 parameters: \na,\nb.")) == "Missing 2 parameters: a, b."
    assert one_line(ValueError("\n\n")) == "ValueError"
    assert one_line(ValueError("it failed:\n")) == "it failed"
    long = one_line(ValueError("Missing:\n" + ",\n".join(map(str, range(1000)))))
    assert len(long) <= 302
    assert long.endswith(" …")
