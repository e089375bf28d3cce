"""The command lines of the commands for people.

Owns their options and which function each command calls. Runs in the main thread of a short-lived process. Imports a
command's module only when that command is given: most of them take a moment to import.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from server.config.user_path import user_path

COMMANDS = {
    "status": "print the verdict on a running server, its figures and its running generations",
    "top": "show the same live, second by second",
    "ask": "ask a running server, or one that is started for the question, and print the answer as it comes",
    "cache": "show the KV that is kept on disk, or clear it",
    "models": "list the models on this machine and which of them fit its memory",
    "config": "print a settings file with every setting, its meaning and its default",
    "journal": "list, show, export or delete the stored answers on this machine",
}


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options that stand behind `marathon COMMAND`."""
    _ADD[command](parser)


def number(text: str) -> float:
    """A number that JSON can say. Raises ValueError, of which argparse makes a line."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _remote_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="address of the server [http://127.0.0.1:8080, or as the settings say]")
    parser.add_argument("--api-key", metavar="TEXT", help="its API key; MARATHON_API_KEY keeps it out of sight")


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    _remote_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the server's report as JSON")
    parser.epilog = "Exit code 0: healthy or loading; 1: a warning or worse; 2: no server answers."


def _ask_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "text",
        nargs="*",
        metavar="TEXT",
        help="the question, behind -- if it begins with a dash; absent or -: standard input, which else is appended",
    )
    _remote_arguments(parser)
    parser.add_argument("--model", help="model to ask, or to serve where a server is started [the served one]")
    parser.add_argument("--system", metavar="TEXT", help="system text")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer [the server's]")
    parser.add_argument("--temperature", type=number, metavar="N", help="how freely tokens are drawn [the model's]")
    parser.epilog = "Exit code 1: an error, in one line; 130: Ctrl-C."


def _models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder",
        type=user_path,
        action="append",
        default=[],
        metavar="PATH",
        help="look here too: a model's folder, or one that holds such folders; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def _cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("act", nargs="?", choices=("show", "clear"), default="show", help="[show]")
    parser.add_argument("--folder", type=user_path, metavar="PATH", help="where it lies [as the settings say]")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """The command takes none."""


def _journal_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=["list", "show", "export", "delete"],
        help="what to do: list all, show some with what was asked, export as one line of JSON each, delete [list]",
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="which answers; export takes all where none is named")
    parser.add_argument("--journal", metavar="PATH", help="file of the journal [the one that a server would use]")
    parser.add_argument("--all", action="store_true", help="delete every finished answer")
    parser.add_argument("--json", action="store_true", help="list as one line of JSON each")
    parser.epilog = "Works beside a running server. What isn't finished is cancelled through the server."


def run(command: str, options: dict[str, Any]) -> int:
    """Carry out a command and return the exit code. Raises StartupError with the line to print."""
    return _RUN[command](options)


def _status(options: dict[str, Any]) -> int:
    from server.commands import remote, status

    return status.show(remote.find(options["url"], options["api_key"]), as_json=options["json"])


def _top(options: dict[str, Any]) -> int:
    from server.commands import remote, top

    return top.watch(remote.find(options["url"], options["api_key"]))


def _ask(options: dict[str, Any]) -> int:
    from server.commands import ask

    return ask.ask(options)


def _models(options: dict[str, Any]) -> int:
    from server.commands import models

    return models.show(options["folder"], as_json=options["json"])


def _cache(options: dict[str, Any]) -> int:
    from server.commands import cache

    act = {"show": cache.show, "clear": cache.clear}[options["act"]]
    return act(options["config"], options["folder"], as_json=options["json"])


def _config(options: dict[str, Any]) -> int:
    from server.commands import settings_file

    print(settings_file.example())
    return 0


def _journal(options: dict[str, Any]) -> int:
    from server.commands import journal

    return journal.run(options)


_ADD: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "status": _status_arguments,
    "top": _remote_arguments,
    "ask": _ask_arguments,
    "models": _models_arguments,
    "cache": _cache_arguments,
    "config": _no_arguments,
    "journal": _journal_arguments,
}
_RUN: dict[str, Callable[[dict[str, Any]], int]] = {
    "status": _status,
    "top": _top,
    "ask": _ask,
    "models": _models,
    "cache": _cache,
    "config": _config,
    "journal": _journal,
}
