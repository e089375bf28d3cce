"""A model that says what scripts say: `python -m loadtests.zoo.scripted SCRIPTS.json FOLDER [--loose]`.

For agents and clients whose next request depends on the answer: thoughts, texts and calls are known beforehand, and
still go through the served model's own template, decode loop, call parser and resume. Owns the writing of such a model;
runs in a child process or a test, never in the server. Needs numpy alone.

Scripts are named by two letters and consist of turns, a turn of pieces, one token each. A user's text that holds
`SCRIPT:ab` begins script `ab`; each further turn of the assistant's is its next one, and the last one again behind its
end. Without such a text script `dd` is said. A script with a cue is also begun by a user's text that holds the cue's
words (`--cue ab WORDS`): for requests that an agent makes by itself. Each turn's first token is chosen by a mark that
the template writes at the end of the prompt; each piece is a token of its own that is followed by the next one.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Scripts = Mapping[str, Sequence[Sequence[str]]]

TOKENIZER = Path(__file__).parents[2] / "tests" / "data" / "tokenizer"
DEFAULT = "dd"
END = 2  # <|im_end|>
VOCABULARY = 2048  # of the tokenizer, before the scripts
CONTEXT = 131_072
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # spelled: as tokens each could follow one token only
SURE = 50.0  # the logit of the only token that can follow
_SMALL = 64  # every other dimension of the model

_SYSTEM = """{%- if tools or messages[0].role == 'system' %}<|im_start|>system
{%- if messages[0].role == 'system' %}{{ '\n' + messages[0].content }}{% endif %}
{%- if tools %}
<tools>{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
</tools>
To call one, write <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}<|im_end|>
{% endif %}"""
_ONLY_FIRST = (
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}"
    "{% endif %}"
)
_MARK = "{{ '<|' ~ at.name ~ ([at.turn, last[at.name]] | min) ~ '|>' }}"
_OTHERS = """{%- for m in messages %}ONLY_FIRST
{%- if m.role == 'user' and 'SCRIPT:' in m.content %}
{%- set named = m.content.split('SCRIPT:')[-1][:2] %}
{%- if named in last %}{% set at.name = named %}{% set at.turn = 0 %}{% endif %}{% endif %}
{%- if m.role == 'user' %}{% for named, words in cues.items() %}
{%- if words in m.content %}{% set at.name = named %}{% set at.turn = 0 %}{% endif %}{% endfor %}{% endif %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}MARK
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% set at.turn = at.turn + 1 %}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- elif m.role != 'system' or not loop.first %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}MARK{% endif %}"""


def template(scripts: Scripts, *, strict: bool = True, cues: Mapping[str, str] | None = None) -> str:
    """Shows everything where it is said, tools, thoughts and calls. `strict`: it refuses a system message that isn't
    the first one, as many models' templates do. `cues`: script → words that begin it."""
    last = ", ".join(f"'{name}': {len(turns) - 1}" for name, turns in scripts.items())
    begin = f"{{%- set last = {{{last}}} %}}{{%- set at = namespace(name='{DEFAULT}', turn=0) %}}"
    begin += f"{{%- set cues = {json.dumps(cues or {})} %}}"
    others = _OTHERS.replace("ONLY_FIRST", _ONLY_FIRST if strict else "").replace("MARK", _MARK)
    return begin + _SYSTEM + others


def write(folder: Path, scripts: Scripts, *, strict: bool = True, cues: Mapping[str, str] | None = None) -> Path:
    """The model's folder. `scripts` must have one called `dd`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text("utf-8"))
    follows = dict(_chains(scripts, tokenizer["added_tokens"], {*tokenizer["model"]["vocab"], *TAGS}))
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text("utf-8"))
    settings |= {"chat_template": template(scripts, strict=strict, cues=cues), "model_max_length": CONTEXT}
    width = _SMALL * (2 + len(follows) // _SMALL)
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        "config.json": _config(VOCABULARY + len(follows), width),
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    save(folder / "model.safetensors", _weights(follows, VOCABULARY + len(follows), width))
    return folder


def _chains(scripts: Scripts, added: list[dict[str, Any]], taken: set[str]) -> Iterator[tuple[int, int]]:
    """Pairs of a token and the one that follows it; the tokens are added to those whose texts are `taken`."""
    for name, turns in scripts.items():
        for number, pieces in enumerate(turns):
            before = _add(f"<|{name}{number}|>", added, special=True)
            for piece in _distinct(pieces, taken):
                token = _add(piece, added, special=False)
                yield before, token
                before = token
            yield before, END


def _distinct(pieces: Sequence[str], taken: set[str]) -> Iterator[str]:
    """Pieces that aren't tokens yet: one that is one goes together with the next."""
    held = ""
    for piece in pieces:
        held += piece
        if held not in taken:
            taken.add(held)
            yield held
            held = ""
    if held:
        raise ValueError(f"a turn can't end with {held!r}, which is a token already")


def _add(content: str, added: list[dict[str, Any]], *, special: bool) -> int:
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    token = VOCABULARY + len(added) - len(_own(added))
    added.append({"id": token, "content": content, "special": special, **flags})
    return token


def _own(added: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tokenizer's own added tokens."""
    return [token for token in added if token["id"] < VOCABULARY]


# ---------------------------------------------------------------- the network
def _config(words: int, width: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": 1,
        "intermediate_size": _SMALL,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": _SMALL,
        "rms_norm_eps": 1e-6,
        "vocab_size": words,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": END,
    }


def _weights(follows: Mapping[int, int], words: int, width: int) -> dict[str, np.ndarray]:
    """One layer that adds nothing; embedding and head are a table from a token to the one that follows. Each scripted
    token has a dimension of its own, all others share the last one, behind which the answer ends."""
    embedding = np.zeros((words, width), np.float32)
    head = np.zeros((words, width), np.float32)
    embedding[:, -1] = 1
    head[END, -1] = SURE
    for place, (token, after) in enumerate(follows.items()):
        embedding[token] = 0
        embedding[token, place] = 1
        head[after, place] = SURE
    attention = dict.fromkeys(["q_proj", "k_proj", "v_proj"], (_SMALL, width)) | {"o_proj": (width, _SMALL)}
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {"mlp.gate_proj": (_SMALL, width), "mlp.up_proj": (_SMALL, width), "mlp.down_proj": (width, _SMALL)}
    zeros = {f"model.layers.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    made: dict[str, np.ndarray] = dict(zeros)
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        made[f"model.{name}.weight"] = np.ones(width, np.float32)
    return made | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}


def save(file: Path, weights: Mapping[str, np.ndarray]) -> None:
    """The safetensors form: the length of a JSON head, the head, the arrays of float32."""
    head: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, array in weights.items():
        head[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    encoded = json.dumps(head).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for array in weights.values():
            out.write(array.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, help="a JSON object: name → turns → pieces")
    parser.add_argument("folder", type=Path, help="where the model is written")
    parser.add_argument("--loose", action="store_true", help="the template takes system messages anywhere")
    parser.add_argument(
        "--cue", nargs=2, action="append", default=[], metavar=("NAME", "WORDS"), help="words that begin a script"
    )
    arguments = parser.parse_args()
    scripts = json.loads(arguments.scripts.read_text("utf-8"))
    print(write(arguments.folder, scripts, strict=not arguments.loose, cues=dict(arguments.cue)))


if __name__ == "__main__":
    main()
