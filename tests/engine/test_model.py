"""What loading a model finds out: whether it batches, what its rows cost, and why it can't be loaded."""

import json
import math

import mlx.core as mx
import pytest
from driving import FAMILIES, prompt
from driving import model as tiny_model
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from loadtests import zoo
from server.cache_guard import cache_arrays, pinned_bytes
from server.engine import model
from server.errors import StartupError
from server.ipc.messages import Ready
from server.ipc.probe import Probe
from server.ipc.sequence import Sampling, TokenSequence
from server.supervision.admission import Capacity


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5", "deepseek_v32", "recurrent_gemma"])
def test_a_family_that_batches_rightly_batches(family):
    assert model.try_batching(tiny_model(family)) == (2048, "batched")


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("llama4", "merge"),
        ("gemma2", "broadcast"),
        ("minimax_m3_vl", "differ"),  # only where blocks of keys are left out
        ("longcat_flash_ngram", "differ"),  # only where the window of newest tokens isn't full
    ],
)
def test_a_family_that_does_not_is_found_out_and_the_reason_given(family, why):
    vocabulary, verdict = model.try_batching(tiny_model(family))
    assert vocabulary == 2048
    assert why in verdict
    assert "\n" not in verdict


def test_a_model_whose_logits_are_no_numbers_when_batched_does_not_batch():
    plain = tiny_model("llama")

    class Broken:
        layers, modules = plain.layers, plain.modules

        def __call__(self, inputs, cache=None):
            logits = plain(inputs, cache=cache)
            return logits * mx.nan if inputs.shape[0] > 1 else logits

    assert "nan" in model.try_batching(Broken())[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_costs_what_was_predicted(family):
    """Within 5 %, at two lengths, after chunks and decode steps."""
    built = tiny_model(family)
    costs = model.row_cost(built)
    for length in (100, 700):
        caches, tokens = make_prompt_cache(built), prompt(length)
        for at in range(0, length - 2, 256):
            built(mx.array([tokens[at : min(at + 256, length - 2)]]), cache=caches)
            mx.eval(cache_arrays(caches))
        mx.clear_cache()  # a buffer from the pool may be larger than what was asked for
        for token in tokens[-2:]:
            built(mx.array([[token]]), cache=caches)
            mx.eval(cache_arrays(caches))
        real = pinned_bytes(cache_arrays(caches))
        assert sum(cost.bytes(length) for cost in costs) == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("patience", [math.inf, 0], ids=["quick machine", "slow machine"])
def test_the_peak_of_the_largest_chunk_is_derived_from_smaller_ones(monkeypatch, patience):
    """From the part for each token and the part for each pair of tokens, at both pairs of lengths."""
    read = []

    def measured(_, length: int) -> int:
        read.append(length)
        return 3_000 * length + 16 * length**2

    monkeypatch.setattr(model, "measure_peak", measured)
    largest, pair = model.chunk_peak(tiny_model("llama"), patience)
    assert largest == 3_000 * model.LARGEST_CHUNK + 16 * model.LARGEST_CHUNK**2
    assert pair == 16
    assert max(read) < model.LARGEST_CHUNK / 2


@pytest.mark.parametrize("low", range(3))
def test_one_reading_of_a_peak_that_is_too_low_changes_nothing(monkeypatch, low):
    """A device that frees an array before it needs the next shows less than what a chunk may take."""
    readings = {256: 0, 512: 0}

    def measured(_, length: int) -> int:
        true = 3_000 * length + 16 * length**2
        if length not in readings:
            return true
        readings[length] += 1
        return true // 2 if readings[length] == low + 1 else true

    monkeypatch.setattr(model, "measure_peak", measured)
    assert model.chunk_peak(tiny_model("llama"), math.inf)[1] == 16


def test_the_peak_that_is_derived_is_about_what_a_chunk_takes(monkeypatch):
    """On a CPU scores are a matrix, so the peak grows with the square."""
    monkeypatch.setattr(model, "LARGEST_CHUNK", 1024)
    built = tiny_model("llama")
    real = max(model.measure_peak(built, 1024) for _ in range(3))
    largest, pair = model.chunk_peak(built, math.inf)
    assert real / 1.5 < largest < 1.5 * real
    assert real > 2 * model.measure_peak(built, 512)
    assert 8 < pair < 32, "about a float32 for each of four heads"


@pytest.mark.parametrize(("patience", "factor"), [(math.inf, 1.8), (0, 3)], ids=["quick machine", "slow machine"])
@pytest.mark.parametrize(("family", "sizes"), [("llama", {}), ("llama", {"hidden": 128}), ("qwen3_5", {})])
def test_what_is_planned_for_a_short_chunk_is_about_what_it_takes(family, sizes, patience, factor):
    """Scaled down in proportion from the longest one it would be several times that."""
    built = zoo.build(family, **sizes)
    largest, pair = model.chunk_peak(built, patience)
    probe = Probe(2048, "batched", [], largest, 0, pair_bytes=pair)
    for size in (128, 256):
        real = model.measure_peak(built, size)
        assert real / factor < probe.chunk_peak(size) < factor * real
    assert probe.chunk_peak(model.LARGEST_CHUNK) == pytest.approx(largest, rel=0.01)
    assert probe.chunk_peak(64, 2048) - probe.chunk_peak(64) == pytest.approx(64 * 2048 * pair, rel=0.01, abs=2)


def test_a_lone_prompt_that_can_be_read_is_not_refused():
    """Whatever a chunk was thought to take: the limit is hardly more than what it takes in truth."""
    built = zoo.build("llama", hidden=256)
    weights = sum(array.nbytes for _, array in tree_flatten(built.parameters()))
    largest, pair = model.chunk_peak(built)
    probe = Probe(2048, "batched", model.row_cost(built), 10 * largest, 0, pair_bytes=10 * pair)
    cost = sum(one.bytes(400) for one in probe.row_cost)
    limit = weights + cost + model.measure_peak(built, 400)
    ready = Ready(1, 1, probe, 4096, weights, "llama", "none", "cpu", "0", "0", 0, memory_limit=limit)
    Capacity(ready, None, 8).check(TokenSequence([1] * 400, Sampling(0), 100))


def test_quantization_is_described_as_people_say_it():
    assert model.quantization({"quantization": {"bits": 4}}) == "4-bit"
    assert model.quantization({"torch_dtype": "bfloat16"}) == "bfloat16"
    assert model.quantization({}) == "none"


@pytest.mark.parametrize("config", [None, "{", json.dumps({"model_type": "no_such_thing"}), json.dumps({})])
def test_a_folder_that_holds_no_model_is_refused_in_one_line(tmp_path, config):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(StartupError, match="can't load the model") as caught:
        model.load(tmp_path, trust_remote_code=False, probe=None, on_stage=lambda stage: None)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", "{}", "config.json names no model_type"),
        ("config.json", '{"model_type": 5}', "config.json names no model_type"),
        ("config.json", "[]", "config.json is no JSON object"),
        ("config.json", '{"model_type": "llama",', "config.json can't be read: "),
        ("tokenizer_config.json", '"x"', "tokenizer_config.json is no JSON object"),
    ],
)
def test_the_file_that_is_no_config_is_named(tmp_path, name, text, said):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / name).write_text(text)
    with pytest.raises(StartupError) as caught:
        model.load(tmp_path, trust_remote_code=False, probe=None, on_stage=lambda stage: None)
    assert f"can't load the model in {tmp_path}: {said}" in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b'"x"', b"7", b'{"temperature": 1, "_": "\xe9"}'])
def test_a_broken_generation_config_ends_no_start(tmp_path, content):
    zoo.write("llama", tmp_path)
    (tmp_path / "generation_config.json").write_bytes(content)
    known = model.Probe(8, "batched", [], 0, 0)
    loaded = model.load(tmp_path, trust_remote_code=False, probe=known, on_stage=lambda stage: None)
    assert loaded.config["model_type"] == "llama"


# ---------------------------------------------------------------- reading
def test_parts_rise_to_the_total_and_each_is_there_when_it_is_reported(monkeypatch):
    monkeypatch.setattr(model, "LEAST_BYTES", 10_000)
    built = tiny_model("llama")
    reported: list[tuple[int, int]] = []
    total = model.read_weights(built, lambda done, total: reported.append((done, total)))
    assert total == sum(array.nbytes for _, array in tree_flatten(built.parameters()))
    done = [part for part, _ in reported]
    assert len(done) > 5
    assert done == sorted(set(done))
    assert reported[-1] == (total, total)
    assert {whole for _, whole in reported} == {total}


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "deepseek_v32", "gemma3_text"])
def test_a_load_in_parts_gives_the_model_that_a_load_at_once_gives(family, tmp_path):
    zoo.write(family, tmp_path)
    reported: list[tuple[int, int]] = []
    loaded = model.load(
        tmp_path,
        trust_remote_code=False,
        probe=None,
        on_stage=lambda stage: None,
        on_read=lambda done, total: reported.append((done, total)),
    )
    assert reported[-1] == (loaded.weights_bytes, loaded.weights_bytes)
    expected = dict(tree_flatten(tiny_model(family).parameters()))
    found = dict(tree_flatten(loaded.model.parameters()))
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(found[name], expected[name]) for name in expected)
