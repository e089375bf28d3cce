"""The folder is its owner's, one process writes into it, and people see and clear what it holds."""

import os
import stat
import subprocess
import sys

from server.kv_store.files import folder
from server.kv_store.files.folder import FolderLock, Name

NAME = Name("piece", 0, 256, b"\x01" * 16, b"\x02" * 16, 0b101)
MODEL = "0123456789abcdef" * 2


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def write(home, name, size=10, model=MODEL):
    (home / model).mkdir(exist_ok=True, parents=True)
    (home / model / str(name)).write_bytes(b"x" * size)


def test_a_name_says_what_a_file_stands_for():
    assert Name.parse(str(NAME)) == NAME


def test_what_is_no_name_is_left_alone():
    for text in ("", "x.kv", "piece.0.256.zz.00.1.kv", "part.0.1.00.00.1.kv", "piece.9.1.00.00.1.kv", f"0{NAME}"):
        assert Name.parse(text) is None


def test_the_folder_is_for_its_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        folder.note_model(tmp_path / "kv", "tiny")
    finally:
        os.umask(before)
    assert mode(tmp_path / "kv") == 0o700
    assert mode(tmp_path / "kv" / folder.ABOUT) == 0o600


def test_two_processes_never_hold_one_lock(tmp_path):
    mine, other = FolderLock(tmp_path), FolderLock(tmp_path)
    assert mine.take()
    assert not other.take()
    mine.release()
    assert other.take()
    other.release()


def test_a_killed_process_leaves_no_lock(tmp_path):
    code = (
        "import os, sys, pathlib; from server.kv_store.files.folder import FolderLock;"
        "assert FolderLock(pathlib.Path(sys.argv[1])).take(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    lock = FolderLock(tmp_path)
    assert lock.take()
    lock.release()


def test_usage_counts_each_prefix_once(tmp_path):
    folder.note_model(tmp_path / MODEL, "tiny")
    write(tmp_path, NAME, 100)
    write(tmp_path, Name("piece", 0, 256, NAME.origin, NAME.key, 0b1), 50)
    write(tmp_path, Name("state", 256, 256, NAME.key, NAME.key, 0b10), 7)
    write(tmp_path, "something else", 1000)
    (one,) = folder.usage(tmp_path)
    assert (one.model, one.files, one.size, one.tokens) == ("tiny", 3, 157, 256)


def test_clearing_leaves_no_conversation_and_keeps_the_lock(tmp_path):
    lock = FolderLock(tmp_path)
    assert lock.take()
    write(tmp_path, NAME, 100)
    assert folder.clear(tmp_path) == 100
    assert [path.name for path in tmp_path.iterdir()] == [folder.LOCK]
    lock.release()


def test_a_folder_that_is_not_there_holds_nothing(tmp_path):
    assert folder.usage(tmp_path / "none") == []
    assert folder.clear(tmp_path / "none") == 0


def test_half_written_files_of_a_killed_writer_are_swept(tmp_path):
    (tmp_path / MODEL).mkdir()
    (tmp_path / MODEL / "piece.part").write_bytes(b"x")
    (tmp_path / "models.json.7-8.part").write_bytes(b"x")
    write(tmp_path, NAME)
    folder.sweep(tmp_path)
    assert not (tmp_path / "models.json.7-8.part").exists()
    assert [found.name for found in folder.files(tmp_path)] == [NAME]
    assert not (tmp_path / MODEL / "piece.part").exists()


def test_a_folder_of_another_user_stays_as_it_is(tmp_path):
    """A user may name a folder that holds other things, too: none is swept, and its mode is its owner's choice."""
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / "film.part").write_bytes(b"x")
    tmp_path.chmod(0o755)
    folder.prepare(tmp_path)
    folder.sweep(tmp_path)
    assert (tmp_path / "downloads" / "film.part").exists()
    assert mode(tmp_path) == 0o755
    (tmp_path / MODEL).mkdir(mode=0o755)
    folder.prepare(tmp_path / MODEL)
    assert mode(tmp_path / MODEL) == 0o700
