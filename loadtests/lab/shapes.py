"""The models that the laboratory measures: by a zoo family's name, by a size with random weights, or in a folder.

Owns no process. Runs in a measuring child; everything is drawn on whatever device MLX takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from loadtests import zoo
from loadtests.zoo import models
from server.config.cache_folder import cache_folder
from server.model_files.starter import NAME

SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "small": ("llama", {"layers": 4, "hidden": 256}),
    "small-hybrid": ("qwen3_5", {"layers": 8, "hidden": 256}),
}


def build(name: str) -> Any:
    """The model. Raises ValueError for a name that is no family, no size and no folder.

    `@float32` behind the name changes the type of the weights: MLX's CPU backend is slow at bfloat16.
    """
    name, _, dtype = name.partition("@")
    model = _build(name)
    if dtype:
        model.set_dtype(getattr(mx, dtype))
        mx.eval(model.parameters())
    return model


def _build(name: str) -> Any:
    if name in SIZES:
        family, sizes = SIZES[name]
        return zoo.build(family, **sizes)
    if name in zoo.FAMILIES:
        return zoo.build(name)
    if name in models.RECIPES and models.RECIPES[name].config:
        return models.build(name)
    return load_model(folder_of(name))[0]


def folder_of(name: str) -> Path:
    """The folder of `starter`, or the one named."""
    folder = cache_folder() / NAME if name == "starter" else Path(name).expanduser()
    if not (folder / "config.json").exists():
        raise ValueError(f"{name}: no model of the laboratory, and no folder with a model")
    return folder


def weights_bytes(model: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def vocabulary(model: Any) -> int:
    """The width of its logits."""
    return int(model(mx.array([[1]])).shape[-1])


def prompt_of(length: int, vocab: int) -> list[int]:
    """Token ids without a period, none of them a control token; the same each time."""
    span = min(vocab, 2000) - 16
    return [(7 * i * i + 31 * i) % span + 10 for i in range(length)]
