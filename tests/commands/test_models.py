"""`marathon models`: the models on this machine, and whether they fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mlx_lm.utils import load_model

from server import cli
from server.commands import models
from server.engine.model import row_cost
from server.model_files import kv_cost, model_config
from server.model_files.weights import weight_files

Tiny = Callable[..., Path]
LENGTH = 5000


@pytest.mark.parametrize("family", sorted(kv_cost.UNDERSTOOD))
def test_the_estimate_of_a_row_is_what_an_engine_measures(family: str, tiny: Tiny) -> None:
    folder = tiny(family)
    config = model_config.read(folder, "config.json")
    estimate = kv_cost.layer_costs(config, kv_cost.float_width(weight_files(folder)))
    measured = row_cost(load_model(folder)[0])
    assert estimate is not None
    growing = [sum(one.per_position for one in costs if not one.cap) for costs in (estimate, measured)]
    assert growing[0] == growing[1]
    whole = [sum(one.bytes(LENGTH) for one in costs) for costs in (estimate, measured)]
    assert whole[0] == pytest.approx(whole[1], rel=0.05)


def test_a_model_whose_caches_are_not_understood_has_no_estimate(tiny: Tiny) -> None:
    found = models.look_at("mamba", tiny("mamba2"), 10**10)
    assert (found.kv_per_token, found.longest, found.fits) == (None, None, True)


def test_a_model_fits_as_far_as_the_memory_goes(tiny: Tiny) -> None:
    folder = tiny("llama")
    room = models.look_at("llama", folder, 10**12)
    assert room.weights is not None
    assert room.kv_per_token is not None
    assert room.longest == room.context
    some = models.look_at("llama", folder, room.weights + 1024 * room.kv_per_token)
    assert (some.longest, some.fits) == (1024, True)
    assert not models.look_at("llama", folder, room.weights).fits


def test_folders_and_the_hubs_cache_are_listed_and_what_is_broken_says_why(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = tmp_path / "hub" / "models--an-org--a-model" / "snapshots" / "1"
    cached.parent.mkdir(parents=True)
    cached.symlink_to(tiny("llama"))
    broken = tmp_path / "mine" / "broken"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{}", "utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(models, "ask_device", lambda settings: {"memory_limit_bytes": 8 * 10**9})
    with pytest.raises(SystemExit) as ended:
        cli.main(["models", "--folder", str(broken.parent), "--json"])
    assert ended.value.code == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], first["fits"], first["lack"]) == ("an-org/a-model", True, None)
    assert (second["name"], second["fits"], second["lack"]) == (str(broken), False, "there is no tokenizer")
    with pytest.raises(SystemExit):
        cli.main(["models", "--folder", str(broken.parent)])
    shown = capsys.readouterr().out
    assert "MLX may use 8.00 GB here." in shown
    assert "an-org/a-model" in shown
    assert "no: there is no tokenizer" in shown


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["models", "--folder", str(tmp_path / "nowhere")])
    assert ended.value.code == 2
