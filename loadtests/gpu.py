"""The speed of large models on a GPU: `python -m loadtests.gpu --out FOLDER`.

A llama and a hybrid of about a billion random bfloat16 weights, written on the device at first use, through HTTP
against mlx-lm's BatchGenerator called directly and against mlx_lm.server, at 1, 8, 32 and 64 streams. Needs no
network. Prints as it goes and stays within `--minutes`; rounds that wouldn't fit are left out and that is said.
Writes gpu.csv and gpu.md. It never imports MLX itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

from loadtests import harness
from loadtests.bench.ledger import Bar, Ledger, Verdict, of, ratio
from loadtests.bench.rounds import Plan, Row
from loadtests.bench.rows import greedy
from loadtests.bench.targets import NAMES, REFERENCE
from loadtests.speed import conclude, end_on_sigterm, run

STREAMS = (1, 8, 32, 64)
TOKENS = 256
MODELS = ("llama-1b", "hybrid-1b")
SMALL = ("cheap", "qwen3_5")  # what --quick takes in their place
LLAMA_SHARE = 0.55  # of the minutes
PARTS = ("forward", "sample", "guard", "read", "publish")
END_SECONDS = 20.0  # to stop the servers and write the table


def bars(streams: int) -> list[Bar]:
    """Twice the reference from 32 streams on."""
    found = [
        Bar("output tok/s × raw", ratio("tok_s"), "≥", 0.95),
        Bar("output tok/s × mlx_lm.server", ratio("tok_s", REFERENCE), "≥", 2.0 if streams >= 32 else 1.0),
        Bar("output tok/s", of("tok_s")),
        Bar("raw's output tok/s", of("tok_s", "raw")),
        Bar("mlx_lm.server's output tok/s × raw", ratio("tok_s", target=REFERENCE)),
        Bar("TTFT p50 × raw", ratio("ttft_p50")),
        Bar("CPU seconds per 1,000 tokens × raw", ratio("cpu_s_per_1k")),
        Bar("chunks ÷ tokens", of("chunks_per_token"), "≥", 0.9),
    ]
    return found + [Bar(f"host ms a step: {part}", of(f"ms_{part}")) for part in PARTS]


def rows_of(model: str, streams: Sequence[int] = STREAMS) -> list[Row]:
    return [greedy(f"{model}, {n}", model, n, TOKENS, bars(n)) for n in streams]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu.csv and gpu.md")
    parser.add_argument("--minutes", type=float, default=7.0, help="for everything")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, if they fit")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--streams", nargs="+", type=int, choices=STREAMS, default=STREAMS, help="how many at once")
    parser.add_argument("--targets", nargs="+", choices=NAMES, default=NAMES, help="who is measured")
    parser.add_argument("--folder", type=Path, help="where models and logs are kept; default: the temporary folder")
    parser.add_argument("--quick", action="store_true", help="tiny models and loads: shows that it works")
    return parser.parse_args(arguments)


def measure(models: Sequence[str], streams: Sequence[int], plan: Plan, ledger: Ledger, ends: float) -> list[Verdict]:
    """Each model gets its share of the time that is left."""
    verdicts: list[Verdict] = []
    for i, model in enumerate(models):
        share = LLAMA_SHARE if i + 1 < len(models) else 1.0
        began = monotonic()
        print(f"{model}: {share * (ends - began):.0f} s", flush=True)
        verdicts += run(rows_of(model, streams), replace(plan, deadline=began + share * (ends - began)), ledger)
    return verdicts


def main() -> int:
    ends = monotonic() - END_SECONDS
    arguments = parse()
    ends += 60 * arguments.minutes
    end_on_sigterm()
    folder = arguments.folder or Path(tempfile.gettempdir()) / "marathon-models"
    plan = Plan(
        rounds=arguments.rounds,
        folder=folder,
        logs=folder / "logs",
        targets=arguments.targets,
        quick=arguments.quick,
        rows=max(arguments.streams),
    )
    plan.logs.mkdir(parents=True, exist_ok=True)
    models = SMALL[: len(arguments.models)] if arguments.quick else arguments.models
    with Ledger(arguments.out, "gpu", harness.device()) as ledger:
        print(ledger.machine.line(), flush=True)
        return conclude(measure(models, arguments.streams, plan, ledger, ends), plan, ledger)


if __name__ == "__main__":
    sys.exit(main())
