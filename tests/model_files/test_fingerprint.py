"""The digest that tells models apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from server.model_files.fingerprint import SAMPLE_BYTES, fingerprint


def folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"a": 1}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 4000)
    (path / "README.md").write_text("A model.")
    return path


def test_the_same_files_have_the_same_fingerprint_wherever_they_lie(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "a"), folder(tmp_path / "b")
    (second / "README.md").write_text("The same model.")
    assert fingerprint(first) == fingerprint(second)
    assert len(fingerprint(first)) == 32


def swap_head(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[3] ^= 1
    (path / "model.safetensors").write_bytes(content)


def swap_end(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-SAMPLE_BYTES] ^= 1
    (path / "model.safetensors").write_bytes(content)


CHANGES: dict[str, Callable[[Path], object]] = {
    "configuration": lambda path: (path / "config.json").write_text('{"a": 2}'),
    "template": lambda path: (path / "chat_template.jinja").write_text("{{ tools }}"),
    "tokenizer": lambda path: (path / "tokenizer.json").write_text("{}"),
    "head of the weights": swap_head,
    "end of the weights": swap_end,
    "length of the weights": lambda path: (path / "model.safetensors").write_bytes(b"\0" * 5),
    "another file of weights": lambda path: (path / "model-2.safetensors").write_bytes(b"\0"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_the_tokens_changes_the_fingerprint(tmp_path: Path, what: str) -> None:
    path = folder(tmp_path / "a")
    before = fingerprint(path)
    CHANGES[what](path)
    assert fingerprint(path) != before
