"""Question A: twenty thousand tokens in one answer. Pure: rows of `loadtests.count` in, the finding out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtests.lab import plots, published
from loadtests.lab.page import Finding, Judgement, Table
from loadtests.lab.plots import Plot, Series
from loadtests.lab.rows import UNSTEADY, Row, Rows, cell, devices, drift_cell, groups, listed, middle, taken, values

KEPT = 0.8  # of the second thousand's speed the last must have, corrected
FLAT = 0.01  # live buffers a token
THOUSAND = 1000
LENGTH = 20  # thousands that were asked for
SHORT = {"http": ", HTTP", "direct": ", loop"}
WAYS = {"http": "through HTTP", "direct": "Marathon's loop, no HTTP"}


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve: a row a thousand, and the bare step's times over caches of its two lengths, if they were taken."""

    rows: Rows
    reference: Row | None

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def second(self) -> Row:
        return min(self.rows, key=lambda row: abs(row["thousand"] - 2))

    @property
    def last(self) -> Row:
        return self.rows[-1]

    @property
    def sampled(self) -> bool:
        return bool(self.first["real"] != "" and self.first["real"] < THOUSAND)

    @property
    def name(self) -> str:
        row = self.first
        many = "" if row["rows"] == 1 else "s"
        return f"{row['shape']}, {cell(row['rows'])} row{many}"

    @property
    def kept(self) -> float:
        """The last thousand's speed ÷ the second's; nan where there is no later one."""
        if self.last is self.second:
            return float("nan")
        return float(self.last["tok_s"] / self.second["tok_s"])

    @property
    def corrected(self) -> float:
        """nan without a reference, or for a curve that no answer went along."""
        if self.reference is None or self.sampled:
            return float("nan")
        return self.kept * float(self.reference["bare_last_ms"] / self.reference["bare_second_ms"])

    @property
    def growth(self) -> float:
        """Live buffers a token between the second thousand and the last; nan without a count."""
        ends = values([self.second, self.last], "live_buffers")
        tokens = THOUSAND * (self.last["thousand"] - self.second["thousand"])
        return (ends[1] - ends[0]) / tokens if len(ends) == 2 and tokens else float("nan")


def runs_of(rows: Rows) -> list[Curve]:
    """Every curve, in the order in which they were written."""
    references = groups([row for row in rows if row["way"] == "reference"], "device", "shape", "tokens")
    curves = groups([row for row in rows if row["thousand"] != ""], "device", "shape", "way", "rows", "real", "tokens")
    found = []
    for own in curves.values():
        key = tuple(next(iter(groups(own[:1], "device", "shape", "tokens"))))
        known = references.get(key, []) if own[0]["rows"] == 1 else []
        found += [Curve(part, _after(part[-1], known)) for part in _cut(own)]
    return found


def _after(last: Row, references: Rows) -> Row | None:
    """The bare step that was timed next after a curve, as `loadtests.count` does; else the newest."""
    later = [row for row in references if row["time"] >= last["time"]]
    return next(iter([*later, *reversed(references)]), None)


def _cut(rows: Rows) -> list[list[Row]]:
    """One list a curve: a thousand that isn't later than the one before it begins a new one."""
    found: list[list[Row]] = []
    for row in rows:
        if not found or row["thousand"] <= found[-1][-1]["thousand"]:
            found.append([])
        found[-1].append(row)
    return found


def long(rows: Rows) -> Finding:
    """The finding, from rows without errors."""
    runs = runs_of(rows)
    finding = Finding(
        "A. Twenty thousand tokens in one answer (our question)",
        "Does a single answer go on to 20,000 tokens, and does it stay as quick and as small as it began?",
        published.LONG.text,
        _verdict(runs),
        short=published.LONG.short,
        means=_means(runs),
    )
    finding.answer = [_where(rows), CORRECTION, *_doubts(runs), *_batches(runs)]
    finding.tables = [_answers(runs), _samples(runs)]
    finding.tables = [table for table in finding.tables if len(table.rows) > 1]
    finding.plots = [plot for device in devices(rows) for plot in _plots(device, runs)]
    finding.unproven = (
        "One run of each. Weights are random but for the starter model, so that theirs have no numbers in order. "
        "Where the table has no live buffers they weren't counted (there is no counter on CUDA), and nothing ran on "
        "Metal."
    )
    return finding


CORRECTION = (
    "A longer cache makes each step slower by itself. Corrected ratio = (tok/s of the last thousand ÷ of the second) "
    "× (mlx-lm's bare step over a fresh cache of the last thousand's length ÷ over one of 1,500 positions). 1 says "
    f"that age costs nothing; the bound is {KEPT}."
)


# ---------------------------------------------------------------- the words
def _verdict(runs: Sequence[Curve]) -> Judgement:
    whole = [run for run in runs if not run.sampled]
    judged = [run for run in whole if run.corrected == run.corrected]
    missed = [run for run in judged if run.corrected < KEPT]
    word = "Can't tell"
    if judged:
        word = f"Speed missed the bound in {len(missed)} of {len(judged)} answers" if missed else "Holds"
    short = [run for run in whole if run.last["thousand"] < LENGTH]
    said = "; ".join(f"{_named(run)} {_kept(run)}" for run in whole) or "no whole answer was measured"
    words = f"Of the second thousand's speed the last has: {said}. {_buffers(whole)}{_wide(runs)}"
    sure = (
        f"One run each: {len(whole)} whole answer(s), {len(short)} of them shorter than {LENGTH},000 tokens; the other "
    )
    sure += f"{len(runs) - len(whole)} curves are sampled and so are no answers."
    return Judgement(word, words, sure)


def _means(runs: Sequence[Curve]) -> str:
    whole = [run for run in runs if not run.sampled]
    if not whole:
        return ""
    longest = THOUSAND * max(run.last["thousand"] for run in whole)
    words = f"{len(whole)} answers went on to their end, the longest to {longest:,.0f} tokens. {_buffers(whole)}"
    kept = [run.corrected for run in whole if run.corrected == run.corrected]
    if not kept:
        return words
    words += " They slow down as their caches grow; beyond that the last thousand keeps "
    words += " to ".join(dict.fromkeys(f"{end(kept):.2f}" for end in (min, max)))
    return words + f" of the second thousand's speed, where the bound is {KEPT}."


def _named(run: Curve) -> str:
    row = run.last
    return f"{run.name} ({WAYS.get(row['way'], row['way'])}, {row['device']}, to {row['thousand'] * THOUSAND:,.0f})"


def _kept(run: Curve) -> str:
    if run.last is run.second:
        return "nothing, being too short"
    words = f"{run.kept:.3f}"
    return words + (f", corrected {run.corrected:.3f}" if run.corrected == run.corrected else ", not corrected")


def _buffers(runs: Sequence[Curve]) -> str:
    counted = [abs(run.growth) for run in runs if run.growth == run.growth]
    if not counted:
        return "Live buffers weren't counted."
    flat = sum(growth <= FLAT for growth in counted)
    return f"Live buffers stayed flat within {FLAT} a token in {flat} of {len(counted)} counted answers."


def _wide(runs: Sequence[Curve]) -> str:
    """What sampled batches of several rows keep."""
    kept = [f"{run.name} {run.kept:.3f}" for run in runs if run.sampled and run.first["rows"] > 1]
    return f" Sampled batches keep: {'; '.join(kept)}, uncorrected." if kept else ""


def _where(rows: Rows) -> str:
    return (
        f"Measured on {listed(devices(rows))}. tok/s is summed over the rows of a batch; p50 and p99 are of the time "
        "between two tokens of one row, within one thousand."
    )


def _doubts(runs: Sequence[Curve]) -> list[str]:
    """Corrections whose bare step was not taken at the curve's own speed, and answers that end in one slow thousand."""
    words = []
    for run in runs:
        if run.corrected != run.corrected or run.reference is None:
            continue
        apart = run.reference["bare_second_ms"] / run.second["p50_ms"]
        if max(apart, 1 / apart) > UNSTEADY:
            words.append(
                f"{_named(run)}: the correction is doubtful. The bare step over 1,500 positions took "
                f"{cell(run.reference['bare_second_ms'])} ms, {apart:.1f} times the median of the curve's own second "
                "thousand, so that the machine (or the loop) was not the same for both."
            )
        before = middle(run.rows[-2:-1], "p50_ms")
        if run.last["p50_ms"] / before > UNSTEADY:
            words.append(
                f"{_named(run)}: the last thousand is {run.last['p50_ms'] / before:.2f} times as slow as the one "
                f"before it ({cell(before)} → {cell(run.last['p50_ms'])} ms); up to there the speed had come to "
                f"{run.rows[-2]['tok_s'] / run.second['tok_s']:.3f} of the second thousand's."
            )
    return words


def _batches(runs: Sequence[Curve]) -> list[str]:
    """How sampled batches slow down, beside what their caches grow."""
    words = []
    for run in runs:
        if not run.sampled:
            continue
        slower, larger = (run.last[name] / run.second[name] for name in ("p50_ms", "kv_mib"))
        words.append(
            f"{run.name}, {run.last['device']}: {cell(run.second['tok_s'])} → {cell(run.last['tok_s'])} tok/s "
            f"({run.kept:.2f}), a step {slower:.1f} times as long over {larger:.1f} times the bytes of cache"
        )
    if not words:
        return []
    opening = (
        "Sampled curves take some steps of some thousands, on caches filled up to there: they say what length costs "
    )
    return [opening + "and nothing about age. From the second thousand to the last: " + "; ".join(words) + "."]


# ---------------------------------------------------------------- tables and plots
def _answers(runs: Sequence[Curve]) -> Table:
    head = ["model", "device", "way", "rows", "to token", "tok/s, 2nd → last thousand", "last ÷ 2nd"]
    head += ["bare step ms, 1,500 → last", "corrected ratio", "p99 ms, 2nd → last", "live buffers, 2nd → last"]
    head += ["numbers in order", "drift", "taken"]
    body = [_answer(run) for run in runs if not run.sampled]
    return Table("Whole answers, every token generated", [head, *body])


def _answer(run: Curve) -> list[str]:
    second, last = run.second, run.last
    bare = "–" if run.reference is None else _ends(run.reference["bare_second_ms"], run.reference["bare_last_ms"])
    cells = [last["shape"], last["device"], WAYS.get(last["way"], last["way"]), cell(last["rows"])]
    cells += [f"{THOUSAND * last['thousand']:,.0f}", _ends(second["tok_s"], last["tok_s"]), _share(run.kept), bare]
    cells += [_share(run.corrected), _ends(second["p99_ms"], last["p99_ms"])]
    cells += [_ends(second["live_buffers"], last["live_buffers"]), cell(last["numbers_right"])]
    return [*cells, drift_cell(run.rows), taken(run.rows)]


def _share(ratio: float) -> str:
    return "–" if ratio != ratio else f"{ratio:.3f}"


def _ends(first: float | str, last: float | str) -> str:
    return "–" if "" in (first, last) else f"{cell(first)} → {cell(last)}"


def _samples(runs: Sequence[Curve]) -> Table:
    head = [
        "model",
        "device",
        "rows",
        "steps of a thousand",
        "tok/s of all rows, 2nd → last",
        "tok/s a row, 2nd → last",
    ]
    head += ["last ÷ 2nd", "p50 ms, 2nd → last", "p99 ms, 2nd → last", "cache MiB, 2nd → last", "drift", "taken"]
    return Table("Sampled curves: no answers", [head, *(_sample(run) for run in runs if run.sampled)])


def _sample(run: Curve) -> list[str]:
    second, last, many = run.second, run.last, run.last["rows"]
    cells = [last["shape"], last["device"], cell(many), cell(last["real"]), _ends(second["tok_s"], last["tok_s"])]
    cells += [_ends(second["tok_s"] / many, last["tok_s"] / many), _share(run.kept)]
    cells += [_ends(second[name], last[name]) for name in ("p50_ms", "p99_ms", "kv_mib")]
    return [*cells, drift_cell(run.rows), taken(run.rows)]


def _plots(device: str, runs: Sequence[Curve]) -> list[tuple[str, str]]:
    own = [run for run in runs if run.first["device"] == device]
    series = [_series(run) for run in own]
    if not series:
        return []
    plot = Plot(
        f"Time between two tokens, {device}",
        "tokens of the answer, thousands",
        "p50 within the thousand, ms (logarithmic)",
        series,
        log="y",
    )
    return [("The median time from one token of a row to its next. Broken lines are sampled.", plots.curves(plot))]


def _series(run: Curve) -> Series:
    name = run.name + (", sampled" if run.sampled else SHORT.get(run.first["way"], ""))
    xs = [row["thousand"] for row in run.rows]
    return Series(name, xs, [row["p50_ms"] for row in run.rows], dashed=run.sampled)
