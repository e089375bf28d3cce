"""The five findings, put together from the programs' rows: what was asked, what was published, what MLX answers.

Owns the words and the choice of figures. Pure: rows in, findings out; plots come from `loadtests.lab.plots`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from loadtests.bench.ledger import number
from loadtests.lab import plots
from loadtests.lab.page import Finding, Table
from loadtests.lab.plots import Plot, Series

Row = dict[str, Any]
Rows = Sequence[Row]
Key = tuple[str, ...]


def every(sheets: Mapping[str, Rows]) -> list[Finding]:
    """All findings that there are rows of, in the order of the questions."""
    makers: dict[str, Callable[[Rows], Finding]] = {
        "residency": residency,
        "count": count,
        "cache_kinds": cache_kinds,
        "pinned": pinned,
        "attention_paths": attention_paths,
        "kv_passes": kv_passes,
        "endurance": endurance,
    }
    whole = {name: [row for row in sheets.get(name, []) if not row["error"]] for name in makers}
    return [make(whole[name]) for name, make in makers.items() if whole[name]]


# ---------------------------------------------------------------- rows
def groups(rows: Rows, *names: str) -> dict[Key, list[Row]]:
    """Rows by their values of these columns, in order of first appearance."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(word(row[name]) for name in names), []).append(row)
    return found


def word(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def middle(rows: Iterable[Row], name: str) -> float:
    """The median of a column; nan where it is empty."""
    values = [row[name] for row in rows if row[name] != ""]
    return median(values) if values else float("nan")


def cell(value: Any) -> str:
    if value == "" or value != value:
        return "–"
    return number(value) if isinstance(value, float) else str(value)


def where(key: Sequence[str]) -> str:
    return ", ".join(part for part in key if part)


# ---------------------------------------------------------------- 1. the leak
ARMS = {
    "mlx_lm alone": "mlx-lm, one row",
    "mlx_lm": "mlx-lm, others come and go",
    "off": "Marathon, guard off",
    "guard": "Marathon",
}


def residency(rows: Rows) -> Finding:
    families = groups([row for row in rows if row["family"]], "family", "arm")
    names = list(dict.fromkeys(family for family, _ in families))
    rate = {key: middle(own, "buffers_a_step") for key, own in families.items()}
    leaking = [name for name in names if rate.get((name, "mlx_lm alone"), 0) > 0.5]
    guarded = max((abs(value) for (_, arm), value in rate.items() if arm == "guard"), default=float("nan"))
    finding = Finding(
        "1. Buffers that a decode loop never gives back",
        "Does mlx-lm's loop keep a buffer a step for each array that no step evaluates, and where does that end?",
        "47 buffers a token exhaust Metal's 499,000 at token 10,570 (measured 10,560); 23 a token at 21,696 (21,641). "
        "A model with attention alone was flat. Evaluating the metadata each step kept it flat.",
    )
    finding.answer = [
        f"In mlx-lm {rows[0]['mlx_lm']} {len(leaking)} of {len(names)} families lose buffers with every token of a "
        f"lone row in BatchGenerator. Rows of the same models in Marathon lose at most {guarded:.4f} a token. The bare "
        "patterns show the cause: a chain of which nothing is evaluated keeps each link's buffer.",
        "For a low limit the line through the first steps foretold the end; the table has what then came.",
    ]
    finding.tables = [_patterns(rows), _families(names, families), _ceilings(leaking, families)]
    shown_arms = {arm for _, arm in rate} - {"off"}
    shown = [
        (label, [rate.get((name, arm), 0.0) for name in names]) for arm, label in ARMS.items() if arm in shown_arms
    ]
    title = "Live buffers lost a token"
    finding.plots = [
        (
            "Models are tiny: a real one has more layers, and loses more.",
            plots.bars(title, "buffers a token", names, shown),
        )
    ]
    finding.unproven = (
        "The count is that of a counter around MLX's allocator on Linux. Metal's own end was not reached here."
    )
    return finding


def _patterns(rows: Rows) -> Table:
    head = ["pattern, 20,000 steps", "buffers a step", "bytes a step", "published bytes"]
    published = {"x = x - 1, never evaluated": "4"}
    own = groups([row for row in rows if row["pattern"]], "pattern")
    body = [
        [name, f"{middle(r, 'buffers_a_step'):.4f}", f"{middle(r, 'bytes_a_step'):.2f}", published.get(name, "0")]
        for (name,), r in own.items()
    ]
    return Table("Bare patterns", [head, *body])


def _families(names: Sequence[str], families: dict[Key, list[Row]]) -> Table:
    head = ["family", *ARMS.values(), "what holds the chain in mlx-lm"]
    body = []
    for name in names:
        cells = []
        for arm in ARMS:
            value = middle(families.get((name, arm), []), "buffers_a_step")
            cells.append("–" if value != value else f"{value:.3f}")
        holders = next((row["holders"] for row in families.get((name, "mlx_lm alone"), []) if row["holders"]), "")
        body.append([name, *cells, holders])
    return Table("Buffers lost a token, by family", [head, *body])


def _ceilings(names: Sequence[str], families: dict[Key, list[Row]]) -> Table:
    head = ["family", "low limit", "foretold at", "reached at", "ratio", "foretold for 499,000"]
    body = []
    for name in names:
        own = families[name, "mlx_lm alone"]
        foretold, reached = middle(own, "ceiling_predicted"), middle(own, "ceiling_measured")
        figures = [cell(value) for value in (middle(own, "limit"), foretold, reached, reached / foretold)]
        body.append([name, *figures, cell(middle(own, "ceiling_metal"))])
    return Table("Where it ends in mlx-lm, one row, in tokens", [head, *body])


# ---------------------------------------------------------------- the long count
def count(rows: Rows) -> Finding:
    finding = Finding(
        "2. Twenty thousand tokens in one answer",
        "Does a single answer go on to 20,000 tokens, and does it stay as quick and as small as it began?",
        "14,000 tokens in one request once the metadata was evaluated; before, none of the affected models came beyond "
        "its ceiling. No speed by thousand tokens was published for MLX.",
    )
    curves = groups([row for row in rows if row["thousand"] != ""], "device", "shape", "way", "rows", "real")
    references = groups([row for row in rows if row["way"] == "reference"], "device", "shape")
    body = []
    for key, own in curves.items():
        device, shape, way, batch, real = key
        reference = references.get((device, shape), []) if batch == "1" else []
        body.append([shape, device, _way(way, real), batch, *_ends_of(own, reference)])
    head = ["model", "device", "way", "rows", "tok/s, 2nd thousand", "tok/s, last", "corrected ratio"]
    head += ["thousands", "p99 ms, last", "live buffers, 2nd", "live buffers, last"]
    finding.tables = [Table("Ends of each curve", [head, *body])]
    for (device,) in groups(rows, "device"):
        finding.plots += _curve(device, {key: value for key, value in curves.items() if key[0] == device})
    finding.answer = [
        f"Curves that came to their end: {len(curves)}. From the second thousand to the last the count of "
        f"live buffers grew by {cell(_growth(curves.values()))} at most in those that were counted.",
        "The corrected ratio is the last thousand's speed over the second's, times how much slower mlx-lm's bare step "
        "is over a fresh cache of that length than over one of 1,500 positions: 1 says that age costs nothing. A "
        "sampled curve takes some steps of some thousands, on caches filled up to there, and says nothing about age.",
    ]
    finding.unproven = "One machine of each kind, weights random but for the starter model, nothing on Metal."
    return finding


def _growth(curves: Iterable[Rows]) -> float:
    """The largest growth of the live buffers from the second reading to the last; nan without readings."""
    readings = [[row["live_buffers"] for row in own if row["live_buffers"] != ""] for own in curves]
    grown = [found[-1] - found[1] for found in readings if len(found) > 2]
    return max(grown, default=float("nan"))


def _way(way: str, real: str) -> str:
    if way == "http":
        return "through HTTP"
    return "in the loop" if real == "1000" else "in the loop, sampled"


def _ends_of(own: Rows, reference: Rows) -> list[str]:
    second = min(own, key=lambda row: abs(row["thousand"] - 2))
    last = max(own, key=lambda row: row["thousand"])
    slower = middle(reference, "bare_last_ms") / middle(reference, "bare_second_ms")
    corrected = last["tok_s"] / second["tok_s"] * slower
    figures = [
        second["tok_s"],
        last["tok_s"],
        corrected,
        last["thousand"],
        last["p99_ms"],
        second["live_buffers"],
        last["live_buffers"],
    ]
    return [cell(value) for value in figures]


def _curve(device: str, curves: Mapping[Key, Rows]) -> list[tuple[str, str]]:
    series = []
    for (_, shape, _, batch, real), own in curves.items():
        name = f"{shape}, {batch} row" + ("" if batch == "1" else "s")
        name += {"1000": "", "": ", HTTP"}.get(real, ", sampled")
        series.append(Series(name, [row["thousand"] for row in own], [row["p50_ms"] for row in own]))
    plot = Plot(
        f"Time between tokens, {device}", "tokens of the answer, in thousands", "p50 of the thousand, ms", series
    )
    return [("Median time from one token of a row to its next.", plots.curves(plot))] if series else []


# ---------------------------------------------------------------- 3. cache kinds
PUBLISHED_KINDS = {  # concatenate strided, contiguous, preallocated
    "513": {"concatenate": (1376, 86), "contiguous": (1338, 131), "step": (1166, 137)},
    "2049": {"concatenate": (4628, 41), "contiguous": (4488, 104), "step": (1683, 109)},
    "4097": {"concatenate": (14872, 23), "contiguous": (14367, 75), "step": (3273, 83)},
}


def cache_kinds(rows: Rows) -> Finding:
    finding = Finding(
        "3. How the KV cache is kept",
        "What do a concatenating, a contiguous, a step-allocated, a rotating, a quantised and a batched cache cost?",
        "With Qwen2.5-0.5B on another engine a strided concatenating cache copied itself at each step: 59 % slower "
        "than a contiguous one at 2,049 tokens, and a peak of 4,628 MiB against 1,683 of a preallocated one.",
    )
    cases = groups(rows, "device", "shape", "prompt", "kind")
    head = ["model", "device", "prompt", "cache", "peak MiB", "÷ step's", "prefill tok/s", "first token ms"]
    head += ["decode tok/s", "÷ step's", "published: peak and decode ÷ preallocated"]
    body = []
    for (device, shape, prompt, kind), own in cases.items():
        base = cases.get((device, shape, prompt, "step"), [])
        peak, speed = middle(own, "peak_mib"), middle(own, "decode_tok_s")
        ratios = [peak / middle(base, "peak_mib"), speed / middle(base, "decode_tok_s")]
        cells = [peak, ratios[0], middle(own, "prefill_tok_s"), middle(own, "first_ms"), speed, ratios[1]]
        body.append([shape, device, prompt, kind, *map(cell, cells), _published(prompt, kind)])
    finding.tables = [Table("Medians of the recorded runs", [head, *body])]
    for (device, shape), own in groups(rows, "device", "shape").items():
        series = [
            Series(kind, *_medians(kinds, "prompt", "peak_mib")) for (kind,), kinds in groups(own, "kind").items()
        ]
        plot = Plot(f"Peak memory, {shape}, {device}", "prompt, tokens", "peak of MLX's memory, MiB", series)
        finding.plots.append(("Peak of a generation of 128 tokens, weights included.", plots.curves(plot)))
    finding.answer = [
        "MLX's concatenation always gives a contiguous array, so that a contiguous copy after it copies nothing: "
        "decode with it was measured, the machine's noise included, "
        f"{_spread(cases, 'contiguous', 'concatenate')} times as fast as without. What is left is the copy of the "
        "whole cache at each step. The step-allocated cache has none and decodes "
        f"{_spread(cases, 'step', 'concatenate')} times as fast as the concatenating one.",
    ]
    finding.unproven = "The published model and machine were not used here; only ratios compare."
    return finding


def _spread(cases: Mapping[Key, Rows], kind: str, base: str) -> str:
    """The least and the most of a kind's decode speed over another's, in words."""
    ratios = [
        middle(own, "decode_tok_s") / middle(cases[*key[:3], base], "decode_tok_s")
        for key, own in cases.items()
        if key[3] == kind and (*key[:3], base) in cases
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "–"


def _published(prompt: str, kind: str) -> str:
    known = PUBLISHED_KINDS.get(prompt, {})
    if kind not in known:
        return "–"
    ours, base = known[kind], known["step"]
    return f"{ours[0] / base[0]:.2f}, {ours[1] / base[1]:.2f}"


def _medians(rows: Rows, x: str, y: str) -> tuple[list[float], list[float]]:
    points = {float(key[0]): middle(own, y) for key, own in groups(rows, x).items()}
    return list(points), list(points.values())


# ---------------------------------------------------------------- 4. pinned
def pinned(rows: Rows) -> Finding:
    ours = [row for row in rows if not row["moment"].startswith("mlx-lm")]
    theirs = [row for row in rows if row["moment"].startswith("mlx-lm")]
    worst = max(ours, key=lambda row: row["ratio"])
    finding = Finding(
        "4. Buffers held by small tensors",
        "Do long-lived cache arrays hold buffers that are much larger than they are?",
        "A pool that handed out buffers of any size let a tensor of 1 MiB hold 512 MiB in each layer: a peak of 14.5 "
        "GiB where 3.4 were needed. Four times the request as an upper bound mended it.",
    )
    finding.answer = [
        f"MLX's pool is bounded, but views are not: the caches that mlx-lm's BatchGenerator hands over at a row's end "
        f"hold up to {max((row['ratio'] for row in theirs), default=float('nan')):.1f} times their bytes, evaluated. "
        f"In Marathon the most is {worst['ratio']:.2f} ({worst['shape']}, {worst['moment']}); the bound is 1.1.",
    ]
    moments = list(groups(rows, "moment"))
    cells = groups(rows, "shape", "moment")
    body = [
        [shape, *(cell(middle(cells.get((shape, name), []), "ratio")) for (name,) in moments)]
        for (shape,) in groups(rows, "shape")
    ]
    finding.tables = [Table("Bytes pinned ÷ bytes owned", [["model", *(name for (name,) in moments)], *body])]
    finding.unproven = (
        "The pool of Metal rounds to larger pages than that of Linux; its ratios for tiny arrays may be higher."
    )
    return finding


# ---------------------------------------------------------------- 5. attention
PUBLISHED_PATHS = {"513": (0.99, 1.42, 1.14), "2049": (0.77, 2.86, 1.40), "4097": (0.43, 4.56, 1.77)}


def attention_paths(rows: Rows) -> Finding:
    finding = Finding(
        "5. Fused attention",
        "What does mx.fast.scaled_dot_product_attention gain over the same attention in steps, and does the text stay?",
        "Fused ÷ in steps on another engine, prompts of 513, 2,049 and 4,097 tokens: peak 0.99, 0.77, 0.43; prefill "
        "1.42, 2.86, 4.56 times as fast; decode 1.14, 1.40, 1.77. The top token may differ only at near ties.",
    )
    timed = groups([row for row in rows if row["path"]], "device", "shape", "prompt", "path")
    body = [
        [shape, device, prompt, *_fused_ratios(own, timed[device, shape, prompt, "fused"]), _published_path(prompt)]
        for (device, shape, prompt, path), own in timed.items()
        if path == "steps" and (device, shape, prompt, "fused") in timed
    ]
    head = ["model", "device", "prompt", "peak", "prefill tok/s", "first token", "decode tok/s"]
    head.append("published: peak, prefill, decode")
    compared = groups([row for row in rows if row["positions"] != ""], "device", "shape", "prompt")
    ties = [
        [shape, device, prompt, *(cell(own[0][name]) for name in APART)]
        for (device, shape, prompt), own in compared.items()
    ]
    tie_head = ["model", "device", "prompt", "positions", "top token differs", "no near tie", "largest difference"]
    finding.tables = [Table("Fused ÷ in steps", [head, *body]), Table("Where the top token differs", [tie_head, *ties])]
    broken = sum(own[0]["against_the_rule"] for own in compared.values())
    positions = sum(own[0]["positions"] for own in compared.values())
    differs = sum(own[0]["top_differs"] for own in compared.values())
    finding.answer = [
        f"Of {positions:.0f} positions the top token differs at {differs:.0f}, and at {broken:.0f} of these without a "
        "near tie. On a GPU a fused kernel can do without the matrix of scores; MLX's CPU backend has no such kernel "
        "and computes attention in steps itself, so that there the ratios say how close both forms are.",
    ]
    finding.unproven = "Metal's kernel was not run."
    return finding


APART = ("positions", "top_differs", "against_the_rule", "largest_difference")


def _fused_ratios(steps: Rows, fused: Rows) -> list[str]:
    names = ("peak_mib", "prefill_tok_s", "first_ms", "decode_tok_s")
    return [cell(middle(fused, name) / middle(steps, name)) for name in names]


def _published_path(prompt: str) -> str:
    return ", ".join(f"{value:.2f}" for value in PUBLISHED_PATHS.get(prompt, ())) or "–"


# ---------------------------------------------------------------- 6. passes
def kv_passes(rows: Rows) -> Finding:
    finding = Finding(
        "6. Passes over the cache",
        "How many times does a decode step go through the memory of its cache?",
        "SmolLM2-135M on another engine: concatenating 2.7 passes at 77 GB/s (R² 0.997), static 6.4 at 33 GB/s (R² "
        "0.998), both about 1.3 once the extra copies were gone; copies ran at 212 GB/s.",
    )
    lines = groups([row for row in rows if row["point"] == "line"], "device", "shape", "kind")
    body = []
    for (device, shape, kind), own in lines.items():
        names = ("intercept_ms", "gb_s", "copy_gb_s", "passes")
        figures = [cell(middle(own, name)) for name in names]
        body.append([shape, device, kind, *figures, f"{middle(own, 'r2'):.4f}", cell(middle(own, "again"))])
    head = ["model", "device", "cache", "empty step ms", "effective GB/s", "copy GB/s", "passes", "R²"]
    head.append("first point, end ÷ beginning")
    finding.tables = [Table("Lines of latency against bytes of cache", [head, *body])]
    for (device, shape), own in groups(rows, "device", "shape").items():
        series = [_line_of(kind, kinds) for (kind,), kinds in groups(own, "kind").items()]
        plot = Plot(f"Decode step, {shape}, {device}", "bytes of cache, MiB", "median step, ms", series)
        finding.plots.append(("Points are measured, lines are fitted.", plots.curves(plot)))
    poor = [key for key, own in lines.items() if middle(own, "r2") < 0.98]
    finding.answer = [
        f"The table has the passes. A step-allocated cache is written in place and read by attention alone; one that "
        f"concatenates is read and written once more. {len(lines) - len(poor)} of {len(lines)} lines have an R² of at "
        "least 0.98. On the CPU attention computes more slowly than memory could deliver, so that passes there count "
        "arithmetic too and must not be read as memory traffic.",
    ]
    finding.unproven = "Caches were filled with random keys and values, whose content doesn't change what a step costs."
    return finding


def _line_of(kind: str, rows: Rows) -> Series:
    points = [row for row in rows if row["point"] == "context"]
    line = next((row for row in rows if row["point"] == "line"), None)
    xs = [row["kv_bytes"] / (1 << 20) for row in points]
    ys = [row["ms"] for row in points]
    if line is None:
        return Series(kind, xs, ys)
    return Series(kind, xs, ys, (line["intercept_ms"], 1e-6 / line["gb_s"] * (1 << 20)))


# ---------------------------------------------------------------- endurance
def endurance(rows: Rows) -> Finding:
    finding = Finding(
        "7. Mixed traffic for as long as it was given",
        "Do buffers, bytes, speed and latency stay where they are under requests of every kind?",
        "Nothing was published of any MLX server.",
    )
    newest = rows[-1]
    finding.answer = [
        f"{newest['requests']:.0f} requests in {newest['minutes']:.1f} minutes, each with one truthful ending but for "
        f"{newest['untruthful']:.0f}. The slopes after warm-up stand in the table.",
    ]
    names = ("live_slope", "bytes_slope", "tok_s_slope", "p99_slope")
    head = [
        "model",
        "device",
        "minutes",
        "requests",
        "buffers an hour",
        "MiB an hour",
        "tok/s an hour",
        "p99 ms an hour",
    ]
    body = [
        [row["shape"], row["device"], cell(row["minutes"]), cell(row["requests"]), *(cell(row[name]) for name in names)]
        for row in rows
    ]
    finding.tables = [Table("Slopes", [head, *body])]
    finding.unproven = "Hours, not weeks."
    return finding
