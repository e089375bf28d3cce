"""One decode step as each section has it, side by side, and why they differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadtests.lab.answers import passes
from loadtests.lab.page import Chapter, Table
from loadtests.lab.rows import Row, Rows, cell, groups, middle, taken, values

POSITIONS = {"513": (512, 1), "2049": (2048, 2), "4097": (4096, 4)}  # prompt: context of 5, thousand of A
Step = tuple[list[float], Rows]  # milliseconds, and the rows that they are from

USED = ("cache_kinds", "attention_paths", "kv_passes", "count")
WHY = [
    "The same step isn't timed in the same way. Sections 2 and 4 draw with a repetition penalty and submit a step "
    "before they read the one before it, as mlx-lm's loop does; section 5 draws greedily, and waits for each step by "
    "itself, so that Python's time isn't hidden; section A is Marathon's whole loop, through HTTP where its table "
    "says so. The “empty step” of section 5 is a line's end and was never timed. Compare within a section.",
    "The rest is the machine. Rows of other commits and times were taken in another state of it, on the two CPU cores "
    "often beside other work; where the last column is far from 1, that is what the figures can be trusted to. "
    "Section 5's shortest context is given at the start and at the end of its process.",
]


def together(sheets: Mapping[str, Rows]) -> list[Chapter]:
    """The chapter, where at least two sections measured a step of the same model."""
    places = groups([row for name in ("cache_kinds", "kv_passes") for row in sheets[name]], "device", "shape")
    body = [
        line
        for device, shape in places
        for prompt in POSITIONS
        for line in _line(device, shape, prompt, _steps(sheets, device, shape, prompt))
    ]
    if not body:
        return []
    head = ["model", "device", "near position", "2: step-allocated", "4: fused", "5: step-allocated", "5: Marathon"]
    head += ["A: one row", "slowest ÷ fastest"]
    table = Table("Milliseconds of a decode step with one row (commit, day)", [head, *body])
    return [Chapter("Do the sections agree?", WHY, (), [table])]


def _line(device: str, shape: str, prompt: str, steps: Sequence[Step]) -> list[list[str]]:
    """One row of the table, if two sections have a figure for it."""
    every = [time for times, _ in steps for time in times]
    if sum(bool(times) for times, _ in steps) < 2:
        return []
    return [[shape, device, prompt, *map(_words, steps), f"{max(every) / min(every):.2f}"]]


def _steps(sheets: Mapping[str, Rows], device: str, shape: str, prompt: str) -> list[Step]:
    """What each column has, near one position."""
    own = {name: _of(sheets.get(name, []), device, shape) for name in USED}
    context, thousand = POSITIONS[prompt]
    found = [
        _from_speed(groups(own["cache_kinds"], "kind", "prompt").get(("step", prompt), [])),
        _from_speed(groups(own["attention_paths"], "path", "prompt").get(("fused", prompt), [])),
    ]
    for kind in ("step", "marathon"):
        rows = groups(own["kv_passes"], "kind").get((kind,), [])
        found.append((passes.step_ms(rows, context) if rows else [], rows))
    rows = [row for row in own["count"] if row["thousand"] == thousand and row["rows"] == 1]
    return [*found, ([middle(rows, "p50_ms")] if rows else [], rows)]


def _of(rows: Rows, device: str, shape: str) -> list[Row]:
    return [row for row in rows if row["device"] == device and row["shape"] == shape]


def _from_speed(rows: Rows) -> Step:
    return [1e3 / middle(rows, "decode_tok_s")] if values(rows, "decode_tok_s") else [], rows


def _words(step: Step) -> str:
    times, rows = step
    return f"{', '.join(map(cell, times))} ({taken(rows)})" if times else "–"
