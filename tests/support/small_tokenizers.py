"""Small tokenizers of each kind, made on the spot: what the text tests run on. No network, no model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

PROSE = [
    "the quick brown fox jumps over the lazy dog and looks at the moon",
    "What is the capital of France? The capital of France is Paris.",
    'call a function: {"name": "get_time", "arguments": {"city": "Oslo"}}',
    "user assistant system tool think response naïve größer 日本語 🎉",
] * 4

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{%- for call in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{%- endfor %}"
    "{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# mlx-lm chooses the JSON parser for templates in which it finds these words.
JSON_TOOLS = "{#- <tool_call> tool_call.name #}"
THINKING = (
    JSON_TOOLS
    + CHATML.removesuffix("{% endif %}")
    + "{{ '<think>\n' if enable_thinking is not defined or enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
)
# What the templates of Llama 3.1 and later say, in few words.
BARE = (
    "{{ bos_token }}{%- set head = '<|im_start|>' %}{%- set end = '<|im_end|>' %}"
    "{%- if tools %}{{ head + 'system\n' }}"
    '{{ \'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\' }}'
    "{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ end }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    "{{ head + 'assistant\n{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}' + end }}"
    "{%- else %}{{ head + m.role + '\n' + m.content + end }}{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ head + 'assistant\n' }}{% endif %}"
)
TRIMMING = (
    "{{ bos_token }}{%- for m in messages %}{%- if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '[INST]' if m.role == 'user' else '' }}{{ m.content | trim }}{{ '[/INST]' if m.role == 'user' else eos_token }}"
    "{%- endfor %}"
)

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(*more: AddedToken, behind: bool = False) -> Tokenizer:
    """As GPT-2 and most newer models have it, with ChatML's special tokens: in the model's own vocabulary, or `behind`
    it, as Llama 3 and Qwen have theirs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[] if behind else SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(PROSE, trainer)
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens(list(more))
    return tokenizer


def pieces(*more: AddedToken) -> Tokenizer:
    """As Llama 2 has it: ▁ for spaces, bytes for what isn't known, a space before the text."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.train_from_iterator(PROSE, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learnt = json.loads(learner.to_str())["model"]
    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    words = sorted((word for word in learnt["vocab"] if word.isascii() or "▁" in word), key=learnt["vocab"].get)
    vocabulary = {word: n for n, word in enumerate(dict.fromkeys(["<unk>", "<s>", "</s>", *bytes_, "▁", *words]))}
    merges = [(a, b) for a, b in learnt["merges"] if a in vocabulary and b in vocabulary and a + b in vocabulary]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(strip)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(list(more))
    return tokenizer


def whole_words() -> Tokenizer:
    """As no larger model has it, so that no rule for bytes fits."""
    words = sorted({word for line in PROSE for word in line.split()})
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(["[UNK]", "[END]", *words, "a"])}, "[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[UNK]", "[END]"])
    return tokenizer


def write(
    folder: Path,
    tokenizer: Tokenizer | Callable[[], Tokenizer],
    template: str | None = CHATML,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """A model folder without a model."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizer if isinstance(tokenizer, Tokenizer) else tokenizer()
    made.save(str(folder / "tokenizer.json"))
    shown = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **fields}
    shown |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(shown))
    (folder / "config.json").write_text(json.dumps(config or {}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
