"""`marathon cache`: what is kept on disk is shown and cleared, and nothing else is touched."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from server import cli
from server.kv_store.files import folder
from server.kv_store.files.folder import FolderLock, Name

HOUR = 3600
MODEL, OTHER = "0123456789abcdef" * 2, "f" * 32


def write(home: Path, model: str, name: str, start: int, size: int, age: float) -> None:
    folder.note_model(home / model, name)
    file = home / model / str(Name("piece", start, start + 256, bytes(16), bytes([start % 255]) * 16, 1))
    file.write_bytes(b"x" * size)
    os.utime(file, (time.time() - age,) * 2)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write(tmp_path, MODEL, "an-org/a-model", 0, 3_000_000, 2 * HOUR)
    write(tmp_path, MODEL, "an-org/a-model", 256, 2_000_000, 60)
    write(tmp_path, OTHER, "another", 0, 1_000, HOUR)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["cache", *words])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    return out


def test_models_are_listed_with_files_bytes_and_ages(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reported = json.loads(said(capsys, "--folder", str(home), "--json"))
    assert (reported["folder"], reported["bytes"], reported["in_use"], reported["limit_bytes"]) == (
        str(home),
        5_001_000,
        False,
        0,
    )
    first, second = reported["models"]
    assert (first["model"], first["files"], first["bytes"], first["tokens"]) == ("an-org/a-model", 2, 5_000_000, 512)
    assert first["last_used_seconds"] == pytest.approx(60, abs=30)
    assert first["oldest_seconds"] == pytest.approx(2 * HOUR, abs=30)
    assert second["model"] == "another"
    text = said(capsys, "show", "--folder", str(home))
    assert text.startswith(f"0.01 GB of KV in {home}, switched off (--kv-disk).")
    assert "an-org/a-model" in text


def test_the_settings_say_where_it_is_and_how_much_may_be(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = tmp_path_factory.mktemp("config") / "marathon.toml"
    config.write_text(f'kv_disk = "1GB"\nkv_disk_folder = "{home}"\n', "utf-8")
    lock = FolderLock(home)
    assert lock.take()
    text = said(capsys, "--config", str(config))
    lock.release()
    assert text.startswith(f"0.01 GB of KV in {home}, 1.00 GB allowed, in use by a server.")
    assert "in use" not in said(capsys, "--config", str(config))


def test_clearing_removes_what_is_kept_and_nothing_else(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user may have named a folder that holds other things as well."""
    (home / "photos").mkdir()
    (home / "photos" / "half.part").write_bytes(b"x")
    (home / OTHER / "notes.txt").write_bytes(b"x")
    (home / ("a" * 32)).symlink_to(home / "photos")
    assert json.loads(said(capsys, "clear", "--folder", str(home), "--json"))["removed_bytes"] == 5_001_000
    assert sorted(path.name for path in home.iterdir()) == ["a" * 32, OTHER, "photos"]
    assert (home / "photos" / "half.part").exists()
    assert [path.name for path in (home / OTHER).iterdir()] == ["notes.txt"]
    assert said(capsys, "clear", "--folder", str(home)) == f"0.00 GB of KV removed from {home}.\n"


def test_a_folder_that_isnt_there_holds_nothing_and_isnt_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "--folder", str(tmp_path / "none")).startswith("0.00 GB of KV in ")
    said(capsys, "clear", "--folder", str(tmp_path / "none"))
    assert list(tmp_path.iterdir()) == []


def test_something_else_in_its_place_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for act in ("show", "clear"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["cache", act, "--folder", str(tmp_path / "file")])
        assert ended.value.code == 2
        assert capsys.readouterr().err.endswith("file is no folder\n")
