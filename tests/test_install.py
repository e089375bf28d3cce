"""`make install` says what it is at, and what went wrong."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "install.py"


@pytest.fixture
def install(monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SAY_SECONDS", 0.1)
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    return module


def environment(folder: Path, pip: str) -> Path:
    """An environment whose Python does what `pip` says when it is run as pip."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\n{pip}\n')
    python.chmod(0o755)
    return folder


def test_pips_lines_become_a_word_every_few_seconds(install, tmp_path, capfd):
    pip = 'echo Collecting a; echo Collecting b; sleep 0.4; echo "Installing collected packages: a"; sleep 0.4'
    folder = environment(tmp_path / "venv", pip)
    assert install.main([str(folder), "--", "--requirement", "pins.txt"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == f"installing pins.txt into {folder}"
    assert any("2 found, " in line for line in lines)
    assert any("being written, " in line for line in lines)
    assert all(re.search(r"\d s so far$", line) for line in lines[1:])
    assert len(lines) > 4


def test_what_pip_said_is_shown_when_it_fails(install, tmp_path, capfd):
    folder = environment(tmp_path / "venv", "echo ERROR: no such package >&2; exit 3")
    assert install.main([str(folder), "--", "x"]) == 3
    assert "ERROR: no such package" in capfd.readouterr().err


def test_an_environment_is_made_where_there_is_none(install, tmp_path, capfd, monkeypatch):
    maker = environment(tmp_path / "maker", f'[ "$2" = venv ] && cp -r {tmp_path}/maker "$4"; exit 0')
    monkeypatch.setattr(install.sys, "executable", str(maker / "bin" / "python"))
    assert install.main([str(tmp_path / "new")]) == 0
    assert install.has_pip(tmp_path / "new" / "bin" / "python")
    assert capfd.readouterr().out.startswith(f"making {tmp_path / 'new'} with Python ")
