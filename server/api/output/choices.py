"""A request's answer while it forms.

Owns the state of each choice and the loop that reads news of them, the same for streamed and plain answers, so that
they can't differ. Runs on the event loop. Never decides what a chunk looks like: that is each protocol's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from server.ipc.sequence import TokenLogprobs, TokenSequence
from server.supervision.generation import Generation, GenerationDelta, GenerationHandle
from server.text.detokenizer import Answer, Content, Piece, Reasoning, TextState


@dataclass(slots=True)
class ScoredToken:
    """A token of the answer with its log probabilities. `in_text`: it is part of the answer's text, not of a thought, a
    call or a tag; None as long as it may become either."""

    token: int
    logprobs: TokenLogprobs
    in_text: bool | None = None


@dataclass(slots=True)
class Choice:
    """One answer of a request; mutable, owned by whatever reads its news.

    Attributes:
        generation: its timing, while a request waits for it.
        scored: tokens with log probabilities that no chunk has shown yet.
        undecided: of all scored ones, those that may still become text.
        ids: tokens that no chunk has had yet, where ids are asked for; with the one that ended the answer.
        begun: a chunk of it was sent.
    """

    index: int
    sequence: TokenSequence
    text: TextState
    generation: Generation | None = None
    finish: str | None = None
    cached: int = 0
    begun: bool = False
    scored: list[ScoredToken] = field(default_factory=list)
    undecided: list[ScoredToken] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    keeps_ids: bool = False
    prompt_logprobs: list[TokenLogprobs] | None = None
    answer: Answer = field(default_factory=Answer)

    def take(self, delta: GenerationDelta) -> list[Piece]:
        """What the news adds for the client to see."""
        if delta.cached is not None:
            self.cached = delta.cached
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        before = self.text.tokens
        pieces = self._feed(delta)
        if self.keeps_ids:
            self.ids += delta.tokens[: self.text.tokens - before]
        if delta.finish is not None or self.text.stopped:
            rest = self.text.finish(cut=delta.finish == "length")
            self._decide(rest)
            pieces = joined(pieces, rest)
            self.finish = self._reason(delta.finish)
        return pieces

    def _reason(self, finish: str | None) -> str | None:
        """Say to a client why the answer ended; a stop string counts as the model's own end, and calls go before it."""
        stopped = self.text.stopped or finish == "stop"
        if not stopped:
            return finish
        if self.text.calls:
            return "tool_calls"
        return "stop"

    def _feed(self, delta: GenerationDelta) -> list[Piece]:
        """Tokens with log probabilities are read one by one, to know which are text."""
        if not delta.logprobs:
            return self.text.feed(delta.tokens)
        stops = self.sequence.stop_ids  # a drawn one ends the answer, whenever the end itself is sent
        pieces: list[Piece] = []
        for token, found in zip(delta.tokens, delta.logprobs, strict=True):
            if self.text.stopped:
                break
            if token not in stops:
                score = ScoredToken(token, self._with_own(token, found))
                self.scored.append(score)
                self.undecided.append(score)
            shown = self.text.feed([token])
            self._decide(shown)
            pieces = joined(pieces, shown)
        return pieces

    def _decide(self, shown: list[Piece]) -> None:
        """Scored tokens were text if there is text now, and none if there is something else, or none can come."""
        is_text = any(isinstance(piece, Content) for piece in shown)
        if not (shown or not self.text.in_text):
            return
        for score in self.undecided:
            score.in_text = is_text
        self.undecided.clear()

    def _with_own(self, token: int, found: TokenLogprobs) -> TokenLogprobs:
        """Where alternatives are named by the request, the drawn token is always one more."""
        named = self.sequence.scored
        if not named or token in named:
            return found
        return TokenLogprobs(found.logprob, sorted([(token, found.logprob), *found.top], key=lambda pair: -pair[1]))

    def take_ids(self) -> list[int]:
        ids = self.ids
        self.ids = []
        return ids

    def take_scored_text(self) -> list[ScoredToken]:
        """Those that are text; the others are dropped, but for those that may still become text."""
        scored = self.scored
        self.scored = [score for score in scored if score.in_text is None]
        return [score for score in scored if score.in_text]

    def take_scored(self) -> list[ScoredToken]:
        scored = self.scored
        self.scored = []
        return scored


def joined(first: list[Piece], second: list[Piece]) -> list[Piece]:
    """Pieces in a row, with text where they meet made one: a last token and what it lets go are one chunk."""
    if first and second:
        left = first[-1]
        right = second[0]
        for kind in (Content, Reasoning):
            if isinstance(left, kind) and isinstance(right, kind):
                return [*first[:-1], kind(left.text + right.text), *second[1:]]
    return first + second


class Reply:
    """All choices of one request, and the `GenerationHandle` that brings their news."""

    def __init__(
        self, live: GenerationHandle, texts: Sequence[TextState], keepalive: float, *, keeps_ids: bool = False
    ) -> None:
        self.live = live
        self.choices = [
            Choice(i, generation.sequence, text, generation, keeps_ids=keeps_ids)
            for i, (generation, text) in enumerate(zip(live.generations, texts, strict=True))
        ]
        self._open = len(self.choices)
        self._keepalive = keepalive
        self._shown = monotonic()

    @property
    def _patience(self) -> float:
        """Seconds until the line needs a sign of life."""
        return max(0.0, self._shown + self._keepalive - monotonic())

    def showed(self, anything: bool) -> bool:
        """Whether the line needs a sign of life, after news of which the client was shown something or nothing."""
        if not anything and self._patience:
            return False
        self._shown = monotonic()
        return not anything

    @property
    def is_open(self) -> bool:
        """There is more to come."""
        return self._open > 0

    async def news(self) -> list[tuple[Choice, list[Piece]]]:
        """Choices with their new pieces; [] when nothing has come for so long that the line needs a sign of life."""
        deltas = await self.live.read(self._patience or self._keepalive)
        return [(self.choices[index], self._take(index, delta)) for index, delta in deltas]

    def _take(self, index: int, delta: GenerationDelta) -> list[Piece]:
        choice = self.choices[index]
        pieces = choice.take(delta)
        if choice.finish is not None:
            self._end(choice)
        return pieces

    def _end(self, choice: Choice) -> None:
        self._open -= 1
        if choice.text.stopped:
            self.live.cancel(choice.index)
        if not self._open and any(one.finish == "tool_calls" for one in self.choices):
            self.live.outcome = "tool_calls"

    async def collect(self, keep: Callable[[Choice, list[Piece]], None]) -> None:
        """Reads all of it; `keep` is given each choice's news."""
        while self.is_open:
            for choice, pieces in await self.news():
                keep(choice, pieces)

    def usage(self, per_prompt: int = 1) -> dict[str, Any]:
        return usage_of(self.choices, per_prompt)


def usage_of(choices: Sequence[Choice], per_prompt: int) -> dict[str, Any]:
    """Token counts; the `per_prompt` choices of one prompt count it once."""
    firsts = choices[::per_prompt]
    prompt = sum(len(choice.sequence.prompt) for choice in firsts)
    completion = sum(choice.text.tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.text.reasoning_tokens for choice in choices)},
    }
