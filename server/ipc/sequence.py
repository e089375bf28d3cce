"""A sequence: all that an engine needs to begin a generation, or to go on with one.

Prompt ids and generated ids are apart, limits are counted from the start of the output, and the server has drawn the
seed: a fresh start is a continuation with no generated ids. Runs in both processes; does no I/O.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Finish = Literal["stop", "length"]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a token is drawn. Neutral values are the defaults; the order is the field's: bias and penalties on the
    logits, then temperature, top-k, top-p, min-p."""

    seed: int  # 64-bit, unsigned
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    logit_bias: dict[int, float] = {}
    allowed: list[int] = []  # no other id is drawn; empty: any may be


# In llguidance's symbols: about 2,000 properties. Building more takes the engine longer than a second.
MAX_GRAMMAR_SIZE = 20_000
# What may come next at one place of an answer, in llguidance's items: about 500 optional properties. Computing a mask
# over more holds a step for longer than 20 ms where the vocabulary is large.
MAX_GRAMMAR_WIDTH = 2_000


class Grammar(msgspec.Struct, frozen=True):
    """A constraint on the output, already validated by the server."""

    text: str  # llguidance grammar, as its own JSON or Lark text


class TokenSequence(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence to generate; all counts are of output tokens from the start of the output."""

    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    min_tokens: int = 0  # stop_ids can't be drawn before
    stop_ids: list[int] = []  # a drawn stop id ends the row with "stop" and is delivered as its last token
    choice: int = 0  # index within the request; part of the random stream
    logprobs: int = -1  # -1: none; else the number of alternatives to report with each token
    scored: list[int] = []  # ids whose logprobs are reported instead of the likeliest ones
    prompt_logprobs: bool = False  # report the prompt's own logprobs with the first step
    grammar: Grammar | None = None
    marks: list[int] = []  # prompt positions worth a prefix snapshot, ascending


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprob of the drawn token and its alternatives, best first, from the untempered distribution."""

    logprob: float
    top: list[tuple[int, float]] = []


class TokenTable(msgspec.Struct, frozen=True):
    """What each id of the tokenizer says, as the client reads it; grammars are followed in these bytes.

    The ids may be more or fewer than the model has logits.
    """

    texts: list[bytes]  # by id; empty for an id that says nothing
    control: list[int]  # ids that structure an answer: no text is written with them
    ends: list[int]  # control ids that end an answer
