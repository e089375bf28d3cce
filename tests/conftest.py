"""What every test stands on: a clean environment, and models that are written once a session."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import slipcover

from loadtests import zoo
from server.config.cache_folder import cache_folder
from server.errors import StartupError
from server.model_files.starter import ensure_starter
from server.telemetry.logs import JsonLines, Lines

Tiny = Callable[..., Path]


def pytest_report_header() -> str:
    packages = ("mlx", "mlx-lm", "transformers", "tokenizers", "fastapi", "uvicorn", "pydantic")
    return ", ".join(f"{package} {version(package)}" for package in packages)


def pytest_configure() -> None:
    """Let SIGINT through to the commands that tests start, which inherit what a shell in the background ignores.

    Where coverage is measured, its probes stay in the code. To take them out, slipcover on Python 3.11 asks each
    running frame for its variables, and the frame keeps what they held then: live buffers, which some tests count.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(slipcover.Slipcover, "deinstrument_seen"):
        slipcover.Slipcover.deinstrument_seen = lambda self: None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests, or one of few but long tests comes last, with one process at work."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def empty_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder that is new."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, empty_home: Path) -> None:
    """No setting, cache or proxy of the person who runs the tests reaches a test."""
    for name in os.environ:
        if name.startswith("MARATHON_") or name.lower() in {"http_proxy", "https_proxy", "all_proxy"}:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(empty_home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty_home / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(empty_home / "data"))


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """What a test sets up of logging ends with it: a handler would go on to write to a stream that is closed."""
    root = logging.getLogger()
    level = root.level
    hooks = (warnings.showwarning, sys.excepthook, sys.unraisablehook, threading.excepthook)
    yield
    root.setLevel(level)
    for handler in list(root.handlers):
        if isinstance(handler.formatter, Lines | JsonLines):
            root.removeHandler(handler)
    warnings.showwarning, sys.excepthook, sys.unraisablehook, threading.excepthook = hooks


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`tiny("llama")` is the folder of that family's tiny model; sizes as in `loadtests.zoo.write`."""
    root = tmp_path_factory.mktemp("tiny")
    written: dict[str, Path] = {}

    def folder(family: str, **sizes: int) -> Path:
        name = "-".join([family, *(f"{key}{value}" for key, value in sorted(sizes.items()))])
        if name not in written:
            written[name] = zoo.write(family, root / name, **sizes)
        return written[name]

    return folder


@pytest.fixture(scope="session")
def starter_folder(request: pytest.FixtureRequest) -> Path:
    """The real starter model, kept in the user's own cache so that it is fetched once and not once a run."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled():
            return ensure_starter(cache_folder(), print)
    except StartupError as error:
        pytest.skip(str(error))
