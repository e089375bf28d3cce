"""Finding 2: how the KV cache is kept. Pure: rows of `loadtests.cache_kinds` in, the finding out."""

from __future__ import annotations

from collections.abc import Mapping

from loadtests.lab import plots, published
from loadtests.lab.page import Finding, Judgement, Table
from loadtests.lab.rows import (
    NOISE_RULE,
    UNSTEADY,
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
    ratio,
    spread,
    taken,
)

Cases = Mapping[Key, list[Row]]  # by device, shape, prompt, kind
HIGHER = 1.1  # a peak counts as higher from here on
BASE = "step"


def kinds(rows: Rows) -> Finding:
    """The finding, from rows without errors."""
    cases = groups([row | {"above": _above(row)} for row in rows], "device", "shape", "prompt", "kind")
    finding = Finding(
        "2. How the KV cache is kept",
        "What do a concatenating, a contiguous, a step-allocated, a rotating, a quantised and a batched cache cost in "
        "memory and speed?",
        published.KINDS.text,
        _verdict(cases),
        short=published.KINDS.short,
        means=_means(cases),
    )
    finding.answer = [*_speeds(cases), *_costly(cases), NOISE_RULE]
    finding.tables = [_memory(cases), _times(cases)]
    finding.plots = [_plot(device, shape, own) for (device, shape), own in groups(rows, "device", "shape").items()]
    finding.unproven = (
        "The published model and machine were not used, and nothing ran on Metal; only ratios compare. A strided "
        "cache as the source had it doesn't exist in MLX, so that its cost can't be measured."
    )
    return finding


def _above(row: Row) -> float | str:
    return "" if "" in (row["peak_mib"], row["weights_mib"]) else row["peak_mib"] - row["weights_mib"]


def _against(cases: Cases, kind: str, base: str, name: str) -> dict[Key, Ratio]:
    """The column of one kind over that of another, by device, shape and prompt, where both were measured."""
    timed = name not in ("peak_mib", "above")
    return {
        key[:3]: ratio(own, cases[*key[:3], base], name, timed=timed)
        for key, own in cases.items()
        if key[3] == kind and (*key[:3], base) in cases
    }


# ---------------------------------------------------------------- the words
def _verdict(cases: Cases) -> Judgement:
    copies = _against(cases, "contiguous", "concatenate", "decode_tok_s")
    peaks = _against(cases, "concatenate", BASE, "peak_mib")
    faster, slower = (sum(getattr(found, way) for found in copies.values()) for way in ("above", "below"))
    said = f"A contiguous copy makes decode over a concatenating cache faster beyond noise in {faster} and slower in "
    said += f"{slower} of {len(copies)} cases, and a concatenating cache has a peak more than a tenth above a "
    said += f"step-allocated one's in {len(_raised(peaks))} of {len(peaks)}."
    costly = [_with_prefill(cases, *found) for found in _higher(cases)]
    if costly:
        said += f" Peaks that do rise, ÷ the step-allocated one's: {'; '.join(costly)}."
    return Judgement(_word(copies, peaks), said, _sure(cases, copies))


def _means(cases: Cases) -> str:
    """Of a concatenating cache beside the step-allocated one, and of those that cost more than either."""
    peaks = _against(cases, "concatenate", BASE, "peak_mib")
    speeds = _against(cases, "concatenate", BASE, "decode_tok_s")
    if not peaks:
        return ""
    words = "mlx-lm's usual cache is the step-allocated one. A concatenating cache has "
    words += f"{_between(peaks)} times its peak (published: 1.18 to 4.54) and {_between(speeds)} times its decode "
    words += f"speed (published: 0.63 to 0.28), beyond noise slower in {sum(found.below for found in speeds.values())} "
    words += f"of {len(speeds)} cases."
    costly = [_with_prefill(cases, *found) for found in _higher(cases)]
    if not costly:
        return words + " No kind of cache had a peak more than a tenth above it."
    words += " What costs memory is probably a cache that hands attention its mask as an array. Peak and prefill "
    return words + f"speed ÷ the step-allocated one's: {'; '.join(costly)}."


def _between(found: Mapping[Key, Ratio]) -> str:
    """The least and the most of some ratios."""
    ends = [f"{end(each.value for each in found.values()):.2f}" for end in (min, max)]
    return " to ".join(dict.fromkeys(ends))


def _word(copies: dict[Key, Ratio], peaks: dict[Key, Ratio]) -> str:
    """The source saw its effects at every prompt: one that most cases lack is not it."""
    if not any(found.known for found in (*copies.values(), *peaks.values())):
        return "Can't tell"
    strided = sum(found.above for found in copies.values()) > len(copies) / 2
    higher = len(_raised(peaks)) > len(peaks) / 2
    return {(True, True): "Reproduced", (False, False): "Not reproduced"}.get((strided, higher), "Reproduced in part")


def _raised(found: dict[Key, Ratio]) -> list[Key]:
    return [key for key, each in found.items() if each.above and each.value > HIGHER]


def _sure(cases: Cases, copies: dict[Key, Ratio]) -> str:
    unsteady = sum(drift(own) > UNSTEADY for own in cases.values())
    within = sum(found.known and not (found.above or found.below) for found in copies.values())
    words = "Sure of the peaks, which repeat within a few percent; less sure of the speeds: "
    words += f"{within} of these {len(copies)} comparisons are within noise, and the machine's own speed changed by "
    return words + f"more than a quarter during {unsteady} of {len(cases)} processes."


def _with_prefill(cases: Cases, key: Key, kind: str, found: Ratio) -> str:
    prefill = _against(cases, kind, BASE, "prefill_tok_s")[key].words
    return f"{kind} {found.value:.2f} with prefill {prefill} ({_place(key)})"


def _place(key: Key) -> str:
    device, shape, prompt = key
    return f"{shape}, {prompt} tokens, {device}"


def _higher(cases: Cases) -> list[tuple[Key, str, Ratio]]:
    """Kinds whose peak is beyond noise higher than the step-allocated one's."""
    kinds_but_base = [kind for kind in dict.fromkeys(key[3] for key in cases) if kind != BASE]
    against = {kind: _against(cases, kind, BASE, "peak_mib") for kind in kinds_but_base}
    return [(key, kind, found[key]) for kind, found in against.items() for key in _raised(found)]


def _speeds(cases: Cases) -> list[str]:
    return [
        f"Measured on {listed(devices(own[0] for own in cases.values()))}. MLX's concatenation gives a contiguous "
        "array by itself, so that the copy after it has nothing to mend. What is left of the published cost is one "
        "copy of the whole cache in each step, which a step-allocated cache (256 positions at once, written in "
        "place) saves. Decode, contiguous ÷ concatenating: "
        + _each(_against(cases, "contiguous", "concatenate", "decode_tok_s"))
        + ". As `mx.contiguous` returns a contiguous array as it is, a ratio other than 1 there shows how far two "
        "processes with the same work can be apart. "
        "Decode, step-allocated ÷ concatenating: " + _each(_against(cases, BASE, "concatenate", "decode_tok_s")) + "."
    ]


def _each(found: dict[Key, Ratio]) -> str:
    return "; ".join(f"{_place(key)}: {each.words}" for key, each in found.items())


def _costly(cases: Cases) -> list[str]:
    """Kinds with a higher peak once more without the weights, and why it may be."""
    found = _higher(cases)
    if not found:
        return []
    above = [f"{kind} {_against(cases, kind, BASE, 'above')[key].words} ({_place(key)})" for key, kind, _ in found]
    return [
        f"Without the weights those peaks are, ÷ the step-allocated one's: {'; '.join(above)}. A likely cause, read "
        "in mlx-lm's code and not measured: these caches hand attention an array as its mask instead of the word "
        "“causal” (a rotating one once the prompt is longer than its window), and CUDA then has no fused kernel, so "
        "that the matrix of scores is made. A rotating cache whose window is longer than the prompt is a "
        "step-allocated one."
    ]


# ---------------------------------------------------------------- tables and plots
def _memory(cases: Cases) -> Table:
    head = ["model", "device", "prompt, tokens", "cache", "runs", "peak MiB, weights included", "of it weights"]
    head += ["peak ÷ step-allocated", "the same without weights", "published peak ÷ preallocated", "taken"]
    body = []
    for (device, shape, prompt, kind), own in cases.items():
        base = cases.get((device, shape, prompt, BASE), [])
        ratios = [_over(own, base, name) for name in ("peak_mib", "above")]
        figures = [str(len(own)), spread(own, "peak_mib"), cell(middle(own, "weights_mib"))]
        body.append([shape, device, prompt, kind, *figures, *ratios, _published(prompt, kind, 0), taken(own)])
    return Table(
        "Peak of MLX's memory during prefill and 128 tokens: the median of the runs (least to most)", [head, *body]
    )


def _over(own: Rows, base: Rows, name: str) -> str:
    if own is base:
        return "1"
    return ratio(own, base, name, timed=name not in ("peak_mib", "above")).words if base else "–"


def _times(cases: Cases) -> Table:
    head = ["model", "device", "prompt, tokens", "cache", "runs", "drift", "prefill tok/s", "prefill ÷ step-allocated"]
    head += ["first token ms", "decode tok/s", "decode ÷ step-allocated", "published decode ÷ preallocated", "taken"]
    body = []
    for (device, shape, prompt, kind), own in cases.items():
        base = cases.get((device, shape, prompt, BASE), [])
        figures = [str(len(own)), drift_cell(own), spread(own, "prefill_tok_s"), _over(own, base, "prefill_tok_s")]
        figures += [spread(own, "first_ms"), spread(own, "decode_tok_s"), _over(own, base, "decode_tok_s")]
        body.append([shape, device, prompt, kind, *figures, _published(prompt, kind, 1), taken(own)])
    return Table("Speed of one row: the median of the runs (least to most). * the machine was unsteady", [head, *body])


def _published(prompt: str, kind: str, which: int) -> str:
    known = published.KINDS_FIGURES.get(prompt, {})
    return f"{known[kind][which] / known[BASE][which]:.2f}" if kind in known else "–"


def _plot(device: str, shape: str, rows: Rows) -> tuple[str, str]:
    prompts = [key[0] for key in groups(rows, "prompt")]
    cases = groups([row | {"above": _above(row)} for row in rows], "kind", "prompt")
    shown = [
        (kind, [middle(cases.get((kind, prompt), []), "above") for prompt in prompts])
        for (kind,) in groups(rows, "kind")
    ]
    names = [f"{prompt} tokens" for prompt in prompts]
    drawn = plots.bars(plots.Bars(f"Peak memory above the weights, {shape}, {device}", "MiB", names, shown))
    return "Peak during a prompt of that length and 128 tokens after it, less the bytes of the weights.", drawn
