"""How long a death keeps a long context waiting: `python -m loadtests.resumes [--model FOLDER] [--prompt 30000]`.

One server with `--kv-disk` and one without. In each a stream with a short prompt is killed under way, whose pause is
the start of an engine and little more, and then one with a long prompt; several times each, by turns. Prints every
pause and the medians. The exit code is 0 when the long stream with KV on disk waits no longer than the short one and
`--slack` seconds. Never imports MLX.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from loadtests import harness
from loadtests.chaos.silence import silence_after_kill, wait_for_spare
from loadtests.chaos.sse_client import completion
from loadtests.harness import Server
from loadtests.warm import ids
from loadtests.zoo.models import obtain

SHORT = 20  # tokens of the short prompt
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
        short.append(silence(server, ids(SHORT, number), SHORT))
        long.append(silence(server, ids(asked.prompt, number), asked.tokens))
        print(f"{name}: {short[-1]:.2f} s with {SHORT} tokens, {long[-1]:.2f} s with {asked.prompt}", flush=True)
    return median(short), median(long)


def silence(server: Server, prompt: list[int], tokens: int) -> float:
    """Seconds until an answer goes on whose engine is killed under way, once the spare one is there."""
    wait_for_spare(server)
    return asyncio.run(silence_after_kill(server, completion(prompt, tokens + 1000), tokens))


if __name__ == "__main__":
    sys.exit(main())
