"""The digests that tell models apart: one for stored answers, one for caches on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from server.errors import StartupError
from server.model_files.fingerprint import KEPT_HASHES, SAMPLE_BYTES, answer_fingerprint, cache_fingerprint

HEAD = json.dumps({"a": {"dtype": "U8", "shape": [1 << 20], "data_offsets": [0, 1 << 20]}}).encode()
WEIGHTS = len(HEAD).to_bytes(8, "little") + HEAD + bytes(range(256)) * 4096


def folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"a": 1}')
    (path / "tokenizer.json").write_text('{"b": 1}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "model.safetensors").write_bytes(WEIGHTS)
    (path / "README.md").write_text("A model.")
    return path


def for_caches(path: Path) -> str:
    return cache_fingerprint(path, path.parent / "hashes.json")


def swap(place: int) -> Callable[[Path], object]:
    """Change one byte of the weights, and nothing of their size."""

    def change(path: Path) -> None:
        content = bytearray(WEIGHTS)
        content[place] ^= 1
        (path / "model.safetensors").write_bytes(content)

    return change


BOTH: dict[str, Callable[[Path], object]] = {
    "configuration": lambda path: (path / "config.json").write_text('{"a": 2}'),
    "code": lambda path: (path / "model.py").write_text("a = 1"),
    "head of the weights": swap(len(HEAD) + 9),
    "end of the weights": swap(-SAMPLE_BYTES),
    "length of the weights": lambda path: (path / "model.safetensors").write_bytes(WEIGHTS + b"\0"),
    "another file of weights": lambda path: (path / "model-2.safetensors").write_bytes(WEIGHTS),
}
TEXT: dict[str, Callable[[Path], object]] = {
    "template": lambda path: (path / "chat_template.jinja").write_text("{{ tools }}"),
    "tokenizer": lambda path: (path / "tokenizer.json").write_text("{}"),
}
BETWEEN_SAMPLES = swap(len(WEIGHTS) // 14)


@pytest.mark.parametrize("fingerprint", [answer_fingerprint, for_caches])
def test_the_same_files_have_the_same_fingerprint_wherever_they_lie(
    tmp_path: Path, fingerprint: Callable[[Path], str]
) -> None:
    first, second = folder(tmp_path / "a"), folder(tmp_path / "b")
    (second / "README.md").write_text("The same model.")
    assert fingerprint(first) == fingerprint(second)
    assert len(fingerprint(first)) == 32


@pytest.mark.parametrize("what", BOTH)
@pytest.mark.parametrize("fingerprint", [answer_fingerprint, for_caches])
def test_a_change_of_the_model_changes_both_fingerprints(
    tmp_path: Path, fingerprint: Callable[[Path], str], what: str
) -> None:
    path = folder(tmp_path / "a")
    before = fingerprint(path)
    BOTH[what](path)
    assert fingerprint(path) != before


@pytest.mark.parametrize("what", TEXT)
def test_a_change_of_the_text_changes_only_the_fingerprint_of_answers(tmp_path: Path, what: str) -> None:
    path = folder(tmp_path / "a")
    before, caches = answer_fingerprint(path), for_caches(path)
    TEXT[what](path)
    assert answer_fingerprint(path) != before
    assert for_caches(path) == caches


def test_only_the_fingerprint_of_caches_reads_every_byte_of_the_weights(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    before, caches = answer_fingerprint(path), for_caches(path)
    BETWEEN_SAMPLES(path)
    assert answer_fingerprint(path) == before
    assert for_caches(path) != caches


def test_another_version_of_mlx_lm_makes_other_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "a")
    before = for_caches(path)
    monkeypatch.setattr("server.model_files.fingerprint.version", lambda name: "0.0")
    assert for_caches(path) != before


def test_weights_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "a")
    before = for_caches(path)

    def fail(*_: object) -> str:
        raise AssertionError("a file was read again")

    monkeypatch.setattr("hashlib.file_digest", fail)
    assert for_caches(path) == before


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}'])
def test_a_damaged_file_of_hashes_costs_only_the_reading(tmp_path: Path, content: str) -> None:
    path = folder(tmp_path / "a")
    before = for_caches(path)
    (tmp_path / "hashes.json").write_text(content)
    assert for_caches(path) == before


def test_the_file_of_hashes_keeps_those_that_were_asked_for_last(tmp_path: Path) -> None:
    path, hashes = folder(tmp_path / "a"), tmp_path / "hashes.json"
    for_caches(path)
    mine = set(json.loads(hashes.read_text()))
    others = {f"other {number}": "0" for number in range(KEPT_HASHES)}
    hashes.write_text(json.dumps(json.loads(hashes.read_text()) | others))
    for_caches(path)
    kept = json.loads(hashes.read_text())
    assert mine < set(kept)
    assert len(kept) == KEPT_HASHES
    assert os.stat(hashes).st_mode & 0o077 == 0


def test_a_model_without_weights_has_no_caches(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    (path / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="no weights"):
        for_caches(path)
