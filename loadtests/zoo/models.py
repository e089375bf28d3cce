"""The models that speed is measured on: random weights, written to folders.

`python -m loadtests.zoo.models NAME FOLDER` writes one; it runs in a child process, so that the load tests themselves
never touch MLX. Small ones are the zoo's; the large ones are drawn in bfloat16 on the device.

Every token must show: a client can only time what has text. So the vocabulary is filled up with made-up words where
it is wider than the tokenizer's, and tokens that are no whole characters, or end an answer, are made improbable.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from loadtests.harness import ROOT, HarnessError, start

TOKENIZER = ROOT / "tests" / "data" / "tokenizer"
DULL = 0.1  # scale of the output rows of tokens that shouldn't be drawn
EOS = 2


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model of the zoo's `family`, `layers` deep if given; or, with `config`, one drawn in bfloat16."""

    family: str
    vocab: int
    layers: int | None = None
    config: dict[str, Any] = field(default_factory=dict)


LLAMA_1B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}
# Few layers, each with a large cache: its reading takes a fast GPU longer than the host takes to launch the step.
MHA_1B = LLAMA_1B | {
    "num_hidden_layers": 4,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "head_dim": 128,
}
HYBRID_1B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
    },
}

RECIPES = {
    # Cheap steps, as on a fast GPU: what the server costs shows. Prefill isn't cheap: some 0.4 ms a token on two cores.
    "cheap": Recipe("llama", 2048, 2),
    # A vocabulary as real models have it: what sampling costs shows.
    "wide": Recipe("llama", 49_152, 2),
    "gemma3_text": Recipe("gemma3_text", 2048),
    "qwen3_5": Recipe("qwen3_5", 2048),
    "smollm3": Recipe("smollm3", 2048),
    "llama": Recipe("llama", 2048),
    "llama-1b": Recipe("llama", 49_152, config=LLAMA_1B),
    "mha-1b": Recipe("llama", 49_152, config=MHA_1B),
    "hybrid-1b": Recipe("qwen3_5", 49_152, config=HYBRID_1B),
}


def obtain(name: str, folder: Path) -> Path:
    """The folder of the model, written by a child process unless it is there. Raises HarnessError."""
    path = folder / name
    if not (path / "config.json").exists():
        command = [sys.executable, "-m", "loadtests.zoo.models", name, str(path)]
        if status := start(command).wait():
            raise HarnessError(f"the model {name} can't be written (status {status})")
    return path


def write(name: str, folder: Path) -> None:
    """All or nothing: a folder that is there is complete."""
    recipe, unfinished = RECIPES[name], folder.with_name(folder.name + f".{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        _write_weights(recipe, unfinished)
        write_tokenizer(unfinished, recipe.vocab)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# ---------------------------------------------------------------- weights
def _write_weights(recipe: Recipe, folder: Path) -> None:
    import mlx.core as mx

    if recipe.config:
        config = _filled(recipe)
        weights = _drawn(config)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    else:
        from loadtests import zoo

        zoo.write(recipe.family, folder, vocab=recipe.vocab, layers=recipe.layers)
        weights = cast(dict[str, Any], mx.load(str(folder / "model.safetensors")))
    _dull(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a recipe with a `config`."""
    return _filled(RECIPES[name])


def _filled(recipe: Recipe) -> dict[str, Any]:
    config = json.loads(json.dumps(recipe.config)) | {"eos_token_id": EOS, "vocab_size": recipe.vocab}
    if "text_config" in config:
        config["text_config"]["vocab_size"] = recipe.vocab
    return dict(config)


def _drawn(config: dict[str, Any]) -> dict[str, Any]:
    """Random weights of the usual spread, as the model's class names and shapes them."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    mx.random.seed(0)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    weights = {}
    for path, array in tree_flatten(model.parameters()):
        if array.ndim > 1:
            array = mx.random.normal(array.shape, scale=array.shape[-1] ** -0.5, dtype=mx.bfloat16)
        weights[path] = array.astype(mx.bfloat16)
        mx.eval(weights[path])
    return weights


def build(name: str) -> Any:
    """The model of a recipe with a `config`, in memory and evaluated."""
    import mlx.core as mx
    from mlx_lm.utils import _get_classes

    config = config_of(name)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    model.load_weights(list(_drawn(config).items()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _dull(weights: dict[str, Any]) -> None:
    """Scale down the output rows of tokens without text of their own."""
    import mlx.core as mx

    head = next(name for name in weights if name.endswith("lm_head.weight"))
    rows = mx.array(unseen())
    weights[head][rows] = weights[head][rows] * DULL
    mx.eval(weights[head])


# ---------------------------------------------------------------- words
def _vocabulary(tokenizer: Path = TOKENIZER) -> dict[str, int]:
    return dict(json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])


def unseen() -> list[int]:
    """Ids whose bytes are no whole characters, and control tokens. Byte-level vocabularies write bytes from 0x80
    on, and control characters, as characters of their own."""
    printable = {chr(code) for code in range(0x21, 0x7F)} | {"Ġ", "Ċ"}
    return [id for piece, id in _vocabulary().items() if id <= EOS or not set(piece) <= printable]


def words() -> list[str]:
    """Words that are one token each when a space stands before them."""
    return [
        piece[1:]
        for piece in _vocabulary()
        if piece[0] == "Ġ" and len(piece) > 3 and piece[1:].isascii() and piece[1:].isalpha()
    ]


def write_tokenizer(folder: Path, vocab: int) -> None:
    """The test tokenizer, with made-up words up to `vocab`; text is never read as one of them."""
    for file in TOKENIZER.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    known = data["model"]["vocab"]
    known.update({f"Ġword{id}": id for id in range(len(known), vocab)})
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write one of the models that speed is measured on.")
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write(arguments.name, arguments.folder)


if __name__ == "__main__":
    main()
