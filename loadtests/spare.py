"""Pauses after the death of an engine, with the spare one and without: `python -m loadtests.spare [--pauses 10]`.

Starts one server of each kind for each model and kills their engines by turns in the middle of a streamed answer, each
once the server says that its spare is ready. Prints every pause, between the last token before the kill and the next
one, the medians, and the memory of the spare process; its exit code is 0 when the median with the spare is the
shorter. It never imports MLX.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from loadtests import harness, process_tree
from loadtests.chaos.silence import silence_after_kill, wait_for_spare
from loadtests.chaos.sse_client import completion
from loadtests.harness import Server
from loadtests.zoo.models import obtain

AFTER_TOKENS = 10
LENGTH = 5000  # tokens of an answer, which is left once it has gone on
MIB = 2**20


@dataclass(slots=True)
class MeasuredServer:
    """One server, and the pauses that its clients saw."""

    name: str
    server: Server
    has_spare: bool
    pauses: list[float] = field(default_factory=list)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", type=Path, default=[], help="folders [a tiny llama]")
    parser.add_argument("--pauses", type=int, default=10, help="of each server")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds between the spare's readiness and the kill")
    return parser.parse_args(arguments)


def main() -> int:
    asked = parse()
    with tempfile.TemporaryDirectory() as folder:
        models = asked.model or [obtain("cheap", Path(folder))]
        return max(compared(model, asked, Path(folder)) for model in models)


def compared(model: Path, asked: argparse.Namespace, folder: Path) -> int:
    """Measure one model. 0 if the spare made the pauses shorter."""
    with ExitStack() as stack:
        subjects = []
        for name, switch in (("with the spare", "on"), ("without it", "off")):
            log = folder / f"{model.name}-{switch}.log"
            server = stack.enter_context(harness.marathon(model, log, spare_engine=switch, access_log="off"))
            subjects.append(MeasuredServer(name, server, switch == "on"))
        for _ in range(asked.pauses):
            for subject in subjects:
                subject.pauses.append(asyncio.run(pause(subject, asked.wait)))
                print(f"{model.name} {subject.name}: {subject.pauses[-1]:.2f} s", flush=True)
        memory = spare_bytes(subjects[0])
    medians = [median(subject.pauses) for subject in subjects]
    figures = ", ".join(f"{subject.name} {seconds:.2f} s" for subject, seconds in zip(subjects, medians, strict=True))
    print(f"{model.name}: median pause {figures}; the spare process takes {memory / MIB:.0f} MiB", flush=True)
    return int(medians[0] >= medians[1])


async def pause(subject: MeasuredServer, wait: float) -> float:
    """Kill the engine in the middle of an answer and return the silence. Raises HarnessError if no token follows."""
    await asyncio.to_thread(wait_for_spare, subject.server, has_spare=subject.has_spare)
    await asyncio.sleep(wait)
    return await silence_after_kill(subject.server, completion("Once upon a time", LENGTH), AFTER_TOKENS)


def spare_bytes(subject: MeasuredServer) -> int:
    """Memory of the process below the server that is a spare engine."""
    wait_for_spare(subject.server)
    engine = subject.server.engine_pid()
    below = process_tree.descendants(subject.server.pid)[1:]
    return sum(process_tree.memory_bytes(process.pid) for process in below if process.pid != engine)


if __name__ == "__main__":
    sys.exit(main())
