"""Whether a model is still the one that an earlier engine loaded, by its files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from server.errors import StartupError
from server.model_files import same_files
from server.model_files.same_files import file_states, require_same

HEAD = json.dumps({"a": {"dtype": "U8", "shape": [1 << 20], "data_offsets": [0, 1 << 20]}}).encode()
WEIGHTS = len(HEAD).to_bytes(8, "little") + HEAD + bytes(range(256)) * 4096
SINCE = "since then"

Change = Callable[[Path], object]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"a": 1}')
    (path / "tokenizer.json").write_text('{"b": 1}')
    (path / "model.py").write_text("a = 1")
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (path / name).write_bytes(WEIGHTS)
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def other_weights(path: Path) -> None:
    """Of the same size, written in the place of the others and with their time of change."""
    file = path / "model-00002-of-00002.safetensors"
    before = file.stat()
    file.write_bytes(WEIGHTS[:-1] + b"\0")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def moved_into_place(path: Path) -> None:
    beside = path / "download.incomplete"
    beside.write_bytes(WEIGHTS[:-1] + b"\0")
    os.replace(beside, path / "model-00001-of-00002.safetensors")


def linked_elsewhere(path: Path) -> None:
    elsewhere = path.parent / "blob"
    elsewhere.write_text('{"a": 2}')
    (path / "config.json").unlink()
    (path / "config.json").symlink_to(elsewhere)


def another_folder(path: Path) -> None:
    path.rename(path.parent / "before")
    shutil.copytree(path.parent / "before", path)
    (path / "config.json").write_text('{"a": 2}')


OTHERS: dict[str, tuple[str, Change]] = {
    "configuration": ("config.json", lambda path: (path / "config.json").write_text('{"a": 2}')),
    "code": ("model.py", lambda path: (path / "model.py").write_text("a = 2")),
    "more code": ("more.py", lambda path: (path / "more.py").write_text("a = 1")),
    "code that is gone": ("model.py", lambda path: (path / "model.py").unlink()),
    "weights in place": ("model-00002-of-00002.safetensors", other_weights),
    "weights moved into place": ("model-00001-of-00002.safetensors", moved_into_place),
    "a link": ("config.json", linked_elsewhere),
    "the folder": ("config.json", another_folder),
}
SAME: dict[str, Change] = {
    "nothing": lambda path: None,
    "its time": lambda path: os.utime(path / "config.json"),
    "its mode": lambda path: (path / "config.json").chmod(0o600),
    "a copy in its place": lambda path: (path / "config.json").write_text('{"a": 1}'),
    "the tokenizer": lambda path: (path / "tokenizer.json").write_text("{}"),
    "a file of no meaning": lambda path: (path / "README.md").write_text("A model."),
    "a download beside it": lambda path: (path / "model-00001-of-00002.safetensors.part").write_bytes(b"0"),
}


@pytest.mark.parametrize("change", OTHERS)
def test_a_file_that_was_replaced_is_named(model: Path, change: str) -> None:
    name, act = OTHERS[change]
    before = file_states(model)
    act(model)
    with pytest.raises(StartupError, match=rf"^its files have changed since then: {name}$"):
        require_same(before, file_states(model, before), SINCE)


@pytest.mark.parametrize("change", SAME)
def test_files_of_the_same_content_are_the_same_model(model: Path, change: str) -> None:
    before = file_states(model)
    SAME[change](model)
    require_same(before, file_states(model, before), SINCE)


def test_of_many_files_the_first_are_named_and_the_others_counted(model: Path) -> None:
    before = file_states(model)
    for number in range(5):
        (model / f"code{number}.py").write_text("a = 1")
    with pytest.raises(StartupError, match=r"code0\.py, code1\.py, code2\.py and 2 more$"):
        require_same(before, file_states(model, before), SINCE)


def test_files_that_didnt_change_are_not_read_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file_states(model)
    os.utime(model / "config.json")
    read: list[str] = []

    def samples(path: Path) -> list[bytes]:
        read.append(path.name)
        return []

    monkeypatch.setattr(same_files, "samples", samples)
    file_states(model, before)
    assert read == ["config.json"]
