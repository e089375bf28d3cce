"""The rows of the speed table: what each one requests for, and the bar it is held to.

Data and small functions; `loadtests.speed` runs them. A `measure` knows the target only by its face, so that all
three do the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median

from loadtests.bench.ledger import Bar, Figures, of, quotient, ratio
from loadtests.bench.rounds import Row, Work
from loadtests.bench.targets import EARLIER, MARATHON, RAW, REFERENCE, Target, measured
from loadtests.bench.workload import LoadRequest, Stream, first_p50, tokens_a_second
from server.settings import Settings

PROMPT = 64
TURNS = 40
STALL_SECONDS = Settings.model_fields["prefill_stall_ms"].default / 1000


# ---------------------------------------------------------------- greedy streams
def greedy(name: str, model: str, streams: int, tokens: int, bars: Sequence[Bar]) -> Row:
    """`streams` prompts at once, each with an answer of `tokens` tokens."""

    def measure(target: Target, work: Work) -> Figures:
        requests = [LoadRequest(work.tokens(tokens), work.prompt(PROMPT)) for _ in range(work.streams(streams))]
        return measured(target, requests, profile=work.profile)

    return Row(name, model, measure, bars)


def greedy_bars(streams: int, *, costs: bool) -> list[Bar]:
    """`costs`: also the bars on first token and CPU time. One stream or four need only be as fast as mlx_lm.server's:
    on two cores client and server take from what the engine would use."""
    bars = [
        Bar("output tok/s × raw", ratio("tok_s"), "≥", 0.95 if streams >= 16 else None),
        Bar("output tok/s × mlx_lm.server", ratio("tok_s", REFERENCE), "≥", 1.0),
        Bar("mlx_lm.server's output tok/s × raw", ratio("tok_s", target=REFERENCE)),
        Bar("output tok/s", of("tok_s")),
        Bar("chunks ÷ tokens", of("chunks_per_token"), "≥", 0.9),
    ]
    if costs and streams >= 16:
        bars += [
            Bar("TTFT p50 × raw", ratio("ttft_p50"), "≤", 1.5),
            Bar("CPU seconds per 1,000 tokens × raw", ratio("cpu_s_per_1k"), "≤", 1.25),
            Bar("mlx_lm.server's TTFT p50 × raw", ratio("ttft_p50", target=REFERENCE)),
            Bar("mlx_lm.server's CPU seconds × raw", ratio("cpu_s_per_1k", target=REFERENCE)),
        ]
    return bars


# ---------------------------------------------------------------- sampling
SEEN = [
    {"temperature": 0.5 + 0.05 * (i % 12), "top_p": 0.8 + 0.01 * (i % 16), "top_k": (0, 20, 40, 80)[i % 4]}
    for i in range(32)
]
SAME = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}
SAMPLED_STREAMS, SAMPLED_TOKENS = 16, 256


def sampling(target: Target, work: Work) -> Figures:
    """Rows with parameters of their own: seen before, never seen before, and all the same."""
    draw = work.random
    count = work.streams(SAMPLED_STREAMS)
    fresh = [{"temperature": draw.uniform(0.5, 1.1), "top_p": draw.uniform(0.8, 0.98)} for _ in range(count)]
    kinds = {
        "seen": SEEN[:count],
        "fresh": [values | {"top_k": SEEN[i]["top_k"]} for i, values in enumerate(fresh)],
        "same": [SAME] * count,
    }
    return {
        name: tokens_a_second(target.run(_sampled(kinds[name], target, work))) for name in draw.sample(list(kinds), 3)
    }


def _sampled(sets: Sequence[dict[str, float]], target: Target, work: Work) -> list[LoadRequest]:
    """mlx-lm's server serves seeded requests one at a time, so it gets no seeds."""
    seeds = [{} if target.name == REFERENCE else {"seed": work.random.getrandbits(32)} for _ in sets]
    tokens = work.tokens(SAMPLED_TOKENS)
    return [
        LoadRequest(tokens, work.prompt(PROMPT), sampling=own | seed) for own, seed in zip(sets, seeds, strict=True)
    ]


SAMPLING_BARS = [
    Bar("mixed parameters × raw with parameters seen before", ratio("seen"), "≥", 1.8),
    Bar("parameters never seen × the same seen before", quotient("fresh", "seen"), "≥", 0.95),
    Bar("mixed parameters × all the same, which are narrow", quotient("seen", "same")),
    Bar("raw: never seen × seen", quotient("fresh", "seen", RAW)),
    Bar("mlx_lm.server: mixed parameters × raw", ratio("seen", target=REFERENCE)),
    Bar("mlx_lm.server: never seen × seen", quotient("fresh", "seen", REFERENCE)),
]


# ---------------------------------------------------------------- long beside short
def stall(target: Target, work: Work) -> Figures:
    """A prompt of 4,000 tokens arrives while four streams run."""
    running = [LoadRequest(work.tokens(256), work.prompt(PROMPT)) for _ in range(4)]
    long = LoadRequest(8, work.prompt(400 if work.quick else 4000), after=(0, 2 if work.quick else 16))
    streams = target.run([*running, long])
    arrived = streams[-1]
    return {
        "stall": max(stream.longest_gap(arrived.started, arrived.times[0]) for stream in streams[:-1]),
        "ttft_long": arrived.first,
        "step": _step(streams[0], arrived.started),
    }


def _step(stream: Stream, until: float) -> float:
    """The usual time between two tokens before `until`."""
    early = [time for time in stream.times if time < until]
    return median([b - a for a, b in pairwise(early)] or [0.0])


STALL_BARS = [
    Bar("longest stall × raw's", ratio("stall"), "≤", 0.15),
    Bar(
        "longest stall ÷ (2 × --prefill-stall-ms + one step), worst round",
        lambda one: one[MARATHON]["stall"] / (2 * STALL_SECONDS + one[MARATHON]["step"]),
        "≤",
        1.0,
        worst=True,
    ),
    Bar("the long prompt's own TTFT × raw", ratio("ttft_long"), "≤", 1.25),
    Bar("longest stall, seconds", of("stall")),
    Bar("raw's longest stall, seconds", of("stall", RAW)),
    Bar("mlx_lm.server's longest stall × raw's", ratio("stall", target=REFERENCE)),
]


def beside(target: Target, work: Work) -> Figures:
    """Requests of 32 tokens, one after another, beside a generation of 6,000."""
    total = 240 if work.quick else 6000
    apart = total // 20  # the last comes well before the end, also where chunks are few
    shorts = [LoadRequest(8, work.prompt(32), after=(0, apart * (k + 1))) for k in range(8)]
    streams = target.run([LoadRequest(total, work.prompt(PROMPT)), *shorts])
    return {"ttft_p50": first_p50(streams[1:]), "ttft_mean": mean(stream.first for stream in streams[1:])}


BESIDE_BARS = [
    Bar("TTFT of a 32-token request beside a 6,000-token generation × raw", ratio("ttft_p50"), "≤", 1.3),
    Bar("mlx_lm.server's × raw", ratio("ttft_p50", target=REFERENCE)),
]


def burst(target: Target, work: Work) -> Figures:
    """32 prompts of 64 tokens at once."""
    return measured(target, [LoadRequest(16, work.prompt(64)) for _ in range(work.streams(32))])


BURST_BARS = [
    Bar("32 prompts of 64 tokens at once: mean TTFT × raw", ratio("ttft_mean"), "≤", 1.1),
    Bar("mlx_lm.server's mean TTFT × raw", ratio("ttft_mean", target=REFERENCE)),
]


# ---------------------------------------------------------------- conversations
def turns(target: Target, work: Work) -> Figures:
    """40 turns of about 110 new tokens; raw keeps the caches of the turn before by reference."""
    history: list[dict[str, str]] = []
    requests = []
    for _ in range(6 if work.quick else TURNS):
        history.append({"role": "user", "content": work.prompt(50).strip()})
        requests.append(LoadRequest(8, messages=list(history)))
        history.append({"role": "assistant", "content": work.prompt(50).strip()})
    streams = target.run(requests, in_turn=True)
    first = [stream.first for stream in streams]
    cached = sum(stream.cached_tokens for stream in streams) / sum(stream.prompt_tokens for stream in streams)
    return {"sum": sum(first), "last_five": sum(first[-5:]), "turn_2": first[1], "turn_40": first[-1], "cached": cached}


FLAT = Bar("TTFT of turn 40 ÷ turn 2", quotient("turn_40", "turn_2"), "≤", 2.0)
TURN_BARS = [
    Bar("40 turns, sum of TTFT × an ideal cache", ratio("sum"), "≤", 1.2),
    Bar("40 turns, last five × an ideal cache", ratio("last_five"), "≤", 1.15),
    FLAT,
    Bar("raw's TTFT of turn 40 ÷ turn 2", quotient("turn_40", "turn_2", RAW)),
    Bar("share of the prompts found in the cache", of("cached")),
    Bar("mlx_lm.server's sum of TTFT × an ideal cache", ratio("sum", target=REFERENCE)),
]

LENGTHS = {1: 1024, 4: 768, 16: 512, 32: 512}  # tokens a stream, so that each load lasts
ROWS = [
    *(greedy(f"greedy-{n}", "cheap", n, tokens, greedy_bars(n, costs=True)) for n, tokens in LENGTHS.items()),
    *(greedy(f"wide-{n}", "wide", n, 256, greedy_bars(n, costs=False)) for n in LENGTHS),
    Row("burst", "cheap", burst, BURST_BARS),
    Row("beside", "cheap", beside, BESIDE_BARS),
    Row("sampling", "wide", sampling, SAMPLING_BARS),
    Row("stall", "cheap", stall, STALL_BARS),
    Row("turns", "cheap", turns, TURN_BARS),
    Row("turns-gemma3", "gemma3_text", turns, [FLAT], [MARATHON]),
    Row("turns-qwen3_5", "qwen3_5", turns, [FLAT], [MARATHON]),
]

# ---------------------------------------------------------------- another checkout
COMPARED = {  # figures by the beginnings of rows' names
    "burst": ("ttft_mean",),
    "beside": ("ttft_p50",),
    "sampling": ("seen", "fresh"),
    "stall": ("stall", "ttft_long"),
    "turns": ("sum", "turn_40"),
    "": ("tok_s", "ttft_p50", "cpu_s_per_1k"),
}


def with_earlier(row: Row) -> Row:
    """The same row, in which an earlier checkout is measured as well and both are compared; no promise is made."""
    figures = next(figures for beginning, figures in COMPARED.items() if row.name.startswith(beginning))
    bars = [Bar(f"{figure} × earlier", ratio(figure, EARLIER)) for figure in figures]
    bars += [Bar(f"earlier: {figure} × raw", ratio(figure, target=EARLIER)) for figure in figures]
    return replace(row, bars=[*row.bars, *bars], targets=[*row.targets, EARLIER])


# ---------------------------------------------------------------- in process, see loadtests.groups
GROUPS_MODEL = "cheap"
GROUPS_BARS = [
    Bar(
        "20,000-token row + 8 short rows: iteration ÷ (short alone + long alone)",
        lambda one: one[MARATHON]["together"] / (one[MARATHON]["short"] + one[MARATHON]["long"]),
        "≤",
        1.1,
    ),
    Bar("the same ÷ the single padded batch", quotient("together", "padded"), "≤", 1.0),
    Bar("the same: KV bytes held ÷ the rows' own", quotient("held", "own"), "≤", 1.15),
    Bar("the same, padded: KV bytes held ÷ the rows' own", quotient("held_padded", "own")),
    Bar("the same: groups", of("groups")),
]
