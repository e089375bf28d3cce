"""What deploy/ offers, held to the settings and linted as far as this machine can."""

from __future__ import annotations

import configparser
import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from server import cli, serve
from server.settings import ENV_PREFIX, Settings, option

DEPLOY = Path(__file__).parent.parent / "deploy"
UNIT = DEPLOY / "systemd" / "marathon.service"
AGENT = DEPLOY / "launchd" / "marathon.plist"
DRAIN = Settings.model_fields["drain_seconds"].default + serve.CLOSE_SECONDS
OURS = {option(name) for name in Settings.model_fields} | {"--config"}
COMMAND = "/opt/marathon/bin/marathon"  # of the unit


def names_of(text: str) -> set[str]:
    """Settings that a file sets or speaks of by their name in the environment."""
    return {name.lower() for name in re.findall(rf"\b{ENV_PREFIX}([A-Z_]+)\b", text)}


def unknown(arguments: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in arguments if word.startswith("--")} - OURS


def serves(arguments: list[str]) -> bool:
    """The command line is one that `marathon` takes."""
    return cli.parser().parse_args(arguments).command == "serve"


# ---------------------------------------------------------------- launchd
@pytest.fixture(scope="module")
def agent() -> dict[str, Any]:
    return plistlib.loads(AGENT.read_bytes())


def test_the_agent_runs_marathon_with_options_that_exist(agent: dict[str, Any]):
    program, *arguments = agent["ProgramArguments"]
    assert program.endswith("/marathon")
    assert unknown(arguments) == set()
    assert serves(arguments)


def test_the_agent_is_not_throttled_and_comes_back_after_a_crash(agent: dict[str, Any]):
    assert agent["ProcessType"] == "Interactive"
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ThrottleInterval"] >= 10  # launchd's own default
    assert agent["RunAtLoad"] is True


def test_the_agent_may_drain_before_it_is_killed(agent: dict[str, Any]):
    assert agent["ExitTimeOut"] > DRAIN


def test_the_readme_calls_the_agent_and_its_log_by_their_names(agent: dict[str, Any]):
    readme = (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert agent["StandardOutPath"] == agent["StandardErrorPath"]
    assert f"Logs/{Path(agent['StandardErrorPath']).name}" in readme
    assert f"bootout gui/$(id -u)/{agent['Label']}`" in readme


def test_the_readme_fills_in_all_that_the_agent_leaves_open():
    filled = set(re.findall(r"s\|(@[A-Z]+@)\|", (DEPLOY / "README.md").read_text(encoding="utf-8")))
    assert filled == set(re.findall(r"@[A-Z]+@", re.sub(r"<!--.*?-->", "", AGENT.read_text(), flags=re.DOTALL)))


def test_the_agent_passes_macos_own_lint():
    if (plutil := shutil.which("plutil")) is None:
        pytest.skip("plutil is macOS's")
    subprocess.run([plutil, "-lint", str(AGENT)], check=True, capture_output=True)


# ---------------------------------------------------------------- systemd
class Repeated(dict[str, Any]):
    """Directives may come again; later ones are added to the list."""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, list) and key in self:
            self[key].extend(value)
        else:
            super().__setitem__(key, value)


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    """The unit's [Service]; of directives that come again, the values in lines."""
    parser = configparser.RawConfigParser(dict_type=Repeated, strict=False, comment_prefixes=("#",), delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return dict(parser["Service"])


def test_the_unit_runs_marathon_with_options_and_settings_that_exist(service: dict[str, str]):
    program, *arguments = service["ExecStart"].split()
    assert program == COMMAND
    assert unknown(arguments) == set()
    assert serves(arguments)
    texts = UNIT.read_text(encoding="utf-8"), (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert names_of(" ".join(texts)) <= set(Settings.model_fields)


def test_the_unit_may_drain_before_it_is_killed(service: dict[str, str]):
    assert float(service["TimeoutStopSec"]) > DRAIN
    assert service["KillMode"] == "mixed"  # the server ends its engine itself


def test_the_unit_survives_the_death_of_an_engine(service: dict[str, str]):
    assert service["OOMPolicy"] == "continue"
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == str(cli.EXIT_UNABLE)


def test_the_unit_may_write_where_the_caches_are(service: dict[str, str]):
    assert f"XDG_CACHE_HOME=%C/{service['CacheDirectory']}" in service["Environment"].split()


@pytest.fixture(scope="module")
def unit_here(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The unit, with a command that is on this machine."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze isn't on this machine")
    path = tmp_path_factory.mktemp("systemd") / UNIT.name
    path.write_text(UNIT.read_text(encoding="utf-8").replace(COMMAND, sys.executable), encoding="utf-8")
    return str(path)


def analyzed(*arguments: str) -> str:
    """Fails with what systemd-analyze says; it warns of an unknown directive without failing."""
    ended = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stderr


def test_systemd_finds_no_fault_in_the_unit(unit_here: str):
    warnings = [line for line in analyzed("verify", unit_here).splitlines() if UNIT.name in line]
    assert warnings == []


def test_systemd_calls_the_unit_well_confined(unit_here: str):
    try:
        analyzed("security", "--offline=true", "--no-pager", "--threshold=20", unit_here)  # 2.0 of 10
    except AssertionError as error:
        if "unrecognized option" in str(error):
            pytest.skip("this systemd-analyze is too old to judge a unit that isn't loaded")
        raise


# ---------------------------------------------------------------- what is said of them is what they do
def test_both_services_drain_for_the_seconds_that_the_pages_name(agent: dict[str, Any]):
    asked = agent["ProgramArguments"][agent["ProgramArguments"].index("--drain-seconds") + 1]
    unit = re.search(r"^Environment=MARATHON_DRAIN_SECONDS=(\d+)$", UNIT.read_text(), re.MULTILINE)
    assert unit is not None
    page = (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert asked == unit[1] == re.search(r"under way (\d+) seconds when it", page)[1]
    limit = int(re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)[1])
    assert min(limit, agent["ExitTimeOut"]) > int(asked) + serve.CLOSE_SECONDS


def test_the_scrape_of_a_server_with_keys_only_needs_its_comment_taken_away():
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    opened = re.sub(r"^    # (authorization:|  type:|  credentials_file:)", r"    \1", text, flags=re.MULTILINE)
    (job,) = yaml.safe_load(opened)["scrape_configs"]
    assert job["authorization"]["type"] == "Bearer"
    assert Path(job["authorization"]["credentials_file"]).is_absolute()
    assert "authorization" not in yaml.safe_load(text)["scrape_configs"][0]


@pytest.mark.parametrize("page", [DEPLOY / "README.md", DEPLOY.parent / "README.md"])
def test_prometheus_is_started_with_a_folder_that_a_plain_user_may_write(page: Path):
    """Without one it takes ./data or, as Debian builds it, a folder of the system's, and panics."""
    commands = re.findall(r"prometheus --config\.file=\S+[^`\n]*", page.read_text(encoding="utf-8"))
    assert commands
    assert all("--storage.tsdb.path=" in command for command in commands)
