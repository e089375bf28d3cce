"""Real coding agents against a running Marathon: `python scripts/agents.py [--only codex] [--cache FOLDER]`.

Each agent is installed by npm into a cache folder of its own and gets an empty home. The model says a script
(`loadtests.zoo.scripted`): so the agent's calls, and what must come of them, are known beforehand. The engine is killed
twice while the last answer is on its way. The exit code is the number of agents that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from loadtests import harness  # noqa: E402
from server.agents.configuration import codex_model  # noqa: E402
from server.config.cache_folder import cache_folder  # noqa: E402

SECONDS = 240
CONTEXT = 65_536
WORDS = 1500  # of the last answer
STRIKES = (300, 800)  # tokens of all answers at which the engine is killed
CACHED = 0.95  # of a later turn's prompt
PROMPT = "SCRIPT:ab Do as you are told."
TOKENS = "marathon_generation_tokens_total"
PATCH = "*** Begin Patch\n*** Add File: patched.txt\n+by a patch\n*** End Patch\n"


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent: npm's name of it, the turns that its model says, how it is run and judged, which routes it asks, and
    the prompts with which it is run again afterwards."""

    name: str
    package: str
    script: list[list[str]]
    command: Callable[[Path, Path, str], tuple[list[str], dict[str, str]]]
    faults: Callable[[Path, str], Iterator[str]]
    routes: tuple[str, ...]
    later: tuple[str, ...] = ()


# ---------------------------------------------------------------- Codex
def call(name: str, **arguments: str) -> list[str]:
    """A call in three pieces, so that it is cut in the middle."""
    text = json.dumps({"name": name, "arguments": arguments})
    return ["<tool_call>" + text[:20], text[20:30], text[30:] + "</tool_call>"]


def last_answer() -> list[str]:
    return [f" word{number}" for number in range(WORDS)]


CODEX_SCRIPT = [
    ["<think>I make", " a file.</think>", "One moment.", *call("exec_command", cmd="echo by a call > made.txt")],
    ["<think>I read", " it.</think>", *call("exec_command", cmd="cat made.txt")],
    ["<think>I patch.</think>", *call("apply_patch", input=PATCH)],
    ["<think>I close.</think>", *call("multi_agent_v1__close_agent", target="nobody")],
    last_answer(),
]


def codex(folder: Path, home: Path, url: str) -> tuple[list[str], dict[str, str]]:
    """The command, and what its environment needs."""
    catalog = home / "catalog.json"
    catalog.write_text(json.dumps({"models": [codex_model(CONTEXT)]}), encoding="utf-8")
    settings = f"""model = "default"
model_provider = "marathon"
model_context_window = {CONTEXT}
model_catalog_json = "{catalog}"
show_raw_agent_reasoning = true
[model_providers.marathon]
name = "Marathon"
base_url = "{url}"
wire_api = "responses"
"""
    (home / "config.toml").write_text(settings, encoding="utf-8")
    program = folder / "node_modules" / ".bin" / "codex"
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-o", str(home / "last.txt")]
    return [str(program), "exec", *flags, PROMPT], {"CODEX_HOME": str(home)}


def codex_faults(home: Path, said: str) -> Iterator[str]:
    work = home / "work"
    for name, text in (("made.txt", "by a call\n"), ("patched.txt", "by a patch\n")):
        if not (work / name).exists() or (work / name).read_text(encoding="utf-8") != text:
            yield f"{name} isn't what the agent was to write"
    for words in ("I make a file.", "I read it.", "I patch.", "I close."):
        if words not in said:
            yield f"the thought {words!r} isn't shown"
    if "unsupported" in said.lower():
        yield "a call was unsupported"
    last = home / "last.txt"
    if not last.exists() or last.read_text(encoding="utf-8").strip() != "".join(last_answer()).strip():
        yield "the last answer didn't come out word for word"


# ---------------------------------------------------------------- Claude Code
CLAUDE_SCRIPT = [
    ["<think>I make", " a file.</think>", "One moment.", *call("Bash", command="echo by a call > made.txt")],
    ["<think>I read", " it.</think>", *call("Read", file_path="made.txt")],
    ["<think>I look.</think>", *call("ToolSearch", query="select:CronList")],
    ["<think>I list.</think>", *call("CronList")],
    last_answer(),
]


def claude(folder: Path, home: Path, url: str) -> tuple[list[str], dict[str, str]]:
    """The command, and what its environment needs."""
    program = folder / "node_modules" / ".bin" / "claude"
    tools = ["--allowedTools", "Bash", "Read", "ToolSearch", "CronList"]
    said = ["--verbose", "--output-format", "stream-json"]
    return [str(program), "-p", PROMPT, *said, *tools], {
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "default",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "default",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ENABLE_TOOL_SEARCH": "true",
        "CLAUDE_CONFIG_DIR": str(home / "claude"),
    }


def claude_faults(home: Path, said: str) -> Iterator[str]:
    made = home / "work" / "made.txt"
    if not made.exists() or made.read_text(encoding="utf-8") != "by a call\n":
        yield "made.txt isn't what the agent was to write"
    for words in ("I make a file.", "I read it.", "I look.", "I list."):
        if words not in said:
            yield f"the thought {words!r} isn't told"
    if '"tool_reference"' not in said:
        yield "the deferred tool wasn't found"
    if "No such tool" in said or '"is_error":true' in said:
        yield "a call failed"
    if "## Context Usage" not in said or not re.search(r"\| System tools \| [1-9]", said):
        yield "/context doesn't count the tools"
    if "".join(last_answer()).strip() not in said:
        yield "the last answer didn't come out word for word"


AGENTS = [
    Agent("codex", "@openai/codex@0.171.0", CODEX_SCRIPT, codex, codex_faults, ("/v1/responses",)),
    Agent(
        "claude",
        "@anthropic-ai/claude-code@2.1.197",
        CLAUDE_SCRIPT,
        claude,
        claude_faults,
        ("/v1/messages", "/v1/messages/count_tokens"),
        later=("/context",),
    ),
]


# ---------------------------------------------------------------- the run
def installed(agent: Agent, cache: Path) -> Path:
    """The agent's folder, made once a version."""
    folder = cache / agent.name
    note = folder / "package.txt"
    if not (note.exists() and note.read_text(encoding="utf-8") == agent.package):
        folder.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), agent.package]
        subprocess.run(npm, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        note.write_text(agent.package, encoding="utf-8")
    return folder


def scripted(folder: Path, script: list[list[str]]) -> Path:
    """The model, written by a child process: this one never touches MLX."""
    scripts = folder / "scripts.json"
    scripts.write_text(json.dumps({"dd": [["Hello", " there, friend."]], "ab": script}), encoding="utf-8")
    command = [sys.executable, "-m", "loadtests.zoo.scripted", str(scripts), str(folder / "model")]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return folder / "model"


def trial(agent: Agent, cache: Path, folder: Path) -> list[str]:
    """What is wrong."""
    program = installed(agent, cache)
    home = folder / "home"
    (home / "work").mkdir(parents=True)
    with harness.marathon(scripted(folder, agent.script), folder / "log", context=CONTEXT) as server:
        command, more = agent.command(program, home, f"http://127.0.0.1:{server.port}/v1")
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        with struck(server) as struck_at:
            said = _run(command, kept | {"HOME": str(home)} | more, home / "work")
        for prompt in agent.later:
            again = [prompt if word == PROMPT else word for word in command]
            said += _run(again, kept | {"HOME": str(home)} | more, home / "work")
        log = server.log.read_text(encoding="utf-8")
        found = [*agent.faults(home, said), *cache_faults(log), *route_faults(log, agent.routes)]
        if len(struck_at) < len(STRIKES):
            found.append(f"the engine was killed {len(struck_at)} times, not {len(STRIKES)}")
    if found:
        print(said[-4000:])
    return found


def _run(command: list[str], environment: dict[str, str], work: Path) -> str:
    try:
        done = subprocess.run(
            command,
            env=environment,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        return f"no end after {SECONDS} s: {error.stdout!r}"
    return done.stdout + done.stderr


@contextmanager
def struck(server: harness.Server) -> Iterator[list[int]]:
    """The engine is killed as the answers reach so many tokens; gives its pids."""
    over = threading.Event()
    pids: list[int] = []
    thread = threading.Thread(target=_strike, args=(server, over, pids))
    thread.start()
    try:
        yield pids
    finally:
        over.set()
        thread.join()


def _strike(server: harness.Server, over: threading.Event, pids: list[int]) -> None:
    for tokens in STRIKES:
        while sum(server.metric(TOKENS).values()) < tokens:
            if over.wait(0.01):
                return
        while (pid := server.engine_pid()) is None or pid in pids:
            if over.wait(0.05):
                return
        pids.append(pid)
        os.kill(pid, signal.SIGKILL)


def cache_faults(log: str) -> Iterator[str]:
    """Each turn but the first reads nearly all of its prompt from the cache; what isn't sent back, or moves, shows."""
    turns = re.findall(r"prompt_tokens=(\d+) cached_tokens=(\d+)", log)
    for number, (prompt, cached) in enumerate(turns[1:], 2):
        if int(cached) < CACHED * int(prompt):
            yield f"turn {number} read {cached} of {prompt} tokens from the cache"


def route_faults(log: str, routes: tuple[str, ...]) -> Iterator[str]:
    """Each of these routes was asked, and every request was answered with 200."""
    answers = re.findall(r"POST (\S+) (\d+) ", log)
    asked = {route for route, _ in answers}
    yield from (f"{route} wasn't asked" for route in routes if route not in asked)
    yield from (f"{route} answered {status}" for route, status in answers if status != "200")


def main() -> int:
    names = [agent.name for agent in AGENTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="which agents")
    parser.add_argument("--cache", type=Path, default=cache_folder() / "agents", help="where agents are kept")
    arguments = parser.parse_args()
    failed = 0
    for agent in [one for one in AGENTS if one.name in arguments.only]:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = trial(agent, arguments.cache, Path(folder))
        failed += bool(found)
        print(f"{'FAILED' if found else 'passed'}  {agent.name}  {time.monotonic() - began:.1f} s", flush=True)
        print("".join(f"        {fault}\n" for fault in found), end="", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
