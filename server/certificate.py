"""The command line of `marathon certify`, and the child process that does its work.

Owns the options and the order that the child is given. Runs in the main thread of the process that the user started,
which, like the server, never creates a device; `server/certify.py` is the child. Never touches MLX.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SETTINGS = ("model", "trust_remote_code", "cache_dir")  # of the options, those that are the server's settings too
TOKENS = 1000
ROWS = 3


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be certified, and how."""

    path: str  # the model's folder
    tokens: int = TOKENS
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
    parser.add_argument("--tokens", type=_number(200), default=TOKENS, metavar="N", help=f"tokens of a run [{TOKENS}]")
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
        "--cache-dir", type=Path, default=absent, metavar="PATH", help="where the starter model is kept"
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


def order(path: Path, options: Mapping[str, Any]) -> Order:
    """`options` as `add_arguments` gives them, the model being the one in the folder `path`."""
    cache_dir = options.get("cache_dir")
    return Order(
        path=str(path),
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
