"""The laboratory's report: its verdicts come from the rows, and what the rows can't carry is not shown."""

from typing import Any

import pytest

from loadtests import attention_paths, cache_kinds, count, endurance, kv_passes, pinned, report, residency
from loadtests.lab import experiment, findings, page, plots
from loadtests.lab.rows import ratio

PROGRAMS = {
    program.__name__.rpartition(".")[2]: program
    for program in (attention_paths, cache_kinds, count, endurance, kv_passes, pinned, residency)
}
ORIGIN = {
    "device": "a <device>",
    "system": "Linux",
    "mlx": "0.32.4",
    "mlx_lm": "0.32.2",
    "commit": "abc1234",
    "time": "2026-12-01T10:00:00Z",
    "drift": 1.0,
}


def rows_of(program: str, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows as a CSV gives them: every column is there."""
    empty = dict.fromkeys((*experiment.COMMON, *experiment.OF_THE_PROCESS, *PROGRAMS[program].COLUMNS), "")
    return [empty | ORIGIN | row for row in rows]


def leaking(**fields: Any) -> dict[str, Any]:
    row = {"family": "qwen3_5", "arm": "mlx_lm alone", "steps": 600.0, "limit": 1500.0, "buffers_a_step": 2.0}
    row |= {"expected": 2.0, "holders": "a.b", "half_width": 0.0}
    return row | {"ceiling_metal": 249_500.0, "ceiling_predicted": 707.0, "ceiling_measured": 708.0} | fields


def bare(rate: float = 1.0) -> dict[str, Any]:
    return {"pattern": "x = x - 1, never evaluated", "steps": 20_000.0, "buffers_a_step": rate, "bytes_a_step": 4.0}


GUARDED = {"family": "qwen3_5", "arm": "guard", "steps": 600.0, "buffers_a_step": 0.0, "half_width": 0.0}


def thousands(*speeds: float, **fields: Any) -> list[dict[str, Any]]:
    common = {"shape": "llama", "way": "direct", "rows": 1.0, "real": 1000.0, "tokens": 1000.0 * len(speeds)} | fields
    times = [common | {"thousand": 1.0 + n, "tok_s": speed, "p50_ms": 1e3 / speed} for n, speed in enumerate(speeds)]
    return [row | {"p99_ms": 9.0, "kv_mib": row["thousand"]} for row in times]


def reference(second: float, last: float, tokens: float) -> dict[str, Any]:
    row = {"shape": "llama", "way": "reference", "tokens": tokens}
    return row | {"bare_second_ms": second, "bare_last_ms": last}


def cache(kind: str, run: int, **fields: Any) -> dict[str, Any]:
    row = {"shape": "llama", "kind": kind, "prompt": 513.0, "run": float(run), "peak_mib": 100.0, "weights_mib": 50.0}
    return row | {"prefill_tok_s": 900.0, "first_ms": 1.0, "decode_tok_s": 90.0 + run} | fields


def line(kind: str, **fields: Any) -> list[dict[str, Any]]:
    points = [(512.0, 1e6, 1.0), (1024.0, 2e6, 2.0)]
    common = {"shape": "llama", "kind": kind}
    found = [common | {"point": "context", "context": c, "kv_bytes": b, "ms": ms} for c, b, ms in points]
    fit = {"intercept_ms": 0.5, "gb_s": 1.0, "copy_gb_s": 7.25, "passes": 7.25, "r2": 0.99, "again": 1.0}
    return [*found, common | {"point": "line"} | fit | fields]


def attended(path: str, run: int, **fields: Any) -> dict[str, Any]:
    row = {"shape": "llama", "path": path, "prompt": 513.0, "run": float(run), "peak_mib": 9.0}
    return row | {"prefill_tok_s": 900.0 + run, "first_ms": 1.0, "decode_tok_s": 90.0 + run} | fields


TIES = {"shape": "llama", "prompt": 512.0, "positions": 64.0, "top_differs": 3.0, "against_the_rule": 0.0}
TIES |= {"largest_difference": 0.1, "smallest_margin": 0.0}
TRAFFIC = {"shape": "llama", "ran_minutes": 1.7, "requests": 9.0, "untruthful": 0.0, "live_growth": 1.01}
TRAFFIC |= {"live_slope": -132.0, "bytes_slope": 495.0, "tok_s_slope": 1872.0, "p99_slope": -6575.0}

SAMPLES: dict[str, list[dict[str, Any]]] = {
    "residency": [bare(), leaking(), GUARDED],
    "count": [*thousands(110.0, 100.0, 90.0), reference(10.0, 11.0, 3000.0)],
    "cache_kinds": [cache(kind, run) for kind in ("step", "concatenate", "contiguous") for run in (1, 2)],
    "pinned": [{"shape": "llama", "moment": "decode", "arrays": 4.0, "owned": 1.0, "pinned": 1.07, "ratio": 1.07}],
    "attention_paths": [*(attended(path, run) for path in ("steps", "fused") for run in (1, 2)), TIES],
    "kv_passes": line("step"),
    "endurance": [TRAFFIC],
}


def finding_of(program: str, *rows: dict[str, Any]) -> page.Finding:
    (found,) = findings.every({program: rows_of(program, *rows)})
    return found


def text_of(finding: page.Finding) -> str:
    """All that a reader sees of it but its plots."""
    return page.markdown(page.Document("", [], findings.summary([finding]), [finding], []))


# ---------------------------------------------------------------- the page
def written(folder):
    for name, rows in SAMPLES.items():
        columns = (*experiment.COMMON, *experiment.OF_THE_PROCESS, *PROGRAMS[name].COLUMNS)
        with experiment.Sheet(folder, name, columns) as sheet:
            for row in rows:
                sheet.write(ORIGIN | row)


def test_the_report_is_one_page_with_every_finding(tmp_path, monkeypatch, capsys):
    written(tmp_path)
    monkeypatch.setattr("sys.argv", ["report", "--data", str(tmp_path), "--out", str(tmp_path)])
    assert report.main() == 0
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    short = (tmp_path / "report.md").read_text(encoding="utf-8")
    for text in (html, short):
        assert all(text.count(word) >= 7 for word in ("Asked.", "Published.", "On MLX.", "Not proven."))
        assert "7.25" in text
        assert "1.07" in text
    assert html.count("<svg") == 4
    assert "currentColor" in html
    assert "<device>" not in html
    assert "http://" not in html.replace("http://www.w3.org/", "")
    assert "nan" not in short.replace("nanb", "")
    capsys.readouterr()


def test_a_report_of_nothing_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["report", "--data", str(tmp_path), "--out", str(tmp_path)])
    assert report.main() == 2
    assert "no CSV file" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_five_findings_are_numbered_and_our_questions_have_letters():
    found = findings.every({name: rows_of(name, *rows) for name, rows in SAMPLES.items()})
    assert [finding.title[:2] for finding in found] == ["1.", "2.", "3.", "4.", "5.", "A.", "B."]
    table = findings.summary(found)
    assert [row[0] for row in table.rows[1:]] == [finding.title for finding in found]
    assert all(all(row) for row in table.rows)


def test_only_the_first_finding_is_said_to_be_of_mlx_lm():
    sources = [finding_of(name, *SAMPLES[name]).source for name in ("residency", "cache_kinds", "kv_passes")]
    assert ["mlx-lm 0.31.3 itself" in source for source in sources] == [True, False, False]
    assert "Qwen2.5-0.5B" in sources[1]
    assert "SmolLM2-135M" in sources[2]


@pytest.mark.parametrize(
    ("program", "figure"),
    [
        ("residency", "2 buffers a token in 1 of 1 families"),
        ("cache_kinds", "1.00 times its peak"),
        ("pinned", "1.070 times their bytes"),
        ("attention_paths", "of 64 positions 3 have another top token"),
        ("kv_passes", "7.25 passes"),
        ("count", "0.99 of the second thousand's speed"),
    ],
)
def test_the_answers_at_a_glance_say_what_a_finding_means_for_mlx_with_its_figure(program, figure):
    finding = finding_of(program, *SAMPLES[program])
    glance = findings.summary([finding]).rows
    assert figure in glance[1][glance[0].index("what it means for MLX")]
    assert f"**What it means for MLX.** {finding.means}" in text_of(finding)


def test_every_table_names_device_commit_and_day():
    for name, rows in SAMPLES.items():
        finding = finding_of(name, *rows)
        text = text_of(finding)
        assert "a <device>" in text
        for table in finding.tables:
            assert all(row[-1].endswith("abc1234, 2026-12-01") for row in table.rows[1:]), table.caption


def test_models_and_words_are_explained():
    report_of = report.compose({name: rows_of(name, *SAMPLES.get(name, [])) for name in report.PROGRAMS})
    text = page.markdown(report_of)
    assert "| llama | llama | 4 | 64 | 4 (2) | 32 | 2,048 | float32 | 459 K |" in text
    for word in ("guard", "join, leave, taken out", "kept prefix", "beside", "sampled", "near tie", "pass", "drift"):
        assert f"**{word}" in text


def test_a_model_that_is_not_here_has_its_name_only():
    from loadtests.lab import catalogue

    assert catalogue.describe("/nowhere/at all")[0] == "/nowhere/at all"
    assert "not on this machine" in catalogue.describe("/nowhere/at all")
    assert catalogue.describe("llama-1b")[7:9] == ["bfloat16", "1.17 B"]


def test_a_failed_case_is_said_and_not_shown():
    failed = cache("quantised", 1) | {"error": "the process ended with 1", "device": ""}
    finding = finding_of("cache_kinds", *SAMPLES["cache_kinds"], failed)
    assert "quantised, 513, commit abc1234 (the process ended with 1)" in finding.answer[-1]
    assert all("quantised" not in row for table in finding.tables for row in table.rows)


def test_a_family_that_can_not_be_run_is_said():
    finding = finding_of("residency", bare(), leaking(), {"family": "gpt2", "arm": "off", "note": "can't be run: why"})
    assert "gpt2, off, a <device>, commit abc1234 (can't be run: why)" in finding.answer[-1]
    assert all("gpt2" not in row for table in finding.tables for row in table.rows)


# ---------------------------------------------------------------- noise
def test_a_ratio_within_the_spread_of_its_runs_is_noise():
    steady = rows_of("cache_kinds", *(cache("a", run, decode_tok_s=speed) for run, speed in ((1, 100.0), (2, 120.0))))
    near = rows_of("cache_kinds", *(cache("b", run, decode_tok_s=speed) for run, speed in ((1, 90.0), (2, 110.0))))
    far = rows_of("cache_kinds", *(cache("c", run, decode_tok_s=speed) for run, speed in ((1, 40.0), (2, 50.0))))
    assert ratio(steady, near, "decode_tok_s", timed=True).words == "within noise (0.91 to 1.33)"
    assert ratio(far, steady, "decode_tok_s", timed=True).words == "0.41 (0.33 to 0.50)"
    assert ratio(far[:1], steady, "decode_tok_s", timed=True).words == "0.36, one run"


def test_the_drift_of_the_machine_widens_times_but_not_bytes():
    base = rows_of("cache_kinds", cache("a", 1), cache("a", 2))
    drifted = rows_of("cache_kinds", *(cache("b", run, decode_tok_s=140.0, peak_mib=140.0) for run in (1, 2)))
    drifted = [row | {"drift": 0.5} for row in drifted]
    assert not ratio(drifted, base, "decode_tok_s", timed=True).above
    assert ratio(drifted, base, "peak_mib", timed=False).above


# ---------------------------------------------------------------- verdicts
@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([bare(), leaking(), GUARDED], "Reproduced"),
        ([bare(0.0), leaking(buffers_a_step=0.0)], "Not reproduced"),
        ([leaking()], "Reproduced in part"),
        ([bare(0.0)], "Can't tell"),
    ],
)
def test_the_leak_is_judged_by_its_rows(rows, word):
    assert finding_of("residency", *rows).verdict.word == word


def test_a_leak_in_marathon_is_said_with_its_rate():
    said = finding_of("residency", bare(), leaking(), GUARDED | {"buffers_a_step": 0.0213}).verdict.said
    assert "0.0213" in said
    assert "at most 0.0000" not in text_of(finding_of("residency", bare(), leaking(), GUARDED))


def test_an_end_on_the_lines_own_tokens_is_no_forecast():
    tables = [
        finding_of("residency", bare(), leaking(ceiling_predicted=predicted)).tables[-1] for predicted in (464.0, 707.0)
    ]
    assert [table.rows[1][5].startswith("yes") for table in tables] == [False, True]


def test_an_arm_without_rows_has_no_column_and_one_with_rows_has():
    head = finding_of("residency", bare(), leaking(), GUARDED).tables[1].rows[0]
    assert "Marathon, guard off" not in head
    more = [bare(), leaking(), GUARDED, leaking(arm="off"), leaking(arm="mlx_lm", expected=2.25)]
    assert {"Marathon, guard off", "mlx-lm, others come and go"} <= set(
        finding_of("residency", *more).tables[1].rows[0]
    )


def test_a_family_measured_twice_counts_once():
    verdict = finding_of("residency", bare(), leaking(), leaking(), GUARDED, GUARDED).verdict
    assert "1 of 1 families lose 2 buffers" in verdict.said
    assert "none of 1 families" in verdict.said
    assert "1 of 1 families are within 5 %" in verdict.sure


def test_the_mend_for_users_of_mlx_lm_stands_in_the_first_finding():
    text = text_of(finding_of("residency", *SAMPLES["residency"]))
    assert "(../../upstream/issue.md)" in text
    assert "cache.state for cache in self.prompt_cache" in text


def test_a_costly_kind_of_cache_is_said_in_the_verdict_with_its_slower_prefill():
    rows = [cache(kind, run) for kind in ("step", "concatenate", "contiguous") for run in (1, 2)]
    rows += [cache("rotating", run, peak_mib=216.0, prefill_tok_s=250.0) for run in (1, 2)]
    verdict = finding_of("cache_kinds", *rows).verdict
    assert verdict.word == "Not reproduced"
    assert "rotating 2.16 with prefill 0.28" in verdict.said


def test_strided_copies_and_high_peaks_would_be_reproduced():
    rows = [cache("step", run, peak_mib=60.0) for run in (1, 2)]
    rows += [cache("concatenate", run, decode_tok_s=40.0) for run in (1, 2)] + [
        cache("contiguous", 1),
        cache("contiguous", 2),
    ]
    assert finding_of("cache_kinds", *rows).verdict.word == "Reproduced"


def test_peaks_are_given_with_and_without_the_weights():
    rows = [cache(kind, run, peak_mib=peak) for kind, peak in (("step", 100.0), ("batched", 150.0)) for run in (1, 2)]
    (line_of_it,) = [row for row in finding_of("cache_kinds", *rows).tables[0].rows if "batched" in row]
    assert line_of_it[7].startswith("1.50")
    assert line_of_it[8].startswith("2.00")


def test_a_missed_bound_of_pinned_bytes_is_the_verdict():
    rows = [SAMPLES["pinned"][0] | {"ratio": 1.2}]
    assert finding_of("pinned", *rows).verdict.word == "Bound missed"
    theirs = SAMPLES["pinned"][0] | {"moment": "mlx-lm, taken out", "ratio": 4.2}
    verdict = finding_of("pinned", *SAMPLES["pinned"], theirs).verdict
    assert "in mlx-lm by another cause" in verdict.word
    assert "4.200" in verdict.said


def test_a_moment_without_arrays_has_no_ratio_and_states_are_said():
    nothing = {"shape": "mamba2", "moment": "decode", "arrays": 0.0, "ratio": 1.0, "with_states": 1.24}
    finding = finding_of("pinned", *SAMPLES["pinned"], nothing)
    assert [row[1] for row in finding.tables[0].rows[1:]] == ["1.070", "–"]
    assert "1.24 (mamba2, decode)" in text_of(finding)


def test_the_gain_of_fused_attention_is_claimed_only_beyond_noise():
    assert finding_of("attention_paths", *SAMPLES["attention_paths"]).verdict.word == "Can't tell"
    rows = [attended("steps", 1), attended("steps", 2)]
    rows += [attended("fused", run, prefill_tok_s=1800.0) for run in (1, 2)]
    assert finding_of("attention_paths", *rows).verdict.word == "Reproduced in direction"


def test_the_rule_of_near_ties_is_written_out_and_its_breaches_are_counted():
    finding = finding_of("attention_paths", *SAMPLES["attention_paths"][:-1], TIES | {"against_the_rule": 2.0})
    assert "broken at 2 of 64 positions" in finding.verdict.sure
    assert "no near tie" not in text_of(finding)
    assert "margin between the two best logits" in text_of(finding)


def test_a_way_without_its_counterpart_is_named():
    finding = finding_of("attention_paths", attended("steps", 1, prompt=2049.0), attended("steps", 2, prompt=2049.0))
    assert "2049 tokens, a <device>, steps" in finding.answer[0]


@pytest.mark.parametrize("fit", [{"r2": 0.06}, {"r2": 0.99, "gb_s": -556.0, "passes": -4.8}])
def test_a_line_that_is_none_gives_no_figures(fit):
    finding = finding_of("kv_passes", *line("step", **fit))
    text = text_of(finding)
    assert "no line: R²" in text
    assert "7.25 |" not in text.replace("| 7.25 | – |", "")
    assert "-556" not in text
    assert "-4.8" not in text
    assert finding.verdict.word == "Can't tell"


def test_passes_are_compared_only_beyond_the_drift():
    more = [*line("step", passes=2.0), *line("concatenate", passes=4.0)]
    assert finding_of("kv_passes", *more).verdict.word == "Reproduced that concatenating costs more"
    unsteady = [*line("step", passes=2.0, again=2.5), *line("concatenate", passes=4.0)]
    assert finding_of("kv_passes", *unsteady).verdict.word == "Can't tell"
    assert (
        finding_of("kv_passes", *line("step", passes=4.0), *line("concatenate", passes=2.0)).verdict.word
        == "Not reproduced"
    )


def test_a_longer_row_beside_is_said():
    beside = [row | {"ms": 5.0} if row["point"] == "context" else row for row in line("marathon beside", passes=15.0)]
    text = text_of(finding_of("kv_passes", *line("marathon"), *beside))
    assert "2.5 times as long a step as alone" in text
    assert "15 passes" in text


def test_an_answer_below_the_bound_is_said_first():
    rows = [*thousands(100.0, 100.0, 50.0), reference(10.0, 12.0, 3000.0)]
    verdict = finding_of("count", *rows).verdict
    assert verdict.word == "Speed missed the bound in 1 of 1 answers"
    assert "0.500, corrected 0.600" in verdict.said
    assert finding_of("count", *thousands(100.0, 100.0, 90.0), reference(10.0, 11.0, 3000.0)).verdict.word == "Holds"


def test_a_sampled_curve_is_no_answer_and_batches_are_said():
    finding = finding_of("count", *thousands(900.0, 800.0, 200.0, rows=8.0, real=100.0))
    assert finding.verdict.word == "Can't tell"
    assert "0 whole answer(s)" in finding.verdict.sure
    assert "llama, 8 rows 0.250" in finding.verdict.said
    assert "100 → 25" in text_of(finding)


def test_a_correction_from_another_machine_state_is_doubted():
    rows = [*thousands(100.0, 100.0, 90.0), reference(39.0, 41.0, 3000.0)]
    assert "3.9 times the median" in text_of(finding_of("count", *rows))
    assert "doubtful" not in text_of(finding_of("count", *thousands(100.0, 100.0, 90.0), reference(10.0, 11.0, 3000.0)))


def test_curves_of_one_case_taken_twice_stay_apart():
    finding = finding_of("count", *thousands(100.0, 90.0, 80.0), *thousands(200.0, 190.0, 180.0))
    assert len(finding.tables[0].rows) == 3


def test_a_curve_is_corrected_by_the_bare_step_that_was_timed_after_it():
    first, second = "2026-12-01T10:00:00Z", "2026-12-02T10:00:00Z"
    rows = []
    for time, last in ((first, 12.0), (second, 20.0)):
        own = [*thousands(100.0, 100.0, 50.0), reference(10.0, last, 3000.0)]
        rows += [row | {"time": time} for row in own]
    assert [row[8] for row in finding_of("count", *rows).tables[0].rows[1:]] == ["0.600", "1.000"]


def test_two_thousand_tokens_have_no_later_thousand():
    finding = finding_of("count", *thousands(100.0, 90.0))
    assert "nothing, being too short" in finding.verdict.said
    assert finding.tables[0].rows[1][6] == "–"
    assert finding.verdict.word == "Can't tell"


def test_slopes_an_hour_are_shown_of_long_runs_only():
    short = text_of(finding_of("endurance", TRAFFIC))
    assert "-132" not in short
    assert "too short" in short
    long = finding_of("endurance", TRAFFIC | {"ran_minutes": 120.0})
    assert "-132" in text_of(long)
    assert long.verdict.word == "Holds"
    assert finding_of("endurance", TRAFFIC | {"ran_minutes": 120.0, "untruthful": 1.0}).verdict.word == "Doesn't hold"
    assert "nan" not in finding_of("endurance", TRAFFIC | {"live_growth": ""}).verdict.said


# ---------------------------------------------------------------- plots
def test_a_kind_has_one_colour_whatever_else_was_measured():
    assert plots.looks(["step", "batched"])[1] == plots.looks(["concatenate", "batched (no line)"])[1]
    assert len(set(plots.looks(list(plots.KNOWN)))) == len(plots.KNOWN)


def test_sections_are_laid_beside_each_other():
    sheets = {name: rows_of(name, *SAMPLES.get(name, [])) for name in report.PROGRAMS}
    (chapter,) = [chapter for chapter in report.compose(sheets).chapters if chapter.title.startswith("Do the sections")]
    assert chapter.tables[0].rows[1][2:5] == ["513", "10.9 (abc1234, 2026-12-01)", "10.9 (abc1234, 2026-12-01)"]
