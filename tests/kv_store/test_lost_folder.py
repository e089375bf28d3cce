"""A folder of kept caches that goes away while an engine uses it."""

import shutil
import tempfile
import time
from pathlib import Path

import pytest
from driving import Rig, prompt
from keeping import kept
from reading_prompts import reading

from server.kv_store import store, writer
from server.kv_store.files import folder
from server.kv_store.files.folder import FolderLock
from server.kv_store.files.keys import BLOCK

LENGTH = BLOCK + 60
SHARED_MEMORY = Path("/dev/shm")


def emptied(home):
    for path in home.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def replaced(home):
    home.rename(home.with_name("aside"))
    home.mkdir()


WAYS = {
    "deleted": shutil.rmtree,
    "moved": lambda home: home.rename(home.with_name("aside")),
    "replaced by an empty one": replaced,
    "emptied": emptied,
    "deleted with what it lay in": lambda home: shutil.rmtree(home.parent),
    "without its lock": lambda home: (home / folder.LOCK).unlink(),
    "without its model": lambda home: shutil.rmtree(next(path for path in home.iterdir() if path.is_dir())),
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "LOOK_SECONDS", 0.0)
    return tmp_path / "cache" / "kv"


@pytest.fixture(scope="module")
def model():
    return Rig("llama").raw


def save(disk, model, seed):
    tokens = prompt(LENGTH, seed)
    disk.save(tokens[: LENGTH - 1], reading(model, tokens[: LENGTH - 1]), lasting=True)
    disk.flush()
    return tokens


def on_disk(home):
    return sum(found.size for found in folder.files(home)), len(list(folder.files(home)))


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_that_goes_away_is_made_again_and_is_still_one_servers(home, model, way, caplog):
    with kept(model, home) as disk:
        before = save(disk, model, 1)
        disk.store.append(home / disk.store.root.hex() / "tail.1.log", [b"first"])
        WAYS[way](home)
        after = save(disk, model, 2)
        disk.store.append(home / disk.store.root.hex() / "tail.1.log", [b"second"])
        assert (disk.store.size, disk.store.files) == on_disk(home)
        assert folder.is_in_use(home), "another server could write into it"
        assert [used.model for used in folder.usage(home)] == ["a model"]
        assert (home / disk.store.root.hex() / "tail.1.log").read_bytes().endswith(b"second")
        assert disk.read(after) is not None
        assert (disk.read(before) is not None) == (way == "without its lock")
        assert disk.store.counts.skipped == disk.store.counts.dropped == {}
        disk.store.end_appending()
    assert caplog.text.count("it is made again") == 1


@pytest.mark.parametrize("way", WAYS)
def test_while_nothing_is_written_the_figures_of_a_folder_become_true_too(home, model, way, monkeypatch):
    monkeypatch.setattr(writer, "LOOK_SECONDS", 0.02)
    with kept(model, home) as disk:
        save(disk, model, 1)
        WAYS[way](home)
        until = time.monotonic() + 20
        while (disk.store.size, disk.store.files) != on_disk(home) or not folder.is_in_use(home):
            assert time.monotonic() < until
            time.sleep(0.02)


def test_a_folder_that_another_server_has_meanwhile_is_left_to_it(home, model, caplog):
    with kept(model, home) as disk:
        save(disk, model, 1)
        shutil.rmtree(home)
        folder.prepare(home)
        other = FolderLock(home)
        assert other.take()
        save(disk, model, 2)
        assert on_disk(home) == (disk.store.size, disk.store.files) == (0, 0)
        assert "is in use by another server" in caplog.text
        other.release()
        disk.store.look()
        assert folder.is_in_use(home)


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs two disks")
def test_a_disk_that_is_gone_is_not_written_around(home, model, caplog):
    home.parent.mkdir()
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as mounted:
        home.symlink_to(mounted)
        with kept(model, home) as disk:
            save(disk, model, 1)
            assert on_disk(home) != (0, 0)
            home.unlink()
            save(disk, model, 2)
            assert on_disk(home) == (disk.store.size, disk.store.files) == (0, 0)
            assert "the disk of" in caplog.text
