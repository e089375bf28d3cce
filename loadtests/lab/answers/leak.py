"""Finding 1: buffers that a decode loop never gives back. Pure: rows of `loadtests.residency` in, the finding out."""

from __future__ import annotations

from collections.abc import Sequence

from loadtests.lab import plots, published
from loadtests.lab.page import Finding, Judgement, Table
from loadtests.lab.rows import Key, Row, Rows, cell, devices, groups, listed, middle, origin, values

ARMS = {
    "mlx_lm alone": "mlx-lm, one row",
    "mlx_lm": "mlx-lm, others come and go",
    "off": "Marathon, guard off",
    "guard": "Marathon, guard on",
}
LEAST = 5e-5  # buffers a token that four decimals would show as nothing
LEAKS = 0.5  # buffers a token from which a family counts as leaking
NEAR = 0.05
CHAIN = "x = x - 1, never evaluated"
METAL = 499_000
Families = dict[Key, list[Row]]

MECHANISM = [
    "How one buffer a step comes about: an array that isn't evaluated is a graph that remembers its operands. In `x = "
    "x - 1` Python makes a new constant 1 in each step; the graph of `x` holds every one of them, and each is a "
    "buffer of 4 bytes. In `x = x - one` the operand is the same array in all steps: the graph grows too (by host "
    "memory, about 1 KB a step), but it holds no new buffer, and so the table says 0. The leaves of the graph count "
    "so as well: 101 buffers after 100 steps of the first pattern, 2 of the second.",
    "Why 1, 2 or 3 a token: each array that a step rewrites and no logit reads is one chain, and each chain keeps one "
    "buffer a token. The number of chains is a property of the model. `BatchKVCache.offset` is read only by a rotary "
    "embedding: one chain for each attention layer without one. `ArraysCache.left_padding` is moved on by `advance` "
    "in each recurrent layer and read only by the mask, which is made from the first recurrent layer: one chain for "
    "each recurrent layer but the first.",
    "So attention alone doesn't decide it. In llama each layer's rotary embedding reads the offset, and nothing is "
    "left pending. In smollm3 every fourth layer has no rotary embedding, in cohere2 the layers with full attention "
    "have none (here 2 of 8 and 2 of 4), and in minimax_m3_vl nothing reads the offset of the cache that chooses "
    "blocks. rwkv7 and recurrent_gemma never call `advance`: with one row they lose nothing, and grow only as rows "
    "join and leave.",
]
MEND = (
    "For a user of mlx-lm: `generate_step`, the loop for a single sequence, keeps no such chain; BatchGenerator, and "
    "so `mlx_lm.server`, does. The mend is to evaluate the caches' state along with each step: "
    "`mx.async_eval([cache.state for cache in self.prompt_cache])` at the end of `GenerationBatch._step`. "
    "[docs/upstream/issue.md](../../upstream/issue.md) has the text for mlx-lm, and "
    "[docs/upstream/live_buffers.py](../../upstream/live_buffers.py) shows leak and mend in one file without Marathon "
    "(`--mend`; `--time` measures what it costs)."
)


def leak(rows: Rows) -> Finding:
    """The finding, from rows without errors."""
    families = groups([row for row in rows if row["family"]], "family", "arm")
    names = list(dict.fromkeys(family for family, _ in families))
    lost = {name: middle(families.get((name, "mlx_lm alone"), []), "buffers_a_step") for name in names}
    leaking = [name for name in names if lost[name] > LEAKS]
    finding = Finding(
        "1. Buffers that a decode loop never gives back",
        "Does mlx-lm's loop keep a buffer a token for each array that no step evaluates, and where does that end?",
        published.LEAK.text,
        _verdict(rows, families, lost, leaking),
        short=published.LEAK.short,
        means=_means(families, lost, leaking),
    )
    finding.answer = [_where(rows, families), *MECHANISM, MEND]
    tables = [_patterns(rows), _families(names, families), _ceilings(leaking, families)]
    finding.tables = [table for table in tables if len(table.rows) > 1]
    if names:
        finding.plots = [_plot(names, families)]
    finding.unproven = (
        "Metal's own end: buffers were counted by a counter around MLX's allocator on Linux, and no run reached "
        f"{METAL:,}. The 22 % in time that the source gained by evaluating: not measured here. The models are tiny "
        "(the table at the end); a real one has more layers and so more chains."
    )
    return finding


# ---------------------------------------------------------------- the words
def _verdict(rows: Rows, families: Families, lost: dict[str, float], leaking: Sequence[str]) -> Judgement:
    chain = middle([row for row in rows if row["pattern"] == CHAIN], "buffers_a_step")
    bare = abs(chain - 1) < NEAR
    said = [] if chain != chain else [f"the bare chain loses {chain:.2f} buffers a step"]
    if lost:
        said.append(f"{len(leaking)} of {len(lost)} families lose {_range(lost, leaking)} a token in mlx-lm")
    said += _guarded(families)
    word = "Reproduced" if leaking and bare else "Not reproduced"
    if chain != chain or not lost:
        word = "Reproduced in part" if leaking or bare else "Can't tell"
    return Judgement(word, _sentence(listed(said)), _sure(families, leaking))


def _means(families: Families, lost: dict[str, float], leaking: Sequence[str]) -> str:
    if not lost:
        return ""
    if not leaking:
        return f"mlx-lm's loop keeps no buffer in any of {len(lost)} families."
    ends = {name: middle(families[name, "mlx_lm alone"], "ceiling_metal") for name in leaking}
    first = min(ends, key=lambda name: ends[name])
    words = f"mlx-lm's batched loop, which `mlx_lm.server` runs, keeps {_range(lost, leaking)} a token in "
    words += f"{len(leaking)} of {len(lost)} families as long as its batch lives. A tiny {first} at "
    words += f"{cell(lost[first])} a token would use up Metal's {METAL:,} at token {cell(ends[first])}; a real model "
    words += "has more layers and so ends sooner, as the published ones did. Evaluating the caches' state in each "
    return words + f"step mends it: {listed(_guarded(families)) or 'Marathon was not measured'}."


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _range(lost: dict[str, float], leaking: Sequence[str]) -> str:
    rates = sorted({cell(lost[name]) for name in leaking})
    return "nothing" if not rates else f"{listed(rates, 'or')} buffers"


def _guarded(families: Families) -> list[str]:
    """What Marathon's rows lose, in words, where they were measured."""
    found = [row for (_, arm), own in families.items() if arm == "guard" for row in own]
    rates = [abs(rate) for rate in values(found, "buffers_a_step")]
    if not rates:
        return []
    families_seen = len({row["family"] for row in found})
    if max(rates) < LEAST:
        return [f"with Marathon's guard none of {families_seen} families loses any"]
    return [f"with Marathon's guard {families_seen} families lose at most {max(rates):.4f}"]


def _sure(families: Families, leaking: Sequence[str]) -> str:
    alone = [own for (_, arm), own in families.items() if arm == "mlx_lm alone"]
    known = [(middle(own, "buffers_a_step"), middle(own, "expected")) for own in alone if values(own, "expected")]
    near = [rate for rate, expected in known if abs(rate - expected) <= (NEAR * expected or NEAR)]
    words = "Sure of the rates, which are counts and no times"
    if known:
        words += f": {len(near)} of {len(known)} families are within 5 % of the number of chains that the model's "
        words += "code has"
    reached = [name for name in leaking if middle(families[name, "mlx_lm alone"], "ceiling_measured") > 0]
    words += f"; a low limit was reached in {len(reached)} of {len(leaking)} leaking families"
    return words + f"; not sure of Metal's own end at {METAL:,}, which no run reached."


def _where(rows: Rows, families: Families) -> str:
    steps = sorted({cell(row["steps"]) for row in rows if row["family"]})
    missing = [words for arm, words in ARMS.items() if arm not in {arm for _, arm in families}]
    words = f"Counted on {listed(devices(rows))} with mlx-lm {rows[0]['mlx_lm']}"
    words += f", {listed(steps)} tokens a family." if steps else "."
    widest = max(values(rows, "half_width"), default=0.0)
    words += " A rate is the slope of a line through counts; "
    words += f"its 95 % interval is ±{cell(widest)} or less." if widest else "no count lies off its line."
    if "mlx_lm" in {arm for _, arm in families}:
        words += " Where others come and go, each chain gains 5 buffers more each time two rows have come and gone; "
        words += "a chain that only joins and leaves prolong (rwkv7, recurrent_gemma) gains 4 then, and none between."
    words += _unguarded(families)
    return words + (f" Not measured: {listed(missing)}." if missing else "")


def _unguarded(families: Families) -> str:
    """What the guard is for: what Marathon's own loop loses without it."""
    rates = {name: middle(own, "buffers_a_step") for (name, arm), own in families.items() if arm == "off"}
    losing = [f"{name} {rate:.3g}" for name, rate in rates.items() if rate > LEAKS]
    if not rates:
        return ""
    words = f" Without its guard Marathon's loop loses in {len(losing)} of {len(rates)} families"
    return f"{words}: {listed(losing)}." if losing else f"{words}."


# ---------------------------------------------------------------- the tables
def _patterns(rows: Rows) -> Table:
    head = ["pattern, never reset", "steps", "buffers a step", "bytes a step", "published bytes a step", "taken"]
    own = groups([row for row in rows if row["pattern"]], "pattern")
    body = [[name, *_pattern(found), "4" if name == CHAIN else "0", origin(found)] for (name,), found in own.items()]
    return Table("Bare patterns: `one` is an array made once, `1` a constant made in each step", [head, *body])


def _pattern(rows: Rows) -> list[str]:
    figures = [f"{middle(rows, 'buffers_a_step'):.4f}", f"{middle(rows, 'bytes_a_step'):.2f}"]
    return [cell(middle(rows, "steps")), *figures]


def _families(names: Sequence[str], families: Families) -> Table:
    arms = [arm for arm in ARMS if arm in {arm for _, arm in families}]
    head = ["family", "chains known", *(ARMS[arm] for arm in arms), "what holds the chain in mlx-lm", "taken"]
    body = []
    for name in names:
        alone = families.get((name, "mlx_lm alone"), [])
        rates = [_rate(families.get((name, arm), [])) for arm in arms]
        holders = next((row["holders"] for row in alone if row["holders"]), "–")
        own = [row for (family, _), found in families.items() if family == name for row in found]
        body.append([name, cell(middle(alone, "expected")), *rates, holders, origin(own)])
    return Table("Buffers lost a token, by family", [head, *body])


def _rate(rows: Rows) -> str:
    rate = middle(rows, "buffers_a_step")
    return "–" if rate != rate else f"{rate:.3f}"


def _ceilings(names: Sequence[str], families: Families) -> Table:
    head = ["family", "low limit, buffers", "line over tokens", "calculated end", "reached", "a forecast?"]
    head += ["calculated for 499,000", "taken"]
    body = [_ceiling(name, families[name, "mlx_lm alone"]) for name in names]
    caption = "Where it ends in mlx-lm with one row, in tokens: end = (limit − buffers at the start) ÷ rate"
    return Table(caption, [head, *body])


def _ceiling(name: str, rows: Rows) -> list[str]:
    limit, steps, predicted, reached, metal = (
        middle(rows, column) for column in ("limit", "steps", "ceiling_predicted", "ceiling_measured", "ceiling_metal")
    )
    ahead = "yes" if predicted > steps else "no, it lies on the line's own tokens"
    return [name, *map(cell, (limit, steps, predicted, reached)), ahead, cell(metal), origin(rows)]


def _plot(names: Sequence[str], families: Families) -> tuple[str, str]:
    arms = [arm for arm in ARMS if arm in {arm for _, arm in families}]
    shown = [(ARMS[arm], [middle(families.get((name, arm), []), "buffers_a_step") for name in names]) for arm in arms]
    drawn = plots.bars(plots.Bars("Live buffers lost a token", "buffers a token", names, shown))
    return "Tiny models of each family: a real one has more layers, and loses more. 0: flat.", drawn
