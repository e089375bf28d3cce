"""This checkout against an earlier one: `python -m loadtests.versions FOLDER [--starts 5] [--streams 1 16 32]`.

Serves the same model from both checkouts (the earlier one with the packages in its `.venv` if it has one), measures
output tok/s through HTTP in interleaved rounds, and holds the ratio to a bar. Two processes of the same program differ
by some 5 %, by where their memory lies, so both are started anew several times. `git worktree add FOLDER COMMIT` makes
the earlier checkout. Writes one CSV row a measurement and a table; its exit code is 0 when every bar is met. It never
imports MLX.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loadtests import harness
from loadtests.bench.ledger import Bar, Ledger, of, ratio
from loadtests.bench.rounds import Plan, Row
from loadtests.bench.rows import greedy
from loadtests.bench.targets import EARLIER, MARATHON
from loadtests.speed import conclude, end_on_sigterm, run
from loadtests.zoo.models import RECIPES

SUBJECTS = (MARATHON, EARLIER)
LEAST = 0.98  # of the earlier checkout's output tok/s
TOKENS = 256


def bars() -> list[Bar]:
    return [
        Bar("output tok/s × earlier", ratio("tok_s", EARLIER), "≥", LEAST),
        Bar("output tok/s", of("tok_s")),
        Bar("earlier: output tok/s", of("tok_s", EARLIER)),
        Bar("TTFT p50 × earlier", ratio("ttft_p50", EARLIER)),
        Bar("CPU seconds per 1,000 tokens × earlier", ratio("cpu_s_per_1k", EARLIER)),
    ]


def rows_of(model: str, streams: Sequence[int]) -> list[Row]:
    made = [greedy(f"{model}, {count}", model, count, TOKENS, bars()) for count in streams]
    return [replace(row, targets=SUBJECTS) for row in made]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("earlier", type=harness.checkout, metavar="FOLDER", help="the earlier checkout")
    parser.add_argument("--starts", type=int, default=5, help="of both servers")
    parser.add_argument("--rounds", type=int, default=2, help="of each start that count, after one that warms up")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 32], help="how many at once")
    parser.add_argument("--model", choices=RECIPES, default="cheap", help="made at first use")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "results", help="folder of the CSV and the table")
    parser.add_argument("--quick", action="store_true", help="tiny loads: shows that it works, measures nothing")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    end_on_sigterm()
    plan = Plan(
        rounds=arguments.rounds,
        starts=arguments.starts,
        folder=arguments.out / "models",
        logs=arguments.out / "logs",
        targets=SUBJECTS,
        quick=arguments.quick,
        rows=max(arguments.streams),
        earlier=arguments.earlier,
    )
    plan.logs.mkdir(parents=True, exist_ok=True)
    with Ledger(arguments.out, "versions", harness.device()) as ledger:
        print(f"{ledger.machine.line()}, load {os.getloadavg()[0]:.1f}", flush=True)
        return conclude(run(rows_of(arguments.model, arguments.streams), plan, ledger), plan, ledger)


if __name__ == "__main__":
    sys.exit(main())
