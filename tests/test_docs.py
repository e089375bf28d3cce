"""What the documents say, held to the command line, the Makefile and the files that they speak of."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from scripts import readme
from server import cli, faults
from server.settings import ENV_PREFIX, Settings, option

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.md")]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in sorted(PAGES)}
OURS = {option(name) for name in Settings.model_fields}
# What runs the commands of the pages beside README.md, by how they begin; `marathon` and `make` have their own tests.
RUN_BY = {
    "curl -s http://127.0.0.1:8080/health": "scripts/readme.py",
    "kill -9 $(curl": "scripts/readme.py",
    ".venv/bin/python scripts/readme.py": "scripts/readme.py",
    ".venv/bin/marathon check": "scripts/readme.py",
    "sh: curl": "tests/api/stored/test_background_page.py",
    "python: stream = client.responses.create": "tests/clients/background_python.py",
    "sh: export ANTHROPIC_BASE_URL": "scripts/coding_agents.py",
    "sh: export OPENAI_BASE_URL": "scripts/coding_agents.py",
    "prometheus --config.file": "loadtests/monitoring.py",
    "pip install --upgrade .": "scripts/install.py",
    "promtool test rules": "tests/test_deploy.py",
}
# Those that nothing here can run, and why.
RUN_BY_HAND = {
    "curl -N http://127.0.0.1:8080/v1/completions": "on-a-mac.md: what comes is looked at",
    "while sleep 5; do curl": "on-a-mac.md: repeats until it is stopped",
    "pgrep -fl server.engine": "on-a-mac.md: has to print nothing; tests/test_survival.py looks for processes itself",
    "pmset ": "macOS",
    "launchctl ": "macOS",
    "sed -e": "macOS; tests/test_deploy.py reads what it fills in",
    "mkdir -p ~/Library": "macOS",
    "tail -f ~/Library": "macOS",
    "python3 -m venv /opt/marathon": "writes to the system's folders",
    "cp deploy/systemd": "writes to the system's folders",
    "echo MARATHON_MODEL=": "writes to the system's folders",
    "systemctl ": "needs systemd; tests/test_deploy.py has systemd-analyze read the unit",
    "journalctl ": "needs systemd",
    "  [Service]": "a part of a unit",
    "  LoadCredential": "a part of a unit",
    "  Environment": "a part of a unit",
    "pip uninstall mlx-marathon": "pip's own",
    "sh: export OPENAI_API_BASE": "Open WebUI and aider, lines of their own manuals",
    "docker compose": "needs Docker; tests/test_deploy.py reads the file",
}
DATA = ("json: ", "toml: ", "yaml: ")
# Options of other programs that the documents name.
FOREIGN = {
    "--force-reinstall",
    "--no-deps",
    "--config.file",
    "--storage.tsdb.path",
    "--enable",
    "--install",
    "--now",
    "--upgrade",
    "--port",
    "--mode",
    "--version",
    "--help",
    "--config",
}
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def commands() -> dict[str, str]:
    """`marathon`'s commands and what their --help prints."""
    actions = cli.parser()._subparsers._group_actions  # type: ignore[union-attr]
    return {name: command.format_help() for name, command in actions[0].choices.items()}


def code_of(text: str) -> str:
    """What stands between backquotes or is indented: that which readers will type."""
    blocks = re.findall(r"^```[\s\S]*?^```|^ {4}.+$", text, re.MULTILINE)
    return "\n".join([*blocks, *re.findall(r"`[^`\n]+`", text)])


@pytest.mark.parametrize("page", TEXTS)
def test_every_option_that_is_named_exists(page: str):
    helps = "\n".join(commands().values())
    known = OURS | FOREIGN | set(re.findall(r"--[a-z-]+", helps))
    named = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", code_of(TEXTS[page])))
    assert named - known == set()


@pytest.mark.parametrize("page", TEXTS)
def test_every_setting_of_the_environment_that_is_named_exists(page: str):
    named = re.findall(rf"\b{ENV_PREFIX}([A-Z][A-Z_]*)", TEXTS[page])
    assert {name.lower() for name in named} - set(Settings.model_fields) == set()


@pytest.mark.parametrize("page", TEXTS)
def test_every_command_that_is_named_exists(page: str):
    named = set(re.findall(r"(?:^|[`/ ])marathon ([a-z]+)\b", code_of(TEXTS[page]), re.MULTILINE))
    assert named - set(commands()) == set()


@pytest.mark.parametrize("page", TEXTS)
def test_every_make_target_that_is_named_exists(page: str):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"(?:^ {4}|`|&& )make ([a-z-]+)\b", code_of(TEXTS[page]), re.MULTILINE))
    assert named - set(targets) == set()


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_leads_somewhere(page: str):
    broken = [link for link in LINK.findall(TEXTS[page]) if "://" not in link and not leads(page, link)]
    assert broken == []


def leads(page: str, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (ROOT / page).parent / path if path else ROOT / page
    if target.is_dir() or not target.exists():
        return target.exists()
    return not anchor or anchor in map(anchor_of, HEADING.findall(target.read_text(encoding="utf-8")))


def anchor_of(heading: str) -> str:
    """As GitHub makes them."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", TEXTS)
def test_every_file_of_ours_that_is_named_exists(page: str):
    named = set(re.findall(r"(?<![\w/.~])((?:server|tests|docs|deploy|loadtests|scripts)/[\w./-]+)", TEXTS[page]))
    assert {name for name in named if not (ROOT / name.rstrip(".")).exists()} == set()


@pytest.mark.parametrize("command", ["serve", "check"])
def test_every_setting_is_documented_by_help(command: str):
    shown = " ".join(commands()[command].split())
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert option(name) in shown
        # argparse breaks lines at hyphens too
        assert field.description.replace(" ", "")[:30] in shown.replace(" ", ""), name


def test_the_list_of_faults_in_the_readme_is_whole_and_right():
    """A part of the table may be the beginning or the end of a fault; whole ones must be understood."""
    section = TEXTS["README.md"].partition("## Dangerous")[2].partition("\n## ")[0]
    named = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\|([^|]+)\|", section, re.MULTILINE)))
    whole = [name for name in named if ":" in name and not name.startswith("@")]
    assert all(map(faults.parse, whole))
    assert {name.partition(":")[0] for name in whole} >= {"slow-start", "fail-start", "leak"}
    words = set(re.findall(r"[a-z]+", " ".join(named)))
    assert words >= {*faults.ACTS, *faults.PLACES}


def test_every_command_of_the_readme_is_run_by_its_script_or_said_why_not():
    """`scripts/readme.py` runs them in a clean clone; a command that it doesn't know may not stand there."""
    named = readme.commands(TEXTS["README.md"])
    assert len(named) > 15
    assert [command for command in named if not (readme.runner(command) or readme.elsewhere(command))] == []
    assert [start for start in readme.ELSEWHERE if not any(one.startswith(start) for one in named)] == []
    assert [start for start in readme.RUNNERS if not any(one.startswith(start) for one in named)] == []


def beside_the_readme() -> list[str]:
    """The commands of all other pages."""
    found = [command for page, text in TEXTS.items() if page != "README.md" for command in readme.commands(text)]
    return list(dict.fromkeys(found))


def test_every_command_of_the_other_pages_is_run_by_a_program_or_said_why_not():
    own = ("marathon ", "make ", *DATA)
    others = [command for command in beside_the_readme() if not command.startswith(own)]
    known = (*RUN_BY, *RUN_BY_HAND)
    assert [command for command in others if not command.startswith(known)] == []
    assert [program for program in RUN_BY.values() if not (ROOT / program).is_file()] == []
    text = "\n".join(TEXTS.values())
    assert [start for start in known if start.removeprefix("sh: ").removeprefix("python: ") not in text] == []


@pytest.mark.parametrize("page", TEXTS)
def test_every_line_of_marathon_is_one_that_it_takes(page: str):
    """Its options exist, and take the values that are written there."""
    named = [line for line in readme.commands(TEXTS[page]) if re.match(r"(\.venv/bin/)?marathon [a-z]", line)]
    for line in [line for line in named if "--help" not in line]:
        words = shlex.split(re.sub(r" [>|] .*", "", line))[1:]
        asked = cli.parser().parse_args(words)
        assert asked.command == words[0], line


@pytest.mark.parametrize("page", TEXTS)
def test_every_module_that_is_run_exists(page: str):
    named = re.findall(r"python3? -m ((?:server|loadtests|scripts)[\w.]*)", TEXTS[page])
    places = [ROOT / name.rstrip(".").replace(".", "/") for name in named]
    assert [p for p in places if not (p.with_suffix(".py").is_file() or (p / "__main__.py").is_file())] == []


@pytest.mark.parametrize("page", TEXTS)
def test_every_metric_that_is_named_exists(page: str):
    """The page of metrics has each of them, and `scripts/metrics_table.py` holds it to the code."""
    if page == "CHANGELOG.md":
        return  # says what was, too
    known = set(re.findall(r"`(marathon_\w+)", TEXTS["docs/metrics.md"]))
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in known}
    named = {
        re.sub(r"_(total|bucket|sum|count)$", "", name) for name in re.findall(r"\bmarathon_[a-z_]+[a-z]", TEXTS[page])
    }
    assert len(families) > 60
    assert {name for name in named if not any(one.startswith(name) for one in families)} == set()


def test_the_readme_stays_short():
    assert len(TEXTS["README.md"].splitlines()) <= 220


def test_each_override_names_files_that_are_there():
    page = (ROOT / "docs" / "overrides.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:server|tests)/[\w/]+\.(?:py|cpp))`", page)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_override_names_the_upstream_report_or_that_there_is_none():
    page = (ROOT / "docs" / "overrides.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")
    ]
    headings = [row for row in rows if row[0] == "library"]
    upstream = [row[headings[0].index("upstream")] for row in rows if row[0] != "library"]
    assert len(upstream) > 10
    assert [
        cell for cell in upstream if not re.search(r"/(issues|pull)/\d+\)|^no public report|^not a fault", cell)
    ] == []


@pytest.mark.parametrize("page", TEXTS)
def test_every_block_of_json_and_toml_can_be_read(page: str):
    for kind, text in re.findall(r"^```(json|toml)\n(.*?)^```", TEXTS[page], re.MULTILINE | re.DOTALL):
        {"json": json.loads, "toml": tomllib.loads}[kind](text)
