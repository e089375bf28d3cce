"""What the report's words mean, and the models that it names: sizes, types and weights, read from their recipes.

Builds the models' classes without evaluating a weight, so that a large one costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from loadtests import zoo
from loadtests.lab import caches, shapes
from loadtests.lab.page import Chapter, Table
from loadtests.lab.rows import Rows
from loadtests.zoo import models
from server.model_files.starter import NAME, SMOLLM2

Config = dict[str, Any]
DEPTH = ("num_hidden_layers", "num_layers", "n_layer")
WIDTH = ("hidden_size", "block_dim", "n_embd")
HEADS = ("num_attention_heads", "num_heads", "n_head")
TINY = "random, seeded by the name"

GLOSSARY = [
    "**bare loop / bare step**: a model called in a Python loop with mlx-lm's caches, without a server around it.",
    "**batched**: mlx-lm's BatchKVCache, here with one row, so that its cost beside the step-allocated cache is that "
    "of its padding and its mask and not of other rows.",
    "**beside**: Marathon's batch with a second row twice as long, to whose length the first is padded.",
    "**cache kinds**: *concatenate* makes a new array of all keys and values in each step; *contiguous* copies that "
    "once more; *step-allocated* (`step`) makes room for 256 positions at once and writes in place; *rotating* keeps "
    f"the newest positions of a window (1,024 unless the CSV says otherwise); *quantised* keeps {caches.BITS} bits a "
    f"value with one scale and offset a group of {caches.GROUP} (32 where the head isn't a multiple of "
    f"{caches.GROUP}, as in the tiny llama).",
    "**chain**: an array that each step rewrites and no evaluation reads; its graph grows by a node a step.",
    "**corrected ratio**: of section A: how much of its early speed an answer keeps, beyond what a longer cache alone "
    "takes. The formula is there.",
    "**drift**: the time of one fixed matrix product after a measurement ÷ before it. 1: the machine was as fast at "
    "the end as at the start. Beyond 1.25 either way it is marked *.",
    "**first point, end ÷ start**: of section 5: the shortest context measured once more at the end, over its first "
    "time.",
    "**guard**: Marathon's cache guard: with each step it evaluates every array that a cache can reach.",
    "**join, leave, taken out**: a row joins a running batch; it leaves; its caches are taken out of the batch's "
    "arrays.",
    "**kept prefix**: caches of a prompt that stay in memory for a later request that begins with it.",
    "**live buffer**: an allocation of MLX that is not free. Metal allows 499,000, whatever their size.",
    "**near tie**: two best logits closer to each other than two ways of computing them are; the exact rule is in "
    "section 4.",
    "**numbers in order**: how many numbers from 1 on an answer has before the first that is wrong.",
    "**owned, pinned (held)**: the bytes of an array; the bytes of the buffer that it keeps from being freed.",
    "**pass**: the cache read once at the speed of a large copy; the formula is in section 5.",
    "**peak**: the most memory that MLX held from the prompt's start to the last token, weights included unless said.",
    "**prompt, context**: always in tokens. **tok/s**: of one row, unless a table says that it is summed over rows.",
    "**sampled**: a curve of some steps of some thousands, on caches filled up to there with random values.",
    "**steps, fused**: attention as matrix product, mask, softmax, matrix product; attention in one kernel.",
    "**taken**: the commit of Marathon and the day (UTC) that a row is from. A plus: with changes not committed.",
]


def chapters(sheets: Mapping[str, Rows]) -> list[Chapter]:
    """Glossary and models."""
    named = (row.get("shape") or row.get("family") for rows in sheets.values() for row in rows)
    names = list(dict.fromkeys(name for name in named if name))
    head = ["model", "family", "layers", "width", "heads (keys)", "head size", "vocabulary", "type", "parameters"]
    head += ["weights", "caches of a row"]
    table = Table("Models", [head, *map(describe, names)])
    words = [
        "Tiny models are the zoo's: mlx-lm's own classes of a family, made small, so that caches and leaks are the "
        "real ones and sizes are not. Buffers and bytes don't depend on the weights' values; texts do."
    ]
    return [Chapter("What the words mean", (), GLOSSARY), Chapter("Which models", words, (), [table])]


def describe(name: str) -> list[str]:
    """One row of the table. A model that isn't on this machine has only its name."""
    plain, _, dtype = name.partition("@")
    try:
        config, kind, weights = _recipe(plain)
    except ValueError:
        return [name, *["–"] * 8, "not on this machine", "–"]
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    count = sum(array.size for _, array in tree_flatten(model.parameters()))
    made = model.make_cache() if hasattr(model, "make_cache") else None
    held = zoo.describe(made) if made else f"{_first(config, DEPTH)} KVCache"
    return [name, config["model_type"], *_sizes(config), dtype or kind, _count(count), weights, held]


def _recipe(name: str) -> tuple[Config, str, str]:
    """Its config, the type of its weights and where they are from. Raises ValueError for a name without a model."""
    if name in shapes.SIZES:
        family, sizes = shapes.SIZES[name]
        return zoo.config_of(family, **sizes), "float32", TINY
    if name in zoo.FAMILIES:
        return zoo.config_of(name), "float32", TINY
    if name in models.RECIPES and models.RECIPES[name].config:
        return models.config_of(name), "bfloat16", "random"
    folder = shapes.folder_of(name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, _dtype(folder, config), f"{NAME} ({SMOLLM2.requirement})" if name == "starter" else "its own"


def _dtype(folder: Path, config: Config) -> str:
    quantised = config.get("quantization")
    if quantised:
        return f"{quantised['bits']} bits, groups of {quantised['group_size']}"
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found = sorted({entry["dtype"] for key, entry in header.items() if key != "__metadata__"})
    return ", ".join(found)


def _sizes(config: Config) -> list[str]:
    inner = config | config.get("text_config", {})
    heads, keys = _first(inner, HEADS), inner.get("num_key_value_heads")
    size = inner.get("head_dim") or _whole(_first(inner, WIDTH), heads)
    both = f"{heads} ({keys})" if keys else heads
    return [_first(inner, DEPTH), _first(inner, WIDTH), both, str(size), f"{inner['vocab_size']:,}"]


def _whole(width: str, heads: str) -> str:
    return str(int(width) // int(heads)) if width.isdigit() and heads.isdigit() else "–"


def _first(config: Config, names: Iterable[str]) -> str:
    return next((str(config[name]) for name in names if name in config), "–")


def _count(parameters: int) -> str:
    for unit, size in ((" B", 1e9), (" M", 1e6)):
        if parameters >= size:
            return f"{parameters / size:.2f}{unit}"
    return f"{parameters / 1e3:.0f} K"
