"""Where settings are written: the command line, the environment and a TOML file.

Owns the reading of all three, which of them wins, and the place that each value came from, so that an error names what
the user has to change. Runs at start in the process that the user began. It doesn't know what a setting means.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path
from typing import Any

from server.config.user_path import NoSuchHome, user_path
from server.errors import StartupError

ENV_PREFIX = "MARATHON_"
LIKE = 0.7  # of two words, as difflib measures it: `prot` and `port` are 0.75, `url` and `journal` 0.6
_CONFIG = "config"


def option(name: str) -> str:
    """`stall_seconds` → `--stall-seconds`."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """`stall_seconds` → `MARATHON_STALL_SECONDS`."""
    return ENV_PREFIX + name.upper()


def as_written(value: object) -> str:
    """A setting's value as it stands in a TOML file or on the command line, not as Python has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, list):
        return f"[{', '.join(map(as_written, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {as_written(part)}' for name, part in value.items())} }}"
    return repr(value)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean --port?`, or nothing where no known word is near."""
    names = {_without_prefix(name): name for name in known}  # a prefix that all have makes none of them more alike
    near = difflib.get_close_matches(_without_prefix(word), list(names), n=1, cutoff=LIKE)
    if near:
        return f"; did you mean {names[near[0]]}?"
    return ""


def _without_prefix(name: str) -> str:
    return name.removeprefix("--").removeprefix(ENV_PREFIX)


@dataclass(frozen=True, slots=True)
class Sources:
    """What stands in each of the three places, by the setting's name."""

    given: Mapping[str, Any]  # on the command line
    environment: Mapping[str, str]
    file: Mapping[str, Any]
    path: Path | None = None  # of the file
    lines: Mapping[str, int] = field(default_factory=dict)  # in which each setting of the file begins

    @classmethod
    def read(cls, given: Mapping[str, Any], config: str | Path | None, known: Collection[str]) -> Sources:
        """`given` as the command line has it. Raises StartupError for settings that aren't `known` and for a file that
        can't be read."""
        environment = _environment(known)
        config = config or environment.pop(_CONFIG, None)
        environment.pop(_CONFIG, None)
        if config is None:
            return cls(given, environment, {})
        try:
            path = user_path(config)
        except NoSuchHome as error:
            raise StartupError(f"config file {config}: {error}") from None
        text = _text(path)
        try:
            file = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise StartupError(f"config file {path} isn't TOML: {error}") from None
        sources = cls(given, environment, file, path, _lines(text))
        sources._refuse_unknown(known)
        return sources

    def merged(self) -> dict[str, Any]:
        """One value a setting: the command line wins over the environment, the environment over the file."""
        return {**self.file, **self.environment, **self.given}

    def origin(self, name: str) -> str:
        """The place of a setting's value as the user would find it again; empty for one that stands nowhere."""
        if name in self.given:
            return option(name)
        if name in self.environment:
            return variable(name)
        if name in self.file:
            return self._place(name)
        return ""

    def blame(self, name: str, value: object) -> str:
        """The beginning of an error about a setting: its place and its value."""
        shown = "" if name == "api_key" else f" {as_written(value)}"  # never an API key
        if name in self.given or name not in {**self.environment, **self.file}:
            return f"{option(name)}{shown}"
        if name in self.environment:
            return f"{variable(name)}{shown}"
        return f"{self._place(name)}: {name}{shown}"

    def _place(self, name: str) -> str:
        line = self.lines.get(name)
        if line:
            return f"{self.path}, line {line}"
        return str(self.path)

    def _refuse_unknown(self, known: Collection[str]) -> None:
        for name, value in self.file.items():
            if isinstance(value, dict):
                raise StartupError(f"{self._place(name)}: settings stand in no table, and {name!r} is one")
            if name not in known:
                raise StartupError(f"{self._place(name)}: unknown setting {name!r}{did_you_mean(name, known)}")


def refuse_undecoded(text: str, place: str) -> None:
    """Raises StartupError for text from outside that Python couldn't read in the locale's encoding: what stands for its
    bytes can't be written anywhere, so that it would fail later."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        encoding = sys.getfilesystemencoding()
        raise StartupError(f"{place} isn't text in this locale's encoding, {encoding}; set LC_ALL=C.UTF-8, say")


def _environment(known: Collection[str]) -> dict[str, str]:
    """The variables that are set to something, by the names of their settings. An empty one counts as absent."""
    found = {
        name.upper().removeprefix(ENV_PREFIX).lower(): (name, value)
        for name, value in os.environ.items()
        if name.upper().startswith(ENV_PREFIX) and value
    }
    for name in sorted(set(found) - set(known) - {_CONFIG}):
        near = did_you_mean(variable(name), map(variable, known))
        raise StartupError(f"unknown setting in the environment: {found[name][0]}{near}")
    for name, value in found.values():
        refuse_undecoded(value, name)
    return {name: value for name, (_, value) in found.items()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise StartupError(f"config file {path} doesn't exist") from None
    except OSError as error:
        raise StartupError(f"config file {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise StartupError(f"config file {path} isn't UTF-8 text (line {line})") from None


def _lines(text: str) -> dict[str, int]:
    """The line in which each name at the top of a TOML file, and each table, is first written."""
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"""\s*\[*\s*["']?([\w-]+)["']?\s*[]=.]""", line):
            found.setdefault(match[1], number)
    return found
