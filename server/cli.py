"""The command `marathon`.

Owns the command line: its options are the settings' fields, read back from `server/settings.py`, so none is written
twice. Runs in the main thread. What can't start ends with one line on stderr and exit code 2, never with a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import server
from server import faults
from server.certify import certificate
from server.commands import completion
from server.commands import options as people
from server.commands.completion import OfferedCommand, OfferedOption
from server.config import open_files
from server.config.sources import ENV_PREFIX, Sources, did_you_mean, option, refuse_undecoded, variable
from server.errors import StartupError, joined_lines
from server.settings import GROUPS, SIZE_UNITS, SIZES, Settings, in_words, load, load_from, read_sources
from server.telemetry import logs
from server.telemetry.output import checked_output

EXIT_UNABLE = 2
COMMANDS = {
    "serve": "serve a model",
    "check": "print effective settings, model, device and limits",
    "agents": "print the lines of configuration with which coding agents use this server",
    "certify": "prove that a model's live-buffer count stays flat here, and what it does in mlx-lm",
    **people.COMMANDS,
    "completion": "print completion of commands, options and values for a shell",
}
_UNKNOWN_COMMAND = re.compile(r"argument command: invalid choice: '([^']*)'")
WITHOUT_SETTINGS = ("config", "completion")
_SIGNED = re.compile(r"-[^-]")
PATHS = ("PATH", "FILE")
EPILOG = (
    f"Each option can also be set as {ENV_PREFIX}<NAME> in the environment or as <name> in a TOML file. "
    f"SIZE is {SIZE_UNITS}."
)


class Parser(argparse.ArgumentParser):
    """argparse's, with one line for a mistake instead of the whole usage. `commands`: the parsers of its commands."""

    commands: dict[str, argparse.ArgumentParser]

    def error(self, message: str) -> NoReturn:
        if word := _UNKNOWN_COMMAND.match(message):
            hint = did_you_mean(word[1], COMMANDS)
            message = f"there is no command {word[1]!r} among {', '.join(COMMANDS)}{hint}"
        raise StartupError(f"{message} (see {self.prog} --help)")

    def refuse(self, word: str) -> NoReturn:
        """An argument that no option and no command takes."""
        if not word.startswith("-"):
            hint = ""
            if "--model" in self._option_string_actions:
                hint = f"; a model is named with --model {word}"
            self.error(f"unknown argument {word!r}{hint}")
        self.refuse_option(word)

    def refuse_option(self, word: str, elsewhere: str = "") -> NoReturn:
        """An option that the command doesn't have. `elsewhere`: where it belongs, unless it is a slip of the pen."""
        name = word.partition("=")[0]
        hint = did_you_mean(name, self._option_string_actions) or elsewhere
        if not hint and self._takes_text:
            hint = "; a text that begins with a dash follows --"
        self.error(f"unknown option {name}{hint}")

    @property
    def _takes_text(self) -> bool:
        return any(action.nargs == "*" for action in self._actions)

    def has_option(self, word: str) -> bool:
        return word.partition("=")[0] in self._option_string_actions

    def wants_value(self, word: str) -> bool:
        """Whether the word is an option whose value must follow it."""
        action = self._option_string_actions.get(word)
        return action is not None and action.nargs is None

    def with_signed_values(self, words: Iterable[str]) -> list[str]:
        """The words with `--port -1` as `--port=-1`: argparse takes what begins with a minus for an option."""
        joined: list[str] = []
        words = iter(words)
        for word in words:
            is_value = _SIGNED.match(word) and not self.has_option(word)
            if joined and is_value and self.wants_value(joined[-1]):
                joined[-1] += f"={word}"
            else:
                joined.append(word)
            if word == "--":
                break
        return [*joined, *words]

    def offered(self) -> list[OfferedOption]:
        """Its long options, as completion sees them."""
        return [_offered(action) for action in self._actions if action.option_strings]

    def words(self) -> tuple[str, ...]:
        """Those that may stand behind it without an option."""
        return tuple(
            str(word) for action in self._actions if not action.option_strings for word in action.choices or ()
        )


def _offered(action: argparse.Action) -> OfferedOption:
    flag = action.option_strings[-1]
    metavar = str(action.metavar or "")
    values = tuple(map(str, action.choices or ()))
    if "|" in metavar:
        values = tuple(metavar.split("|"))
    return OfferedOption(
        flag,
        (action.help or "").replace("%%", "%"),
        values=values,
        files=metavar in PATHS or flag == option("model"),
        switch=action.nargs == 0,
        bare=action.nargs == "?",
    )


def parser() -> Parser:
    top = Parser(
        prog="marathon",
        description="An OpenAI-compatible inference server for MLX whose generations do not die.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"marathon {server.__version__}")
    commands = top.add_subparsers(dest="command", metavar="command", title="commands")
    for name, words in COMMANDS.items():
        description = f"{words[0].upper()}{words[1:]}."
        command = commands.add_parser(name, help=words, description=description, allow_abbrev=False)
        command.set_defaults(parser=command)
        if name == "certify":
            certificate.add_arguments(command)
        elif name in people.COMMANDS:
            people.add_arguments(command, name)
        elif name == "completion":
            command.add_argument("shell", choices=completion.SHELLS, help="the shell")
        else:
            _add_options(command, name)
    top.commands = dict(commands.choices)
    return top


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    command.usage = f"marathon {name} [options]"
    command.epilog = EPILOG
    command.add_argument("--config", metavar="FILE", help="TOML file with settings")
    for title, part in GROUPS.items():
        _add_settings(command.add_argument_group(title), part)


def _add_settings(group: Any, part: type[BaseModel]) -> None:
    for name, field in part.model_fields.items():
        # A bare switch turns it on; `--guard off` turns it off.
        switch: dict[str, Any] = {}
        if field.annotation is bool:
            switch = {"nargs": "?", "const": "on"}
        group.add_argument(
            option(name), default=argparse.SUPPRESS, metavar=_metavar(name, field), help=_help(name, field), **switch
        )


def _metavar(name: str, field: FieldInfo) -> str:
    kinds = get_args(field.annotation) or (field.annotation,)
    if all(isinstance(kind, str) for kind in kinds):
        return "|".join(kinds)
    if name in SIZES:
        return "SIZE"
    return {bool: "on|off", int: "N", float: "N", Path: "PATH"}.get(kinds[0], "TEXT")


def _help(name: str, field: FieldInfo) -> str:
    words = (field.description or "").replace("%", "%%")
    default = field.default
    if default in (None, [], ""):
        return words
    return f"{words} [{in_words(name, default)}]"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    open_files.fill_standard()
    _leave_lost_folder()
    try:
        with checked_output():
            code = _run(parse(given))
        sys.exit(code)
    except StartupError as error:
        sys.exit(_complain(str(error), given))
    except KeyboardInterrupt:
        sys.exit(130)


def _leave_lost_folder() -> None:
    """Libraries ask for the current folder as they are imported, and fail where it was deleted."""
    try:
        os.getcwd()
    except OSError:
        os.chdir("/")


def _run(options: dict[str, Any]) -> int:
    """The exit code."""
    command = options.pop("command")
    if command is None:
        parser().print_help()
        return 0
    if command == "certify":
        return certify(options)
    if command in people.COMMANDS:
        return people.run(command, options)
    if command == "completion":
        print(completion.script(options["shell"], offered()))
        return 0
    config = options.pop("config", None)
    run(command, read_sources(options, config))
    return 0


def offered() -> list[OfferedCommand]:
    """The whole command line, as completion sees it."""
    return [
        OfferedCommand(name, COMMANDS[name], command.offered(), command.words())
        for name, command in parser().commands.items()
        if isinstance(command, Parser)
    ]


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """The options by name, `command` among them. Raises StartupError for those that don't exist."""
    for argument in arguments:
        refuse_undecoded(argument, f"the argument {argument!a}")
    top = parser()
    _refuse_option_without_command(top, arguments[:1])
    known = top.commands.get("".join(arguments[:1]))
    words = list(arguments)
    if isinstance(known, Parser):
        words = [words[0], *known.with_signed_values(words[1:])]
        _refuse_foreign_option(top, known, words)
    options, unknown = top.parse_known_args(words)
    values = vars(options)
    command = values.pop("parser", top)
    if unknown:
        command.refuse(unknown[0])
    return values


def _refuse_option_without_command(top: Parser, first: Iterable[str]) -> None:
    for word in first:
        if word.startswith("-") and word not in ("-h", "--help", "--version"):
            top.error(f"{word} stands before the command; options follow it, as in `marathon serve {word}`")


def _refuse_foreign_option(top: Parser, command: Parser, words: Sequence[str]) -> None:
    """Before argparse takes the option's value for an argument of the command, and complains of that. It also takes
    `-5`, and a dash with a space behind it, for text, with which a command would begin its work."""
    for word in itertools.takewhile(lambda word: word != "--", words[1:]):
        if word.startswith("-") and word != "-" and not command.has_option(word):
            command.refuse_option(word, _owner(top, words[0], word.partition("=")[0]))


def _owner(top: Parser, command: str, flag: str) -> str:
    """Where an option belongs that `command` doesn't have; empty where no command has it."""
    for name in Settings.model_fields:
        if option(name) == flag and command not in WITHOUT_SETTINGS:
            return f"; it is a setting, which {variable(name)} in the environment sets here"
    owners = [name for name, other in top.commands.items() if isinstance(other, Parser) and other.has_option(flag)]
    if owners:
        return f"; it is an option of marathon {', '.join(owners)}"
    return ""


def certify(options: dict[str, Any]) -> int:
    """The exit code: 1 when the model doesn't pass."""
    from server.model_files.locate import locate

    if options["demo"] and "model" in options:
        raise StartupError("--demo brings its own model; leave out either")
    settings = load(certificate.settings_of(options))
    logs.configure()
    if options["demo"]:
        path = None
    else:
        path = locate(settings).path
    return certificate.run(certificate.order(path, options)).returncode


def run(command: str, sources: Sources) -> None:
    """Imports only what the command needs: most of it takes seconds to import."""
    settings = load_from(sources)
    faults.parse(settings.faults)
    if command == "serve":
        from server.serve import serve

        serve(settings)
    elif command == "agents":
        from server.agents import configuration

        print(configuration.report(settings))
    else:
        from server.check import report

        logs.configure(settings.log_level, settings.log_format)
        print(report(settings, sources))


def _complain(message: str, given: Sequence[str]) -> int:
    line = joined_lines(message)
    if wants_json(given):
        logs.configure(form="json")
        logging.getLogger("marathon").critical("%s", line)
    else:
        with contextlib.suppress(OSError):  # the exit code still says it
            print(f"marathon: {line}", file=sys.stderr, flush=True)
    return EXIT_UNABLE


def wants_json(given: Sequence[str]) -> bool:
    """Whether lines are for machines, as far as that can be known of settings that may be wrong."""
    words = " ".join(given).replace("=", " ")
    return "--log-format json" in words or os.environ.get(variable("log_format"), "").lower() == "json"


if __name__ == "__main__":
    main()
