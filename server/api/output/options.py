"""What an answer says besides its text.

Owns the fields that a request switches on: usage in every chunk, token ids, log probabilities of the prompt. Runs on
the event loop; pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.api.input.schema import GenerationRequest
from server.api.output.choices import Choice
from server.api.output.logprobs import LOWEST, Spelling, by_id
from server.api.output.sse import encode
from server.supervision.generation import Generation
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Extras:
    """Which of them one request wants.

    Attributes:
        top_logprobs: alternatives of each token of the answer, or None: no log probabilities.
        prompt_logprobs: the same of the prompt's tokens.
        timings: how long prompt and answer have taken.
        usage: the last event of a stream has the usage; `each_usage`: each chunk does.
    """

    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    timings: bool = False
    token_ids: bool = False
    names_ids: bool = False
    usage: bool = False
    each_usage: bool = False

    @classmethod
    def of(cls, request: GenerationRequest, top_logprobs: int | None) -> Extras:
        if top_logprobs is not None and request.logprob_token_ids:
            top_logprobs = len(request.logprob_token_ids) + 1  # with the drawn one
        options = request.stream_options
        usage = bool(options and options.include_usage)
        each = usage and bool(options and options.continuous_usage_stats)
        ids = bool(request.return_token_ids)
        named = bool(request.return_tokens_as_token_ids)
        return cls(top_logprobs, request.prompt_logprobs, bool(request.timings_per_token), ids, named, usage, each)

    def spelling(self, tokenizer: Tokenizer) -> Spelling:
        if self.names_ids:
            return by_id(tokenizer)
        return tokenizer.spell

    def ids(self, choice: Choice) -> dict[str, Any]:
        """Return the ids of the answer that no chunk has had yet."""
        if self.token_ids:
            return {"token_ids": choice.take_ids()}
        return {}

    def prompt_ids(self, choice: Choice) -> dict[str, Any]:
        if self.token_ids:
            return {"prompt_token_ids": choice.sequence.prompt}
        return {}

    def times(self, choice: Choice) -> dict[str, Any]:
        if self.timings and choice.generation is not None:
            return {"timings": timings(choice, choice.generation)}
        return {}

    def prompt_scores(self, choice: Choice, tokenizer: Tokenizer) -> list[dict[str, Any] | None] | None:
        """By id; nothing comes before the first token, so nothing is known of it."""
        if self.prompt_logprobs is None or not choice.sequence.prompt:
            return None
        pairs = zip(choice.sequence.prompt[1:], choice.prompt_logprobs or [], strict=True)
        return [None, *(self._alternatives(token, scores.logprob, scores.top, tokenizer) for token, scores in pairs)]

    def _alternatives(
        self, token: int, logprob: float, top: list[tuple[int, float]], tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """The likeliest ones and the token itself, whose rank is only known if it is among them."""
        ranks = {other: rank for rank, (other, _) in enumerate(top, 1)}
        shown = dict(top[: self.prompt_logprobs]) | {token: logprob}
        return {
            str(other): {
                "logprob": max(value, LOWEST),
                "rank": ranks.get(other),
                "decoded_token": tokenizer.spell(other)[0],
            }
            for other, value in shown.items()
        }


def timings(choice: Choice, times: Generation) -> dict[str, float]:
    """How long the prompt and the tokens so far have taken, in llama.cpp's words. An answer's time begins with its
    first token, so that one has no speed yet."""
    drawn = choice.text.tokens
    read = len(choice.sequence.prompt) - choice.cached
    prompt = times.first - times.submitted
    answer = times.last - times.first
    return {
        "cache_n": choice.cached,
        "prompt_n": read,
        "prompt_ms": prompt * 1000,
        "prompt_per_second": read / prompt if prompt > 0 else 0.0,
        "predicted_n": drawn,
        "predicted_ms": answer * 1000,
        "predicted_per_second": (drawn - 1) / answer if answer > 0 else 0.0,
    }


def usage_so_far(choice: Choice, completion: int) -> dict[str, int]:
    """Of one choice, in a chunk."""
    prompt = len(choice.sequence.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class ChunkFrame:
    """What is the same in every chunk of one stream, as bytes: a chunk is put together around its choice's news.

    Attributes:
        before_index: all that stands before the number of the choice.
        after_choice: all that stands behind its members, where the extras add nothing.
        has_extras: the extras add something.
    """

    def __init__(self, head: dict[str, Any], extras: Extras) -> None:
        self.before_index = b"data: " + encode(head)[:-1] + b',"choices":[{"index":'
        self.has_extras = extras.token_ids or extras.each_usage or extras.timings
        if extras.usage:
            self.after_choice = b'}],"usage":null}\n\n'
        else:
            self.after_choice = b"}]}\n\n"


def members(fields: dict[str, Any]) -> bytes:
    """Further members of a JSON object."""
    if fields:
        return b"," + encode(fields)[1:-1]
    return b""


def reason_of(finish: str | None) -> bytes:
    """Why a choice ended, as JSON."""
    if finish:
        return b'"%b"' % finish.encode()
    return b"null"
