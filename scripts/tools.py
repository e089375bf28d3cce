"""Fetches what some tests need and pip can't bring, as Debian packages, without root: Chromium, Prometheus, zsh, fish.

`python scripts/tools.py [--into build/tools]` downloads the packages with `apt-get`, unpacks them into the folder and
writes a starter for each program. On a system without `apt-get` it says so and exits with 1; tests that need a program
which isn't there are skipped.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROGRAMS = {
    "chromium": "usr/lib/chromium/chromium",
    "prometheus": "usr/bin/prometheus",
    "promtool": "usr/bin/promtool",
    "zsh": "bin/zsh",
    "fish": "usr/bin/fish",
}
PACKAGES = ("chromium", "prometheus", "fonts-dejavu-core", "zsh", "fish")
STARTER = """#!/bin/sh
# Runs a program from the packages beside it, with their libraries.
export LD_LIBRARY_PATH="{libraries}"
export FONTCONFIG_PATH="{root}/etc/fonts"
exec "{root}/{program}" "$@"
"""


def needed() -> list[str]:
    """The packages, and those that they need and the system lacks."""
    plan = subprocess.run(
        ["apt-get", "--simulate", "--no-install-recommends", "install", *PACKAGES],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return sorted({*PACKAGES, *(line.split()[1] for line in plan.splitlines() if line.startswith("Inst "))})


def fetch(folder: Path) -> None:
    """Download and unpack; what was fetched before is fetched again."""
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    names = needed()
    print(f"fetching {len(names)} packages into {folder}", flush=True)
    subprocess.run(["apt-get", "--quiet", "download", *names], cwd=packages, check=True)
    root = folder / "root"
    for package in sorted(packages.glob("*.deb")):
        subprocess.run(["dpkg", "--extract", package, root], check=True)
    write_starters(folder, root)


def write_starters(folder: Path, root: Path) -> None:
    libraries = sorted({str(path.parent) for path in root.rglob("*.so*")})
    for name, program in PROGRAMS.items():
        starter = folder / name
        starter.write_text(STARTER.format(libraries=":".join(libraries), root=root, program=program))
        starter.chmod(0o755)
        print(f"{name}: {starter}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "tools", help="the folder")
    arguments = parser.parse_args()
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        print(
            "only Debian and its kin have these packages; install Chromium and Prometheus by other means",
            file=sys.stderr,
        )
        return 1
    fetch(arguments.into.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
