"""Kept caches are put together in the memory where they stay, or in the host's where MLX shares none."""

from __future__ import annotations

import mlx.core as mx
import pytest
from driving import Rig, prompt
from keeping import AMPLE, PATIENCE, kept
from mlx_lm.models.cache import make_prompt_cache

from server.cache_guard import cache_arrays
from server.kv_store import destination
from server.kv_store.copies import put_back
from server.kv_store.files import folder
from server.kv_store.files.keys import BLOCK

TOKENS = prompt(3 * BLOCK + 7)


@pytest.fixture(params=["llama", "gemma3_text"])
def disk(request, tmp_path):
    """A store that holds the caches of `TOKENS`, and those caches."""
    rig = Rig(request.param)
    caches = make_prompt_cache(rig.raw)
    rig.raw(mx.array([TOKENS]), cache=caches)
    mx.eval(cache_arrays(caches))
    with kept(rig.raw, tmp_path) as one:
        one.save(TOKENS, caches)
        one.flush()
        yield one, caches


def fetched(one, allocate=AMPLE):
    """(a reading that is done, its image)."""
    fetch = one.reader.fetch([*TOKENS, 1], 0)
    while not fetch.destination.is_settled:
        fetch.destination.allocate(allocate)
    return fetch, fetch.wait(PATIENCE)


def assert_as_before(one, fetch, image, caches):
    found = make_prompt_cache(one.model)
    put_back(fetch.destination, image, found)
    for a, b in zip(caches, found, strict=True):
        assert a.offset == b.offset
        wanted = min(a.offset, a.keys.shape[2])
        assert mx.array_equal(a.keys[..., :wanted, :], b.keys[..., :wanted, :]).item()
        assert mx.array_equal(a.values[..., :wanted, :], b.values[..., :wanted, :]).item()


@pytest.mark.parametrize("allocate", [1, AMPLE], ids=["an array at a time", "all at once"])
def test_files_are_put_together_where_they_stay(disk, allocate):
    one, caches = disk
    fetch, image = fetched(one, allocate)
    assert any(part.is_in_place for part in image.parts)
    assert_as_before(one, fetch, image, caches)


def test_where_mlx_shares_no_memory_they_are_copied(disk, monkeypatch):
    one, caches = disk
    monkeypatch.setattr(destination, "shares_memory", lambda: False)
    fetch, image = fetched(one)
    assert not any(part.is_in_place for part in image.parts)
    assert_as_before(one, fetch, image, caches)


def test_arrays_that_a_damaged_file_was_to_fill_are_left_alone(disk, tmp_path):
    one, _ = disk
    last = max((found for found in folder.files(tmp_path) if found.name.kind == "piece"), key=lambda f: f.name.end)
    last.path.write_bytes(b"x" * last.size)
    _, image = fetched(one)
    assert image is None or image.length < len(TOKENS)
    assert image is None or not any(part.is_in_place for part in image.parts)


def test_a_reading_that_is_given_up_waits_for_no_memory(disk):
    one, _ = disk
    fetch = one.reader.fetch([*TOKENS, 1], 0)
    fetch.give_up()
    assert fetch.wait(PATIENCE) is None


def test_memory_is_shared_on_this_device():
    """MLX's CPU backend; one that doesn't share would take the slower way unseen."""
    if mx.default_device() == mx.cpu:
        assert destination.shares_memory()
