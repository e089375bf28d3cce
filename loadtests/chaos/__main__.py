"""Chaos: `python -m loadtests.chaos --mode kill [poison …] [--model llama qwen3_5] [--quick] [--out results]`.

Breaks the engine in every way that it can break, and the patience of clients besides, while requests run; compares
what each client got with an undisturbed run. Prints what it counted; exits with 1 on any loss. It never imports MLX.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import monotonic

from loadtests import harness
from loadtests.chaos import deaths, disconnects, enemy, shortage, starts
from loadtests.chaos.scenario import RECOMPUTED_SHARE, Findings, Scenario, obtain

WARM = {"kill", "leak", "preempt", "preempt-long"}  # modes in which KV on disk saves nearly all

PROGRESS_SECONDS = 20.0

Mode = Callable[[Scenario], Awaitable[Findings]]

MODES: dict[str, Mode] = {
    "kill": deaths.kill,
    "kill-during-resume": deaths.kill_during_resume,
    "abort": deaths.abort,
    "raise": deaths.raises,
    "stall": deaths.stall,
    "garbage": deaths.garbage,
    "poison": deaths.poison,
    "zombies": deaths.zombies,
    "lone": enemy.lone,
    "as-ready": starts.as_ready,
    "starts": starts.starts,
    "burst": starts.burst,
    "no-spawn": starts.no_spawn,
    "boundaries": enemy.boundaries,
    "last-token": enemy.last_token,
    "drain-death": enemy.drain_death,
    "paused": enemy.paused,
    "leak": shortage.leak,
    "fast-leak": shortage.fast_leak,
    "guard-off": shortage.guard_off,
    "preempt": shortage.preempt,
    "preempt-long": shortage.preempt_long,
    "drain": disconnects.drain,
    "disconnects": disconnects.disconnects,
}
MODELS: dict[str, list[str]] = {"kill": ["llama", "qwen3_5"], "guard-off": ["smollm3"]}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=[*MODES, "all"], default=["all"], help="default: all of them")
    parser.add_argument("--model", nargs="+", help="of the tiny models; default: what suits the mode, mostly llama")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "results", help="folder of the logs")
    parser.add_argument("--models", type=Path, help="folder of the models; default: the folder `tiny` in --out")
    parser.add_argument("--quick", action="store_true", help="a few of each: shows that it works, proves little")
    parser.add_argument(
        "--kv-disk", default="0", help="of the servers: with KV on disk no more than 2 %% of the tokens are recomputed"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the moments; default: another one each time")
    return parser.parse_args(arguments)


async def play(scenario: Scenario, progress_seconds: float = PROGRESS_SECONDS) -> Findings:
    """One mode with one model; whatever goes wrong is a finding."""
    progress = asyncio.create_task(_show_progress(scenario, progress_seconds))
    try:
        findings = await MODES[scenario.mode](scenario)
    except Exception as error:
        traceback.print_exc()
        findings = Findings(scenario.mode, problems=[f"{type(error).__name__}: {error}"])
    finally:
        progress.cancel()
    findings.problems += scenario.left
    if scenario.kv_disk != "0" and scenario.mode in WARM and not scenario.quick:
        findings.problems += _recomputed_too_many(findings)
    return findings


async def _show_progress(scenario: Scenario, every: float) -> None:
    """A mode may take minutes; say meanwhile what happens."""
    began = monotonic()
    while True:
        await asyncio.sleep(every)
        words = await asyncio.to_thread(scenario.progress)
        print(f"...   {scenario.mode} ({scenario.model.name}, {monotonic() - began:.0f} s): {words}", flush=True)


def _recomputed_too_many(findings: Findings) -> list[str]:
    share = findings.figures.get("recomputed tokens", 0) / max(1, findings.figures.get("generated tokens", 0))
    if share <= RECOMPUTED_SHARE:
        return []
    return [f"{100 * share:.1f} % of the tokens were recomputed"]


def show(scenario: Scenario, findings: Findings, seconds: float) -> None:
    figures = ", ".join(f"{name} {value:.3g}" if value < 1000 else f"{name} {value:,.0f}"
                        for name, value in findings.figures.items())  # fmt: skip
    lost = ", ".join(f"{reason} {count:.0f}" for reason, count in findings.lost.items() if count) or "none"
    word = "FAIL" if findings.problems else "pass"
    print(
        f"{word}  {scenario.mode} ({scenario.model.name}, {seconds:.0f} s): {figures}; engines lost: {lost}", flush=True
    )
    for problem in findings.problems[:20]:
        print(f"      problem: {problem}")
    for note in findings.notes[:20]:
        print(f"      note: {note}")


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended in order
    seed = random.randrange(2**32) if asked.seed is None else asked.seed
    print(f"{harness.device()}; seed {seed}", flush=True)
    modes = list(MODES) if "all" in asked.mode else asked.mode
    failed = False
    for mode in modes:
        for name in asked.model or MODELS.get(mode, ["llama"]):
            model = obtain(name, asked.models or asked.out / "tiny")
            rng = random.Random(f"{seed} {mode} {name}")
            scenario = Scenario(mode, model, asked.out / "logs", asked.quick, rng, asked.kv_disk)
            began = monotonic()
            findings = asyncio.run(play(scenario))
            show(scenario, findings, monotonic() - began)
            failed = failed or bool(findings.problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
