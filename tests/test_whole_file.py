"""Small files are there whole or not at all, also when several write them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from little_room import files_end_at

from server.config.whole_file import write_whole


def test_threads_that_write_one_file_at_once_leave_one_of_their_contents(tmp_path):
    file = tmp_path / "a.json"
    contents = [bytes([n]) * 100_000 for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda content: write_whole(file, content, 0o600), contents * 5))
    assert file.read_bytes() in contents
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_disk_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path):
    file = tmp_path / "a.json"
    write_whole(file, b"before")
    with files_end_at(1000), pytest.raises(OSError, match="large"):
        write_whole(file, b"x" * 100_000)
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]
