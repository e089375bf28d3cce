"""Folders of the user, and the locks that keep processes apart in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from server.config.cache_folder import cache_folder
from server.config.data_folder import data_folder
from server.config.file_lock import try_lock


@pytest.mark.parametrize(("platform", "cache", "data"), [
    ("linux", ".cache", ".local/share"),
    ("darwin", "Library/Caches", "Library/Application Support"),
])  # fmt: skip
def test_cache_and_data_lie_where_the_platform_keeps_them(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch, platform: str, cache: str, data: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder() == empty_home / cache / "mlx-marathon"
    assert data_folder() == empty_home / data / "mlx-marathon"


def test_a_variable_moves_either_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "d"))
    assert (cache_folder(), data_folder()) == (tmp_path / "c" / "mlx-marathon", tmp_path / "d" / "mlx-marathon")


def test_a_lock_has_one_holder_and_is_free_once_its_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("wb") as first, path.open("wb") as second:
        assert try_lock(first)
        assert not try_lock(second.fileno())
    with path.open("wb") as third:
        assert try_lock(third)
