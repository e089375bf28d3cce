"""Writes docs/certified-models.md: what `marathon certify` says of every family of the zoo.

    python -m scripts.certified_models [--families llama …] [--tokens 400] [--keep FOLDER]

Each family is built tiny, with random weights from its own class in mlx-lm, and certified in a process of its own.
With --keep the certificates stay in that folder, and a run that was cut short goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests import harness, zoo
from loadtests.chaos.scenario import obtain
from server.certify import certificate
from server.certify.certificate import FLAT, Order

TARGET = harness.ROOT / "docs" / "certified-models.md"
TOKENS = 400
HEAD = [
    *("family", "caches", "mlx-lm", "Marathon", "Marathon, guard off", "at fault in mlx-lm", "rows", "batch = alone"),
    "verdict",
]
INTRODUCTION = """\
# Certified models

What `marathon certify` says of every model family of mlx-lm that the zoo (`loadtests/zoo/families.py`) builds: tiny,
with random weights, from the family's own class. One long row, two short ones that join it every 40 steps and leave
again; {tokens} steps a run. Written by `python -m scripts.certified_models`; {versions}; {device}.

The three figures are live buffers a step that nothing gives back, counted with the pool dropped: in mlx-lm's
BatchGenerator, in Marathon, and in Marathon with `--guard off`. Of the 2.25 of a family with two chains, 2 come with
each step and 0.25 with the rows that join and leave. *Flat by construction*: Marathon doesn't make the metadata that
would leak, because rows are read alone before they join, or because they run alone altogether.

`marathon certify MODEL` says the same of the model that you serve.
"""


def figure(value: float | None) -> str:
    """`2.25`; what lies within the bounds of flat is 0."""
    if value is None:
        return "–"
    return "0" if abs(value) <= FLAT else f"{value:.2f}"


def row(family: str, found: dict[str, Any]) -> list[str]:
    arms = found["arms"]
    return [
        family,
        found["caches"],
        other(arms["mlx_lm"]),
        figure(arms["guarded"]["buffers_a_token"]),
        unguarded(arms["unguarded"]),
        fields(arms["mlx_lm"]),
        "together" if found["batching"] == "batched" else "alone",
        together(found["agreement"]),
        "passed" if found["passed"] else "**failed**: " + "; ".join(found["faults"]),
    ]


def other(arm: dict[str, Any]) -> str:
    return "can't batch" if arm["failed"] else figure(arm["buffers_a_token"])


def unguarded(arm: dict[str, Any]) -> str:
    value = figure(arm["buffers_a_token"])
    return "flat by construction" if value == "0" else value


def fields(arm: dict[str, Any]) -> str:
    """Classes and fields, without the layers."""
    if figure(arm["buffers_a_token"]) in ("0", "–"):
        return ""
    return ", ".join(re.sub(r" \(.*", "", words) for words in arm["at_fault"])


def together(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    equal = f"{found['streams'] - found['parted']} of {found['streams']}"
    return equal if found["holds"] else f"**{equal}**"


def page(certificates: dict[str, dict[str, Any]]) -> str:
    one = next(iter(certificates.values()))
    versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
    head = INTRODUCTION.format(tokens=one["tokens"], versions=versions, device=one["device"])
    rows = [row(family, certificates[family]) for family in sorted(certificates)]
    lines = ["| " + " | ".join(cells) + " |" for cells in [HEAD, ["---"] * len(HEAD), *rows]]
    leaking = sum(
        figure(found["arms"]["mlx_lm"]["buffers_a_token"]) not in ("0", "–") for found in certificates.values()
    )
    passed = sum(found["passed"] for found in certificates.values())
    summary = f"{len(rows)} families: {leaking} leak in mlx-lm, {passed} pass in Marathon.\n"
    return "\n".join([head, summary, *lines]) + "\n"


def certify(family: str, tokens: int, models: Path) -> dict[str, Any]:
    """Raises HarnessError when there is no certificate, which is another thing than one that says no."""
    order = Order(str(obtain(family, models)), tokens=tokens, as_json=True)
    done = certificate.run(order, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if not done.stdout:
        raise harness.HarnessError(f"{family}: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--families", nargs="+", choices=sorted(zoo.FAMILIES), default=sorted(zoo.FAMILIES), metavar="NAME"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="steps of a run")
    parser.add_argument("--keep", type=Path, help="folder of the certificates; those that are there aren't made again")
    parser.add_argument("--out", type=Path, default=TARGET, help="the page")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        kept = arguments.keep or Path(scratch) / "certificates"
        kept.mkdir(parents=True, exist_ok=True)
        for family in arguments.families:
            file = kept / f"{family}.json"
            if not file.exists():
                file.write_text(json.dumps(certify(family, arguments.tokens, Path(scratch))), encoding="utf-8")
            found[family] = json.loads(file.read_text(encoding="utf-8"))
            print(" | ".join(row(family, found[family])), file=sys.stderr, flush=True)
    arguments.out.write_text(page(found), encoding="utf-8")
    return 0 if all(one["passed"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
