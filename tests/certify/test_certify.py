"""`marathon certify`: what it plays, what it concludes, what it prints, and how it ends."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server import cli
from server.certify import __main__, agreement, certificate, demonstration
from server.certify.certificate import Agreement, Arm, Certificate, Death, Order
from server.engine import model
from server.memory import native_count
from server.memory.allocator import CountUnavailable

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiler():
    try:
        native_count.find_compiler()
    except CountUnavailable as reason:
        pytest.skip(str(reason))


def ordered(arguments, folder):
    parser = argparse.ArgumentParser()
    certificate.add_arguments(parser)
    return certificate.order(folder, vars(parser.parse_args(arguments)))


def issue(order):
    """Exit status, the certificate, and what was said on the way."""
    done = certificate.run(order, capture_output=True)
    return done.returncode, done.stdout, done.stderr


# ---------------------------------------------------------------- the whole of it
def test_a_leaking_family_passes_and_its_death_elsewhere_comes_when_it_was_predicted(compiler, tiny, tmp_path):
    arguments = ["--tokens", "300", "--json", "--buffer-limit", "1100", "--cache-dir", str(tmp_path)]
    status, printed, said = issue(ordered(arguments, tiny("smollm3")))
    assert status == 0, said
    found = json.loads(printed)
    arms = found["arms"]
    assert found["passed"] is True
    assert found["caches"] == "8 KVCache"
    assert found["versions"].keys() == {"marathon", "mlx", "mlx-lm", "python"}
    assert abs(arms["guarded"]["buffers_a_token"]) < 0.01
    assert arms["mlx_lm"]["buffers_a_token"] == pytest.approx(2.25, rel=0.05)
    assert arms["mlx_lm"]["bytes_a_token"] > 4
    assert arms["mlx_lm"]["at_fault"] == ["BatchKVCache.offset (layers 3, 7)"]
    assert arms["unguarded"]["at_fault"] == arms["mlx_lm"]["at_fault"]
    death = found["death"]
    predicted = (death["limit"] - death["baseline"]) / arms["mlx_lm"]["buffers_a_token"]
    assert death["token"] == pytest.approx(predicted, rel=0.02)
    assert death["reached"] == pytest.approx(death["token"], rel=0.03)
    assert found["agreement"]["holds"] is True
    assert found["guard_changed"] == 0
    assert "mlx-lm: 295 of 300 tokens" in said


def test_the_demonstration_is_made_on_the_spot_and_goes_on_to_the_end(monkeypatch):
    def seen(order, tell):
        loaded = model.load(Path(order.path), trust_remote_code=False, probe=None, on_stage=tell)
        return order, loaded.config["model_type"], loaded.probe.batching

    monkeypatch.setattr(__main__, "certify_model", seen)
    found: Any = __main__.certify(Order(path=""), lambda line: None)
    order, family, batching = found
    assert (family, batching) == ("smollm3", "batched")
    assert (order.tokens, order.buffer_limit) == (demonstration.TOKENS, demonstration.LIMIT)
    assert not Path(order.path).exists()
    monkeypatch.setattr(__main__, "certify_model", lambda order, tell: order)
    given: Any = __main__.certify(Order(path="", tokens=400, buffer_limit=9), lambda line: None)
    assert (given.tokens, given.buffer_limit) == (400, 9)


def test_the_demonstration_and_a_model_are_one_too_many(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["certify", "--demo", "some/model"])
    assert ended.value.code == 2
    assert "--demo" in capsys.readouterr().err


def test_how_long_it_will_take_follows_from_what_has_been_done():
    said, now = [], [0.0]
    progress = __main__.ReplayProgress(said.append, clock=lambda: now[0])
    progress.at(0, "loading")
    progress.expect(100, 100, 50)
    progress.at(0, "begun")
    now[0] = 20.0
    progress.at(50, "first")
    now[0] = 40.0
    progress.at(100, "first")
    progress.end_part()
    now[0] = 60.0
    progress.at(50, "second")
    progress.end_part()
    assert said == [
        "loading",
        "begun",
        "first; about 80 s left",
        "first; about 60 s left",
        "second; about 40 s left",
    ]
    now[0] = 600.0
    progress.at(5, "slow")
    assert said[-1] == "slow; about 2 min left"


def test_a_folder_without_a_model_ends_with_one_line(tmp_path):
    status, printed, said = issue(Order(path=str(tmp_path)))
    assert (status, printed) == (2, "")
    assert said.splitlines()[-1].startswith(f"marathon: can't load the model in {tmp_path}")


def test_without_a_count_the_graphs_are_counted_and_it_says_so(monkeypatch, tiny):
    def refuse(*_):
        raise CountUnavailable("no C++ compiler found")

    monkeypatch.setattr(native_count, "open_count", refuse)
    reported = []
    found = __main__.certify(Order(path=str(tiny("lfm2")), tokens=260, rows=2), reported.append)
    assert (found.source, found.source_reason) == ("graph leaves", "no C++ compiler found")
    assert found.passed
    assert found.arms["mlx_lm"].buffers_a_token == pytest.approx(1.1, rel=0.05)
    assert found.death is None
    text = certificate.to_text(found)
    assert "count                    graph leaves (no C++ compiler found)" in text
    assert "can't be said: no live-buffer count" in text
    assert text.endswith("passed")


# ---------------------------------------------------------------- the verdict
FINE = Arm("Marathon", 0.0, (-0.001, 0.001), 0.0)
AGREED = Agreement(6, 0, 0, 0.0, 0.01)


@pytest.mark.parametrize(
    ("arm", "agreed", "changed", "word"),
    [
        (FINE, AGREED, 0.0, None),
        (FINE, None, 0.0, None),
        (replace(FINE, interval=(-0.001, 0.011)), AGREED, 0.0, "flat"),
        (replace(FINE, interval=(-0.02, 0.001)), AGREED, 0.0, "flat"),
        (Arm("Marathon", failed="its forward pass fails"), AGREED, 0.0, "its forward pass fails"),
        (FINE, replace(AGREED, parted=1, unexplained=1), 0.0, "alone"),
        (FINE, replace(AGREED, distance=0.02), 0.0, "alone"),
        (FINE, AGREED, 0.03, "guard changes the text"),
    ],
)
def test_it_fails_for_each_broken_promise_and_for_nothing_else(arm, agreed, changed, word):
    faults = __main__.faults_of(arm, agreed, changed)
    assert [word in fault for fault in faults] == ([] if word is None else [True])


def test_a_tie_or_two_in_a_hundred_are_no_fault():
    assert replace(AGREED, parted=1).holds
    assert not replace(AGREED, parted=2).holds
    assert Agreement(100, 2, 0, 0.0, 0.01).holds
    assert not Agreement(100, 3, 0, 0.0, 0.01).holds


def test_a_failed_certificate_says_why():
    arm = Arm("Marathon", 1.0, (0.9, 1.1), 4.0, ["Odd.clock (layers 2)"])
    one = Certificate(
        *("m", "odd", "3 Odd", "batched", "CPU", {"mlx": "0"}, 400, 3, "native", ""),
        *(
            {"guarded": arm, "mlx_lm": Arm("mlx-lm's BatchGenerator", failed="no merge")},
            None,
            None,
            20,
            1,
            ["not flat"],
        ),
    )
    text = certificate.to_text(one)
    assert not one.passed
    assert "1.000 ±0.100 buffers a token, 4.0 bytes a token; at fault: Odd.clock (layers 2)" in text
    assert "can't be run: no merge" in text
    assert "19 of 20 streams equal" in text
    assert text.endswith("FAILED: not flat")


def test_a_flat_model_has_no_death_to_predict():
    assert Death(499_000, 50, None).deviation is None
    assert Death(100, 50, 40.0, 41.0).deviation == pytest.approx(0.025)


# ---------------------------------------------------------------- together and alone
def test_a_model_that_batches_wrongly_is_found_out(tiny):
    loaded = model.load(tiny("minimax_m3_vl"), trust_remote_code=False, probe=None, on_stage=lambda stage: None)
    found = agreement.compare(loaded, rounds=1)
    assert found.streams == 3
    assert found.distance > 10 * found.rounding
    assert not found.holds


def test_a_model_that_batches_rightly_says_the_same(tiny):
    loaded = model.load(tiny("gemma3_text"), trust_remote_code=False, probe=None, on_stage=lambda stage: None)
    found = agreement.compare(loaded, rounds=1)
    assert (found.streams, found.unexplained) == (3, 0)
    assert 0 < found.distance < found.rounding
    assert found.holds


# ---------------------------------------------------------------- the command line
def test_the_order_has_what_was_asked_for(tmp_path):
    arguments = ["some/model", "--tokens", "500", "--rows", "4", "--json", "--trust-remote-code"]
    order = ordered(arguments, tmp_path)
    assert order == Order(str(tmp_path), 500, 4, None, True, True, None)
    assert ordered([], tmp_path) == Order(str(tmp_path))


def test_the_settings_among_the_options_are_the_servers():
    parser = argparse.ArgumentParser()
    certificate.add_arguments(parser)
    assert certificate.settings_of(vars(parser.parse_args([]))) == {}
    found = certificate.settings_of(vars(parser.parse_args(["some/model", "--cache-dir", "x", "--tokens", "500"])))
    assert found.keys() == {"model", "cache_dir"}


@pytest.mark.parametrize(
    "arguments", [["--tokens", "199"], ["--rows", "1"], ["--buffer-limit", "0"], ["--tokens", "x"]]
)
def test_what_can_not_be_played_is_refused(arguments, tmp_path):
    with pytest.raises(SystemExit):
        ordered(arguments, tmp_path)


def test_an_order_survives_the_way_to_the_child(tmp_path):
    order = Order(str(tmp_path), buffer_limit=5)
    assert Order(**json.loads(json.dumps(asdict(order)))) == order


@pytest.mark.parametrize(("seconds", "tokens"), [(0.001, 1000), (0.08, 500), (2.0, 400)])
def test_a_slow_model_gets_shorter_runs_unless_asked_otherwise(monkeypatch, seconds, tokens):
    monkeypatch.setattr(__main__.model, "step_seconds", lambda model: seconds)
    assert __main__.affordable_tokens(SimpleNamespace(model=None), rows=3) == tokens
