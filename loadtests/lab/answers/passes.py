"""Finding 5: passes over the cache. Pure: rows of `loadtests.kv_passes` in, the finding out."""

from __future__ import annotations

from collections.abc import Sequence

from loadtests.lab import plots, published
from loadtests.lab.page import Finding, Judgement, Table
from loadtests.lab.plots import Plot, Series
from loadtests.lab.rows import (
    Key,
    Ratio,
    Row,
    Rows,
    cell,
    devices,
    drift,
    drift_cell,
    groups,
    listed,
    middle,
    taken,
    values,
)

FITS = 0.98  # an R² below it is no line
MIB = 1 << 20
FORMULA = (
    "A line is fitted: ms of a step = empty step + bytes of keys and values ÷ effective GB/s. Bytes are counted once, "
    "as if attention read them once. Copy GB/s is that of MLX's own kernel for `x + 1` over 1 GiB, what is read plus "
    "what is written, and not the most that the memory can do. Passes = copy GB/s ÷ effective GB/s. A step that reads "
    "its cache once at that speed has 1 pass; more says that the cache is gone through more often or that a kernel is "
    "slower than the copy, and the line can't tell which."
)
Lines = dict[Key, list[list[Row]]]  # by device, shape, kind; each a measurement: its points, and then its line


def passes(rows: Rows) -> Finding:
    """The finding, from rows without errors."""
    lines = {key: _measurements(own) for key, own in groups(rows, "device", "shape", "kind").items()}
    finding = Finding(
        "5. Passes over the cache",
        "How many times does a decode step go through the memory of its cache?",
        published.PASSES.text,
        _verdict(lines),
        short=published.PASSES.short,
        means=_means(lines),
    )
    finding.answer = [FORMULA, _where(rows, lines), *_beside(lines)]
    finding.tables = [_table(lines)]
    for (device, shape), own in groups(rows, "device", "shape").items():
        series = [_series(kind, _measurements(found)[-1]) for (kind,), found in groups(own, "kind").items()]
        axes = ("keys and values, MiB (logarithmic)", "median step, ms (logarithmic)")
        plot = Plot(f"Decode step, {shape}, {device}", *axes, series, log="xy")
        caption = f"Points are measured. A line, bent by the axes, is drawn only where its R² is at least {FITS}."
        finding.plots.append((caption, plots.curves(plot)))
    finding.unproven = (
        "Caches were filled with random keys and values, whose content doesn't change what a step costs. One process "
        "a line; of several rounds each point is the lowest median. Nothing ran on Metal."
    )
    return finding


def _measurements(rows: Rows) -> list[list[Row]]:
    """Rows of one case cut after each line, as they were written."""
    found: list[list[Row]] = [[]]
    for row in rows:
        found[-1].append(row)
        if row["point"] == "line":
            found.append([])
    return [own for own in found if own]


def line_of(rows: Rows) -> Row | None:
    """The line of a measurement, if it is one: with an R² that says so, and a cost that rises."""
    found = next((row for row in rows if row["point"] == "line"), None)
    return found if found is not None and found["r2"] >= FITS and found["gb_s"] > 0 else None


# ---------------------------------------------------------------- the words
def _verdict(lines: Lines) -> Judgement:
    places = list(dict.fromkeys(key[:2] for key in lines))
    said = [_compared(place, lines) for place in places]
    both = [found for place in places if (found := _both(place, lines))]
    every = [own for found in lines.values() for own in found]
    fitting = sum(line_of(own) is not None for own in every)
    sure = f"{fitting} of {len(every)} measurements are a line (R² at least {FITS}); the others say nothing of passes"
    words = "Passes, concatenating and step-allocated: " + "; ".join([*said, *_besides(lines)]) + "."
    return Judgement(_word(both, len(places)), words, sure + ", and no pass count here is a measurement of traffic.")


def _means(lines: Lines) -> str:
    """What a long cache adds to a step, of each model on each device."""
    places = list(dict.fromkeys(key[:2] for key in lines))
    return " ".join(_meant(place, lines) for place in places if (*place, "step") in lines)


def _meant(place: Key, lines: Lines) -> str:
    """Of the step-allocated cache, with the concatenating one beside it."""
    device, shape = place
    rows = lines[*place, "step"][-1]
    points = [row for row in rows if row["point"] == "context"]
    first, last = points[0], points[-1]
    words = f"On {device} a step of {shape} takes {cell(first['ms'])} ms over {cell(first['context'])} tokens of "
    words += f"step-allocated cache and {cell(last['ms'])} ms over {cell(last['context'])}: {_passes(rows)}"
    if (*place, "concatenate") in lines:
        words += f", and {_passes(lines[*place, 'concatenate'][-1])} with a concatenating cache"
    return words + "."


def _word(both: Sequence[Ratio], places: int) -> str:
    """Whether concatenating goes through the cache more often, where both caches have a line."""
    if not any(found.above or found.below for found in both):
        return "Can't tell"
    word = "Reproduced that concatenating costs more"
    if not all(found.above for found in both):
        word = "Reproduced in part" if any(found.above for found in both) else "Not reproduced"
    return word + (f", in {len(both)} of {places} models" if len(both) < places else "")


def _both(place: Key, lines: Lines) -> Ratio | None:
    """Passes of the concatenating cache ÷ those of the step-allocated, where both have a line. Its range is what the
    machine's speed changed by meanwhile."""
    own = [lines.get((*place, kind), [[]])[-1] for kind in ("concatenate", "step")]
    first, second = map(line_of, own)
    if first is None or second is None:
        return None
    value = first["passes"] / second["passes"]
    wider = max(_unsteadiness(rows) for rows in own)
    return Ratio(value, value / wider, value * wider)


def _unsteadiness(rows: Rows) -> float:
    """By how much the machine's speed changed: by its drift, or by the first point measured once more."""
    again = values(rows, "again")
    return max(drift(rows), *again, *(1 / value for value in again))


def _compared(place: Key, lines: Lines) -> str:
    device, shape = place
    words = [
        f"{kind} {_passes(lines[*place, kind][-1])}" for kind in ("concatenate", "step") if (*place, kind) in lines
    ]
    found = _both(place, lines)
    ending = "" if found is None else f", one ÷ the other {found.words}"
    return f"{shape} on {device}: {listed(words) or 'neither cache was measured'}{ending}"


def _passes(rows: Rows) -> str:
    line = line_of(rows)
    return f"{cell(line['passes'])} passes" if line is not None else _no_line(rows)


def _no_line(rows: Rows) -> str:
    found = middle([row for row in rows if row["point"] == "line"], "r2")
    return f"no line: R² {found:.2f}" if found == found else "no line"


def _where(rows: Rows, lines: Lines) -> str:
    poor = [
        f"{kind}, {shape}, {device}" for (device, shape, kind), found in lines.items() if line_of(found[-1]) is None
    ]
    words = (
        f"Measured on {listed(devices(rows))}. On the CPU attention computes more slowly than memory could deliver, "
    )
    words += "so that passes there count arithmetic too and must not be read as memory traffic. An empty step comes "
    words += "from the line and not from a clock: where the steps bend, it lies above the fastest step measured or far "
    words += "below it; the table has both."
    if poor:
        words += (
            " Without a line: " + "; ".join(poor) + ". There a step's fixed cost, or the machine's noise, hides what "
        )
        words += "the cache adds."
    return words


def _beside(lines: Lines) -> list[str]:
    """What a longer row beside it does to Marathon's row, at the longest context."""
    words = []
    for (device, shape, kind), found in lines.items():
        alone = lines.get((device, shape, "marathon"))
        if kind != "marathon beside" or alone is None:
            continue
        ours, theirs = _longest(alone[-1]), _longest(found[-1])
        words.append(
            f"Marathon's row of {cell(ours['context'])} tokens beside one of twice its length ({shape}, {device}): "
            f"{theirs['ms'] / ours['ms']:.1f} times as long a step as alone, over "
            f"{theirs['kv_bytes'] / ours['kv_bytes']:.1f} times the bytes, since both rows are padded to the longer "
            f"one: {_passes(found[-1])}."
        )
    return words


def _besides(lines: Lines) -> list[str]:
    return [
        f"Marathon beside a longer row, {shape} on {device}: {_passes(found[-1])}"
        for (device, shape, kind), found in lines.items()
        if kind == "marathon beside"
    ]


def _longest(rows: Rows) -> Row:
    return max((row for row in rows if row["point"] == "context"), key=lambda row: row["context"])


# ---------------------------------------------------------------- table and plots
def _table(lines: Lines) -> Table:
    head = ["model", "device", "cache or loop", "R²", "empty step ms (from the line)", "fastest step measured ms"]
    head += ["effective GB/s (bytes once)", "copy GB/s (read plus write)", "passes", "first point, end ÷ start"]
    head += ["drift", "taken"]
    body = [
        [shape, device, kind, *_figures(own), drift_cell(own), taken(own)]
        for (device, shape, kind), found in lines.items()
        for own in found
    ]
    return Table("Latency against bytes of keys and values, 512 to 32,768 tokens", [head, *body])


def _figures(rows: Rows) -> list[str]:
    last = [row for row in rows if row["point"] == "line"]
    line = line_of(rows)
    fastest = cell(min(values([row for row in rows if row["point"] != "line"], "ms"), default=float("nan")))
    ends = [cell(middle(last, "copy_gb_s")), cell(middle(last, "again"))]
    if line is None:
        return [f"{middle(last, 'r2'):.4f}", _no_line(rows), fastest, "–", ends[0], "–", ends[1]]
    figures = [cell(line[name]) for name in ("intercept_ms", "gb_s", "passes")]
    return [f"{line['r2']:.4f}", figures[0], fastest, figures[1], ends[0], figures[2], ends[1]]


def _series(kind: str, rows: Rows) -> Series:
    points = [row for row in rows if row["point"] == "context"]
    xs = [row["kv_bytes"] / MIB for row in points]
    ys = [row["ms"] for row in points]
    line = line_of(rows)
    if line is None:
        return Series(kind + plots.NO_LINE, xs, ys, loose=True)
    return Series(kind, xs, ys, (line["intercept_ms"], 1e-6 / line["gb_s"] * MIB))


def step_ms(rows: Rows, context: int) -> list[float]:
    """The times of a context in one case's newest measurement: once, or at the start and at the end."""
    return [row["ms"] for row in _measurements(rows)[-1] if row["context"] == context]
