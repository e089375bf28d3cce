"""Real coding agents against a running Marathon: `python scripts/agents.py [--only codex] [--cache FOLDER]`.

Each agent is installed by npm into a cache folder of its own and gets an empty home and the lines that
`marathon agents` prints. The model says a script (`loadtests.zoo.scripted`): so the agent's calls, and what must come
of them, are known beforehand (`coding_agents.py`). The engine is killed twice while the last answer is on its way; in
the runs of compaction the conversation outgrows the context instead. The exit code is the number of failed runs.
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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from coding_agents import AGENTS, PROMPT, Agent  # noqa: E402

from loadtests import harness  # noqa: E402
from server.config.cache_folder import cache_folder  # noqa: E402

SECONDS = 240
CACHED = 0.95  # of a later turn's prompt
TOKENS = "marathon_generation_tokens_total"


def installed(agent: Agent, cache: Path) -> Path:
    """The folder of the agent's commands, made once a version."""
    folder = cache / agent.folder
    note, wanted = folder / "package.txt", " ".join(agent.packages)
    if not (note.exists() and note.read_text(encoding="utf-8") == wanted):
        folder.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *agent.packages]
        subprocess.run(npm, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        note.write_text(wanted, encoding="utf-8")
    return folder / "node_modules" / ".bin"


def scripted(folder: Path, agent: Agent) -> Path:
    """The model, written by a child process: this one never touches MLX."""
    scripts = folder / "scripts.json"
    scripts.write_text(json.dumps(agent.scripts), encoding="utf-8")
    cues = [word for name, words in agent.cues.items() for word in ("--cue", name, words)]
    command = [sys.executable, "-m", "loadtests.zoo.scripted", str(scripts), str(folder / "model"), *cues]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return folder / "model"


def trial(agent: Agent, cache: Path, folder: Path) -> list[str]:
    """What is wrong."""
    commands = installed(agent, cache)
    home = folder / "home"
    (home / "work").mkdir(parents=True)
    with harness.marathon(scripted(folder, agent), folder / "log", context=agent.context) as server:
        command, more = agent.command(commands, home, f"http://127.0.0.1:{server.port}")
        environment = own_environment(home, commands) | more
        with struck(server, agent.strikes) as struck_at:
            said = _run(command, environment, home / "work")
        for prompt in agent.later:
            again = [prompt if word == PROMPT else word for word in command]
            said += _run(again, environment, home / "work")
        log = server.log.read_text(encoding="utf-8")
    found = [*agent.faults(home, said), *route_faults(log, agent), *context_faults(log, agent)]
    if len(struck_at) < len(agent.strikes):
        found.append(f"the engine was killed {len(struck_at)} times, not {len(agent.strikes)}")
    if found:
        print(said[-4000:])
    return found


def own_environment(home: Path, commands: Path) -> dict[str, str]:
    """Without proxies and Marathon's own settings; agents look for their configuration in HOME and PWD."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    path = os.pathsep.join([str(commands), os.environ["PATH"]])
    return kept | {"HOME": str(home), "XDG_DATA_HOME": str(home / "data"), "PWD": str(home / "work"), "PATH": path}


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
def struck(server: harness.Server, strikes: tuple[int, ...]) -> Iterator[list[int]]:
    """The engine is killed as the answers reach so many tokens; gives its pids."""
    over = threading.Event()
    pids: list[int] = []
    thread = threading.Thread(target=_strike, args=(server, strikes, over, pids))
    thread.start()
    try:
        yield pids
    finally:
        over.set()
        thread.join()


def _strike(server: harness.Server, strikes: tuple[int, ...], over: threading.Event, pids: list[int]) -> None:
    for tokens in strikes:
        while sum(server.metric(TOKENS).values()) < tokens:
            if over.wait(0.01):
                return
        while (pid := server.engine_pid()) is None or pid in pids:
            if over.wait(0.05):
                return
        pids.append(pid)
        os.kill(pid, signal.SIGKILL)


def context_faults(log: str, agent: Agent) -> Iterator[str]:
    """A run that compacts has a prompt that is shorter than the one before. In any other each later turn reads nearly
    all of its prompt from the cache; what isn't sent back, or moves, shows."""
    turns = [
        (int(prompt), int(cached)) for prompt, cached in re.findall(r"prompt_tokens=(\d+) cached_tokens=(\d+)", log)
    ]
    if agent.compacts:
        if all(before[0] < after[0] for before, after in pairwise(turns)):
            yield "no prompt is shorter than the one before: nothing was compacted"
        return
    for number, (prompt, cached) in enumerate(turns[agent.first :], agent.first + 1):
        if cached < CACHED * prompt:
            yield f"turn {number} read {cached} of {prompt} tokens from the cache"


def route_faults(log: str, agent: Agent) -> Iterator[str]:
    """Each of the agent's routes was asked, and every request was answered with 200, or one refused where one is to
    be."""
    answers = re.findall(r"POST (\S+) (\d+) ", log)
    asked = {route for route, _ in answers}
    yield from (f"{route} wasn't asked" for route in agent.routes if route not in asked)
    statuses = [status for _, status in answers if status != "200"]
    if statuses != ["400"] * agent.refused:
        yield f"besides 200 the statuses were {statuses}"


def main() -> int:
    names = [agent.name for agent in AGENTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="which runs")
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
