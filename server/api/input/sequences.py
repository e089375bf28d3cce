"""A request's options → sequences for the engine.

Owns the defaults: what the client left open is taken from the model's recommendations, then from ours. Runs in the
server's worker thread; pure but for the seed that it draws.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from server.api.input.schema import GenerationRequest
from server.errors import ContextLengthError, InvalidValue
from server.ipc import messages
from server.ipc.sequence import Grammar, Sampling, TokenSequence
from server.settings import Settings
from server.text.tokenizer import Tokenizer

SEED_BITS = 64
ANY_SEED = -1
COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the loaded model can take."""

    vocabulary: int
    context: int

    @classmethod
    def of(cls, ready: messages.Ready, settings: Settings) -> Bounds:
        return cls(ready.vocab_size, settings.allowed_context(ready.context))

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises for an id beyond the vocabulary: unchecked, it would read or write foreign memory in the engine."""
        if ids and (largest := max(ids)) >= self.vocabulary:
            message = f"{param}: token id {largest} is out of vocabulary, which has {self.vocabulary} ids"
            raise InvalidValue(message, param=param)

    def check_length(self, prompt: Sequence[int]) -> None:
        """Raises for a prompt that leaves no room for an answer."""
        if len(prompt) + 1 > self.context:
            raise ContextLengthError.of(len(prompt), self.context)

    def room(self, prompt: int, asked: int | None) -> int:
        """Most tokens of an answer. Where not even one fits, opening the request is refused with both numbers."""
        free = max(1, self.context - prompt)
        if asked is None:
            return free
        return min(asked, free)


def sampling(request: GenerationRequest, tokenizer: Tokenizer, bounds: Bounds) -> Sampling:
    """How the request's tokens are drawn, with nothing left open."""

    def value(name: str, otherwise: float, older: float | None = None) -> Any:
        given = getattr(request, name)
        if given is None:
            given = older
        if given is None:
            return tokenizer.defaults.get(name, otherwise)
        return given

    bias = {int(token): weight for token, weight in (request.logit_bias or {}).items()}
    bounds.check_ids(list(bias), "logit_bias")
    allowed = sorted(set(request.allowed_token_ids or []))
    bounds.check_ids(allowed, "allowed_token_ids")
    top_p = float(value("top_p", 1.0))
    return Sampling(
        seed=seed(request.seed),
        temperature=float(value("temperature", 1.0)) if top_p else 0.0,  # of nothing, only the best is left
        top_p=top_p or 1.0,
        top_k=min(max(0, int(value("top_k", 0))), bounds.vocabulary),
        min_p=float(value("min_p", 0.0)),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=float(value("repetition_penalty", 1.0, request.repeat_penalty)) or 1.0,
        logit_bias=bias,
        allowed=allowed,
    )


def seed(given: int | None) -> int:
    """64 bits: the client's, or drawn here, so that a continuation elsewhere draws the same tokens. -1 asks for that,
    as it does from llama.cpp and vLLM, whose clients send it by default."""
    if given is None or given == ANY_SEED:
        return secrets.randbits(SEED_BITS)
    return given & ((1 << SEED_BITS) - 1)


def stop_ids(request: GenerationRequest, tokenizer: Tokenizer, bounds: Bounds) -> list[int]:
    """Ids that end an answer."""
    asked = request.stop_token_ids or []
    bounds.check_ids(asked, "stop_token_ids")
    own: Collection[int] = ()
    if not request.ignore_eos:
        own = tokenizer.eos_ids
    return sorted({*asked, *(token for token in own if token < bounds.vocabulary)})


def predicted(request: GenerationRequest, default: int | None) -> int | None:
    """Most tokens of the answer by llama.cpp's name for them; None: what fits the context."""
    if request.n_predict == -1:
        return None
    if request.n_predict is None:
        return default
    return request.n_predict


def most_tokens(request: GenerationRequest, bounds: Bounds) -> int | None:
    """Those of a prompt that can be of use; None where it's truncated, for that needs all of them."""
    if request.truncate_prompt_tokens is None:
        return bounds.context
    return None


def truncated(ids: list[int], request: GenerationRequest, bounds: Bounds, max_tokens: int | None) -> list[int]:
    """The prompt, or the part of it that the request wants; the very same list if that is all of it."""
    most = request.truncate_prompt_tokens
    if most == -1:
        most = bounds.context - min(max_tokens or 1, bounds.context - 1)
    if most is None or len(ids) <= most:
        return ids
    if request.truncation_side == "right":
        return ids[:most]
    return ids[-most:]


def sequences(
    request: GenerationRequest,
    prompts: Sequence[list[int]],
    *,
    tokenizer: Tokenizer,
    bounds: Bounds,
    max_tokens: int | None,
    logprobs: int = -1,
    prompt_logprobs: bool = False,
    grammar: Grammar | None = None,
    marks: Sequence[int] = (),
) -> list[TokenSequence]:
    """One sequence a prompt and choice, in the order of the answer's indices."""
    if max_tokens is not None and (request.min_tokens or 0) > max_tokens:
        raise InvalidValue("min_tokens is larger than the most tokens of the answer", param="min_tokens")
    if grammar is not None and request.allowed_token_ids:
        message = "allowed_token_ids: the answer's form says already which tokens may be drawn"
        raise InvalidValue(message, param="allowed_token_ids")
    scored = list(dict.fromkeys(request.logprob_token_ids or []))
    bounds.check_ids(scored, "logprob_token_ids")
    draws = sampling(request, tokenizer, bounds)
    ends = stop_ids(request, tokenizer, bounds)
    made: list[TokenSequence] = []
    for prompt in prompts:
        bounds.check_length(prompt)
        room = bounds.room(len(prompt), max_tokens)
        for _ in range(request.n or 1):
            made.append(
                TokenSequence(
                    prompt=prompt,
                    sampling=draws,
                    max_tokens=room,
                    min_tokens=min(request.min_tokens or 0, room),
                    stop_ids=ends,
                    choice=len(made),
                    logprobs=max(logprobs, -1 if request.prompt_logprobs is None else request.prompt_logprobs),
                    scored=scored,
                    prompt_logprobs=prompt_logprobs or request.prompt_logprobs is not None,
                    grammar=grammar,
                    marks=list(marks),
                )
            )
    return made
