"""`marathon completion`: the three shells complete commands, options and values, each asked as its user asks it."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from server import cli
from server.commands.completion import SHELLS, script

OPTIONS = {"--help", "--folder", "--config", "--json"}
TOOLS = Path(__file__).parents[2] / "build" / "tools"
ASKED = {  # a line that is begun, and what it may go on with
    "marathon ce": {"certify"},
    "marathon serve --log-l": {"--log-level"},
    "marathon serve --log-level ": {"debug", "info", "warning", "error"},
    "marathon serve --guard o": {"on", "off"},
    "marathon status --j": {"--json"},
    "marathon completion ": {"bash", "zsh", "fish", "--help"},
    "marathon cache ": {"show", "clear", "--help", "--folder", "--config", "--json"},
    "marathon serve --port ": set(),
}


def program(name: str) -> str:
    own = TOOLS / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}; `make tools` fetches it")
    return found


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    offered = cli.offered()
    return {shell: script(shell, offered) for shell in SHELLS}


def by_bash(text: str, line: str, folder: Path) -> set[str]:
    """Calls the function as bash does."""
    words = line.split(" ")
    array = " ".join(f"'{word}'" for word in words)
    asking = f"\nCOMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _marathon; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run([program("bash"), "-c", text + asking], capture_output=True, text=True, cwd=folder)
    assert done.stderr == ""
    return set(done.stdout.split())


def by_fish(text: str, line: str, folder: Path) -> set[str]:
    """Asks fish for its completions of a line."""
    (folder / "marathon.fish").write_text(text, encoding="utf-8")
    functions = TOOLS / "root" / "usr" / "share" / "fish" / "functions"
    asking = f"set -p fish_function_path {functions}; source marathon.fish; complete -C '{line}'"
    environment = {**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    done = subprocess.run(
        [program("fish"), "--no-config", "-c", asking], capture_output=True, text=True, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    return {offer.partition("\t")[0] for offer in done.stdout.splitlines()}


@pytest.mark.parametrize("line", ASKED)
@pytest.mark.parametrize("ask", [by_bash, by_fish], ids=["bash", "fish"])
def test_a_line_that_is_begun_goes_on(
    ask: Callable[[str, str, Path], set[str]], line: str, texts: dict[str, str], tmp_path: Path
) -> None:
    found = ask(texts[ask.__name__.removeprefix("by_")], line, tmp_path)
    missing = ASKED[line] - found - OPTIONS  # fish offers options only where one is begun
    assert (missing, found - ASKED[line]) == (set(), set())


def test_zsh_completes_in_a_terminal(texts: dict[str, str], tmp_path: Path) -> None:
    """As a user types it: a word that can go on in one way is written out, several are listed with their meanings."""
    shell = program("zsh")
    own = TOOLS / "root" / "usr" / "share" / "zsh" / "functions"
    folders = [str(folder) for folder in [own, *own.rglob("*")] if folder.is_dir()]
    modules = [str(path) for path in (TOOLS / "root" / "usr" / "lib").glob("*/zsh/*") if path.is_dir()]
    (tmp_path / "marathon.zsh").write_text(texts["zsh"], encoding="utf-8")
    start = f"fpath+=({' '.join(folders)}); module_path+=({' '.join(modules)}); autoload -Uz compinit; compinit -uD; "
    pid, master = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execve(shell, [shell, "-f", "-i"], {"HOME": str(tmp_path), "TERM": "dumb", "PATH": os.environ["PATH"]})
    try:
        said = typed(master, f"PS1='% '; {start}source marathon.zsh; echo rea''dy\n", "ready")
        said = typed(master, "marathon serve --log-l\t", "--log-level")
        assert "--log-level" in said
        said = typed(master, "\x15marathon st\t", "status ")
        assert "status" in said
        typed(master, "\x15marathon serve --log-level \t\t", "warning")
    finally:
        os.close(master)
        os.waitpid(pid, 0)


def typed(master: int, keys: str, awaited: str) -> str:
    """What the terminal shows once it shows `awaited`."""
    os.write(master, keys.encode())
    shown, deadline = "", monotonic() + 20
    while awaited not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\x08]", "", shown):
        left = deadline - monotonic()
        assert select.select([master], [], [], max(0.0, left))[0], shown
        shown += os.read(master, 4096).decode(errors="replace")
    return shown


def test_every_option_of_every_command_is_offered_in_each_shell(texts: dict[str, str]) -> None:
    for command in cli.offered():
        for option in command.options:
            assert option.flag in texts["bash"]
            assert option.flag in texts["zsh"]
            assert f"from {command.name}' -l {option.flag[2:]} " in texts["fish"]
