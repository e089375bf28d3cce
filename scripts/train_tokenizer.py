"""Trains the small tokenizer under tests/data/tokenizer; run it only to change that tokenizer.

The corpus is text that every Python carries: pydoc's topics for prose, a few modules of the standard library for code.
Run by hand, in the project's environment: `python scripts/train_tokenizer.py`. Never imported.
"""

from __future__ import annotations

import argparse
import asyncio.base_events
import inspect
import json.decoder
import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

OUT = Path(__file__).parent.parent / "tests" / "data" / "tokenizer"
VOCABULARY = 2048
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPOKEN = [
    "What is the capital of France? The capital of France is Paris.",
    "Tell me a story about a small robot who learns to paint.",
    "The quick brown fox jumps over the lazy dog.",
    "You are a helpful assistant. Please answer the user in one sentence.",
    "Once upon a time there was a little cat that looked at the moon.",
]

CHAT_TEMPLATE = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}
{%- if tools or system is defined %}
{{- '<|im_start|>system\\n' }}{{ system | default('', true) }}
{%- if tools %}
{{- '\\n\\nFunctions that you may call, one JSON object a line:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nTo call one, write\\n<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' }}{{ message.content }}{{ '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' }}{{ message.role }}{{ '\\n' }}{{ message.content or '' }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
{{- '\\n<tool_call>\\n{"name": ' }}{{ tool_call.name | tojson }}{{ ', "arguments": ' }}
{{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def corpus() -> Iterator[str]:
    """Prose, code and a little dialogue."""
    yield from pydoc_data.topics.topics.values()
    yield from (inspect.getsource(module) for module in (argparse, asyncio.base_events, json.decoder))
    yield from SPOKEN * 200


def train() -> Tokenizer:
    """Byte-level BPE; a digit is always a token of its own, as in SmolLM2."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    train().save(str(OUT / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }
    (OUT / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
