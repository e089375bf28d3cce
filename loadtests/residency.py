"""What leaks, and what stops it: `python -m loadtests.residency [--families llama qwen3_5 …] [--steps 600]`.

First three bare patterns over 20,000 steps: a chain that is never evaluated must lose one buffer and 4 bytes a step,
the same over an evaluated operand or evaluated each step nothing. Then each family: one long row in mlx-lm's
BatchGenerator alone; there, in Marathon's loop without the guard and with it while two others come and go. For each
rate the step at which Metal's 499,000 buffers end, and in the first arm, on a low limit, predicted from the first
steps and measured. Writes one CSV row a run; its exit code is 0 when mlx-lm's rates are within 5 % of those known,
the predicted ends within 5 % of the measured ones, and the guarded runs flat within 0.01.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from loadtests.lab.experiment import Bound, Case, Experiment, Row, carry_out, parser_of

PATTERNS = {  # buffers and bytes that a step must lose
    "x = x - 1, never evaluated": (1.0, 4.0),
    "x = x - one, never evaluated": (0.0, 0.0),
    "x = x - 1, evaluated each step": (0.0, 0.0),
}
ARMS = ("mlx_lm alone", "mlx_lm", "off", "guard")
FAMILIES = [
    *("llama", "gemma3_text", "gpt_oss", "qwen3_5", "qwen3_next", "falcon_h1", "nemotron_h", "mamba2"),
    *("lfm2", "smollm3", "cohere2", "kimi_linear", "minimax_m3_vl", "rwkv7", "recurrent_gemma", "deepseek_v32"),
]
RATES = ("buffers_a_step", "half_width", "bytes_a_step", "expected", "baseline")
ENDS = ("ceiling_metal", "ceiling_predicted", "ceiling_measured")
COLUMNS = ("pattern", "family", "arm", "steps", "limit", *RATES, *ENDS, "holders", "note")
NEAR = 0.05
NOISE = 0.13  # buffers a step that a step in flight may seem to lose
FLAT = 0.01
EXACT = 0.001


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--families", nargs="*", default=FAMILIES, metavar="NAME", help="of the zoo; `all`: each of them"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="what is run")
    parser.add_argument("--steps", type=int, default=600, help="tokens of the long row")
    parser.add_argument("--bare-steps", type=int, default=20_000, help="of the patterns; 0 leaves them out")
    parser.add_argument("--buffers", type=int, default=1500, help="the low limit")
    return parser.parse_args(arguments)


def experiment(asked: argparse.Namespace) -> Experiment:
    cases = [Case({"pattern": pattern, "steps": asked.bare_steps}, 0.3) for pattern in PATTERNS if asked.bare_steps]
    families = _every_family() if asked.families == ["all"] else asked.families
    common = {"steps": asked.steps, "limit": asked.buffers}
    cases += [Case({"family": family, "arm": arm} | common) for family in families for arm in asked.arms]
    return Experiment("residency", COLUMNS, cases, judge)


def _every_family() -> list[str]:
    from loadtests import zoo  # loads MLX

    return sorted(zoo.FAMILIES)


def judge(rows: list[Row]) -> list[Bound]:
    return [bound for row in rows if "buffers_a_step" in row for bound in _bounds(row)]


def _bounds(row: Row) -> list[Bound]:
    if "pattern" in row:
        return [_pattern(row)]
    rate = row["buffers_a_step"]
    name = f"{row['family']}, {row['arm']}: {rate:.4f} buffers a step"
    if row["arm"] == "guard":
        return [Bound(name, abs(rate) <= FLAT)]
    bounds = []
    if row["expected"] is not None:
        bounds.append(Bound(f"{name}, {row['expected']:.3f} expected", is_near(rate, row["expected"])))
    if "ceiling_measured" in row:
        words = f"{row['family']}: {row['limit']} buffers at step {row['ceiling_measured']:.0f}"
        near = is_near(row["ceiling_measured"], row["ceiling_predicted"])
        bounds.append(Bound(f"{words}, {row['ceiling_predicted']:.0f} predicted", near))
    return bounds


def _pattern(row: Row) -> Bound:
    buffers, size = PATTERNS[row["pattern"]]
    words = f"{row['pattern']}: {row['buffers_a_step']:.4f} buffers and {row['bytes_a_step']:.3f} bytes a step"
    holds = abs(row["buffers_a_step"] - buffers) <= EXACT and abs(row["bytes_a_step"] - size) <= 4 * EXACT
    return Bound(words, holds)


def is_near(value: float, expected: float) -> bool:
    """Within 5 %; beside nothing, within the noise."""
    return abs(value - expected) <= (NEAR * expected or NOISE)


def main() -> int:
    asked = parse()
    return carry_out(experiment(asked), asked)


if __name__ == "__main__":
    sys.exit(main())
