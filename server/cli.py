"""The command `marathon`.

Owns the command line: its options are the settings' fields, read back from `server/settings.py`, so none is written
twice. Runs in the main thread. What can't start ends with one line on stderr and exit code 2, never with a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import server
from server import certificate, faults
from server.errors import StartupError
from server.settings import ENV_PREFIX, EngineSettings, Limits, Logs, Serving, Settings, load, option

EXIT_UNABLE = 2
GROUPS: dict[str, type[BaseModel]] = {
    "model and network": Serving,
    "limits": Limits,
    "engine": EngineSettings,
    "logs": Logs,
}


class Parser(argparse.ArgumentParser):
    """argparse's, with one line for a mistake instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_UNABLE, f"marathon: {message} (see {self.prog} --help)\n")


def parser() -> Parser:
    top = Parser(
        prog="marathon",
        description="An OpenAI-compatible inference server for MLX whose generations do not die.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"marathon {server.__version__}")
    commands = top.add_subparsers(dest="command", metavar="command", title="commands")
    for name, words in (("serve", "serve a model"), ("check", "print effective settings, model, device and limits")):
        command = commands.add_parser(
            name,
            help=words,
            usage=f"marathon {name} [options]",
            description=f"{words[0].upper()}{words[1:]}.",
            epilog=f"Each option can also be set as {ENV_PREFIX}<NAME> in the environment or as <name> in a TOML file.",
            allow_abbrev=False,
        )
        command.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
        for title, part in GROUPS.items():
            _add_settings(command.add_argument_group(title), part)
    words = "prove that a model's live-buffer count stays flat here, and what it does in mlx-lm"
    certificate.add_arguments(
        commands.add_parser("certify", help=words, description=f"{words[0].upper()}{words[1:]}.", allow_abbrev=False)
    )
    return top


def _add_settings(group: Any, part: type[BaseModel]) -> None:
    for name, field in part.model_fields.items():
        # A bare switch turns it on; `--guard off` turns it off.
        switch: dict[str, Any] = {"nargs": "?", "const": "on"} if field.annotation is bool else {}
        group.add_argument(
            option(name), default=argparse.SUPPRESS, metavar=_metavar(name, field), help=_help(field), **switch
        )


def _metavar(name: str, field: FieldInfo) -> str:
    kinds = get_args(field.annotation) or (field.annotation,)
    if all(isinstance(kind, str) for kind in kinds):
        return "|".join(kinds)
    if "bytes" in f"{name} {field.description}":
        return "BYTES"
    return {bool: "on|off", int: "N", float: "N", Path: "PATH"}.get(kinds[0], "TEXT")


def _help(field: FieldInfo) -> str:
    words, default = (field.description or "").replace("%", "%%"), field.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    return words if default in (None, [], "") else f"{words} [{default}]"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = vars(parser().parse_args(arguments))
    command, config = options.pop("command"), options.pop("config", None)
    if command is None:
        parser().print_help()
        return
    try:
        if command == "certify":
            sys.exit(certify(options))
        settings = load(options, config)
        faults.parse(settings.faults)
        run(command, settings)
    except StartupError as error:
        sys.exit(_complain(str(error)))
    except KeyboardInterrupt:
        sys.exit(130)


def certify(options: dict[str, Any]) -> int:
    """The exit code: 1 when the model doesn't pass."""
    from server.locate import locate

    settings = load(certificate.settings_of(options))
    return certificate.run(certificate.order(locate(settings).path, options)).returncode


def run(command: str, settings: Settings) -> None:
    """Imports only what the command needs: most of it takes seconds to import."""
    if command == "serve":
        from server.lifecycle import serve

        serve(settings)
    else:
        from server.check import report

        print(report(settings))


def _complain(message: str) -> int:
    print(f"marathon: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_UNABLE


if __name__ == "__main__":
    main()
