"""The coding agents that `scripts/agents.py` runs: what their model says, how each is started, what must come of it.

Owns no process. A script's turns are what the model says one after the other (`loadtests.zoo.scripted`); an agent that
compacts its conversation asks for a summary in words of its own, which are the cue of another script.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from loadtests.zoo.scripted import Scripts
from server.agents import configuration

CONTEXT = 65_536
SMALL_CONTEXT = 40_000  # of a server that refuses what an agent with a wrong idea of it sends
WORDS = 1500  # of the last answer
STRIKES = (300, 800)  # tokens of all answers at which the engine is killed
PROMPT = "SCRIPT:ab Do as you are told."
PATCH = "*** Begin Patch\n*** Add File: patched.txt\n+by a patch\n*** End Patch\n"
COMPACTED = "All is done behind it."

Command = tuple[list[str], dict[str, str]]  # the words of a command, and what its environment needs besides


@dataclass(frozen=True, slots=True)
class Agent:
    """One run of an agent: npm's packages of it, the scripts of its model with their cues, how it is started, which
    faults its folder, what it printed and the server's log show.

    `strikes`: tokens of all answers at which the engine is killed. `first`: how many requests at the beginning have a
    prompt of their own; the later ones read nearly all of theirs from the cache, unless `compacts`. `refused`: an
    answer of 400 belongs to the run. `later`: prompts with which the agent is run again afterwards."""

    name: str
    folder: str
    packages: tuple[str, ...]
    scripts: Scripts
    command: Callable[[Path, Path, str], Command]
    faults: Callable[[Path, str], Iterator[str]]
    routes: tuple[str, ...]
    cues: dict[str, str] = field(default_factory=dict)
    context: int = CONTEXT
    strikes: tuple[int, ...] = ()
    first: int = 1
    compacts: bool = False
    refused: bool = False
    later: tuple[str, ...] = ()


def call(name: str, **arguments: str) -> list[str]:
    """A call in three pieces, so that it is cut in the middle."""
    text = json.dumps({"name": name, "arguments": arguments})
    return ["<tool_call>" + text[:20], text[20:30], text[30:] + "</tool_call>"]


def last_answer() -> list[str]:
    return [f" word{number}" for number in range(WORDS)]


def scripts_of(turns: list[list[str]], **others: list[list[str]]) -> Scripts:
    return {"dd": [["Hello", " there, friend."]], "ab": turns, **others}


def written_faults(home: Path, **texts: str) -> Iterator[str]:
    """Files of the work folder that don't hold what the agent was to write; `_` stands for the dot of a name."""
    for name, text in texts.items():
        file = home / "work" / name.replace("_", ".")
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            yield f"{file.name} isn't what the agent was to write"


# ---------------------------------------------------------------- compaction
def filling(shell: str, argument: str) -> list[list[str]]:
    """Turns that read much, one after the other; the end isn't reached where the conversation is compacted before."""
    reads = [f"seq {1000 * n} {1000 * n + 2500} | tr '\\n' ' '" for n in range(8)]
    return [
        *([f"<think>Part {n}.</think>", *call(shell, **{argument: read})] for n, read in enumerate(reads)),
        ["The end."],
    ]


def compaction(shell: str, argument: str) -> Scripts:
    """The summary begins the script that goes on; an agent may keep the last turn beside the summary."""
    first, again = (call(shell, **{argument: f"echo {words} > after.txt"}) for words in ("behind it", "'behind it'"))
    summary = ["<summary>Files", " were read.", " SCRIPT:af Go on.</summary>"]
    done = [COMPACTED[:7], COMPACTED[7:]]
    return scripts_of(filling(shell, argument), cc=[summary], af=[first, again, done])


def compaction_faults(home: Path, said: str) -> Iterator[str]:
    yield from written_faults(home, after_txt="behind it\n")
    if COMPACTED not in said:
        yield "the conversation didn't go on behind the summary"
    if "The end." in said:
        yield "nothing was compacted"


# ---------------------------------------------------------------- Codex
CODEX_SCRIPT = [
    ["<think>I make", " a file.</think>", "One moment.", *call("exec_command", cmd="echo by a call > made.txt")],
    ["<think>I read", " it.</think>", *call("exec_command", cmd="cat made.txt")],
    ["<think>I patch.</think>", *call("apply_patch", input=PATCH)],
    ["<think>I close.</think>", *call("multi_agent_v1__close_agent", target="nobody")],
    last_answer(),
]


def codex(folder: Path, home: Path, url: str) -> Command:
    catalog = json.dumps({"models": [configuration.codex_model(CONTEXT)]})
    (home / configuration.CATALOG).write_text(catalog, encoding="utf-8")
    lines = "show_raw_agent_reasoning = true\n" + configuration.codex(url, CONTEXT)
    (home / "config.toml").write_text(lines, encoding="utf-8")
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-o", str(home / "last.txt")]
    return [str(folder / "codex"), "exec", *flags, PROMPT], {"CODEX_HOME": str(home)}


def codex_faults(home: Path, said: str) -> Iterator[str]:
    yield from written_faults(home, made_txt="by a call\n", patched_txt="by a patch\n")
    for words in ("I make a file.", "I read it.", "I patch.", "I close."):
        if words not in said:
            yield f"the thought {words!r} isn't shown"
    if "unsupported" in said.lower():
        yield "a call was unsupported"
    last = home / "last.txt"
    if not last.exists() or last.read_text(encoding="utf-8").strip() != "".join(last_answer()).strip():
        yield "the last answer didn't come out word for word"


def compacting_codex(folder: Path, home: Path, url: str) -> Command:
    """Codex that compacts where two parts have been read."""
    command, environment = codex(folder, home, url)
    file = home / "config.toml"
    file.write_text("model_auto_compact_token_limit = 20000\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    return command, environment


# ---------------------------------------------------------------- Claude Code
CLAUDE_SCRIPT = [
    ["<think>I make", " a file.</think>", "One moment.", *call("Bash", command="echo by a call > made.txt")],
    ["<think>I read", " it.</think>", *call("Read", file_path="made.txt")],
    ["<think>I look.</think>", *call("ToolSearch", query="select:CronList")],
    ["<think>I list.</think>", *call("CronList")],
    last_answer(),
]


def claude(folder: Path, home: Path, url: str) -> Command:
    tools = ["--allowedTools", "Bash", "Read", "ToolSearch", "CronList"]
    said = ["--verbose", "--output-format", "stream-json"]
    environment = exported(configuration.claude_code(url, CONTEXT, configuration.KEY))
    own = {"ENABLE_TOOL_SEARCH": "true", "CLAUDE_CONFIG_DIR": str(home / "claude")}
    return [str(folder / "claude"), "-p", PROMPT, *said, *tools], environment | own


def exported(lines: str) -> dict[str, str]:
    """`export A=b` lines as an environment."""
    return dict(re.findall(r"^export (\w+)=(.*)$", lines, re.MULTILINE))


def uninformed_claude(folder: Path, home: Path, url: str) -> Command:
    """Claude Code without a setting for the context, and finds out by a refusal."""
    command, environment = claude(folder, home, url)
    del environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]
    return command, environment


def claude_faults(home: Path, said: str) -> Iterator[str]:
    yield from written_faults(home, made_txt="by a call\n")
    for words in ("I make a file.", "I read it.", "I look.", "I list."):
        if words not in said:
            yield f"the thought {words!r} isn't shown"
    if '"tool_reference"' not in said:
        yield "the deferred tool wasn't found"
    if "No such tool" in said or '"is_error":true' in said:
        yield "a call failed"
    if "## Context Usage" not in said or not re.search(r"\| System tools \| [1-9]", said):
        yield "/context doesn't count the tools"
    if "".join(last_answer()).strip() not in said:
        yield "the last answer didn't come out word for word"


# ---------------------------------------------------------------- agents that speak chat completions
def shell_script(shell: str, *reading: str) -> Scripts:
    made = call(shell, command="echo by a call > made.txt", description="makes a file")
    return scripts_of([["<think>I make", " a file.</think>", "One moment.", *made], [*reading], last_answer()])


def opencode(folder: Path, home: Path, url: str) -> Command:
    lines = configuration.opencode(url, CONTEXT, configuration.KEY)
    (home / "work" / "opencode.json").write_text(lines, encoding="utf-8")
    return [str(folder / "opencode"), "run", PROMPT], {}


def qwen_code(folder: Path, home: Path, url: str) -> Command:
    return [str(folder / "qwen"), "-p", PROMPT, "--yolo"], exported(configuration.openai(url, configuration.KEY))


def chat_agent_faults(home: Path, said: str) -> Iterator[str]:
    yield from written_faults(home, made_txt="by a call\n")
    if "".join(last_answer()).strip() not in said:
        yield "the last answer didn't come out word for word"


NODE = "node@22"  # what wants a newer Node than the machine's brings it
CODEX = ("@openai/codex@0.171.0",)
CLAUDE = ("@anthropic-ai/claude-code@2.1.332",)
CODEX_CUE = {"cc": "CONTEXT CHECKPOINT COMPACTION"}
CLAUDE_CUE = {"cc": "Your task is to create a detailed summary"}
RESPONSES, MESSAGES, CHAT = ("/v1/responses",), ("/v1/messages",), ("/v1/chat/completions",)
AGENTS = [
    Agent("codex", "codex", CODEX, scripts_of(CODEX_SCRIPT), codex, codex_faults, RESPONSES, strikes=STRIKES),
    Agent(
        "codex-compaction",
        "codex",
        CODEX,
        compaction("exec_command", "cmd"),
        compacting_codex,
        compaction_faults,
        RESPONSES,
        cues=CODEX_CUE,
        compacts=True,
    ),
    Agent(
        "claude",
        "claude",
        CLAUDE,
        scripts_of(CLAUDE_SCRIPT),
        claude,
        claude_faults,
        (*MESSAGES, "/v1/messages/count_tokens"),
        strikes=STRIKES,
        later=("/context",),
    ),
    Agent(
        "claude-compaction",
        "claude",
        CLAUDE,
        compaction("Bash", "command"),
        claude,
        compaction_faults,
        MESSAGES,
        cues=CLAUDE_CUE,
        compacts=True,
    ),
    Agent(
        "claude-refused",
        "claude",
        CLAUDE,
        compaction("Bash", "command"),
        uninformed_claude,
        compaction_faults,
        MESSAGES,
        cues=CLAUDE_CUE,
        context=SMALL_CONTEXT,
        compacts=True,
        refused=True,
    ),
    Agent(
        "opencode",
        "opencode",
        ("opencode-ai@1.18.33",),
        shell_script("bash", *call("read", filePath="made.txt")),
        opencode,
        chat_agent_faults,
        CHAT,
        strikes=STRIKES,
        first=2,  # it asks for a title, too
    ),
    Agent(
        "qwen-code",
        "qwen-code",
        ("@qwen-code/qwen-code@0.24.4", NODE),
        shell_script("run_shell_command", *call("run_shell_command", command="cat made.txt", description="reads it")),
        qwen_code,
        chat_agent_faults,
        CHAT,
        strikes=STRIKES,
    ),
]
