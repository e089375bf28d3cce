"""A GGUF file of the Llama architecture → an MLX model folder.

Run as a child process of its own (`python -P -m server.model_files.gguf SOURCE FOLDER`), so that neither server nor
engine ever holds the weights twice. Keeps the quantised values of the file: MLX reads Q4_1 and Q8_0 into its own layout
without rounding, so nothing is quantised again. Only what the starter model needs: one architecture, one kind of
tokenizer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from server.errors import StartupError

GROUP = 32  # values that share a scale, in every GGUF type that MLX reads as quantised
CONTROL = 3  # GGUF's token type of special tokens

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

Metadata = dict[str, Any]


def convert(source: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of `source` into the existing `folder`.

    Raises StartupError when the file is of a kind that isn't understood.
    """
    arrays, metadata = _read(source)
    weights = dict(_renamed(arrays, metadata))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _dump(folder / "config.json", model_config(metadata, weights))
    _dump(folder / "generation_config.json", _special_ids(metadata))
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _dump(folder / "tokenizer_config.json", tokenizer_config(metadata))


def _read(source: Path) -> tuple[dict[str, mx.array], Metadata]:
    try:
        loaded: Any = mx.load(str(source), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise StartupError(f"{source.name} is no GGUF file: {error}") from None
    arrays, metadata = loaded
    plain = {key: value.tolist() if isinstance(value, mx.array) else value for key, value in metadata.items()}
    for key, known in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        if plain.get(key) != known:
            raise StartupError(f"{source.name}: {key} is {plain.get(key)!r}; only {known!r} is understood")
    return arrays, plain


def _renamed(arrays: dict[str, mx.array], metadata: Metadata) -> Iterator[tuple[str, mx.array]]:
    """The weights under mlx-lm's names, query and key rows in its order.

    Scales decide in which type the model computes: half on a GPU. On a CPU, where half is some twenty times slower
    than float32, they are widened, which changes no value.
    """
    if mx.is_available(mx.gpu):
        width = mx.float16
    else:
        width = mx.float32
    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    for name, array in arrays.items():
        *layer, module, kind = name.split(".")
        if layer:
            stem = f"model.layers.{layer[1]}.{_LAYER_NAMES[module]}"
        else:
            stem = _NAMES[module]
        if module in heads:
            array = unpermute(array, heads[module])
        yield f"{stem}.{kind}", array.astype(width) if mx.issubdtype(array.dtype, mx.floating) else array


def unpermute(array: mx.array, heads: int) -> mx.array:
    """Undo GGUF's order of query and key rows.

    GGUF keeps the two halves of a head interleaved, for a rotation of neighbours; mlx-lm rotates half against half.
    Rows move whole, so packed weights, scales and biases all take the same turn.
    """
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def model_config(metadata: Metadata, weights: dict[str, mx.array]) -> dict[str, Any]:
    """mlx-lm's config.json; the quantisation of each module follows from the shapes of its arrays."""
    names = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base",
        "max_position_embeddings": "context_length",
    }
    sizes = {key: metadata[f"llama.{name}"] for key, name in names.items()}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **sizes,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        **_special_ids(metadata),
        **quantization(weights),
    }


def quantization(weights: dict[str, mx.array]) -> dict[str, Any]:
    """`{"quantization": …}` with the commonest width as the rule and the others named; empty if nothing is packed."""
    bits = {
        name.removesuffix(".scales"): weights[name.replace(".scales", ".weight")].shape[-1] // scales.shape[-1]
        for name, scales in weights.items()
        if name.endswith(".scales")
    }
    if not bits:
        return {}
    widths = list(bits.values())
    rule = max(set(widths), key=widths.count)
    others = {name: {"group_size": GROUP, "bits": width} for name, width in bits.items() if width != rule}
    return {"quantization": {"group_size": GROUP, "bits": rule, **others}}


def _special_ids(metadata: Metadata) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}
    return {key: value for key, value in found.items() if value is not None}


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Byte-level BPE; each digit is a token of its own; control tokens are special."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind == CONTROL]
    )
    return tokenizer


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """What transformers wants to know besides tokenizer.json; the chat template is the file's own."""
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {key.removesuffix("_id"): tokens[index] for key, index in _special_ids(metadata).items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Exit code 0, or 1 with one line on stderr."""
    try:
        source, folder = map(Path, arguments)
        mx.set_default_device(mx.cpu)
        convert(source, folder)
    except (StartupError, OSError, ValueError, KeyError, RuntimeError) as error:
        said = str(error)
        if isinstance(error, KeyError):  # its message is the key alone
            said = f"KeyError: {error}"
        print(said, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
