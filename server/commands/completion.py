"""What `marathon completion SHELL` prints: completion of commands, options and values for bash, zsh and fish.

Owns the three scripts. Pure text: the command line hands in what it offers, so that no option is written twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

PROGRAM = "marathon"


@dataclass(frozen=True, slots=True)
class OfferedOption:
    """An option as completion sees it. `values`: the words that it takes, where they are known; `files`: a path is
    wanted; `bare`: it also stands alone. A switch takes no value."""

    flag: str
    words: str
    values: tuple[str, ...] = ()
    files: bool = False
    switch: bool = False
    bare: bool = False


@dataclass(frozen=True, slots=True)
class OfferedCommand:
    """A command, its options, and the words that may stand behind it."""

    name: str
    words: str
    options: Sequence[OfferedOption]
    arguments: tuple[str, ...] = field(default=())


def script(shell: str, commands: Sequence[OfferedCommand]) -> str:
    """The text that the shell reads. `shell`: a key of SHELLS."""
    return "\n".join(SHELLS[shell](commands))


# ---------------------------------------------------------------- bash
def bash(commands: Sequence[OfferedCommand]) -> Iterator[str]:
    yield "# marathon completion bash; in ~/.bashrc:  source <(marathon completion bash)"
    yield f"_{PROGRAM}() {{"
    yield '    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}"'
    yield "    COMPREPLY=()"
    names = " ".join([command.name for command in commands] + ["--help", "--version"])
    yield f'    [ "$COMP_CWORD" -eq 1 ] && {{ {_words(names)}; return; }}'
    yield '    case "$command $prev" in'
    for command in commands:
        yield from _bash_values(command)
    yield "    esac"
    yield '    case "$command" in'
    for command in commands:
        offered = " ".join([*command.arguments, *(option.flag for option in command.options)])
        yield f"        {command.name}) {_words(offered)} ;;"
    yield "    esac"
    yield "}"
    yield f"complete -F _{PROGRAM} {PROGRAM}"


def _words(words: str) -> str:
    return f'COMPREPLY=($(compgen -W "{words}" -- "$cur"))'


def _bash_values(command: OfferedCommand) -> Iterator[str]:
    for option in command.options:
        place = f'        "{command.name} {option.flag}")'
        if option.values:
            yield f"{place} {_words(' '.join(option.values))}; return ;;"
        elif option.files:
            yield f'{place} compopt -o filenames; COMPREPLY=($(compgen -f -- "$cur")); return ;;'
        elif not option.switch:
            yield f"{place} return ;;"


# ---------------------------------------------------------------- zsh
def zsh(commands: Sequence[OfferedCommand]) -> Iterator[str]:
    yield f"#compdef {PROGRAM}"
    yield "# in ~/.zshrc, behind compinit:  source <(marathon completion zsh)"
    yield f"_{PROGRAM}() {{"
    yield "    local -a commands=("
    for command in commands:
        yield f"        {_quoted(command.name + ':' + command.words)}"
    yield "    )"
    yield "    (( CURRENT == 2 )) && { _describe -t commands command commands; return; }"
    yield "    local command=$words[2]"
    yield "    shift words; (( CURRENT-- ))"
    yield "    case $command in"
    for command in commands:
        lines = [_zsh_option(option) for option in command.options]
        if command.arguments:
            lines.append(_quoted(f"1:word:({' '.join(command.arguments)})"))
        yield f"        {command.name}) _arguments \\"
        yield " \\\n".join("            " + line for line in lines)
        yield "        ;;"
    yield "    esac"
    yield "}"
    yield f"compdef _{PROGRAM} {PROGRAM}"


def _zsh_option(option: OfferedOption) -> str:
    words = re.sub(r"([\[\]:\\])", r"\\\1", option.words)
    colons = ":"
    if option.bare:
        colons = "::"
    wanted = f"{colons}value:"
    if option.values:
        wanted += f"({' '.join(option.values)})"
    elif option.files:
        wanted += "_files"
    if option.switch:
        wanted = ""
    return _quoted(f"{option.flag}[{words}]{wanted}")


# ---------------------------------------------------------------- fish
def fish(commands: Sequence[OfferedCommand]) -> Iterator[str]:
    yield "# marathon completion fish > ~/.config/fish/completions/marathon.fish"
    first = f"complete -c {PROGRAM} -n __fish_use_subcommand"
    yield f"complete -c {PROGRAM} -f"
    for command in commands:
        yield f"{first} -a {command.name} -d {_quoted(command.words)}"
        chosen = f"complete -c {PROGRAM} -n '__fish_seen_subcommand_from {command.name}'"
        if command.arguments:
            yield f"{chosen} -a '{' '.join(command.arguments)}'"
        for option in command.options:
            yield f"{chosen} -l {option.flag.removeprefix('--')} {_fish_value(option)}-d {_quoted(option.words)}"


def _fish_value(option: OfferedOption) -> str:
    if option.switch:
        return ""
    if option.values:
        return f"-xa '{' '.join(option.values)}' "
    if option.files:
        return "-rF "
    return "-x "


def _quoted(text: str) -> str:
    """In single quotes, as all three shells read them; a quote within is written outside of them."""
    return "'" + text.replace("'", "'\\''") + "'"


SHELLS: dict[str, Callable[[Sequence[OfferedCommand]], Iterator[str]]] = {"bash": bash, "zsh": zsh, "fish": fish}
