"""What a row of a model costs in caches, estimated from the model's files alone.

Owns the spellings of heads, layers and windows. Runs in both processes; pure but for the reading of a file's head.
Never imports MLX. An engine measures the same (`engine/model.row_cost`) once it has loaded the model; this is for
models that weren't loaded yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from server.ipc.probe import LayerCost

WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of a number, as safetensors names them
USUAL_WIDTH = 2
_PARTS = ("text_config", "llm_config", "language_config")
_CONSTANT = ("linear_attention", "mamba", "conv", "recurrent")  # kinds of layers whose state doesn't grow
_INTERVALS = ("full_attention_interval", "sliding_window_pattern")
# Model types whose caches are as `layer_costs` reads them, each held to the engine's own measure by a test. Others
# share caches between layers, keep more than keys and values, or spell their sizes in ways of their own.
UNDERSTOOD = frozenset(
    {
        "cohere2",
        "deepseek_v3",
        "exaone4",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_oss",
        "llama",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
        "smollm3",
    }
)
ALIASES = {"mistral": "llama"}  # mlx-lm loads them as that
_NO_HEAD_DIM = ("phi3", "qwen2")  # whose models in mlx-lm don't read it
_USUAL_INTERVAL = {"qwen3_5": 4, "qwen3_5_moe": 4, "qwen3_next": 4, "gemma3": 6, "cohere2": 4}


def layer_costs(config: Mapping[str, Any], width: int = USUAL_WIDTH) -> list[LayerCost] | None:
    """List what each layer's caches take for one row; None for a form of config that isn't understood.

    `width`: bytes of a number. A state that doesn't grow counts as nothing, since it is small beside the others.
    """
    if not is_understood(config):
        return None
    part = _language_part(config)
    per_position = _per_position(part, width)
    kinds = _kinds(part)
    if per_position is None or kinds is None:
        return None
    return [_cost(kind, per_position, _number(part, "sliding_window") or 0) for kind in kinds]


def is_understood(config: Mapping[str, Any]) -> bool:
    kind = config.get("model_type")
    return ALIASES.get(str(kind), kind) in UNDERSTOOD


def float_width(files: Sequence[Path]) -> int:
    """Bytes of a number that isn't packed in these safetensors files: caches have the type of the weights."""
    for file in files:
        for name, entry in _head(file).items():
            if "norm" in name and entry.get("dtype") in WIDTHS:
                return WIDTHS[entry["dtype"]]
    return USUAL_WIDTH


def longest(costs: Sequence[LayerCost], room: int, context: int) -> int:
    """Return the most positions, at most `context`, whose caches fit into `room` bytes."""
    fits = 0
    beyond = context + 1
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if sum(cost.bytes(middle) for cost in costs) <= room:
            fits = middle
        else:
            beyond = middle
    return fits


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The innermost part that is about the language model."""
    for name in _PARTS:
        if isinstance(part := config.get(name), dict):
            return _language_part(part)
    return config


def _per_position(part: Mapping[str, Any], width: int) -> int | None:
    """Bytes of keys and values that a layer keeps of each position."""
    if latent := _number(part, "kv_lora_rank"):
        return width * (latent + (_number(part, "qk_rope_head_dim") or 0))
    heads = _number(part, "num_attention_heads", "n_head", "n_heads")
    hidden = _number(part, "hidden_size", "n_embd", "d_model")
    if not heads or not hidden:
        return None
    key = hidden // heads
    if part.get("model_type") not in _NO_HEAD_DIM:
        key = _number(part, "head_dim") or key
    value = _number(part, "v_head_dim") or key
    return width * (_number(part, "num_key_value_heads", "num_kv_heads") or heads) * (key + value)


def _kinds(part: Mapping[str, Any]) -> list[str] | None:
    """The kind of each layer, as `layer_types` names them."""
    count = _number(part, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count is None:
        return None
    named = part.get("layer_types")
    if isinstance(named, list) and len(named) == count:
        return [str(kind) for kind in named]
    return list(_regular(part, count))


def _regular(part: Mapping[str, Any], count: int) -> Iterator[str]:
    """Layers of which each n-th attends to everything."""
    usual = _USUAL_INTERVAL.get(str(part.get("model_type", "")).removesuffix("_text"), 1)
    every = _number(part, *_INTERVALS) or usual
    other = "linear_attention"
    if _number(part, "sliding_window"):
        other = "sliding_attention"
    for number in range(1, count + 1):
        if number % every:
            yield other
        else:
            yield "full_attention"


def _cost(kind: str, per_position: int, window: int) -> LayerCost:
    if any(word in kind for word in _CONSTANT):
        return LayerCost(0, 0)
    if "sliding" in kind and window:
        return LayerCost(0, per_position, cap=window)
    return LayerCost(0, per_position)


def _number(part: Mapping[str, Any], *names: str) -> int | None:
    """The first of the names that has a positive whole number."""
    for name in names:
        value = part.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _head(file: Path) -> dict[str, Any]:
    """A safetensors file's table of arrays; `weights.weight_files` has found it whole."""
    with file.open("rb") as opened:
        table: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return table
