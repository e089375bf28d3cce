"""Count to 20,000: `python -m loadtests.count [--shape qwen3_5 smollm3 llama] [--tokens 20000] [--direct --rows 1 8
32]`.

Asks a server for the numbers from 1 on and forces the answer to its length. By thousand tokens: tok/s, p50 and p99 of
the time between two tokens, settled live buffers, bytes, and how far the buffers are from their limit. With
`--direct` the same in Marathon's batch without HTTP, with several rows; `--real` below 1,000 then takes only so many
steps of some thousands, on caches filled up to there.

A longer cache makes each step slower by itself. So the bare step of mlx-lm is timed over fresh caches of 1,500
positions and of those of the last thousand, in turn, and the speed of the last thousand is multiplied by how much
slower it became. The exit code is 0 when that is at least 0.8 of the second thousand's speed, and the live buffers
are flat within 0.01 a token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from loadtests.lab.counting import THOUSAND
from loadtests.lab.experiment import Bound, Case, Experiment, Row, carry_out, parser_of
from loadtests.lab.line import fit

KEPT = 0.8
FLAT = 0.01  # buffers a token
FEWEST = 5  # readings that tell a slope: each may be some buffers off
FIGURES = ("thousand", "tok_s", "p50_ms", "p99_ms", "live_buffers", "headroom", "active_mib", "kv_mib")
REFERENCE = ("bare_second_ms", "bare_last_ms")
COLUMNS = ("shape", "way", "rows", "tokens", "real", *FIGURES, "pieces_per_token", "numbers_right", *REFERENCE)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", nargs="+", default=["qwen3_5", "smollm3", "llama"], help="model, or a folder")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the answer, a multiple of 1,000")
    parser.add_argument("--direct", action="store_true", help="in Marathon's batch, without HTTP")
    parser.add_argument("--rows", nargs="+", type=int, default=[1], help="sequences at once; with --direct")
    parser.add_argument("--real", type=int, default=THOUSAND, help="steps of a thousand; with --direct")
    return parser.parse_args(arguments)


def experiment(asked: argparse.Namespace) -> Experiment:
    cases = []
    for shape in asked.shape:
        common = {"shape": shape, "tokens": asked.tokens}
        if asked.direct:
            each = common | {"way": "direct", "real": asked.real}
            cases += [Case(each | {"rows": rows}, module="curve") for rows in asked.rows]
        else:
            cases.append(Case(common | {"way": "http", "rows": 1}))
        if asked.tokens > 2 * THOUSAND and (asked.real >= THOUSAND or not asked.direct):
            lengths = [2 * THOUSAND - THOUSAND // 2, asked.tokens - THOUSAND // 2]
            cases.append(Case(common | {"way": "reference", "reference": lengths}, cost=0.1, module="curve"))
    return Experiment("count", COLUMNS, cases, judge)


def judge(rows: list[Row]) -> list[Bound]:
    bounds = []
    for key in dict.fromkeys((row["shape"], row["way"], row.get("rows")) for row in rows if "thousand" in row):
        own = [row for row in rows if (row["shape"], row["way"], row.get("rows")) == key and "thousand" in row]
        name = "{}, {}, {} row(s)".format(*key)
        if own[0].get("real", THOUSAND) >= THOUSAND:
            reference = next((row for row in rows if row["way"] == "reference" and row["shape"] == key[0]), None)
            bounds += flat(name, own) + kept(name, own, reference)
    return bounds


def flat(name: str, rows: list[Row]) -> list[Bound]:
    """The slope of the settled live buffers after the first thousand."""
    counted = [row for row in rows[1:] if "live_buffers" in row]
    if len(counted) < FEWEST:
        return []
    slope = fit([THOUSAND * row["thousand"] for row in counted], [row["live_buffers"] for row in counted]).slope
    return [Bound(f"{name}: {slope:+.4f} live buffers a token", abs(slope) <= FLAT)]


def kept(name: str, rows: list[Row], reference: Row | None) -> list[Bound]:
    """The last thousand's speed over the second's, corrected; for one row, since the bare step has one."""
    if reference is None or rows[0]["rows"] != 1 or len(rows) < 3:
        return []
    second, last = rows[1], rows[-1]
    slower = reference["bare_last_ms"] / reference["bare_second_ms"]
    ratio = last["tok_s"] / second["tok_s"]
    words = f"{name}: the last thousand keeps {ratio:.2f} of the second's speed, {ratio * slower:.2f} corrected"
    return [Bound(words, ratio * slower >= KEPT)]


def main() -> int:
    asked = parse()
    return carry_out(experiment(asked), asked)


if __name__ == "__main__":
    sys.exit(main())
