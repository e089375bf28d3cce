"""The tiny models: real caches, real leaks, lively text."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache

from loadtests import zoo

STEPS = 20
PROMPTS = [[1, 87, 584, 201, 74, 75, 2, 201], [1, *range(300, 320)], [600, 20]]
SAMPLE = ["llama", "qwen3_5", "smollm3", "gemma3_text", "falcon_h1", "mamba2", "lfm2", "minimax_m3_vl"]


def together(model, prompts) -> list[list[int]]:
    generator = BatchGenerator(model, max_tokens=STEPS)
    rows: dict[int, list[int]] = {uid: [] for uid in generator.insert(prompts)}
    while any(len(row) < STEPS for row in rows.values()):
        for news in generator.next()[1]:
            rows[news.uid].append(news.token)
    generator.close()
    return list(rows.values())


def alone(model, prompt) -> list[int]:
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=STEPS)]


@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_every_family_builds_with_the_caches_that_it_is_listed_with(name):
    assert zoo.describe(make_prompt_cache(zoo.build(name))) == zoo.FAMILIES[name].caches


@pytest.mark.parametrize("name", SAMPLE)
def test_rows_decoded_together_are_lively_and_depend_on_their_prompt(name):
    rows = together(zoo.build(name), PROMPTS)
    assert all(len(set(row)) > STEPS // 2 for row in rows)
    assert len({tuple(row) for row in rows}) == len(rows)
    assert not any(token < zoo.SPECIALS for row in rows for token in row)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "smollm3"])
def test_a_row_alone_gives_the_text_that_it_gives_among_others(name):
    model = zoo.build(name)
    assert together(model, PROMPTS) == [alone(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["llama4", "gemma2", "deepseek_v41"])
def test_families_that_cant_batch_raise_when_batched_and_work_alone(name):
    assert zoo.FAMILIES[name].uneven == "raises"
    model = zoo.build(name)
    assert len(set(alone(model, PROMPTS[0]))) > STEPS // 2
    with pytest.raises(ValueError, match=r"batching|broadcast"):
        together(model, PROMPTS)


def test_the_same_name_gives_the_same_weights():
    first, second = zoo.build("mamba2"), zoo.build("mamba2")
    prompt = mx.array([PROMPTS[0]])
    assert mx.array_equal(first(prompt), second(prompt))


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "exaone4", "baichuan_m1"])
def test_a_written_folder_loads_as_the_model_that_was_built(tiny, name):
    model, tokenizer = load(str(tiny(name)))
    prompt = mx.array([tokenizer.encode("The quick brown fox")])
    assert mx.allclose(model(prompt), zoo.build(name)(prompt), atol=1e-4)
    assert tokenizer.eos_token_ids == {2}


def test_vocabulary_width_and_depth_can_be_chosen(tiny):
    model, _ = load(str(tiny("nemotron_h", vocab=4096, hidden=128, layers=12)))
    assert model(mx.array([[1, 2]])).shape == (1, 2, 4096)
    assert len(model.layers) == 12
    assert model.args.mamba_num_heads == 8
