"""A tiny model of a family whose live buffers leak in mlx-lm, made on the spot.

Owns its sizes and its weights, which are random. It has the depth of SmolLM3-3B, so that what it loses a token is what
that model loses: one layer in four has no rotary embedding, and the batched cache of such a layer keeps a chain of
pending offsets, a buffer longer with each step. Runs in the main thread of `marathon certify`.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.smollm3 import Model, ModelArgs

NAME = "smollm3-demonstration"
LIMIT = 5000  # live buffers that the demonstration allows, so that the end comes within a minute
TOKENS = 300
CONFIG = {
    "model_type": "smollm3",
    "hidden_size": 64,
    "num_hidden_layers": 36,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def write(folder: Path) -> Path:
    """The model's folder below `folder`. The same weights each time."""
    place = folder / NAME
    place.mkdir(parents=True)
    mx.random.seed(3)
    model = Model(ModelArgs.from_dict(dict(CONFIG)))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(place / "model.safetensors"), weights, metadata={"format": "mlx"})
    (place / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    return place
