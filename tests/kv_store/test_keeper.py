"""What is saved of a row comes back as it was, in any family and beside any rows, and nothing else does."""

import random
import shutil

import mlx.core as mx
import numpy as np
import pytest
from driving import Rig, prompt, row
from keeping import kept
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from reading_prompts import reading

from server.cache_guard import cache_arrays, own_bytes, parts, pinned_bytes
from server.kv_store.files import folder
from server.kv_store.files.keys import BLOCK, KeyChain
from server.kv_store.keeper import spans
from server.kv_store.layout import LeafLayout
from server.kv_store.store import Disk

FAMILIES = ["llama", "gemma3_text", "qwen3_5", "mamba2", "kimi_linear"]


def next_logits(model, caches):
    logits = model(mx.array([[5]]), cache=caches)[0, -1].astype(mx.float32)
    mx.eval(logits, cache_arrays(caches))
    return np.array(logits)


# ---------------------------------------------------------------- there and back
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_batch_come_back_bit_for_bit(family, tmp_path):
    rig = Rig(family)
    rows = [row(1, prompt(BLOCK + 40), max_tokens=99), row(2, prompt(20), max_tokens=99)]
    batch = rig.batch()
    rig.join(batch, *rig.read(*rows))
    with kept(rig.raw, tmp_path) as disk:
        progress = {one.seq: disk.keeper.begin(one.tokens) for one in rows}
        for _ in range(3):
            rig.step(batch, 9)
            for i, one in enumerate(batch.rows):
                disk.save(batch.held_tokens(one), batch.caches, progress[one.seq], row=i)
        disk.flush()
        for i, one in enumerate(batch.rows):
            held = batch.held_tokens(one)
            caches, length = disk.read([*held, 1])
            assert length == len(held)
            live = [layer.extract(i) for layer in batch.caches]
            assert np.array_equal(next_logits(rig.raw, caches), next_logits(rig.raw, live))


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_a_restored_row_goes_on_like_one_that_was_never_interrupted(family, tmp_path):
    rig = Rig(family)
    tokens = prompt(BLOCK + 90)
    one = row(1, tokens, max_tokens=40)
    with kept(rig.raw, tmp_path) as disk:
        disk.save(tokens[:-1], reading(rig.raw, tokens[:-1]))
        disk.flush()
        one.caches, length = disk.read(tokens)
        assert length == len(tokens) - 1
    batch = rig.batch()
    rig.join(batch, one)
    rig.run(batch)
    rig.assert_as_alone(one, rig.alone(row(0, tokens, max_tokens=40)))


def test_restored_caches_have_the_buffers_of_a_row_and_no_more(tmp_path):
    rig = Rig("gemma3_text")
    tokens = prompt(3 * BLOCK)
    with kept(rig.raw, tmp_path) as disk:
        live = reading(rig.raw, tokens)
        disk.save(tokens, live)
        disk.flush()
        caches, _ = disk.read([*tokens, 1])
    assert len(cache_arrays(caches)) == len(cache_arrays(live))
    assert pinned_bytes(cache_arrays(caches)) <= 1.1 * own_bytes(caches)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 40])
def test_the_first_token_of_a_restored_row_copies_no_array_that_grows_in_steps(family, length, tmp_path):
    rig = Rig(family)
    tokens = prompt(length)
    with kept(rig.raw, tmp_path) as disk:
        disk.save(tokens, reading(rig.raw, tokens))
        disk.flush()
        caches, found = disk.read([*tokens, 1])
    assert found == length
    before = _sizes(caches)
    next_logits(rig.raw, caches)
    assert _sizes(caches) == before


@pytest.mark.parametrize(
    ("step", "positions", "length"),
    [(1, 7, 7), (256, 2, 256), (256, 255, 256), (256, 256, 512), (256, 300, 512)],
)
def test_a_restored_array_has_no_more_room_than_the_next_token_needs(step, positions, length):
    leaf = LeafLayout(("keys",), "float32", (1, 2, step, 4), 2, step)
    assert leaf.with_room(positions).shape == (1, 2, length, 4)


def _sizes(caches):
    """Bytes of the caches that mlx-lm makes longer by steps."""
    return [part.nbytes for part in parts(caches) if type(part) is KVCache]


def test_quantised_caches_and_half_precision_come_back_bit_for_bit(tmp_path):
    class Quantised:
        """A llama whose caches are quantised, in bfloat16."""

        def __init__(self, inner):
            self.inner = inner

        def make_cache(self):
            return [QuantizedKVCache(group_size=32, bits=4) for _ in self.inner.layers]

        def __call__(self, inputs, cache=None):
            return self.inner(inputs, cache=cache)

    rig = Rig("llama")
    model = Quantised(rig.raw)
    tokens = prompt(BLOCK + 9)
    caches = reading(model, tokens)
    with kept(model, tmp_path, batches=False) as disk:
        assert all(part.grows for part in disk.layout.parts)
        disk.save(tokens, caches)
        disk.flush()
        found, length = disk.read([*tokens, 1])
    assert length == len(tokens)
    assert np.array_equal(next_logits(model, found), next_logits(model, caches))


def test_bfloat16_survives(tmp_path):
    rig = Rig("llama")
    tokens = prompt(70)
    model = Halved(rig.raw)
    caches = reading(model, tokens)
    with kept(model, tmp_path, batches=False) as disk:
        disk.save(tokens, caches)
        disk.flush()
        found, length = disk.read([*tokens, 1])
    for a, b in zip(caches, found, strict=True):
        assert b.keys.dtype == mx.bfloat16
        assert mx.array_equal(a.keys[..., :length, :], b.keys[..., :length, :]).item()


class Halved:
    """A model that keeps its keys and values in bfloat16."""

    def __init__(self, inner):
        self.inner = inner

    def make_cache(self):
        caches = make_prompt_cache(self.inner)
        for cache in caches:
            cache.update_and_fetch = _halving(cache, cache.update_and_fetch)
        return caches

    def __call__(self, inputs, cache=None):
        return self.inner(inputs, cache=cache)


def _halving(cache, update):
    def updated(keys, values):
        found = update(keys.astype(mx.bfloat16), values.astype(mx.bfloat16))
        return [array.astype(mx.float32) for array in found]

    return updated


# ---------------------------------------------------------------- how a row is cut
def test_pieces_end_at_the_borders_of_blocks():
    assert spans(0, 0) == []
    assert spans(0, BLOCK) == [(0, BLOCK)]
    assert spans(0, BLOCK + 1) == [(0, BLOCK), (BLOCK, BLOCK + 1)]
    assert spans(300, 700) == [(300, 512), (512, 700)]


def test_only_what_is_new_is_written(tmp_path):
    rig = Rig("llama")
    tokens = prompt(2 * BLOCK)
    with kept(rig.raw, tmp_path) as disk:
        caches = reading(rig.raw, tokens)
        first = disk.save(tokens, caches)
        again = disk.save(list(tokens), caches)
        assert first.size > 0
        assert again.size == 0
        longer = tokens + prompt(10, 1)
        assert disk.save(longer, reading(rig.raw, longer)).size * 2 * BLOCK == first.size * 10


def test_conversations_that_begin_alike_share_their_beginning(tmp_path):
    rig = Rig("llama")
    system = prompt(2 * BLOCK)
    with kept(rig.raw, tmp_path) as disk:
        for seed in (1, 2):
            tokens = system + prompt(30, seed)
            disk.save(tokens, reading(rig.raw, tokens))
        disk.flush()
        assert disk.store.files == 4
        assert disk.read(system + prompt(40, 3))[1] == 2 * BLOCK


def test_a_recurrent_row_goes_on_only_where_its_state_was_saved(tmp_path):
    rig = Rig("qwen3_5")
    tokens = prompt(BLOCK + 60)
    with kept(rig.raw, tmp_path) as disk:
        disk.save(tokens[: BLOCK + 20], reading(rig.raw, tokens[: BLOCK + 20]), lasting=True)
        disk.flush()
        assert disk.read(tokens)[1] == BLOCK + 20
        assert disk.read(tokens[: BLOCK + 10]) is None


def test_of_a_rows_states_the_two_newest_stay(tmp_path):
    rig = Rig("qwen3_5")
    tokens = prompt(90)
    with kept(rig.raw, tmp_path) as disk:
        progress = disk.keeper.begin(tokens)
        for length in (30, 50, 70, 90):
            disk.save(tokens[:length], reading(rig.raw, tokens[:length]), progress)
        disk.flush()
        states = [found for found in folder.files(tmp_path) if found.name.kind == "state"]
        assert sorted(found.name.end for found in states) == [70, 90]
        assert disk.read(tokens)[1] == 70  # the last token has to be read once more
        assert disk.read([*tokens, 1])[1] == 90


def test_a_large_row_is_saved_a_few_pieces_at_a_time(tmp_path):
    rig = Rig("qwen3_5")
    tokens = prompt(5 * BLOCK)
    caches = reading(rig.raw, tokens)
    with kept(rig.raw, tmp_path) as disk:
        progress = disk.keeper.begin(tokens)
        calls = 0
        while progress.complete < len(tokens):
            disk.save(tokens, caches, progress, most=1)
            calls += 1
        assert calls == 5
        disk.flush()
        assert disk.read([*tokens, 1])[1] == len(tokens)


def test_a_window_is_cut_into_positions_until_it_turns_over(tmp_path):
    rig = Rig("gemma3_text")
    tokens = prompt(120)
    with kept(rig.raw, tmp_path) as disk:
        progress = disk.keeper.begin(tokens)
        for length in (20, 31, 60, 120):
            disk.save(tokens[:length], reading(rig.raw, tokens[:length]), progress, lasting=True)
        disk.flush()
        for length in (20, 31, 60, 120):
            found, held = disk.read([*tokens[:length], 1])
            assert held == length
            cold = reading(rig.raw, tokens[:length])
            assert np.array_equal(next_logits(rig.raw, found), next_logits(rig.raw, cold))


# ---------------------------------------------------------------- whose it is
def test_another_models_files_are_never_read(tmp_path):
    rig = Rig("llama")
    tokens = prompt(BLOCK)
    with kept(rig.raw, tmp_path) as disk:
        disk.save(tokens, reading(rig.raw, tokens))
        disk.flush()
    with kept(rig.raw, tmp_path, name=b"other weights") as other:
        assert other.store.size > 0
        assert other.read([*tokens, 1]) is None
        (file,) = folder.files(tmp_path)
        shutil.copy(file.path, tmp_path / other.store.root.hex() / file.path.name)
    with kept(rig.raw, tmp_path, name=b"other weights") as other:
        assert other.read([*tokens, 1]) is None


def test_a_file_under_another_name_is_never_read(tmp_path):
    rig = Rig("llama")
    tokens, others = prompt(80), prompt(80, 1)
    with kept(rig.raw, tmp_path) as disk:
        disk.save(tokens, reading(rig.raw, tokens))
        disk.flush()
        (file,) = folder.files(tmp_path)
        chain = KeyChain(disk.store.root, others)
        forged = folder.Name("piece", 0, 80, chain.key(0), chain.key(80), file.name.parts)
        file.path.rename(file.path.with_name(str(forged)))
    with kept(rig.raw, tmp_path) as disk:
        assert disk.read([*others, 1]) is None
        assert disk.store.counts.dropped == {"other_tokens": 1}


def test_what_was_kept_serves_the_next_process(tmp_path):
    rig = Rig("qwen3_5")
    tokens = prompt(BLOCK + 5)
    with kept(rig.raw, tmp_path) as disk:
        disk.save(tokens, reading(rig.raw, tokens))
        disk.flush()
    with kept(rig.raw, tmp_path) as later:
        assert later.read([*tokens, 1])[1] == len(tokens)


# ---------------------------------------------------------------- damage
def _damage(rng, path):
    raw = bytearray(path.read_bytes())
    act = rng.choice(["flip", "cut", "empty", "remove", "noise", "swap"])
    if act == "flip":
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    elif act == "cut":
        del raw[rng.randrange(len(raw)) :]
    elif act == "empty":
        raw.clear()
    elif act == "noise":
        raw[:] = rng.randbytes(len(raw))
    elif act == "swap":
        other = rng.choice(sorted(path.parent.glob("*.kv")))
        raw[:] = other.read_bytes()
    if act == "remove":
        path.unlink()
    else:
        path.write_bytes(raw)
    return act


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_random_damages_cost_a_prefill_and_never_a_wrong_token(family, tmp_path):
    rig = Rig(family)
    tokens = prompt(2 * BLOCK + 44)
    lengths = (BLOCK, BLOCK + 30, 2 * BLOCK, 2 * BLOCK + 44)
    cold = {length: next_logits(rig.raw, reading(rig.raw, tokens[:length])) for length in lengths}
    whole = tmp_path / "whole"
    with kept(rig.raw, whole) as disk:
        progress = disk.keeper.begin(tokens)
        for length in lengths:
            disk.save(tokens[:length], reading(rig.raw, tokens[:length]), progress, lasting=True)
        disk.flush()
    rng = random.Random(16)
    shorter = 0
    for case in range(15):
        home = tmp_path / str(case)
        shutil.copytree(whole, home)
        with kept(rig.raw, home, layout=disk.layout) as disk:  # it has found the files before they are damaged
            _damage(rng, rng.choice([found.path for found in folder.files(home)]))
            caches, length = disk.read([*tokens, 1]) or (make_prompt_cache(rig.raw), 0)
            shorter += length < len(tokens)
            if length:
                assert np.abs(next_logits(rig.raw, caches) - cold[length]).max() < 1e-3
        shutil.rmtree(home)
    assert shorter > 5


def test_a_file_that_vanishes_is_read_by_prefill_from_there_on(tmp_path):
    rig = Rig("llama")
    tokens = prompt(3 * BLOCK)
    with kept(rig.raw, tmp_path) as disk:
        disk.save(tokens, reading(rig.raw, tokens))
        disk.flush()
        last = max(folder.files(tmp_path), key=lambda found: found.name.end)
        last.path.unlink()
        assert disk.read([*tokens, 1])[1] == 2 * BLOCK
        assert disk.store.counts.dropped == {"missing": 1}


# ---------------------------------------------------------------- limits
def test_the_folder_stays_within_its_limit_and_the_newest_stay(tmp_path):
    rig = Rig("llama")
    limit = 6 * BLOCK * 2048
    with kept(rig.raw, tmp_path, limit=limit) as disk:
        for seed in range(6):
            tokens = prompt(2 * BLOCK, seed)
            disk.save(tokens, reading(rig.raw, tokens))
            disk.flush()
            assert sum(found.size for found in folder.files(tmp_path)) <= limit
        assert disk.store.counts.evicted > 0
        assert disk.read([*prompt(2 * BLOCK, 5), 1])[1] == 2 * BLOCK
        assert disk.read([*prompt(2 * BLOCK, 0), 1]) is None


def test_the_end_of_a_prefix_goes_before_its_beginning(tmp_path):
    rig = Rig("llama")
    with kept(rig.raw, tmp_path, limit=4 * BLOCK * 2048) as disk:
        tokens = prompt(3 * BLOCK)
        disk.save(tokens, reading(rig.raw, tokens))
        disk.flush()
        other = prompt(BLOCK + 100, 1)
        disk.save(other, reading(rig.raw, other))
        disk.flush()
        assert 0 < disk.read([*tokens, 1])[1] < 3 * BLOCK


def test_no_more_is_written_in_an_hour_than_allowed(tmp_path):
    rig = Rig("llama")
    hourly = 4 * BLOCK * 2048 * 3
    with kept(rig.raw, tmp_path, hourly=hourly) as disk:
        refusals = []
        for seed in range(12):
            tokens = prompt(BLOCK, seed)
            refusals.append(disk.save(tokens, reading(rig.raw, tokens)).refusal)
        disk.flush()
        assert "hour" in refusals
        assert disk.store.counts.written_bytes <= hourly


def test_a_full_disk_is_said_once_and_nothing_else_happens(tmp_path, caplog):
    rig = Rig("llama")
    tokens = prompt(3 * BLOCK)
    with kept(rig.raw, tmp_path, disk=Disk(is_full=True)) as disk:
        caches = reading(rig.raw, tokens)
        disk.save(tokens, caches)
        disk.flush()
        assert disk.save(tokens, caches).refusal == "disk"
        assert disk.store.files == 0
        assert disk.read([*tokens, 1]) is None
    assert [record.message for record in caplog.records if "isn't written" in record.message] == [
        "KV isn't written to disk for 10 s: No space left on device"
    ]


def test_a_slow_disk_is_never_waited_for(tmp_path):
    rig = Rig("llama")
    with kept(rig.raw, tmp_path, disk=Disk(bytes_per_second=1e6)) as disk:
        tokens = prompt(BLOCK)
        caches = reading(rig.raw, tokens)
        saved = disk.save(tokens, caches)
        assert saved.size > 400_000
        assert disk.store.counts.written_bytes == 0  # half a second from now
        assert disk.writer.room < 64 << 20
