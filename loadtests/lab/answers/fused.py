"""Finding 4: fused attention. Pure: rows of `loadtests.attention_paths` in, the finding out."""

from __future__ import annotations

from collections.abc import Mapping

from loadtests.lab import published
from loadtests.lab.page import Finding, Judgement, Table
from loadtests.lab.rows import (
    Key,
    Ratio,
    Row,
    Rows,
    cell,
    devices,
    drift_cell,
    groups,
    listed,
    middle,
    ratio,
    taken,
)

FIGURES = ("peak_mib", "prefill_tok_s", "first_ms", "decode_tok_s")
RULE = (
    "A near tie, the source's rule: at a position where both ways have a different top token, the margin between the "
    "two best logits of attention in steps must be no larger than the largest difference of any logit between both "
    "ways at that position. A difference beyond that breaks the rule."
)
Cases = Mapping[Key, list[Row]]  # by device, shape, prompt, path


def fused(rows: Rows) -> Finding:
    """The finding, from rows without errors."""
    timed = groups([row for row in rows if row["path"]], "device", "shape", "prompt", "path")
    compared = groups([row for row in rows if row["positions"] != ""], "device", "shape", "prompt")
    newest = {key: own[-1] for key, own in compared.items()}
    finding = Finding(
        "4. Fused attention",
        "What does `mx.fast.scaled_dot_product_attention` gain over the same attention in steps, and does the text "
        "stay?",
        published.PATHS.text,
        _verdict(timed, newest),
        short=published.PATHS.short,
        means=_means(timed, newest),
    )
    finding.answer = [_where(rows, timed), RULE + _ties(newest)]
    tables = [_gains(timed), _apart(newest)]
    finding.tables = [table for table in tables if len(table.rows) > 1]
    finding.unproven = (
        "Metal's kernel was not run. The starter model is the only one here with real weights; where both ways give "
        "it the same logits, the rule had nothing to judge."
    )
    return finding


def _pairs(timed: Cases) -> dict[Key, tuple[list[Row], list[Row]]]:
    """(fused, steps) by device, shape and prompt, where both were measured."""
    return {
        key[:3]: (own, timed[*key[:3], "steps"])
        for key, own in timed.items()
        if key[3] == "fused" and (*key[:3], "steps") in timed
    }


def _ratios(own: Rows, steps: Rows) -> list[Ratio]:
    return [ratio(own, steps, name, timed=name != "peak_mib") for name in FIGURES]


# ---------------------------------------------------------------- the words
def _verdict(timed: Cases, newest: Mapping[Key, Row]) -> Judgement:
    gains = {key: _ratios(*pair) for key, pair in _pairs(timed).items()}
    faster = [key for key, (_, prefill, *_) in gains.items() if prefill.above]
    said = [f"{_place(key)}: prefill {gain[1].words}, decode {gain[3].words}" for key, gain in gains.items()]
    words = "Fused ÷ in steps: " + "; ".join(said) + "." if said else "No pair of both ways was timed."
    word = "Reproduced in direction" if faster else "Can't tell"
    places = {key[0] for key in faster}
    if faster and len(places) < len({key[0] for key in gains}):
        word += f" on {listed(sorted(places))} only"
    return Judgement(word, words, _sure(gains, newest))


def _means(timed: Cases, newest: Mapping[Key, Row]) -> str:
    gains = {key: _ratios(*pair) for key, pair in _pairs(timed).items()}
    said = [_gain(key, found) for key, found in gains.items() if found[1].above]
    words = f"The fused kernel makes prefill faster: {'; '.join(said)}." if said else ""
    others = [_place(key) for key, found in gains.items() if not found[1].above]
    if others:
        words += f" No faster prefill beyond noise: {'; '.join(others)}."
    if newest:
        differs, broken, positions = (
            sum(row[name] for row in newest.values()) for name in ("top_differs", "against_the_rule", "positions")
        )
        words += f" The text can change, but only where two tokens were nearly tied: of {positions:.0f} positions "
        words += f"{differs:.0f} have another top token, {broken:.0f} of them against that rule."
    return words.strip()


def _gain(key: Key, found: list[Ratio]) -> str:
    peak, prefill, _, decode = found
    words = f"{prefill.value:.2f} times as fast with {peak.value:.2f} of the peak, decode {decode.words} ({_place(key)}"
    known = published.PATHS_FIGURES.get(key[2])
    return words + (f"; published {known[1]:.2f}, {known[0]:.2f} and {known[3]:.2f})" if known else ")")


def _place(key: Key) -> str:
    return f"{key[1]}, {key[2]} tokens, {key[0]}"


def _sure(gains: Mapping[Key, list[Ratio]], newest: Mapping[Key, Row]) -> str:
    broken = sum(row["against_the_rule"] for row in newest.values())
    positions = sum(row["positions"] for row in newest.values())
    words = f"Not very sure of the size of the gain: both ways were timed in {len(gains)} case(s) of a model and a "
    words += "prompt, where three prompts were published; the rule for the text was broken at "
    return words + f"{broken:.0f} of {positions:.0f} positions."


def _where(rows: Rows, timed: Cases) -> str:
    words = f"Measured on {listed(devices(rows))}, both ways over mlx-lm's step-allocated cache. A fused kernel does "
    words += (
        "without the matrix of scores; MLX's CPU backend has no such kernel and computes attention in steps itself, "
    )
    words += "so that there both columns measure the same arithmetic, and a ratio other than 1 is noise."
    lone = [f"{_place(key[:3])}, {key[3]}" for key in timed if key[:3] not in _pairs(timed)]
    return words + (f" Timed without its counterpart, and so left out: {'; '.join(lone)}." if lone else "")


def _ties(newest: Mapping[Key, Row]) -> str:
    same = [_place(key) for key, row in newest.items() if row["largest_difference"] == 0]
    words = f" Where both ways give the same logits to the last bit ({'; '.join(same)}) it can't fail." if same else ""
    loose = [_place(key) for key, row in newest.items() if row["smallest_margin"] == 0]
    if loose:
        words += " In bfloat16 two best logits are often exactly equal (smallest margin 0), and random weights make "
        words += f"such ties common: there the rule is a weak test ({'; '.join(loose)})."
    return words


# ---------------------------------------------------------------- the tables
def _gains(timed: Cases) -> Table:
    head = ["model", "device", "prompt, tokens", "runs, each way", "drift, fused", "drift, steps", "peak"]
    head += ["prefill tok/s", "first token", "decode tok/s", "published: peak, prefill, first token, decode", "taken"]
    body = []
    for (device, shape, prompt), (own, steps) in _pairs(timed).items():
        runs = f"{len(own)} and {len(steps)}"
        ratios = [found.words for found in _ratios(own, steps)]
        cells = [shape, device, prompt, runs, drift_cell(own), drift_cell(steps), *ratios]
        body.append([*cells, _published(prompt), taken([*own, *steps])])
    return Table("Fused ÷ in steps (peaks include the weights)", [head, *body])


def _published(prompt: str) -> str:
    return ", ".join(f"{value:.2f}" for value in published.PATHS_FIGURES.get(prompt, ())) or "–"


def _apart(newest: Mapping[Key, Row]) -> Table:
    head = ["model", "device", "prompt, tokens", "positions compared", "top token differs", "of these near ties"]
    head += ["of these break the rule", "largest difference of a logit", "smallest margin of the two best", "taken"]
    body = []
    for (device, shape, prompt), row in newest.items():
        ties = middle([row], "top_differs") - middle([row], "against_the_rule")
        figures = [row["positions"], row["top_differs"], ties, row["against_the_rule"]]
        figures += [row["largest_difference"], row["smallest_margin"]]
        body.append([shape, device, prompt, *map(cell, figures), taken([row])])
    return Table("Where the top token differs, at the last positions of a prompt", [head, *body])
