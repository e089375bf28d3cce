"""One measurement: `python -m loadtests.lab.child MODULE` reads its values as JSON from standard input.

Calls `measure(values)` of `loadtests.lab.MODULE` and prints its rows as JSON, each with the device, the drift of the
machine while it lasted, and the peak memory of this process.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import resource
import sys
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx

from loadtests import harness
from loadtests.bench.ledger import cores

SIDE = 512
TURNS = 15


def backend() -> str:
    """`metal`, `cuda` or `cpu`: where MLX computes by default."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def device() -> str:
    """The GPU's name; a CPU without its brand, since only its cores and its instruction set matter here."""
    return harness.device() if backend() != "cpu" else f"{cores()}-core {platform.machine()}, CPU backend"


def pace() -> float:
    """Median seconds of a matrix product that is always the same: what else the machine does shows in it."""
    a = mx.ones((SIDE, SIDE))
    mx.eval(a)
    times = []
    for _ in range(TURNS):
        started = perf_counter()
        mx.eval(a @ a)
        times.append(perf_counter() - started)
    return median(times)


def peak_mib() -> float:
    """The most memory that this process has had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def run(module: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    pace()
    before = pace()
    started = perf_counter()
    rows = importlib.import_module(f"loadtests.lab.{module}").measure(values)
    seconds = perf_counter() - started
    common = {
        "device": device(),
        "backend": backend(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "drift": pace() / before,
        "process_peak_mib": peak_mib(),
        "seconds": seconds,
    }
    return [common | row for row in rows]


def main() -> None:
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not end up in the answer
    json.dump(run(sys.argv[1], json.load(sys.stdin)), answer)
    answer.close()
    sys.stdout.flush()
    os._exit(0)  # a late thread of a backend must not turn a measured case into a failed one


if __name__ == "__main__":
    main()
