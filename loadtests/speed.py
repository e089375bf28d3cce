"""The speed table: `python -m loadtests.speed [--rows greedy stall …] [--rounds 5] [--out results]`.

Measures Marathon through HTTP against mlx-lm's BatchGenerator called directly and against mlx_lm.server, in
interleaved rounds, and holds it to the bars of the table. Writes one CSV row a measurement and a table; its exit
code is 0 when every bar is met. It never imports MLX.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtests import harness
from loadtests.bench.ledger import Ledger, Verdict, judge
from loadtests.bench.rounds import Plan, Row, Stage
from loadtests.bench.rows import GROUPS_BARS, GROUPS_MODEL, ROWS, with_earlier
from loadtests.bench.targets import EARLIER, MARATHON, NAMES
from loadtests.harness import HarnessError
from loadtests.zoo.models import obtain

GROUPS = "groups"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join([row.name for row in ROWS] + [GROUPS])
    parser.add_argument("--rows", nargs="+", default=[""], help=f"names of rows, or their beginnings; all: {known}")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that warms up")
    parser.add_argument("--targets", nargs="+", choices=NAMES, default=NAMES, help="who is measured")
    parser.add_argument("--earlier", type=harness.checkout, metavar="FOLDER", help="also measure this earlier checkout")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "results", help="folder of the CSV and the table")
    parser.add_argument("--models", type=Path, help="folder of the models; default: the folder `models` in --out")
    parser.add_argument("--quick", action="store_true", help="tiny loads: shows that it works, measures nothing")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and order")
    return parser.parse_args(arguments)


def chosen(words: Sequence[str]) -> tuple[list[Row], bool]:
    """The rows that are asked for by name or by the beginning of their names, and whether the groups are."""
    names = [row.name for row in ROWS] + [GROUPS]
    wanted = {name for word in words for name in ([word] if word in names else names) if name.startswith(word)}
    if not wanted:
        raise SystemExit(f"no row begins with {' or '.join(words)}")
    return [row for row in ROWS if row.name in wanted], GROUPS in wanted


def measure_groups(plan: Plan, ledger: Ledger) -> list[Verdict]:
    """The engine's batches in process, in a child process."""
    model = obtain(GROUPS_MODEL, plan.folder)
    sizes = ["--long", "1200", "--steps", "3"] if plan.quick else []
    command = [sys.executable, "-m", "loadtests.groups", "--model", str(model), "--rounds", str(plan.rounds), *sizes]
    log = plan.logs / "groups.log"
    with log.open("wb") as errors:
        child = harness.start([*command, "--seed", str(plan.seed)], stdout=subprocess.PIPE, stderr=errors)
        answer, _ = child.communicate()
    if child.returncode:
        plan.notes.append(f"groups: {log.read_text(encoding='utf-8', errors='replace')[-600:]}")
        print(plan.notes[-1], flush=True)
    rounds = [{MARATHON: one} for one in json.loads(answer or b"[]")]
    for turn, one in enumerate(rounds, 1):
        ledger.note(GROUPS, GROUPS_MODEL, (turn, 0), MARATHON, one[MARATHON])
        print(f"[{GROUPS_MODEL}] round {turn}/{plan.rounds}  groups  {one[MARATHON]}", flush=True)
    return judge(GROUPS, GROUPS_BARS, rounds, [MARATHON])


def run(rows: Sequence[Row], plan: Plan, ledger: Ledger, *, with_groups: bool = False) -> list[Verdict]:
    """Stage by stage; a stage that can't be measured is noted and its rows fail."""
    verdicts: list[Verdict] = []
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        try:
            verdicts += Stage(model, own, plan, ledger).run()
        except HarnessError as error:
            plan.notes.append(f"{model}: {error}")
            print(plan.notes[-1], flush=True)
            verdicts += [Verdict(row.name, bar) for row in own for bar in row.bars]
    return verdicts + (measure_groups(plan, ledger) if with_groups else [])


def end_on_sigterm() -> None:
    """So that SIGTERM unwinds, and everything started is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def conclude(verdicts: Sequence[Verdict], plan: Plan, ledger: Ledger) -> int:
    """Print the table; the exit code."""
    print("\n" + ledger.report(verdicts, plan.notes), flush=True)
    failed = [verdict for verdict in verdicts if verdict.passed is False]
    held = sum(verdict.passed is not None for verdict in verdicts)
    print(f"{held - len(failed)} of {held} bars met", flush=True)
    return 1 if failed else 0


def main() -> int:
    arguments = parse()
    end_on_sigterm()
    rows, with_groups = chosen(arguments.rows)
    targets = list(arguments.targets)
    if arguments.earlier:
        rows = [with_earlier(row) for row in rows]
        targets.append(EARLIER)
    plan = Plan(
        rounds=arguments.rounds,
        folder=arguments.models or arguments.out / "models",
        logs=arguments.out / "logs",
        targets=targets,
        earlier=arguments.earlier or harness.ROOT,
        quick=arguments.quick,
        seed=arguments.seed,
    )
    plan.logs.mkdir(parents=True, exist_ok=True)
    with Ledger(arguments.out, "speed-quick" if plan.quick else "speed", harness.device()) as ledger:
        print(f"{ledger.machine.line()}, load {os.getloadavg()[0]:.1f}", flush=True)
        return conclude(run(rows, plan, ledger, with_groups=with_groups), plan, ledger)


if __name__ == "__main__":
    sys.exit(main())
