"""The shipped monitoring in a real Prometheus: `python -m loadtests.monitoring [--seconds 120] [--looks NAME …]`.

Serves a tiny model, scrapes it with the shipped configuration, loads it, kills its engine once, and looks at the end
whether every rule evaluates, which alerts fired, and which panels of the dashboard have no data. Then the same with a
leak (`--faults leak:…`): the residency alert must fire before the first rotation. Then what may fire nothing: prompts
of mixed lengths that fill the prefix cache of a model with 36 layers and turn it over, under the same limit and
without the leak; a long prompt alone; a start that takes a minute and a half. Needs `prometheus` from `make tools` or
an installed one. Its exit code is 0 when all of that holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from loadtests import harness
from loadtests.harness import ROOT, HarnessError, Server
from loadtests.zoo import write

SHIPPED = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "marathon.json"
SCRAPED = "127.0.0.1:8080"
EMPTY = {  # panels that may have no data here, and why
    "Findings of the census": "nothing leaks",
    "Time to exhaustion": "drawn only while a slope rises",
    "Tokens to exhaustion": "drawn only while a slope rises",
    "Seconds without progress": "drawn only while requests run",
    "Refused, by reason": "nothing is refused",
    "Automatic acts": "nothing has to act",
    "Memory used": "MLX has no memory limit on some devices",
}
FAMILY = "smollm3"
LIMIT = 30_000  # live buffers
AFTER_START_SECONDS = 60  # alerts that wait a minute have fired by then
KV_DISK = 1 << 28  # bytes
LEAK = 3  # live buffers a step
DEEP = 36  # layers: each kept prompt holds two arrays a layer
TURNED_OVER = 32  # kept prompts that were given up for newer ones, at the least


def prometheus() -> str:
    """Raises HarnessError where there is none."""
    own = ROOT / "build" / "tools" / "prometheus"
    found = str(own) if own.exists() else shutil.which("prometheus")
    if found is None:
        raise HarnessError("no prometheus; `make tools` fetches one")
    return found


class Prometheus:
    """A running Prometheus that scrapes one server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, path: str, **parameters: Any) -> Any:
        url = self._url + path + "?" + urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def value(self, query: str) -> float:
        """The first value of an instant query; 0 where there is none."""
        found = self.get("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else 0.0

    def fired(self) -> set[str]:
        """Names of the alerts that have fired so far."""
        found = self.get("query", query='count by (alertname) (max_over_time(ALERTS{alertstate="firing"}[1h]))')
        return {series["metric"]["alertname"] for series in found["result"]}

    def faults(self) -> list[str]:
        """Rules that couldn't be evaluated."""
        rules = [rule for group in self.get("rules")["groups"] for rule in group["rules"]]
        if not rules:
            return ["no rules were loaded"]
        return [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] == "err"]


@contextlib.contextmanager
def watched(server: Server, folder: Path) -> Iterator[Prometheus]:
    """The shipped configuration, scraping `server`."""
    shutil.copytree(SHIPPED, folder, dirs_exist_ok=True)
    config = (folder / "prometheus.yml").read_text(encoding="utf-8").replace(SCRAPED, f"127.0.0.1:{server.port}")
    (folder / "prometheus.yml").write_text(config, encoding="utf-8")
    port = harness.free_port()
    command = [
        prometheus(), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    process = harness.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        yield _reached(Prometheus(port), process)
    finally:
        process.terminate()
        process.wait()


def _reached(found: Prometheus, process: subprocess.Popen[bytes]) -> Prometheus:
    deadline = monotonic() + 60
    while monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            found.get("rules")
            return found
        sleep(0.2)
    raise HarnessError("Prometheus didn't start")


def complete(server: Server, prompt: str, tokens: int) -> None:
    """One streamed completion, read to its end."""
    _read(server, "completions", {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True})


def respond(server: Server, prompt: str, tokens: int) -> None:
    """One answer in the background, which is stored, read to its end."""
    _read(server, "responses", {"input": prompt, "max_output_tokens": tokens, "background": True})


def _read(server: Server, route: str, fields: dict[str, Any]) -> None:
    """Reads a stream; an answer that fails is the metrics' business."""
    body = {"model": "default", "stream": True, **fields}
    url = f"http://127.0.0.1:{server.port}/v1/{route}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=600) as answer:
        while answer.read(4096):
            pass


Ask = Callable[[Server, str, int], None]


@contextlib.contextmanager
def loaded(server: Server, streams: int, tokens: int, ask: Ask = complete) -> Iterator[None]:
    """`streams` clients that ask one thing after the other, in prompts of mixed lengths."""
    over = threading.Event()

    def follow(number: int) -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            ask(server, f"{number} {turn} " + "and so on " * (1 + 7 * (turn * number % 40)), tokens)

    threads = [threading.Thread(target=follow, args=(number,), daemon=True) for number in range(1, streams + 1)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()


# ---------------------------------------------------------------- the dashboard
def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        if panel["type"] != "row":
            yield panel


def filled_in(expression: str) -> str:
    """The query with Grafana's variables as a user's first look has them."""
    values = {"$instance": ".*", "$model": ".*", "$__rate_interval": "1m", "$__range": "10m", "$__interval": "15s"}
    for name, value in values.items():
        expression = expression.replace(name, value)
    return expression


def empty_panels(found: Prometheus) -> list[str]:
    """Titles of panels none of whose queries has data; a query that fails raises."""
    return [
        panel["title"]
        for panel in panels()
        if not any(found.get("query", query=filled_in(target["expr"]))["result"] for target in panel["targets"])
    ]


# ---------------------------------------------------------------- the looks
def under_load(model: Path, folder: Path, seconds: float) -> list[str]:
    """Load and one kill: rules evaluate, panels have data, nothing fires that shouldn't."""
    options = {
        "live_buffers": "native", "access_log": "off", "journal": folder / "journal.db", "kv_disk": KV_DISK,
        "kv_disk_folder": folder / "kv",
    }  # fmt: skip
    with harness.marathon(model, folder / "load.log", **options) as server, watched(server, folder / "load") as found:
        with loaded(server, 4, 200), loaded(server, 1, 400, ask=respond):
            sleep(seconds / 2)
            pid = server.engine_pid()
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            sleep(seconds / 2)
            empty = empty_panels(found)
        problems = found.faults()
        fired = found.fired()
    print(f"fired: {sorted(fired) or 'nothing'}", flush=True)
    for title in empty:
        print(f"no data: {title}: {EMPTY.get(title, 'UNEXPECTED')}", flush=True)
    problems += [f"{title} has no data" for title in empty if title not in EMPTY]
    return problems + [f"{name} fired under plain load" for name in fired]


def with_a_leak(model: Path, folder: Path, seconds: float) -> list[str]:
    """The residency alert fires before the first rotation."""
    options = {
        "live_buffers": "native", "buffer_limit": LIMIT, "faults": f"leak:{LEAK}", "access_log": "off",
    }  # fmt: skip
    with (
        harness.marathon(model, folder / "leak.log", **options) as server,
        watched(server, folder / "leak") as found,
        loaded(server, 1, 4000),
    ):
        deadline = monotonic() + seconds
        while monotonic() < deadline and "MarathonLiveBuffersLeak" not in found.fired():
            if found.value('sum(marathon_engine_restarts_total{reason="rotation"})'):
                return ["the engine was replaced before MarathonLiveBuffersLeak fired"]
            sleep(0.5)
        fired = found.fired()
        headroom = found.value("marathon_buffer_headroom_ratio")
    print(f"fired: {sorted(fired)}, with {headroom:.0%} of the buffers left", flush=True)
    return [] if "MarathonLiveBuffersLeak" in fired else ["MarathonLiveBuffersLeak didn't fire"]


def a_full_prefix_cache(model: Path, folder: Path, seconds: float) -> list[str]:
    """Kept prompts of mixed lengths add buffers by the thousand until the prefix cache is full: nothing fires."""
    options = {"live_buffers": "native", "buffer_limit": LIMIT, "access_log": "off"}
    deep = write(FAMILY, folder / "deep", layers=DEEP)
    gone = "sum(marathon_prompt_cache_evictions_total)"
    with (
        harness.marathon(deep, folder / "full.log", **options) as server,
        watched(server, folder / "full") as found,
        loaded(server, 4, 40),
    ):
        deadline = monotonic() + seconds
        least = monotonic() + seconds / 2
        while monotonic() < deadline and (monotonic() < least or found.value(gone) < TURNED_OVER):
            sleep(1)
        fired = found.fired()
        evictions = found.value(gone)
        print(
            f"fired: {sorted(fired) or 'nothing'}; {found.value('marathon_prompt_cache_entries'):g} prompts kept, "
            f"{evictions:g} given up, at most {found.value('max_over_time(marathon_live_buffers[1h])'):g} live buffers",
            flush=True,
        )
    problems = [f"{name} fired while the prefix cache filled up" for name in fired]
    return problems if evictions >= TURNED_OVER else [*problems, "the prefix cache didn't turn over"]


def a_long_prompt(model: Path, folder: Path, seconds: float) -> list[str]:
    """A prompt that takes its time, alone: nothing fires."""
    options = {"live_buffers": "native", "access_log": "off"}
    with harness.marathon(model, folder / "long.log", **options) as server, watched(server, folder / "long") as found:
        deadline = monotonic() + seconds
        while monotonic() < deadline:
            complete(server, "word " * 3500, 8)
        fired = found.fired()
    print(f"fired: {sorted(fired) or 'nothing'}", flush=True)
    return [f"{name} fired for long prompts" for name in fired]


def a_cold_start(model: Path, folder: Path, seconds: float) -> list[str]:
    """A start that takes so long, watched from its first moment: nothing fires, then or in the minute behind it."""
    options = {"live_buffers": "native", "access_log": "off", "faults": f"slow-start:{seconds:.0f}"}
    with harness.starting(model, folder / "cold.log", **options) as server, watched(server, folder / "cold") as found:
        began = monotonic()
        server.wait_ready()
        took = monotonic() - began
        complete(server, "word " * 50, 50)
        sleep(AFTER_START_SECONDS)
        fired = found.fired()
        scraped = found.value("max_over_time(marathon_engine_up[1h])")
    print(f"ready after {took:.0f} s, fired: {sorted(fired) or 'nothing'}", flush=True)
    problems = [f"{name} fired for a cold start" for name in fired]
    if took < seconds or scraped != 1:
        problems.append(f"the start took {took:.0f} s, and engine_up was seen as {scraped:g}")
    return problems


Look = Callable[[Path, Path, float], list[str]]
LOOKS: dict[str, tuple[Look, float]] = {  # with the share of --seconds that it takes
    "load": (under_load, 1.0),
    "leak": (with_a_leak, 0.5),
    "prefix-cache": (a_full_prefix_cache, 2.0),
    "long-prompt": (a_long_prompt, 0.5),
    "cold-start": (a_cold_start, 0.75),
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=120, help="of load; the other looks take half of it to twice as much"
    )
    parser.add_argument("--looks", nargs="+", choices=LOOKS, default=list(LOOKS), help="only these; all by default")
    return parser.parse_args(arguments)


def main() -> int:
    chosen = parse()
    looks = [LOOKS[name] for name in chosen.looks]
    minutes = sum(share for _, share in looks) * chosen.seconds / 60
    print(f"this takes about {minutes + 3:.0f} minutes", flush=True)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write(FAMILY, folder / "model")
        for look, share in looks:
            print(f"{look.__name__.replace('_', ' ')}: {share * chosen.seconds:.0f} s", flush=True)
            problems += look(model, folder, share * chosen.seconds)
    for problem in problems:
        print(f"FAIL {problem}", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
