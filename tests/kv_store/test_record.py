"""A file says what it stands for, and a damaged one is never taken for a whole one."""

import random

import pytest

from server.kv_store.files.record import VERSION, DamagedFile, Head, PartHead, Tensor, pack, unpack

TENSORS = (Tensor("bfloat16", (1, 2, 3)), Tensor("float32", ()))
DATA = [bytes(range(12)), b"\x00\x00\x80\x3f"]


def head(**changes):
    values = {
        "version": VERSION,
        "root": b"r" * 16,
        "kind": "piece",
        "start": 3,
        "end": 6,
        "key": b"k" * 16,
        "ids": (7, 8, 9),
        "parts": (PartHead(2, ["object", [["keys", ["array", 0]]]], TENSORS),),
    }
    return Head(**(values | changes))


def encoded(one=None, data=DATA):
    return b"".join(pack(one or head(), data))


def test_what_is_packed_comes_back():
    found, data = unpack(encoded())
    assert found == head()
    assert [bytes(view) for view in data] == DATA


def test_any_flipped_byte_is_noticed():
    whole = encoded()
    for place in range(len(whole)):
        for bit in (1, 128):
            damaged = bytearray(whole)
            damaged[place] ^= bit
            with pytest.raises(DamagedFile):
                unpack(bytes(damaged))


def test_a_file_cut_anywhere_is_noticed():
    whole = encoded()
    for length in range(len(whole)):
        with pytest.raises(DamagedFile):
            unpack(whole[:length])


def test_noise_is_no_file():
    for seed in range(50):
        with pytest.raises(DamagedFile):
            unpack(random.Random(seed).randbytes(200))


def test_another_version_says_so():
    with pytest.raises(DamagedFile) as caught:
        unpack(encoded(head(version=VERSION + 1)))
    assert caught.value.reason == "version"


@pytest.mark.parametrize("tensors", [(Tensor("float9", (1,)),), (Tensor("int8", (-1,)),), (Tensor("int8", (99,)),)])
def test_a_head_that_does_not_fit_its_arrays_is_refused(tensors):
    parts = (PartHead(0, ["value", None], tensors),)
    with pytest.raises(DamagedFile) as caught:
        unpack(encoded(head(parts=parts)))
    assert caught.value.reason == "format"
