"""Starts and stops what is measured: Marathon, mlx-lm's own server, and worker processes.

Owns every process that a load test starts. Runs in the load test's own process, which never imports MLX. Whatever is
started here is ended here, by its own pid or its own process group, also when the test fails; on Linux the kernel
ends it if the test itself is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from loadtests import process_tree

ROOT = Path(__file__).parent.parent
START_SECONDS = 300.0
STOP_SECONDS = 45.0
ANSWER_SECONDS = 900.0
REST_SECONDS = 4.0  # an idle engine drops its pool at its second look, up to two seconds after its last step
_PR_SET_PDEATHSIG = 1


class HarnessError(RuntimeError):
    """Something that was to be measured didn't start, died or didn't answer."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def device() -> str:
    """The GPU's name where there is one that MLX may use, else the processor's."""
    if sys.platform == "darwin":
        return _said(["sysctl", "-n", "machdep.cpu.brand_string"])
    gpu = _said(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).partition("\n")[0]
    return gpu or _cpu()


def _said(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def environment(root: Path = ROOT) -> dict[str, str]:
    """Ours, with the checkout at `root` importable and no settings of Marathon that would change what is measured.

    On CUDA MLX multiplies float32 matrices in TF32 by default, which rounds a prefill and a step apart by
    0.05 of a log probability: texts of the tiny float32 models couldn't be compared.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MARATHON_")}
    path = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "MLX_ENABLE_TF32": "0"}
    return kept | ours | {"PYTHONPATH": os.pathsep.join(path)}


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start(command: list[str], root: Path = ROOT, **options: Any) -> subprocess.Popen[bytes]:
    """A child in a process group of its own that doesn't outlive us."""
    bound = _end_with_parent if sys.platform == "linux" else None
    return subprocess.Popen(command, start_new_session=True, env=environment(root), preexec_fn=bound, **options)


class Server:
    """One running HTTP server. Owned by the caller that opened it with `marathon` or `reference`."""

    def __init__(self, name: str, command: list[str], port: int, ready: str, log: Path, root: Path = ROOT) -> None:
        """`ready`: the path that answers 200 once it can work. `root`: the checkout that the command runs from."""
        self.name, self.port, self.log, self._ready = name, port, log, ready
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            self.process = start(command, root, cwd=root, **streams)

    @property
    def pid(self) -> int:
        return self.process.pid

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, bytes]:
        """Status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Raises HarnessError when it ends or takes longer."""
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            if (status := self.process.poll()) is not None:
                raise HarnessError(f"{self.name} ended with {status} while starting: {self.last_words()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.get(self._ready)[0] == 200:
                    return
            sleep(0.1)
        raise HarnessError(f"{self.name} wasn't ready after {seconds:.0f} s: {self.last_words()}")

    def wait_whole(self, seconds: float = START_SECONDS) -> None:
        """Marathon only: waits for the last of the processes that it starts by itself, the spare engine, which begins
        some seconds after the first engine is ready. A checkout from before there was one has none to wait for. Raises
        HarnessError."""
        deadline = monotonic() + seconds
        while self._lacks_its_spare():
            if monotonic() > deadline:
                raise HarnessError(f"{self.name} has no spare engine after {seconds:.0f} s: {self.last_words()}")
            sleep(0.2)

    def _lacks_its_spare(self) -> bool:
        status, body = self.get("/status")
        if status != 200:
            return False
        return json.loads(body)["status"]["engine"].get("spare") is False

    def last_words(self, size: int = 600) -> str:
        """The end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-size:].strip()

    def health(self) -> dict[str, Any]:
        return dict(json.loads(self.get("/health")[1]))

    def engine_pid(self) -> int | None:
        """Marathon only: the process that owns MLX."""
        pid = self.health().get("engine", {}).get("pid")
        return None if pid is None else int(pid)

    def metric(self, name: str) -> dict[str, float]:
        """Marathon only: the samples of one metric, by their labels as written."""
        lines = self.get("/metrics")[1].decode().splitlines()
        found = (line.rpartition(" ") for line in lines if line.startswith((name + "{", name + " ")))
        return {labels.removeprefix(name): float(value) for labels, _, value in found}

    def cpu_seconds(self) -> float:
        return process_tree.cpu_seconds(self.pid)

    def memory_bytes(self) -> int:
        return process_tree.memory_bytes(self.pid)

    def stop(self) -> None:
        """SIGTERM to its own pid; what is still there after the drain is killed, by pid."""
        below = process_tree.descendants(self.pid)[1:]
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        for process in filter(process_tree.lives, below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def options(values: Mapping[str, object]) -> list[str]:
    """`{"max_rows": 32}` → `["--max-rows", "32"]`."""
    return [word for name, value in values.items() for word in ("--" + name.replace("_", "-"), str(value))]


def checkout(text: str) -> Path:
    """The folder of a checkout of Marathon, as an option's type. Raises argparse.ArgumentTypeError for any other."""
    folder = Path(text).resolve()
    if not (folder / "server" / "cli.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} is no checkout of Marathon")
    return folder


def python_of(root: Path) -> str:
    """The interpreter that an earlier checkout brings in its `.venv`, else ours."""
    own = root / ".venv" / "bin" / "python"
    return str(own) if root != ROOT and own.exists() else sys.executable


@contextlib.contextmanager
def marathon(model: Path, log: Path, **values: object) -> Iterator[Server]:
    """`marathon serve` on a free port, ready; `values` are its options with underscores."""
    with _running(_marathon("marathon", ROOT, model, log, values)) as server:
        yield server


@contextlib.contextmanager
def starting(model: Path, log: Path, **values: object) -> Iterator[Server]:
    """The same from its first moment: it isn't ready yet."""
    server = _marathon("marathon", ROOT, model, log, values)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def earlier(root: Path, model: Path, log: Path, **values: object) -> Iterator[Server]:
    """`marathon serve` of the checkout at `root`, the same otherwise."""
    with _running(_marathon("earlier", root, model, log, values)) as server:
        yield server


def _marathon(name: str, root: Path, model: Path, log: Path, values: Mapping[str, object]) -> Server:
    port = free_port()
    chosen = {"model": model, "port": port, **values}
    if root == ROOT:  # an earlier one may not know the option
        chosen = {"journal": "off", **chosen}
    command = [python_of(root), "-m", "server.cli", "serve", *options(chosen)]
    return Server(name, command, port, "/ready", log, root)


@contextlib.contextmanager
def reference(model: Path, log: Path, **values: object) -> Iterator[Server]:
    """`mlx_lm.server` on a free port, ready."""
    port = free_port()
    arguments = options({"model": model, "port": port, "log_level": "WARNING"} | values)
    command = [sys.executable, "-m", "mlx_lm", "server", *arguments]
    with _running(Server("mlx_lm.server", command, port, "/health", log)) as server:
        yield server


@contextlib.contextmanager
def _running(server: Server) -> Iterator[Server]:
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


class Worker:
    """A child that answers one line with one line and ends when its input does. Use as a context manager."""

    def __init__(self, module: str, *arguments: str, log: Path) -> None:
        self.name = module
        command = [sys.executable, "-m", module, *arguments]
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("wb") as file:
            self.process = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, bufsize=0)

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, line: bytes, seconds: float = ANSWER_SECONDS) -> bytes:
        """Raises HarnessError when it ends or takes longer."""
        self._write(line)
        deadline, parts = monotonic() + seconds, [b""]
        while not parts[-1].endswith(b"\n"):
            parts.append(self._read(deadline - monotonic()))
        return b"".join(parts)

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        left = memoryview(line)
        try:
            while left:
                left = left[self.process.stdin.write(left) or 0 :]
        except BrokenPipeError:
            raise HarnessError(f"{self.name} has ended: {self.last_words()}") from None

    def _read(self, seconds: float) -> bytes:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], max(0.0, seconds))[0]:
            raise HarnessError(f"{self.name} didn't answer in time")
        if data := os.read(self.process.stdout.fileno(), 1 << 20):
            return data
        raise HarnessError(f"{self.name} ended: {self.last_words()}")

    def last_words(self, size: int = 600) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-size:].strip()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
