"""Tiny random-weight models of the families in `loadtests.zoo.families`, for tests and soaks.

Builds them through mlx-lm's own classes, so that their caches, and their leaks, are the real ones. Runs in whatever
process asks (tests, load tests); the server never imports it. Weights are float32 and seeded: the same name gives the
same model on every machine.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any
from zlib import crc32

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from loadtests.zoo.families import COMMON, CONTEXT, DEPTHS, FAMILIES, WIDTHS, Config, Family

TOKENIZER = Path(__file__).parents[2] / "tests" / "data" / "tokenizer"
VOCABULARY = COMMON["vocab_size"]
WIDTH = COMMON["hidden_size"]
SPECIALS = 3  # the tokenizer's control tokens are its first ids

__all__ = ["CONTEXT", "FAMILIES", "TOKENIZER", "Family", "build", "config_of", "describe", "write"]


def config_of(name: str, *, vocab: int | None = None, hidden: int | None = None, layers: int | None = None) -> Config:
    """The family's config.json, with another vocabulary, width (a multiple of 64) or depth if asked for.

    Kimi names its layers by number, so its depth is fixed.
    """
    family = FAMILIES[name]
    config = COMMON | {"model_type": family.model_type, "eos_token_id": 2} | family.config
    return _resized(config, vocab or VOCABULARY, (hidden or WIDTH) // WIDTH, layers)


def _resized(config: Config, vocab: int, times: int, layers: int | None) -> Config:
    """A copy with other sizes; lists with an entry a layer are repeated or cut to the new depth."""
    depth = next((value for key, value in config.items() if key in DEPTHS), None)
    out: Config = {}
    for key, value in config.items():
        if isinstance(value, dict):
            value = _resized(value, vocab, times, layers)
        elif key.startswith("vocab_size"):
            value = vocab
        elif key in WIDTHS and value is not None:
            value *= times
        elif layers and key in DEPTHS:
            value = layers
        elif layers and isinstance(value, list) and len(value) == depth:
            value = [value[i % len(value)] for i in range(layers)]
        out[key] = value
    return out


def build(name: str, **sizes: int | None) -> nn.Module:
    """A model in float32 with its weights evaluated; `sizes` as in `config_of`. Seeds MLX's random state."""
    config = config_of(name, **sizes)
    model_class, args_class = _get_classes(config)
    mx.random.seed(crc32(name.encode()))
    model = model_class(args_class.from_dict(deepcopy(config)))
    weights = {path: _drawn(FAMILIES[name], path, array) for path, array in tree_flatten(model.parameters())}
    model.load_weights(list(model.sanitize(weights).items() if hasattr(model, "sanitize") else weights.items()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _drawn(family: Family, path: str, array: mx.array) -> mx.array:
    """Lively weights: vectors keep the values of their class, matrices are three times wider than usual, so that
    logits spread and attention looks back; control tokens are hardly ever drawn."""
    if array.size == max(array.shape, default=1):  # a vector, or one with axes of 1 around it
        value = next((value for end, value in family.fill.items() if path.endswith(end)), None)
        return array.astype(mx.float32) if value is None else mx.full(array.shape, value)
    random = np.random.default_rng(crc32(f"{family.name}.{path}".encode()))
    values = random.standard_normal(array.shape, dtype=np.float32) * 3 / math.sqrt(array.shape[-1])
    if array.shape[0] >= VOCABULARY:
        values[:SPECIALS] *= 0.1
    return mx.array(values)


def describe(caches: Sequence[Any]) -> str:
    """`3 ArraysCache, 1 KVCache`, in order of first appearance."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(type(cache).__name__ for cache in caches).items())


def write(name: str, folder: Path, *, tokenizer: Path = TOKENIZER, **sizes: int | None) -> Path:
    """An MLX folder that `mlx_lm.load` takes, with the tokenizer files of the folder `tokenizer`.

    A vocabulary wider than the tokenizer's is allowed: the ids beyond have no piece.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(build(name, **sizes).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config_of(name, **sizes), indent=2) + "\n", encoding="utf-8")
    for file in tokenizer.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    return folder
