"""`marathon config`: a settings file that has every setting and says what is true."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from server import cli
from server.commands.settings_file import example
from server.settings import Settings, load

SETTING = re.compile(r"^#(\w+) = ", re.MULTILINE)


def test_every_setting_stands_in_the_example_once_with_its_meaning() -> None:
    text = example()
    assert sorted(SETTING.findall(text)) == sorted(Settings.model_fields)
    plain = " ".join(line.removeprefix("# ") for line in text.splitlines())
    for name, field in Settings.model_fields.items():
        assert (field.description or "?") in plain, name


def test_the_example_as_it_is_changes_nothing_and_with_every_mark_taken_off_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "marathon.toml"
    file.write_text(example(), encoding="utf-8")
    assert load({}, file) == load({})
    file.write_text(SETTING.sub(r"\1 = ", example()), encoding="utf-8")
    written = load({}, file)
    for name, field in Settings.model_fields.items():
        if field.default is None:
            assert getattr(written, name) is not None
        else:
            assert getattr(written, name) == field.default
    assert tomllib.loads(file.read_text(encoding="utf-8")).keys() == Settings.model_fields.keys()


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["config"])
    assert (ended.value.code, capsys.readouterr().out) == (0, example() + "\n")
