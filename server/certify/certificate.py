"""The command line of `marathon certify`, the child process that does its work, and the form of its report.

Owns the options, the order that the child is given, and what a certificate holds and how it reads. The options belong
to the process that the user started, which, like the server, never creates a device; the report to the child, which is
`certify/__main__.py`. Never touches MLX.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from server.config.user_path import user_path

SETTINGS = ("model", "trust_remote_code", "cache_dir")  # of the options, those that are the server's settings too
TOKENS, FEWEST = 1000, 400  # of a run; fewer where a step takes long
ROWS = 3
FLAT = 0.01  # buffers a token; the whole interval must lie within
SHARE = 0.02  # of the streams may part at a tie: together from alone, with the guard from without
GRAPHS = "graph leaves"  # what is counted where there is no live-buffer count


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be certified, and how."""

    path: str  # the model's folder; empty for the demonstration
    tokens: int | None = None
    rows: int = ROWS
    buffer_limit: int | None = None
    as_json: bool = False
    trust_remote_code: bool = False
    cache_dir: str | None = None  # where the native counter is kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that stand behind `marathon certify`. Those in SETTINGS are absent unless given."""
    absent = argparse.SUPPRESS
    parser.add_argument(
        "model", nargs="?", default=absent, help="MLX model folder or hub id; absent: the starter model"
    )
    parser.add_argument(
        "--demo", action="store_true", help="a tiny model of a family that leaks in mlx-lm, made on the spot: a minute"
    )
    parser.add_argument(
        "--tokens",
        type=_number(300),
        metavar="N",
        help=f"tokens of a run [{TOKENS:,}; down to {FEWEST} where the model is slow]",
    )
    parser.add_argument("--rows", type=_number(2), default=ROWS, metavar="B", help=f"rows at a reading [{ROWS}]")
    parser.add_argument("--json", action="store_true", help="print the certificate as JSON")
    parser.add_argument(
        "--buffer-limit",
        type=_number(1),
        metavar="N",
        help="a live-buffer limit of one's own, up to which mlx-lm's run is then really played",
    )
    parser.add_argument("--trust-remote-code", action="store_true", default=absent, help="let a model bring its code")
    parser.add_argument(
        "--cache-dir", type=user_path, default=absent, metavar="PATH", help="folder for what Marathon keeps"
    )


def _number(least: int) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def settings_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that are settings of the server, for `settings.load`."""
    return {name: options[name] for name in SETTINGS if name in options}


def order(path: Path | None, options: Mapping[str, Any]) -> Order:
    """`options` as `add_arguments` gives them, the model being the one in the folder `path`, or the demonstration's."""
    cache_dir = options.get("cache_dir")
    return Order(
        path=str(path or ""),
        tokens=options["tokens"],
        rows=options["rows"],
        buffer_limit=options["buffer_limit"],
        as_json=options["json"],
        trust_remote_code=options.get("trust_remote_code", False),
        cache_dir=str(cache_dir) if cache_dir else None,
    )


def run(order: Order, **streams: Any) -> subprocess.CompletedProcess[str]:
    """The child that plays, judges and prints; its exit status is the verdict: 0 passed, 1 failed, 2 unable."""
    command = [sys.executable, "-P", "-m", "server.certify"]
    return subprocess.run(command, input=json.dumps(asdict(order)), text=True, check=False, **streams)


# ---------------------------------------------------------------- what it holds
@dataclass(frozen=True, slots=True)
class Arm:
    """One of the three runs, in figures."""

    name: str
    buffers_a_token: float | None = None  # absent where the run failed
    interval: tuple[float, float] | None = None  # 95 %
    bytes_a_token: float | None = None  # beyond what the caches' own growth explains
    at_fault: list[str] = field(default_factory=list)  # fields whose graphs grow, with their layers
    failed: str = ""

    @property
    def flat(self) -> bool:
        return self.interval is not None and self.interval[0] >= -FLAT and self.interval[1] <= FLAT


@dataclass(frozen=True, slots=True)
class Death:
    """When the unguarded run would have no buffers left, and when it had none if that was tried."""

    limit: int
    baseline: float
    token: float | None  # absent: never
    reached: float | None = None

    @property
    def deviation(self) -> float | None:
        if self.reached is None or self.token is None:
            return None
        return self.reached / self.token - 1


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the experiment showed."""

    streams: int
    parted: int  # streams with another token somewhere
    unexplained: int  # of those, not at a tie
    distance: float  # the largest logit difference of the two paths
    rounding: float  # the largest that counts as rounding

    @property
    def holds(self) -> bool:
        return self.distance <= self.rounding and not self.unexplained and self.parted <= max(1, SHARE * self.streams)

    def __str__(self) -> str:
        parted = f", {self.parted - self.unexplained} parted at a tie, {self.unexplained} elsewhere"
        return (
            f"{self.streams - self.parted} of {self.streams} streams equal{parted if self.parted else ''}; "
            f"logits differ by {self.distance:.2g}, of which {self.rounding:.2g} is rounding"
        )


@dataclass(frozen=True, slots=True)
class Certificate:
    """All that is printed."""

    model: str
    model_type: str
    caches: str
    batching: str
    device: str
    versions: dict[str, str]
    tokens: int
    rows: int
    source: str
    source_reason: str
    arms: dict[str, Arm]  # guarded, unguarded, mlx_lm
    death: Death | None
    agreement: Agreement | None  # absent where rows run alone
    guard_streams: int
    guard_changed: int  # streams whose text isn't the same with the guard and without
    faults: list[str]  # why it fails; empty: passed

    @property
    def passed(self) -> bool:
        return not self.faults


# ---------------------------------------------------------------- how it reads
def to_json(certificate: Certificate) -> str:
    body = asdict(certificate) | {"passed": certificate.passed}
    if (agreed := certificate.agreement) is not None:
        body["agreement"]["holds"] = agreed.holds
    return json.dumps(body, indent=2)


def to_text(certificate: Certificate) -> str:
    one = certificate
    words = ", ".join(f"{name} {number}" for name, number in one.versions.items())
    facts = {
        "model": f"{one.model} ({one.model_type}), {one.caches}",
        "batching": one.batching,
        "device": one.device,
        "versions": words,
        "plan": f"{one.tokens:,} tokens; a long row, others join it every 40 and leave; {one.rows} at each reading",
        "count": one.source + (f" ({one.source_reason})" if one.source_reason else ""),
        **{arm.name: _arm_in_words(arm) for arm in one.arms.values()},
        "death without guard": _death_in_words(one),
        "batch = alone": str(one.agreement) if one.agreement else "rows run alone",
        "guard = no guard": f"{one.guard_streams - one.guard_changed} of {one.guard_streams} streams equal",
        "verdict": "passed" if one.passed else "FAILED: " + "; ".join(one.faults),
    }
    width = max(map(len, facts))
    return "\n".join(f"{name:{width}}  {value}" for name, value in facts.items())


def _arm_in_words(arm: Arm) -> str:
    if arm.interval is None or arm.buffers_a_token is None or arm.bytes_a_token is None:
        return f"can't be run: {arm.failed}"
    half = (arm.interval[1] - arm.interval[0]) / 2
    fault = ""
    if arm.at_fault:
        fault = f"; at fault: {', '.join(arm.at_fault)}"
    return f"{arm.buffers_a_token:.3f} ±{half:.3f} buffers a token, {arm.bytes_a_token:.1f} bytes a token{fault}"


def _death_in_words(one: Certificate) -> str:
    death = one.death
    rate = one.arms["mlx_lm"].buffers_a_token
    if death is None or rate is None:
        if one.source == GRAPHS:
            return "can't be said: no live-buffer count"
        return "can't be said"
    if death.token is None:
        return "none: the count is flat in mlx-lm too (`marathon certify --demo` shows a family where it rises)"
    words = f"at token {death.token:,.0f} = ({death.limit:,} − {death.baseline:,.0f}) / {rate:.3f}"
    if death.deviation is None or death.reached is None:
        return words
    return f"{words}; reached at token {death.reached:,.0f}, {death.deviation:+.1%}"
