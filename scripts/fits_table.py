"""Writes the table of docs/what-fits.md: which models fit which Mac, and with how long a conversation.

python scripts/fits_table.py           # rewrite the table
python scripts/fits_table.py --check   # exit code 1 if it isn't up to date

Nothing in it is typed in but the shapes of the models, as their `config.json` has them: weights are counted from those
shapes, and the cache of a token is what `marathon models` says of them (`server/model_files/kv_cost.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.model_files import kv_cost

PAGE = Path(__file__).parent.parent / "docs" / "what-fits.md"
BEGIN, END = "<!-- table: scripts/fits_table.py -->\n", "<!-- end of table -->\n"
GB = 10**9
MACS = (8, 16, 24, 32, 48, 64, 96, 128)  # GB of memory
SMALL_SHARE, LARGE_SHARE, SMALL_MAC = 2 / 3, 3 / 4, 36  # of the memory, what macOS lets the GPU have
BITS = {"4 bits": 4.5, "8 bits": 8.5}  # a weight, with the scale and bias of each group of 64
WORKING_BYTES = 10**9  # that a chunk of a prompt, the engine and the server take besides
SHORTEST = 2048  # positions; with fewer a model is of no use

Shape = Mapping[str, Any]


def shape(
    kind: str, layers: int, hidden: int, heads: int, kv: int, dim: int, inner: int, vocab: int, **more: Any
) -> Shape:
    """A config with the members that count."""
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    } | more


TIED = {"tie_word_embeddings": True}
GEMMA = {"sliding_window": 1024, "sliding_window_pattern": 6, **TIED}
MODELS: dict[str, Shape] = {
    "Llama 3.2 1B": shape("llama", 16, 2048, 32, 8, 64, 8192, 128_256, **TIED),
    "Llama 3.2 3B": shape("llama", 28, 3072, 24, 8, 128, 8192, 128_256, **TIED),
    "Qwen3 4B": shape("qwen3", 36, 2560, 32, 8, 128, 9728, 151_936, max_position_embeddings=40_960, **TIED),
    "Llama 3.1 8B": shape("llama", 32, 4096, 32, 8, 128, 14_336, 128_256),
    "Qwen3 8B": shape("qwen3", 36, 4096, 32, 8, 128, 12_288, 151_936, max_position_embeddings=40_960),
    "Gemma 3 12B": shape("gemma3_text", 48, 3840, 16, 8, 256, 15_360, 262_208, **GEMMA),
    "Qwen3 14B": shape("qwen3", 40, 5120, 40, 8, 128, 17_408, 151_936, max_position_embeddings=40_960),
    "gpt-oss 20B": shape(
        "gpt_oss", 24, 2880, 64, 8, 64, 2880, 201_088, num_local_experts=32, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 12,
    ),
    "Mistral Small 24B": shape("mistral", 40, 5120, 32, 8, 128, 32_768, 131_072, max_position_embeddings=32_768),
    "Gemma 3 27B": shape("gemma3_text", 62, 5376, 32, 16, 128, 21_504, 262_208, **GEMMA),
    "Qwen3 32B": shape("qwen3", 64, 5120, 64, 8, 128, 25_600, 151_936, max_position_embeddings=40_960),
    "Llama 3.3 70B": shape("llama", 80, 8192, 64, 8, 128, 28_672, 128_256),
}  # fmt: skip


def parameters(config: Shape) -> int:
    """Weights of the matrices; norms and biases are too few to count."""
    layers: int = config["num_hidden_layers"]
    hidden, dim = config["hidden_size"], config["head_dim"]
    attention = hidden * dim * 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    experts = config.get("num_local_experts", 1)
    layer = attention + experts * 3 * hidden * config["intermediate_size"]
    if experts > 1:
        layer += experts * hidden  # the router
    tables = 2 - config["tie_word_embeddings"]
    return int(layers * layer + tables * config["vocab_size"] * hidden)


def usable(memory: int) -> float:
    """Bytes of a Mac's memory that its GPU may use."""
    share = LARGE_SHARE
    if memory <= SMALL_MAC:
        share = SMALL_SHARE
    return memory * GB * share


def cell(config: Shape, bits: float, memory: int) -> str:
    """How long a conversation may be."""
    costs = kv_cost.layer_costs(config)
    if costs is None:
        raise SystemExit(f"{config['model_type']} isn't understood")
    room = usable(memory) - WORKING_BYTES - parameters(config) * bits / 8
    context = config["max_position_embeddings"]
    longest = kv_cost.longest(costs, int(room), context)
    if longest < SHORTEST:
        return "–"
    if longest == context:
        return "whole"
    return f"{longest // 1000:,}k"


def per_token(config: Shape) -> int:
    """Bytes of the cache that each further token takes, in the layers that attend to everything."""
    return sum(cost.per_position for cost in kv_cost.layer_costs(config) or () if not cost.cap)


def table() -> str:
    head = ["model", "weights", "KV a token", "context", *(f"{memory} GB" for memory in MACS)]
    lines = [head, ["---", "--:", "--:", "--:", *["--:"] * len(MACS)]]
    for name, config in MODELS.items():
        for words, bits in BITS.items():
            weights = f"{parameters(config) * bits / 8 / GB:.1f} GB"
            fixed = [f"{name}, {words}", weights, f"{per_token(config) / 1000:.0f} kB"]
            fits = [cell(config, bits, memory) for memory in MACS]
            lines.append([*fixed, f"{config['max_position_embeddings'] // 1024}k", *fits])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def page(text: str) -> str:
    """The page with its table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE} has lost the marks around its table")
    return before + BEGIN + table() + END + after


def main(arguments: list[str], path: Path = PAGE) -> int:
    text = path.read_text(encoding="utf-8")
    wanted = page(text)
    if "--check" not in arguments:
        path.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        print(f"{path} isn't up to date: run python scripts/fits_table.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
