"""Is this answer the undisturbed one? The rule of what "the same text" means.

Owns the comparison of two accounts of one request: nothing lost, nothing twice, every token equal, except that a
first difference is allowed where the arithmetic of two equally right ways explains it. Pure but for the random
numbers, which it takes from the server's own sampler when there is a difference to explain.
"""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from loadtests.chaos.sse_client import Account

CLOSE = 1e-2  # largest difference of two ways' log probabilities that counts as rounding, for float32 weights
SHARE = 0.02  # of the answers that may differ at all


@dataclass(slots=True)
class Verdicts:
    """What became of many answers."""

    same: int = 0
    explained: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def judge(self, name: str, expected: Account, seen: Account) -> None:
        if fault := _incomplete(expected, seen):
            self.wrong.append(f"{name}: {fault}")
        elif seen.tokens == expected.tokens and seen.text == expected.text:
            self.same += 1
        else:
            why, is_explained = _explain(expected, seen)
            (self.explained if is_explained else self.wrong).append(f"{name}: {why}")

    def problems(self) -> list[str]:
        """Everything that shouldn't be."""
        total = self.same + len(self.explained) + len(self.wrong)
        too_many = len(self.explained) > math.ceil(SHARE * total)
        return self.wrong + (self.explained if too_many else [])


def _incomplete(expected: Account, seen: Account) -> str:
    """How many there are must be right whatever they are."""
    if not seen.ok:
        return f"ended badly after {len(seen.tokens)} tokens: {seen.trouble()}"
    counted, asked = seen.usage.get("completion_tokens"), seen.body["max_tokens"]
    if not (counted == len(seen.tokens) == asked) and seen.body.get("ignore_eos"):
        return f"asked for {asked} tokens, got {len(seen.tokens)}, and the usage says {counted}"
    if seen.usage.get("prompt_tokens") != expected.usage.get("prompt_tokens"):
        return f"{seen.usage.get('prompt_tokens')} prompt tokens instead of {expected.usage.get('prompt_tokens')}"
    return ""


def _explain(expected: Account, seen: Account) -> tuple[str, bool]:
    pairs = zip(expected.tokens, seen.tokens, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return "the same tokens gave another text", False
    apart = max(_apart(expected.top[i], seen.top[i]) for i in range(place + 1))
    margin = _margin(expected, seen, place)
    said = f"differs at token {place}: margin {margin:.2g}, the two ways' log probabilities differ by {apart:.2g}"
    return said, apart < CLOSE and margin <= 2 * apart  # each of the two may have moved by as much


def _apart(a: dict[str, float], b: dict[str, float]) -> float:
    return max((abs(a[token] - b[token]) for token in a.keys() & b.keys()), default=math.inf)


def _margin(expected: Account, seen: Account, place: int) -> float:
    """How far the expected token was from being the other one, as a difference of logits."""
    top, body = expected.top[place], expected.body
    if not body["temperature"]:
        return abs(top[expected.tokens[place]] - top.get(seen.tokens[place], -math.inf))
    return _distance_to_border(top, body, seen.tokens[place], place) * float(body["temperature"])


def _distance_to_border(top: dict[str, float], body: dict[str, Any], other: str, place: int) -> float:
    """From the random number to the nearest border of the token that was drawn the other way; inf when the request
    keeps more candidates than it reports."""
    from server.compute.sampling import stream_key, uniforms

    if other not in top or not 0 < body.get("top_k", 0) <= len(top):
        return math.inf
    import numpy as np

    ordered = sorted(top, key=lambda token: -top[token])[: body["top_k"]]
    best = top[ordered[0]]
    weights = list(accumulate(math.exp((top[token] - best) / body["temperature"]) for token in ordered))
    borders = [0.0, *(weight / weights[-1] for weight in weights)]
    key = np.array([stream_key(body["seed"], 0)], dtype=np.uint64)
    drawn = float(uniforms(key, np.array([place]))[0])
    if other not in ordered:
        return math.inf
    i, mine = ordered.index(other), bisect(borders, drawn) - 1
    return 0.0 if i == mine else min(abs(drawn - borders[i]), abs(drawn - borders[i + 1]))
