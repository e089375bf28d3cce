"""Real clients against a running Marathon: `python scripts/clients.py [--only openai-3 …] [--url URL --model ID]`.

Each client gets an environment of its own in a cache folder (a venv, or an npm folder), made once and again when its
requirements change, and runs its little program from tests/clients there. Without --url a Marathon is started on a tiny
model with random weights: what is checked is the protocol, and grammars make even that model call tools and write JSON.
Clients whose next request depends on the answer ask a second one, whose model says scripts (`loadtests.zoo.scripted`).
The exit code is the number of clients that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from loadtests import harness  # noqa: E402
from loadtests.zoo.models import obtain  # noqa: E402
from server.config.cache_folder import cache_folder  # noqa: E402

PROGRAMS = ROOT / "tests" / "clients"
SECONDS = 240
MODEL = "cheap"
SCRIPTED = "default"  # any model answers to it
NODE = "node@22"
KEY = "a-key-of-the-clients"


@dataclass(frozen=True, slots=True)
class Client:
    """One client; `requires` are pip's requirements, or npm's for a program that ends in .mjs. `scripted`: it asks the
    model that says scripts."""

    name: str
    program: str
    requires: tuple[str, ...]
    scripted: bool = False

    @property
    def node(self) -> bool:
        return self.program.endswith(".mjs")


CLIENTS = [
    Client("openai-1", "openai_python.py", ("openai>=1.109,<2",)),
    Client("openai-2", "openai_python.py", ("openai>=2,<3",)),
    Client("openai-3", "openai_python.py", ("openai>=3,<4",)),
    Client("responses", "responses_python.py", ("openai>=3,<4",)),
    Client("langchain", "langchain_chat.py", ("langchain-openai>=1",)),
    Client("litellm", "litellm_chat.py", ("litellm>=1.70",)),
    Client("pydantic-ai", "pydantic_ai_agent.py", ("pydantic-ai-slim[openai]>=2",)),
    Client("instructor", "instructor_models.py", ("instructor>=1.10",)),
    Client("llm", "llm_command.py", ("llm>=0.26",)),
    # Newer majors of these want Node 22, which npm has, too.
    Client("openai-node", "openai_node.mjs", ("openai@6", "zod@4")),
    Client("openai-node-7", "openai_node.mjs", ("openai@7", "zod@4", NODE)),
    Client("responses-node", "responses_node.mjs", ("openai@6", "zod@4")),
    Client("responses-node-7", "responses_node.mjs", ("openai@7", "zod@4", NODE)),
    Client("ai-sdk", "ai_sdk.mjs", ("ai@6", "@ai-sdk/openai-compatible@2", "zod@4")),
    Client("anthropic", "anthropic_python.py", ("anthropic>=2",), scripted=True),
    Client("anthropic-node", "anthropic_node.mjs", ("@anthropic-ai/sdk@1", "zod@4"), scripted=True),
    Client("background", "background_python.py", ("openai>=3,<4",), scripted=True),
    Client("background-node", "background_node.mjs", ("openai@6", "zod@4"), scripted=True),
    Client("openai-agents", "openai_agents.py", ("openai-agents>=0.24",), scripted=True),
    Client("pydantic-ai-routes", "pydantic_ai_routes.py", ("pydantic-ai-slim[openai,anthropic]>=2",), scripted=True),
    Client("litellm-routes", "litellm_routes.py", ("litellm[proxy]>=1.70", "anthropic"), scripted=True),
    Client("promptfoo", "promptfoo_eval.mjs", ("promptfoo@0.123", NODE), scripted=True),
]
LOOK_UP = '<tool_call>{"name": "look_up", "arguments": {"key": "oslo"}}</tool_call>'
SCRIPTS = {
    "dd": [["Hello", " there,", " friend."]],
    "ab": [
        ["<think>", "I look", " it up.", "</think>", "One", " moment.", *LOOK_UP.partition("look_up")],
        ["<think>I have", " it now.", "</think>It", " is", " Oslo."],
    ],
    "ho": [
        ['<tool_call>{"name": "transfer_to_', 'expert", "arguments": {}}</tool_call>'],
        ["The expert", " says Oslo."],
    ],
    "fi": [['<tool_call>\n{"name": "final_', 'result", "arguments": {"name": "Oslo"}}\n</tool_call>']],
    "js": [['{"name"', ': "Oslo"}']],
    "lo": [[f" word{number}" for number in range(10)]],
    "lg": [[f" word{number}" for number in range(300)]],
    "lx": [[f" word{number}" for number in range(4000)]],
}


def prepare(client: Client, cache: Path) -> Path:
    """The client's folder, complete. A note of what is in it tells when it must be made again."""
    folder, note = cache / client.name, cache / client.name / "requires.json"
    wanted = json.dumps([client.requires, sys.version_info[:2]])
    if not (note.exists() and note.read_text(encoding="utf-8") == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for command in install(client, folder):
            subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
        note.write_text(wanted, encoding="utf-8")
    return folder


def install(client: Client, folder: Path) -> list[list[str]]:
    if client.node:
        return [["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *client.requires]]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return [[sys.executable, "-m", "venv", str(folder)], [*pip, *client.requires]]


def node(folder: Path) -> Path:
    """The Node that the folder brings, else the machine's."""
    own = folder / "node_modules" / ".bin" / "node"
    return own if own.exists() else Path(shutil.which("node") or "node")


def run(client: Client, folder: Path, url: str, model: str) -> tuple[bool, str]:
    """Whether its program went through, and what it said."""
    program = PROGRAMS / client.program
    if client.node:  # packages are looked for beside the program
        program = Path(shutil.copy(program, folder / client.program))
    command = [str(node(folder)) if client.node else str(folder / "bin" / "python"), str(program)]
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    path = os.pathsep.join([str(node(folder).parent), os.environ["PATH"]])
    own = {"PATH": path, "MARATHON_CLIENT_URL": url, "MARATHON_CLIENT_MODEL": model, "MARATHON_CLIENT_KEY": KEY}
    try:
        done = subprocess.run(
            command, env=kept | own, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no end after {SECONDS} s"
    return done.returncode == 0, (done.stdout + done.stderr).strip()


@contextlib.contextmanager
def site(arguments: argparse.Namespace, cache: Path) -> Iterator[tuple[str, str]]:
    """(base URL, model id) of the server that is asked."""
    if arguments.url:
        yield arguments.url.rstrip("/"), arguments.model or "default"
        return
    folder = obtain(MODEL, cache)
    with harness.marathon(folder, cache / "marathon.log", api_key=KEY, journal=cache / "journal.db") as server:
        yield f"http://127.0.0.1:{server.port}/v1", MODEL


@contextlib.contextmanager
def scripted_site(cache: Path) -> Iterator[tuple[str, str]]:
    """(base URL, model id) of a server whose model says SCRIPTS; a child process writes the model."""
    scripts, folder = cache / "scripts.json", cache / "scripted"
    scripts.write_text(json.dumps(SCRIPTS), encoding="utf-8")
    command = [sys.executable, "-m", "loadtests.zoo.scripted", str(scripts), str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    with harness.marathon(folder, cache / "scripted.log", api_key=KEY, journal=cache / "scripted.db") as server:
        yield f"http://127.0.0.1:{server.port}/v1", SCRIPTED


def ask(clients: list[Client], cache: Path, url: str, model: str) -> int:
    """Run one client after the other; return how many failed."""
    failed = 0
    for client in clients:
        folder = prepare(client, cache)
        began = time.monotonic()
        passed, said = run(client, folder, url, model)
        failed += not passed
        print(f"{'passed' if passed else 'FAILED'}  {client.name}  {time.monotonic() - began:.1f} s", flush=True)
        print("\n".join("        " + line for line in said.splitlines()[-40:]), flush=True)
    return failed


def main() -> int:
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="which clients")
    parser.add_argument("--url", help="base URL of a running server, with /v1; default: one is started")
    parser.add_argument("--model", help="id of the model at --url")
    parser.add_argument("--cache", type=Path, default=cache_folder() / "clients", help="where environments are kept")
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    chosen = [client for client in CLIENTS if client.name in arguments.only]
    plain = [client for client in chosen if not client.scripted]
    scripted = [client for client in chosen if client.scripted]
    failed = 0
    if plain:
        with site(arguments, arguments.cache) as (url, model):
            failed += ask(plain, arguments.cache, url, model)
    if scripted:
        with scripted_site(arguments.cache) as (url, model):
            failed += ask(scripted, arguments.cache, url, model)
    return failed


if __name__ == "__main__":
    sys.exit(main())
