"""Where this machine gets packages from.

Owns the reading of what configures pip and uv for it: their variables, pip.conf, uv.toml. Runs where a start runs.
Asks nothing of the network.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PYPI = "https://pypi.org/simple"
Found = dict[str, list[str]]  # values by pip's name of the option


@dataclass(frozen=True, slots=True)
class Places:
    """Where packages come from: indexes in the order in which they are asked, folders and pages of files, and how."""

    indexes: list[str]
    files: list[str] = field(default_factory=list)
    certificates: str | None = None
    proxy: str | None = None


def places(environment: Mapping[str, str] = os.environ) -> Places:
    """As pip's variables, uv's, pip.conf and uv.toml say, in that order; else PyPI."""
    sources = [_pip_variables(environment), _uv_variables(environment), _pip_files(environment), _uv_files(environment)]

    def first(name: str) -> str | None:
        return next((source[name][0] for source in sources if source.get(name)), None)

    def every(name: str) -> list[str]:
        return list(dict.fromkeys(value for source in sources for value in source.get(name, [])))

    switched_off = (first("no-index") or "").lower() in {"1", "true", "yes", "on"}
    indexes = []
    if not switched_off:
        indexes = [first("index-url") or PYPI, *every("extra-index-url")]
    return Places(indexes, every("find-links"), first("cert"), first("proxy"))


def _pip_variables(environment: Mapping[str, str]) -> Found:
    names = ("index-url", "extra-index-url", "find-links", "no-index", "cert", "proxy")
    return {name: environment.get("PIP_" + name.replace("-", "_").upper(), "").split() for name in names}


def _uv_variables(environment: Mapping[str, str]) -> Found:
    default = environment.get("UV_DEFAULT_INDEX") or environment.get("UV_INDEX_URL") or ""
    more = f"{environment.get('UV_INDEX', '')} {environment.get('UV_EXTRA_INDEX_URL', '')}"
    return {
        "index-url": [_without_name(word) for word in default.split()],
        "extra-index-url": [_without_name(word) for word in more.split()],
        "find-links": environment.get("UV_FIND_LINKS", "").replace(",", " ").split(),
        "no-index": environment.get("UV_NO_INDEX", "").split(),
    }


def _without_name(word: str) -> str:
    """uv's indexes may be written `name=https://…`."""
    return re.sub(r"^[\w.-]+=(?=\w+:)", "", word)


def _pip_files(environment: Mapping[str, str]) -> Found:
    """The newest word wins, as in pip: the machine's file, the user's, the environment's, the one that is named."""
    found: Found = {}
    for path in _pip_paths(environment):
        reader = configparser.RawConfigParser()
        with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
            reader.read(path, encoding="utf-8")
        for section in ("global", "install", "download"):
            if reader.has_section(section):
                found |= {name.replace("_", "-"): value.split() for name, value in reader.items(section)}
    return found


def _pip_paths(environment: Mapping[str, str]) -> Iterator[Path]:
    named = environment.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    home = Path(environment.get("HOME") or Path.home())
    for folder in (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep):
        yield Path(folder) / "pip" / "pip.conf"
    yield Path("/etc/pip.conf")
    if sys.platform == "darwin":
        yield Path("/Library/Application Support/pip/pip.conf")
        yield home / "Library" / "Application Support" / "pip" / "pip.conf"
    yield home / ".pip" / "pip.conf"
    yield Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if named:
        yield Path(named)


def _uv_files(environment: Mapping[str, str]) -> Found:
    home = Path(environment.get("HOME") or Path.home())
    user = Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "uv" / "uv.toml"
    named = environment.get("UV_CONFIG_FILE")
    for path in (Path(named) if named else user, Path("/etc/uv/uv.toml")):
        with contextlib.suppress(OSError, ValueError):
            return _uv_file(tomllib.loads(path.read_text(encoding="utf-8")))
    return {}


def _uv_file(written: Mapping[str, Any]) -> Found:
    named = [index for index in written.get("index", []) if "url" in index]
    default = [index["url"] for index in named if index.get("default")]
    others = [index["url"] for index in named if not index.get("default")]
    url = written.get("index-url")
    return {
        "index-url": default or ([url] if url else []),
        "extra-index-url": [*others, *written.get("extra-index-url", [])],
        "find-links": list(written.get("find-links", [])),
        "no-index": ["true"] if written.get("no-index") else [],
    }
