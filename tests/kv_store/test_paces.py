"""A row begins by the faster way, and what was measured outlives the engine."""

from __future__ import annotations

import pytest

from server.kv_store.paces import Paces

MIB = 1 << 20
GIB = 1 << 30


def seen(file=None, token=1e-3, byte=1e-9):
    paces = Paces(file)
    paces.note_prefill(10_000, 10_000 * token)
    paces.note_reading(GIB, GIB * byte)
    return paces


def test_the_disk_is_read_as_long_as_nothing_is_known_of_prefill():
    paces = Paces()
    paces.note_reading(GIB, 1000)
    assert not paces.prefers_prefill(10, 100 * GIB)


def test_a_prompt_that_is_read_sooner_than_its_caches_is_read():
    assert seen(token=20e-6).prefers_prefill(30_000, GIB)


def test_caches_that_are_there_sooner_are_read():
    assert not seen(token=1e-3).prefers_prefill(30_000, GIB)


def test_where_both_take_as_long_the_disk_is_read():
    assert not seen(token=32e-6).prefers_prefill(30_000, GIB)


def test_a_reading_that_was_slow_once_is_tried_again():
    paces = seen(token=20e-6, byte=3e-9)
    for _ in range(100):
        if not paces.prefers_prefill(30_000, GIB):
            return
    pytest.fail("the disk is never asked again")


def test_the_latest_counts_more_than_what_was_long_ago():
    paces = seen(token=1e-3)
    for _ in range(20):
        paces.note_prefill(100_000, 1.0)
    assert paces.token_seconds < 2e-5


@pytest.mark.parametrize(("tokens", "size"), [(255, 1000), (1, MIB - 1)])
def test_what_is_too_little_for_a_pace_is_left_out(tokens, size):
    paces = Paces()
    paces.note_prefill(tokens, 100.0)
    paces.note_reading(size, 100.0)
    assert paces.token_seconds == 0
    paces.note_prefill(1000, 1.0)
    assert not paces.prefers_prefill(1000, MIB)


def test_the_next_engine_knows_them(tmp_path):
    file = tmp_path / "paces.json"
    seen(file, token=20e-6).save(at_once=True)
    assert file.stat().st_mode & 0o777 == 0o600
    assert Paces(file).prefers_prefill(30_000, GIB)


def test_they_are_written_now_and_then(tmp_path):
    now, found = [0.0], []
    file = tmp_path / "paces.json"
    paces = Paces(file, lambda: now[0])
    for at, seconds in ((0.0, 1.0), (1.0, 3.0), (10.0, 3.0)):
        now[0] = at
        paces.note_prefill(1000, seconds)
        paces.save()
        found.append(Paces(file).token_seconds)
    assert found == pytest.approx([1e-3, 1e-3, 7e-3 / 3])


@pytest.mark.parametrize("content", [b"", b"{}", b'{"prefill": 1}', b"\xff"])
def test_a_broken_file_is_no_fault(tmp_path, content):
    file = tmp_path / "paces.json"
    file.write_bytes(content)
    paces = Paces(file)
    assert paces.token_seconds == 0
    paces.note_prefill(1000, 1.0)
    paces.save(at_once=True)
    assert Paces(file).token_seconds == pytest.approx(1e-3)


def test_a_folder_that_is_gone_is_no_fault(tmp_path):
    seen(tmp_path / "gone" / "paces.json").save(at_once=True)
