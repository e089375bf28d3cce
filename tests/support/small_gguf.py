"""Writes small GGUF files, with the quantised types that MLX's own writer lacks."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from loadtests.zoo import TOKENIZER

MAGIC, VERSION, ALIGNMENT, GROUP = b"GGUF", 3, 32, 32
U32, F32, STRING, ARRAY, I32 = 4, 6, 8, 9, 5  # types of metadata values
TENSOR_F32, TENSOR_Q4_1, TENSOR_Q8_0 = 0, 3, 8

HIDDEN, HEADS, KV_HEADS, HEAD, LAYERS, MIDDLE = 64, 2, 1, 32, 2, 96

Array = np.ndarray


def tokenizer_metadata() -> dict[str, Any]:
    """The project's small tokenizer, as GGUF spells it."""
    model = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": json.loads((TOKENIZER / "tokenizer_config.json").read_text())["chat_template"],
    }


def metadata(**changes: Any) -> dict[str, Any]:
    """A Llama's metadata; `changes` with `__` for the dots."""
    sizes = {
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": MIDDLE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "context_length": 512,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
        "rope.dimension_count": HEAD,
    }
    known = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in sizes.items()}
    return known | tokenizer_metadata() | {key.replace("__", "."): value for key, value in changes.items()}


def tensors(random: np.random.Generator) -> dict[str, Array]:
    """Random weights under GGUF's names."""

    def matrix(rows: int, columns: int) -> Array:
        return (random.standard_normal((rows, columns)) * 2 / np.sqrt(columns)).astype(np.float32)

    rows = len(tokenizer_metadata()["tokenizer.ggml.tokens"])
    out = {"token_embd.weight": matrix(rows, HIDDEN), "output_norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        shapes = {
            "attn_q": (HEADS * HEAD, HIDDEN),
            "attn_k": (KV_HEADS * HEAD, HIDDEN),
            "attn_v": (KV_HEADS * HEAD, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD),
            "ffn_gate": (MIDDLE, HIDDEN),
            "ffn_up": (MIDDLE, HIDDEN),
            "ffn_down": (HIDDEN, MIDDLE),
        }
        out |= {f"blk.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        out |= {f"blk.{layer}.{name}.weight": np.ones(HIDDEN, np.float32) for name in ("attn_norm", "ffn_norm")}
    return out


def permute(weight: Array, heads: int) -> Array:
    """Query and key rows in GGUF's order: the halves of each head interleaved."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def q4_1(weight: Array) -> tuple[bytes, Array]:
    """Packed 4-bit groups with a scale and a minimum, and the values that they stand for."""
    groups = weight.reshape(-1, GROUP)
    low = groups.min(axis=1).astype(np.float16)
    scale = ((groups.max(axis=1) - low) / 15).astype(np.float16)
    wide, base = scale.astype(np.float32)[:, None], low.astype(np.float32)[:, None]
    codes = np.clip(np.round((groups - base) / wide), 0, 15).astype(np.uint8)
    packed = codes[:, : GROUP // 2] | codes[:, GROUP // 2 :] << 4
    blocks = [s.tobytes() + m.tobytes() + p.tobytes() for s, m, p in zip(scale, low, packed, strict=True)]
    return b"".join(blocks), (codes * wide + base).reshape(weight.shape)


def q8_0(weight: Array) -> tuple[bytes, Array]:
    """Packed 8-bit groups with a scale, and the values that they stand for."""
    groups = weight.reshape(-1, GROUP)
    scale = (np.abs(groups).max(axis=1) / 127).astype(np.float16)
    wide = scale.astype(np.float32)[:, None]
    codes = np.clip(np.round(groups / wide), -127, 127).astype(np.int8)
    blocks = [s.tobytes() + c.tobytes() for s, c in zip(scale, codes, strict=True)]
    return b"".join(blocks), (codes * wide).reshape(weight.shape)


def write(path: Path, fields: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    """A file of type Q4_1: embedding in Q8_0, norms in F32, the rest in Q4_1. Returns the values that it holds."""
    held: dict[str, Array] = {}
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", VERSION, len(arrays), len(fields)))
        for key, value in fields.items():
            _string(file, key)
            _value(file, value)
        data = bytearray()
        for name, array in arrays.items():
            kind, packed, held[name] = _packed(name, array)
            data += b"\0" * (-len(data) % ALIGNMENT)
            _string(file, name)
            shape = array.shape[::-1]
            file.write(struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data)))
            data += packed
        file.write(b"\0" * (-file.tell() % ALIGNMENT) + data)
    return held


def _packed(name: str, array: Array) -> tuple[int, bytes, Array]:
    if array.ndim == 1:
        return TENSOR_F32, array.tobytes(), array
    return (TENSOR_Q8_0, *q8_0(array)) if name.startswith("token_embd") else (TENSOR_Q4_1, *q4_1(array))


def _string(file: BinaryIO, text: str) -> None:
    file.write(struct.pack("<Q", len(text.encode())) + text.encode())


def _value(file: BinaryIO, value: Any) -> None:
    if isinstance(value, str):
        file.write(struct.pack("<I", STRING))
        _string(file, value)
    elif isinstance(value, float):
        file.write(struct.pack("<If", F32, value))
    elif isinstance(value, int):
        file.write(struct.pack("<II", U32, value))
    elif isinstance(value[0], str):
        file.write(struct.pack("<IIQ", ARRAY, STRING, len(value)))
        for text in value:
            _string(file, text)
    else:
        file.write(struct.pack(f"<IIQ{len(value)}i", ARRAY, I32, len(value), *value))
