"""The laboratory on tiny models: each measurement gives what it promises, and each bound can be missed."""

import importlib.util
import json
import subprocess
import sys
import zipfile

import mlx.core as mx
import pytest
from mlx_lm.generate import GenerationBatch
from mlx_lm.models.cache import make_prompt_cache

from loadtests import (
    attention_paths,
    cache_kinds,
    count,
    endurance,
    gpu_lab,
    harness,
    kv_passes,
    pinned,
    report,
    residency,
    zoo,
)
from loadtests.lab import __main__ as laboratory
from loadtests.lab import attention_paths as paths
from loadtests.lab import caches, counting, curve, experiment, line, suite, traffic
from loadtests.lab import endurance as enduring
from loadtests.lab import kv_passes as passes
from loadtests.lab import pinned as weights_of
from loadtests.lab import residency as leaks
from server.memory.allocator import CountUnavailable
from server.memory.native_count import open_count

pytestmark = pytest.mark.slow

PROGRAMS = [attention_paths, cache_kinds, count, endurance, gpu_lab, kv_passes, laboratory, pinned, report, residency]


@pytest.fixture(scope="module")
def llama():
    return zoo.build("llama")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    try:
        counter = open_count(tmp_path_factory.mktemp("native"), None)
    except CountUnavailable as reason:
        pytest.skip(str(reason))
    yield counter
    counter.remove()


@pytest.fixture
def built_once(monkeypatch, llama):
    monkeypatch.setattr("loadtests.lab.shapes.build", lambda name: llama)


# ---------------------------------------------------------------- the shared parts
def test_a_line_is_fitted_with_its_r2():
    found = line.fit([1, 2, 3], [3, 5, 7])
    assert (found.intercept, found.slope, found.r2) == pytest.approx((1, 2, 1))
    assert line.fit([1, 2, 3], [1, 5, 1]).r2 == pytest.approx(0)
    assert found.at(10) == pytest.approx(21)


def test_a_case_is_measured_in_a_process_of_its_own_and_a_failed_one_leaves_a_row(tmp_path, capsys):
    asked = attention_paths.parse(
        ["--out", str(tmp_path), "--shape", "llama", "nowhere", "--prompts", "--commit", "abc"]
    )
    asked.compared = [70]
    assert experiment.carry_out(attention_paths.experiment(asked), asked) == 1
    whole, failed = experiment.read_rows(tmp_path / "attention_paths.csv")
    assert (whole["positions"], whole["against_the_rule"], whole["commit"]) == (64, 0, "abc")
    assert all(whole[name] for name in ("mlx", "device", "backend", "system", "python"))
    assert min(whole["drift"], whole["process_peak_mib"]) > 0
    assert failed["shape"] == "nowhere"
    assert "ended" in failed["error"]
    assert "FAILED" in capsys.readouterr().out


def test_rows_of_other_columns_are_not_mixed(tmp_path):
    with experiment.Sheet(tmp_path, "x", ["a", "b"]) as sheet:
        sheet.write({"a": 1.23456789, "b": "words"})
    with experiment.Sheet(tmp_path, "x", ["a", "b"]) as sheet:
        sheet.write({"a": 2})
    assert experiment.read_rows(tmp_path / "x.csv") == [{"a": 1.23457, "b": "words"}, {"a": 2, "b": ""}]
    with pytest.raises(harness.HarnessError, match="other columns"):
        experiment.Sheet(tmp_path, "x", ["a", "c"])


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_explains_itself(program, capsys):
    with pytest.raises(SystemExit) as ended:
        program.parse(["--help"])
    assert ended.value.code == 0
    assert f"python -m {program.__name__.removesuffix('.__main__')}" in capsys.readouterr().out


def test_a_suite_goes_on_after_a_part_that_fails_and_names_it(tmp_path, capfd):
    parts = [suite.Part("nothing_of_that_name", (), 1), suite.Part("pinned", ("--help",), 1)]
    assert suite.run(parts, tmp_path, 60, "abc") == 1
    printed = capfd.readouterr().out
    assert "loadtests.pinned --help: done" in printed
    assert "NOT AS IT SHOULD BE  loadtests.nothing_of_that_name" in printed
    assert suite.run(parts[1:], tmp_path, 0, "abc") == 1
    assert "no time left" in capfd.readouterr().out


SUITES = [gpu_lab.parts(), gpu_lab.quick_parts(), laboratory.soak(), laboratory.bench(), laboratory.bench_of("folder")]


@pytest.mark.parametrize("parts", SUITES)
def test_every_part_of_a_suite_is_understood(parts, capsys):
    programs = {program.__name__.rpartition(".")[2]: program for program in PROGRAMS}
    for part in parts:
        asked = programs[part.program].parse(list(part.arguments))
        assert programs[part.program].experiment(asked).cases
    suite.announce(parts)
    assert capsys.readouterr().out.startswith("1 part, about " if len(parts) == 1 else f"{len(parts)} parts, about ")


def test_suites_keep_to_their_times():
    assert sum(part.seconds for part in gpu_lab.parts()) <= 8 * 60
    assert sum(part.seconds for part in laboratory.soak()) <= 15 * 60


def test_the_results_are_packed_into_one_file(tmp_path):
    for name in ("count.csv", "report.html", "other.txt"):
        (tmp_path / name).write_text(name)
    with zipfile.ZipFile(laboratory.packed(tmp_path)) as archive:
        assert archive.namelist() == ["count.csv", "report.html"]


# ---------------------------------------------------------------- caches
@pytest.mark.parametrize("kind", caches.KINDS)
def test_each_kind_of_cache_is_filled_and_goes_on(llama, kind):
    layers = caches.fill(llama, caches.make(llama, kind, 40), 40)
    assert llama(mx.array([[5]]), cache=layers).shape == (1, 1, zoo.VOCABULARY)
    full = 4 * 2 * 2 * 32 * 4 * 40  # layers, keys and values, heads, their size, float32, positions
    found = caches.position_bytes(layers, 40)
    assert found < full / 2 if kind == "quantised" else found == full


def test_a_cache_can_not_be_filled_with_next_to_nothing(llama):
    with pytest.raises(ValueError, match="at least"):
        caches.fill(llama, caches.make(llama, "step", 0), 1)


@pytest.mark.parametrize("kind", ["step", "marathon", "marathon beside"])
def test_passes_come_with_a_line_and_the_first_point_once_more(built_once, kind):
    values = {"shape": "llama", "kind": kind, "contexts": [32, 64], "rounds": 2, "warm": 1, "steps": 2, "copy_mib": 1}
    *points, last = passes.measure(values)
    assert [(row["point"], row["context"]) for row in points] == [("context", 32), ("context", 64), ("again", 32)]
    assert last["point"] == "line"
    assert min(last["again"], last["copy_gb_s"]) > 0
    ratio = points[1]["kv_bytes"] / points[0]["kv_bytes"]
    assert ratio == pytest.approx(2)


def test_a_line_keeps_the_quickest_round_of_its_points_and_of_the_copy(built_once, monkeypatch):
    contexts, rounds = [1, 2, 3], iter([3.0, 1.0, 2.0, 1.0])
    copies = iter([[5.0, 5.0, 5.0], [1.0, 1.0, 9.0], [4.0, 4.0, 4.0]])

    def point(model, values, context):
        disturbed = next(rounds) if context == 1 else 1.0
        return {"point": "context", "context": context, "kv_bytes": context, "ms": context * disturbed}

    monkeypatch.setattr(passes, "point", point)
    monkeypatch.setattr(passes, "copy_seconds", lambda size: next(copies))
    values = {"shape": "llama", "kind": "step", "contexts": contexts, "rounds": 3, "copy_mib": 1}
    *points, last = passes.measure(values)
    assert [row["ms"] for row in points] == [1.0, 2.0, 3.0, 1.0]
    assert last["r2"] == pytest.approx(1)
    assert last["copy_gb_s"] == pytest.approx(2e-9 * (1 << 20))


def test_attention_in_steps_is_attention(llama):
    prompt = mx.array([list(range(3, 40))])
    fused = llama(prompt, cache=make_prompt_cache(llama))
    with paths.path("steps"):
        assert mx.fast.scaled_dot_product_attention is paths.in_steps
        steps = llama(prompt, cache=make_prompt_cache(llama))
    assert mx.fast.scaled_dot_product_attention is not paths.in_steps
    assert mx.allclose(fused, steps, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("shape", [(2, 1, 5, 9), (2, 4, 5, 9), (5, 9)])
@pytest.mark.parametrize("boolean", [True, False])
def test_attention_in_steps_takes_every_mask(shape, boolean):
    queries = mx.random.normal((2, 4, 5, 8))
    keys, values = mx.random.normal((2, 2, 9, 8)), mx.random.normal((2, 2, 9, 8))
    mask = mx.random.uniform(shape=shape) > 0.3
    mask[..., 0] = True
    if not boolean:
        mask = mx.where(mask, 0.0, -1e9)
    fused = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask)
    assert mx.allclose(paths.in_steps(queries, keys, values, scale=0.3, mask=mask), fused, atol=1e-5)


# ---------------------------------------------------------------- what is kept alive
def test_bare_patterns_lose_what_they_should(source):
    found = {name: leaks.bare(step, source, 500) for name, step in leaks.PATTERNS.items()}
    rows = [{"pattern": name} | row for name, row in found.items()]
    bounds = residency.judge(rows)
    assert len(bounds) == 3
    assert [bound.words for bound in bounds if not bound.holds] == []
    assert not residency.judge([{"pattern": name} | found["x = x - 1, never evaluated"] for name in found])[-1].holds


def test_a_family_leaks_alone_in_mlx_lm_until_the_predicted_end(source):
    row = {"family": "qwen3_5", "arm": "mlx_lm alone", "limit": 1200}
    row |= leaks.of_family("qwen3_5", "mlx_lm alone", source, 480, 1200)
    assert row["buffers_a_step"] == pytest.approx(2, rel=0.05)
    assert "left_padding" in row["holders"]
    assert [bound.holds for bound in residency.judge([row])] == [True, True]
    assert row["ceiling_metal"] == pytest.approx(499_000 / 2, rel=0.06)
    assert not residency.judge([row | {"expected": 3.0}])[0].holds


@pytest.mark.parametrize("family", ["llama", "rwkv7", "mamba2"])
def test_marathon_pins_what_it_owns(monkeypatch, family):
    monkeypatch.setattr("loadtests.lab.shapes.build", zoo.build)
    rows = [{"shape": family} | row for row in weights_of.measure({"shape": family})]
    bounds = pinned.judge(rows)
    assert [bound.words for bound in bounds if not bound.holds] == []
    assert len(bounds) == 6
    assert rows[-1]["moment"] == pinned.THEIRS


# ---------------------------------------------------------------- counting
def test_thousands_have_their_speed_and_their_gaps():
    times = [0.01 * i for i in range(1001)]
    found = counting.by_thousand(3, times, rows=2)
    assert found["tok_s"] == pytest.approx(200)
    assert (found["p50_ms"], found["p99_ms"]) == pytest.approx((10, 10))


def test_tokens_without_text_count_with_the_piece_that_they_came_with():
    found = counting.of_arrivals(1, [(0.0, 0), (0.01, 1), (0.05, 5), (0.06, 6)])
    assert found["tok_s"] == pytest.approx(100)
    assert (found["p50_ms"], found["p99_ms"]) == pytest.approx((10, 10))


@pytest.mark.parametrize(("text", "right"), [("1, 2, 3, 5", 3), ("Sure: 1,2,3.", 3), ("2 3", 0), ("", 0)])
def test_numbers_are_counted_until_one_is_wrong(text, right):
    assert counting.numbers_in_order(text) == right


def test_a_curve_is_measured_without_a_server(tmp_path, capsys):
    arguments = ["--shape", "llama", "--direct", "--tokens", "2000", "--rows", "2", "--real", "20"]
    asked = count.parse([*arguments, "--out", str(tmp_path)])
    assert experiment.carry_out(count.experiment(asked), asked) == 0
    rows = experiment.read_rows(tmp_path / "count.csv")
    assert [row["thousand"] for row in rows] == [1, 2]
    assert rows[0]["tok_s"] > 0
    assert rows[1]["kv_mib"] > 1.5 * rows[0]["kv_mib"]
    capsys.readouterr()


def test_a_bare_step_beside_other_work_for_most_of_its_rounds_keeps_its_own_time(monkeypatch):
    own = [0.010, 0.050]
    rounds = iter(range(2 * curve.ROUNDS))

    def gaps(step):
        number = next(rounds)
        beside_other_work = number // 2 != 4
        return [own[number % 2] + 0.040 * beside_other_work] * 10

    monkeypatch.setattr(curve, "_gaps", gaps)
    monkeypatch.setattr(curve, "cache_step", lambda *_: (None, 0))
    assert curve.reference(None, 1500, 19_500) == {"bare_second_ms": 10.0, "bare_last_ms": 50.0}


def test_the_bounds_of_a_curve_can_be_missed():
    common = {"shape": "llama", "way": "http", "rows": 1}
    rows = [common | {"thousand": n, "tok_s": 100.0 - 2 * n, "live_buffers": 90.0} for n in range(1, 21)]
    reference = {"shape": "llama", "way": "reference", "bare_second_ms": 10.0, "bare_last_ms": 14.0}
    assert [bound.holds for bound in count.judge([*rows, reference])] == [True, True]
    assert [bound.holds for bound in count.judge([*rows, reference | {"bare_last_ms": 11.0}])] == [True, False]
    leaking = [row | {"live_buffers": 90 + 47_000.0 * row["thousand"]} for row in rows]
    assert [bound.holds for bound in count.judge([*leaking, reference])] == [False, True]


def test_the_near_tie_rule_can_be_broken():
    row = {"shape": "llama", "prompt": 512, "positions": 64, "top_differs": 1, "against_the_rule": 0}
    assert attention_paths.judge([row])[0].holds
    assert not attention_paths.judge([row | {"against_the_rule": 1}])[0].holds


def test_kinds_of_cache_are_held_to_each_other():
    row = {"shape": "small", "prompt": 2049, "kind": "concatenate", "peak_mib": 200.0, "ids": "1 2"}
    assert all(bound.holds for bound in cache_kinds.judge([row, row | {"kind": "step", "peak_mib": 190.0}]))
    worse = row | {"kind": "step", "peak_mib": 220.0, "ids": "1 3"}
    assert [bound.holds for bound in cache_kinds.judge([row, worse])] == [False, False]


def test_the_whole_command_answers_with_an_exit_code(tmp_path):
    command = [
        sys.executable,
        "-m",
        "loadtests.kv_passes",
        "--shape",
        "llama",
        "--kinds",
        "step",
        "--out",
        str(tmp_path),
    ]
    command += ["--contexts", "32", "64", "--warm", "1", "--steps", "2", "--copy-mib", "1", "--r2", "2"]
    done = subprocess.run(command, env=harness.environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "MISSED  llama, step" in done.stdout
    assert json.dumps([row["point"] for row in experiment.read_rows(tmp_path / "kv_passes.csv")])


@pytest.fixture
def upstream():
    """The reproduction for mlx-lm, as a module."""
    spec = importlib.util.spec_from_file_location(
        "live_buffers", harness.ROOT / "docs" / "upstream" / "live_buffers.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reproduction_for_upstream_shows_the_leak_and_its_mend(upstream, monkeypatch, capsys):
    monkeypatch.setattr(GenerationBatch, "_step", GenerationBatch._step)
    for arguments, holds in (([], 401), (["--mend"], 1)):
        monkeypatch.setattr("sys.argv", ["live_buffers.py", *arguments])
        upstream.main()
        assert f"after 400 tokens: layer 3's offset holds {holds}\n" in capsys.readouterr().out
    assert upstream.bare_caches(50) == (51, 51)


# ---------------------------------------------------------------- endurance
def ended(**fields):
    return traffic.AnswerEnd(
        **({"limit": 8, "status": 200, "finishes": 1, "finish": "length", "tokens": 8, "done": True} | fields)
    )


def test_truthful_endings_are_distinguished_from_others():
    assert not traffic.is_truthful("short", ended())
    assert not traffic.is_truthful("disconnect", ended(left=True, finishes=0, done=False))
    assert not traffic.is_truthful("deadline", ended(finishes=0, finish="", error="timeout"))
    assert not traffic.is_truthful("schema", ended(finish="stop", tokens=5, text='{"kind": "one", "count": 3}'))
    for kind, fields in {
        "short": {"finish": "stop"},
        "long": {"tokens": 7},
        "plain": {"finishes": 2},
        "agent": {"done": False},
        "deadline": {"error": "timeout"},
        "long prompt": {"finishes": 0, "finish": "", "error": "internal_error"},
        "tools": {"finish": "stop", "tokens": 3},
        "schema": {"finish": "stop", "tokens": 3, "text": "{"},
        "disconnect": {"after_end": True},
    }.items():
        assert traffic.is_truthful(kind, ended(**fields)), kind


def test_a_stream_is_read_to_its_end():
    ending = traffic.AnswerEnd(limit=2)
    for text in ('data: {"choices": [{"delta": {"content": "a"}}]}', "", ": still here"):
        traffic.read_line(ending, text)
    traffic.read_line(ending, 'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}')
    traffic.read_line(ending, 'data: {"choices": [], "usage": {"completion_tokens": 2}}')
    traffic.read_line(ending, "data: [DONE]")
    assert (ending.text, ending.finish, ending.tokens, ending.done) == ("a", "length", 2, True)
    assert traffic.is_truthful("short", ending) == ""
    traffic.read_line(ending, 'data: {"choices": []}')
    assert "whole" in traffic.is_truthful("short", ending)


def test_traffic_has_slopes_and_growth():
    readings = [enduring.Reading(10.0 * n, 100.0 + n, 50.0, 9.0, 3.0) for n in range(20)]
    found = enduring.slopes(readings)
    assert found["live_slope"] == pytest.approx(360)
    assert found["bytes_slope"] == pytest.approx(0)
    assert found["live_growth"] == pytest.approx(119 / 109)
    row = {"shape": "llama", "untruthful": 0, "requests": 9, "left_running": 0, "faults": ""} | found
    asked = endurance.parse(["--growth", "1.05"])
    assert [bound.holds for bound in endurance.experiment(asked).judge([row])] == [True, True, False, True]
