"""Whatever happens to the files, a row gets its own caches bit for bit, of as many tokens as can be had, or none."""

import random
import shutil
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from driving import Rig, prompt
from keeping import kept
from reading_prompts import reading

from loadtests import disk_damage
from server.cache_guard import cache_arrays
from server.kv_store.files import folder
from server.kv_store.files.keys import BLOCK

FAMILIES = ("llama", "qwen3_5")
LENGTH = 2 * BLOCK + 60
PATIENCE = 20.0


def arrays(caches):
    """The caches' arrays as bytes."""
    found = cache_arrays(caches)
    mx.eval(found)
    return [np.array(mx.view(mx.contiguous(array).reshape(-1), mx.uint8)).tobytes() for array in found]


class Folder:
    """Pristine files of two models, and what a row of each reads from them."""

    def __init__(self, home):
        self.home = home
        self.models = {family: Rig(family).raw for family in FAMILIES}
        self.tokens = prompt(LENGTH)
        self.layouts, self.right = {}, {}
        for family, model in self.models.items():
            with self.opened(family, home) as disk:
                self.layouts[family] = disk.layout
                for length in (BLOCK, LENGTH - 1):
                    disk.save(self.tokens[:length], reading(model, self.tokens[:length]), lasting=True)
                disk.flush()
            folder.note_model(home / disk.store.root.hex(), family)
        for family in FAMILIES:
            for length in self.lengths(family):
                self.right[family, length] = self.read(family, home, self.tokens[: length + 1])[1]

    def lengths(self, family):
        return (BLOCK, LENGTH - 1) if family == "qwen3_5" else (BLOCK, 2 * BLOCK, LENGTH - 1)

    def opened(self, family, home):
        return kept(self.models[family], home, name=family.encode(), layout=self.layouts.get(family))

    def read(self, family, home, tokens, damage=None):
        with self.opened(family, home) as disk:
            if damage:
                damage()
            found = disk.read(tokens)
            assert disk.writer.flush(PATIENCE)
        if found is None:
            return 0, []
        return found[1], arrays(found[0])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("kv"))


def test_what_is_whole_is_read_to_its_end(pristine):
    for family in FAMILIES:
        assert pristine.read(family, pristine.home, pristine.tokens)[0] == LENGTH - 1


@pytest.mark.parametrize("name", disk_damage.ACTS)
def test_no_damage_changes_what_a_row_gets(pristine, tmp_path, name):
    """Damaged before the files are listed or after, and read by both models, twice: what couldn't be used is gone."""
    for seed in range(4):
        rng = random.Random(f"{name} {seed}")
        home = tmp_path / str(seed)
        shutil.copytree(pristine.home, home)
        damage = partial(disk_damage.ACTS[name], home, rng)
        if seed % 2:
            damage()
        for family in FAMILIES:
            done = {"damage": damage} if not seed % 2 and family == FAMILIES[0] else {}
            length, got = pristine.read(family, home, pristine.tokens, **done)
            assert not length or got == pristine.right[family, length]
            assert pristine.read(family, home, pristine.tokens) == (length, got)


def test_a_folder_that_cant_be_one_is_an_error_and_no_more(pristine, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"), pristine.opened("llama", tmp_path / "file"):
        pass
