"""How long a death keeps a long context waiting: `python -m loadtests.resumes [--model FOLDER] [--prompt 30000]`.

One server with `--kv-disk` and one without. In each a stream with a short prompt is killed under way, whose pause is
the start of an engine and little more, and then one with a long prompt; several times each, by turns. Prints every
pause and the medians. The exit code is 0 when the long stream with KV on disk waits no longer than the short one and
`--slack` seconds. Never imports MLX.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import monotonic

from loadtests import harness
from loadtests.chaos.sse_client import Account, ask, completion
from loadtests.harness import Failed, Server
from loadtests.zoo.models import obtain

SHORT = 20  # tokens of the short prompt
UNREAD_SECONDS = 0.05  # in which tokens from before the kill may still arrive
LARGEST_ID = 1900
AMPLE = "16GiB"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder [a tiny llama]")
    parser.add_argument("--shape", default="cheap", help="a model of loadtests.zoo, where no folder is given")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of the long prompt")
    parser.add_argument("--tokens", type=int, default=200, help="of its answer before the kill")
    parser.add_argument("--kills", type=int, default=3, help="of each stream")
    parser.add_argument("--slack", type=float, default=2.0, help="seconds that a long stream may wait longer")
    parser.add_argument("--without", action="store_true", help="also with no KV on disk")
    return parser.parse_args(arguments)


def main() -> int:
    asked = parse()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = asked.model or obtain(asked.shape, Path(folder))
        servers = {"KV on disk": AMPLE} | ({"none on disk": 0} if asked.without else {})
        found = {}
        for name, limit in servers.items():
            kept = {"kv_disk": limit, "kv_disk_folder": Path(folder) / "kv", "journal": "off", "access_log": "off"}
            server = stack.enter_context(harness.marathon(model, Path(folder) / f"{limit}.log", **kept))
            found[name] = pauses(name, server, asked)
    short, long = found["KV on disk"]
    for name, (start, whole) in found.items():
        print(f"{name}: median pause {start:.2f} s with {SHORT} tokens, {whole:.2f} s with {asked.prompt}")
    return int(long > short + asked.slack)


def pauses(name: str, server: Server, asked: argparse.Namespace) -> tuple[float, float]:
    """The median pauses of the short and the long stream."""
    short, long = [], []
    for number in range(asked.kills):
        short.append(asyncio.run(pause(server, ids(SHORT, number), SHORT)))
        long.append(asyncio.run(pause(server, ids(asked.prompt, number), asked.tokens)))
        print(f"{name}: {short[-1]:.2f} s with {SHORT} tokens, {long[-1]:.2f} s with {asked.prompt}", flush=True)
    return median(short), median(long)


def ids(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, LARGEST_ID) for _ in range(length)]


async def pause(server: Server, prompt: list[int], tokens: int) -> float:
    """Kill the engine once an answer has so many tokens; the silence until it goes on. Raises Failed."""
    account = Account(completion(prompt, tokens + 1000))
    task = asyncio.create_task(ask(server.port, account.body, account))
    while len(account.tokens) < tokens and not account.ended:
        await asyncio.sleep(0.002)
    engine = await asyncio.to_thread(server.engine_pid)
    if engine is None or account.ended:
        raise Failed(f"nothing to kill: {account.trouble()}")
    os.kill(engine, signal.SIGKILL)
    killed = monotonic()
    while (gap := account.gap_at(killed + UNREAD_SECONDS)) is None and not account.ended:
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait([task])
    if gap is None:
        raise Failed(f"the answer didn't go on: {account.trouble()}")
    return gap


if __name__ == "__main__":
    sys.exit(main())
