"""KV on disk under attack: `python -m loadtests.damage [--cases 200] [--family llama] [--seed 0]`.

Fills one folder with the KV of two tiny models. Then, case by case, damages it in one of the ways of
`loadtests.disk_damage`, while the server uses it, and asks for one of some long prompts again; every tenth time the
engine is killed in the middle of the answer, and so in the middle of writes. After that the same prompts where the
folder can't be used: a second server on one folder, a file in its place, a full disk, another tokenizer. Its exit code
is 0 when every answer is that of a server that keeps nothing, no engine ended that was not killed, and none is stuck.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests import disk_damage, harness
from loadtests.chaos.comparison import Verdicts
from loadtests.chaos.sse_client import Account, ask, completion
from loadtests.harness import Server
from loadtests.lab.experiment import Progress
from loadtests.zoo.models import obtain
from server.kv_store.files import folder as kept

OTHER = "qwen3_5"  # whose files lie in the same folder
LENGTHS = (300, 520, 900)  # of the prompts
TOKENS = 90  # of an answer: long enough to be worth saving
KILL_EACH = 10
ANSWER_SECONDS = 120.0


@dataclass(slots=True)
class Outcome:
    """What went wrong, and what was seen."""

    verdicts: Verdicts = field(default_factory=Verdicts)
    problems: list[str] = field(default_factory=list)
    read_from_disk: int = 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--family", default="llama", help="whose answers are asked for")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> int:
    asked = parse()
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as root:
        place = Path(root)
        model, other = (obtain(name, place / "models") for name in (asked.family, OTHER))
        bodies = [_body(length) for length in LENGTHS]
        with serving(model, place / "nothing", kv_disk=0) as server:
            expected = [answered(server, body) for body in bodies]
        fill(other, place / "kv", bodies)
        attack(model, place / "kv", expected, asked, outcome)
        elsewhere(model, place, expected, outcome)
    problems = outcome.problems + outcome.verdicts.problems()
    print(f"{asked.cases} cases, {outcome.read_from_disk} answers began with KV from disk; {len(problems)} problems")
    print("\n".join(problems))
    return int(bool(problems))


def _body(length: int) -> dict[str, Any]:
    return completion([100 + i * 7 % 800 for i in range(length)], TOKENS)


@contextmanager
def serving(model: Path, home: Path, **values: object) -> Iterator[Server]:
    """A server that keeps KV in `home` and none in memory, so that each request asks the disk."""
    asked = {"kv_disk": "1GiB", "kv_disk_folder": home, "prefix_cache": 0, "spare_engine": "off", "access_log": "off"}
    with harness.marathon(model, home.parent / f"{home.name}.log", **(asked | {"journal": "off"} | values)) as server:
        yield server


def answered(server: Server, body: dict[str, Any]) -> Account:
    """The answer; one that doesn't end in time is cut off."""

    async def within() -> Account:
        account = Account(dict(body))
        await asyncio.wait([asyncio.create_task(ask(server.port, body, account))], timeout=ANSWER_SECONDS)
        return account

    return asyncio.run(within())


def fill(model: Path, home: Path, bodies: Sequence[dict[str, Any]]) -> None:
    """Leave the KV of another model in the folder."""
    with serving(model, home) as server:
        for body in bodies:
            answered(server, body)


# ---------------------------------------------------------------- while a server uses it
def attack(model: Path, home: Path, expected: Sequence[Account], asked: argparse.Namespace, outcome: Outcome) -> None:
    rng = random.Random(asked.seed)
    kills = 0
    progress = Progress("case", [1.0] * asked.cases)
    with serving(model, home) as server:
        for right in expected:
            outcome.verdicts.judge("filling", right, answered(server, right.body))
        for number in range(asked.cases):
            name = rng.choice(sorted(disk_damage.ACTS))
            right = rng.choice(expected)
            is_killed = number % KILL_EACH == KILL_EACH - 1
            progress.report(number, name)
            damage(name, home, rng)
            seen = asyncio.run(_killed(server, right.body)) if is_killed else answered(server, right.body)
            kills += is_killed
            outcome.verdicts.judge(f"case {number}, {name}", right, seen)
            outcome.read_from_disk += bool(_cached(seen))
        restarts = sum(server.metric("marathon_engine_restarts_total").values())
        if restarts != kills:
            outcome.problems.append(f"{restarts:.0f} engines ended, {kills} were killed: {server.last_words()}")


def damage(name: str, home: Path, rng: random.Random) -> None:
    """Do it, unless too little lies there, or it goes while that is done."""
    if len(list(kept.files(home))) < 2:
        return
    try:
        disk_damage.ACTS[name](home, rng)
    except (OSError, ValueError):
        return


async def _killed(server: Server, body: dict[str, Any]) -> Account:
    engine = await asyncio.to_thread(server.engine_pid)
    account = Account(dict(body))
    task = asyncio.create_task(ask(server.port, body, account))
    while len(account.tokens) < TOKENS // 2 and not account.ended:
        await asyncio.sleep(0.002)
    if engine is not None:
        os.kill(engine, signal.SIGKILL)
    await asyncio.wait([task], timeout=ANSWER_SECONDS)
    return account


def _cached(account: Account) -> int:
    return int((account.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


# ---------------------------------------------------------------- where it can't be used
def elsewhere(model: Path, place: Path, expected: Sequence[Account], outcome: Outcome) -> None:
    """Each of these serves as if nothing were kept."""
    (place / "file").write_bytes(b"")
    changed = place / "models" / "another tokenizer"
    shutil.copytree(model, changed)
    config = changed / "tokenizer_config.json"
    config.write_text(config.read_text("utf-8").replace("{", '{"added_by_test": 1, ', 1), "utf-8")
    with serving(model, place / "shared") as first:
        _compare("first of two servers", first, expected, outcome)
        with serving(model, place / "shared") as second:
            _compare("second of two servers", second, expected, outcome)
    for name, home, options in (
        ("a file in its place", place / "file", {}),
        ("a full disk", place / "full", {"faults": "full-disk"}),
    ):
        with serving(model, home, **options) as server:
            _compare(name, server, expected, outcome)
    with serving(changed, place / "shared") as server:
        _compare("another tokenizer", server, expected, outcome)


def _compare(name: str, server: Server, expected: Sequence[Account], outcome: Outcome) -> None:
    for right in expected:
        outcome.verdicts.judge(name, right, answered(server, right.body))
    if restarts := sum(server.metric("marathon_engine_restarts_total").values()):
        outcome.problems.append(f"{name}: {restarts:.0f} engines ended: {server.last_words()}")


if __name__ == "__main__":
    sys.exit(main())
