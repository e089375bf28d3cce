"""Makes an environment and installs into it, with a word every few seconds.

    python3 scripts/install.py FOLDER [-- ARGUMENTS OF pip install …]

Run by the Makefile with any Python that is new enough; the environment gets that Python, unless there is one already.
pip says nothing for a minute where its output is no terminal, and too much where it is; here its lines become a count.
What pip had to say is printed when it fails.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

SAY_SECONDS = 2.0
TICK_SECONDS = 0.1
LAST_LINES = 30


class Work:
    """A command under way: its lines, and what it is at in words."""

    def __init__(self, command: list[str], what: str, at: Callable[[list[str]], str] = lambda lines: "") -> None:
        self._command, self._what, self._at = command, what, at
        self._lines: list[str] = []

    def run(self) -> int:
        """Until it ends; its exit code. Says what it is at in between, and its last lines if it fails."""
        began = said = time.monotonic()
        print(self._what, flush=True)
        with subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            reader = threading.Thread(target=self._read, args=(process,), daemon=True)
            reader.start()
            while process.poll() is None:
                time.sleep(TICK_SECONDS)
                if time.monotonic() - said >= SAY_SECONDS:
                    said = time.monotonic()
                    print(f"{self._what}: {self._at(self._lines)}{said - began:.0f} s so far", flush=True)
            reader.join(1.0)
        if process.returncode:
            print("\n".join(self._lines[-LAST_LINES:]), file=sys.stderr)
        return process.returncode

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.append(line.rstrip())


def has_pip(python: Path) -> bool:
    """Whether the environment is one already."""
    try:
        return subprocess.run([python, "-c", "import pip"], capture_output=True).returncode == 0
    except OSError:
        return False


def progress(lines: list[str]) -> str:
    """What pip is at, from its lines."""
    if any(line.startswith("Installing collected") for line in lines):
        return "all are there and are being written, "
    found = sum(line.startswith("Collecting ") for line in lines)
    return f"{found} found, " if found else ""


def main(arguments: list[str]) -> int:
    """The exit code."""
    folder, *wanted = (argument for argument in arguments if argument != "--")
    python = Path(folder) / "bin" / "python"
    if not has_pip(python):
        version = ".".join(map(str, sys.version_info[:3]))
        command = [sys.executable, "-m", "venv", "--clear", folder]
        if code := Work(command, f"making {folder} with Python {version}").run():
            return code
    if not wanted:
        return 0
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", *wanted]
    return Work(command, f"installing {wanted[-1]} into {folder}", progress).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
