"""What deploy/ offers, held to the settings and linted as far as this machine can."""

from __future__ import annotations

import configparser
import json
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

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
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
    assert agent["KeepAlive"] is True  # also after a signal: background work goes on then
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
    assert service["Restart"] == "always"
    assert service["RestartPreventExitStatus"] == str(cli.EXIT_UNABLE)


def test_the_unit_may_write_where_the_caches_and_the_journal_are(service: dict[str, str]):
    assert f"XDG_CACHE_HOME=%C/{service['CacheDirectory']}" in service["Environment"].split()
    assert f"XDG_DATA_HOME=%S/{service['StateDirectory']}" in service["Environment"].split()
    assert service["StateDirectoryMode"] == "0700"


def test_the_unit_waits_for_an_engine_and_ends_a_server_that_is_stuck(service: dict[str, str]):
    assert service["Type"] == "notify"
    assert service["TimeoutStartSec"] == "infinity"  # a first start may fetch a model
    assert float(service["WatchdogSec"]) >= 30


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


# ---------------------------------------------------------------- alerts, and what to do about them
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
RUNBOOK = ROOT / "server" / "api" / "static" / "runbook.md"


def promtool() -> str:
    """Prometheus's own checker: the one of `make tools`, or one that is installed."""
    own = ROOT / "build" / "tools" / "promtool"
    found = str(own) if own.exists() else shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool; `make tools` fetches one")
    return found


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_each_alert_has_a_paragraph_in_the_runbook_and_each_paragraph_an_alert():
    text = RUNBOOK.read_text(encoding="utf-8")
    paragraphs = dict(re.findall(r"^## (\w+)\n\n(.+?)(?=\n## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert set(paragraphs) == {rule["alert"] for rule in alerts()}
    for name, paragraph in paragraphs.items():
        assert "**Look**" in paragraph, name
        assert "**Do**" in paragraph, name


def test_each_alert_links_to_its_paragraph_on_the_server_that_it_is_about():
    for rule in alerts():
        url = rule["annotations"]["runbook_url"]
        assert url == "http://{{ $labels.instance }}/page/runbook.html#" + rule["alert"]


def test_alerts_and_panels_ask_only_for_series_that_there_are_on_a_mac_too():
    """The client's own `process_*` come from /proc."""
    dashboard = json.loads((DEPLOY / "grafana" / "marathon.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked += [rule["expr"] for rule in alerts()]
    foreign = {name for query in asked for name in re.findall(r"\b(?:process|python)_\w+", query)}
    assert len(asked) > 60
    assert foreign == set()


def test_the_runbook_names_options_and_alerts_that_exist():
    text = RUNBOOK.read_text(encoding="utf-8")
    options = set(re.findall(r"`--([\w-]+)", text))
    assert options <= {name.replace("_", "-") for name in Settings.model_fields}
    assert set(re.findall(r"\bMarathon[A-Z]\w+", text)) <= {rule["alert"] for rule in alerts()}


def test_prometheus_finds_no_fault_in_the_alerts_and_the_configurations():
    for command in (
        ["check", "rules", ALERTS],
        ["check", "config", "--syntax-only", DEPLOY / "prometheus" / "prometheus.yml"],
        ["check", "config", "--syntax-only", DEPLOY / "prometheus" / "compose.yml"],
    ):
        found = subprocess.run([promtool(), *command], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr


def test_each_alert_fires_when_it_should_and_stays_silent_when_it_should():
    tests = DEPLOY / "prometheus" / "alerts_test.yml"
    text = tests.read_text(encoding="utf-8")
    assert [rule["alert"] for rule in alerts() if f'alertname="{rule["alert"]}"' not in text] == []
    found = subprocess.run([promtool(), "test", "rules", tests], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_no_bound_of_a_count_is_a_whole_number_beyond_none():
    """`increase` makes a little more of a count than it is: two deaths would be more than two."""
    queries = {rule["alert"]: rule["expr"] for rule in alerts()}
    counted = {name: re.findall(r"increase\([^)]*\)\)?\s*>\s*(\d+(?:\.\d+)?)\s*$", query, re.MULTILINE)
               for name, query in queries.items()}  # fmt: skip
    bounds = {name: [float(bound) for bound in found] for name, found in counted.items() if found}
    assert len(bounds) >= 5
    assert [name for name, found in bounds.items() if any(bound and bound.is_integer() for bound in found)] == []


def test_a_rule_that_never_fires_is_noticed(tmp_path: Path):
    """With the rule as it is its tests pass, so it's not their excerpt that fails."""
    asked = "marathon_buffers_per_token > 0.05"
    [rule] = [rule["alert"] for rule in alerts() if asked in rule["expr"]]
    tests = yaml.safe_load((DEPLOY / "prometheus" / "alerts_test.yml").read_text(encoding="utf-8"))
    tests["tests"] = [one for one in tests["tests"] if rule in str(one)]
    (tmp_path / "alerts_test.yml").write_text(yaml.safe_dump(tests), encoding="utf-8")
    for never, passes in ((asked, True), ("marathon_buffers_per_token > 9", False)):
        changed = ALERTS.read_text(encoding="utf-8").replace(asked, never)
        (tmp_path / "alerts.yml").write_text(changed, encoding="utf-8")
        found = subprocess.run(
            [promtool(), "test", "rules", tmp_path / "alerts_test.yml"], capture_output=True, text=True
        )
        assert (found.returncode == 0) is passes, found.stdout + found.stderr


def test_both_scrapes_differ_in_the_target_alone():
    here, there = (
        yaml.safe_load((DEPLOY / "prometheus" / name).read_text(encoding="utf-8"))
        for name in ("prometheus.yml", "compose.yml")
    )
    assert here["scrape_configs"][0].pop("static_configs") != there["scrape_configs"][0].pop("static_configs")
    assert here == there


def test_compose_mounts_files_that_are_there_and_listens_here_only():
    services = yaml.safe_load((DEPLOY / "compose.yml").read_text(encoding="utf-8"))["services"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    assert [path for path in mounted if path.startswith("./") and not (DEPLOY / path).exists()] == []
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])
    providers = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/marathon.yml").read_text(encoding="utf-8"))
    folder = providers["providers"][0]["options"]["path"]
    assert any(f"{folder}/marathon.json" in volume for volume in services["grafana"]["volumes"])
