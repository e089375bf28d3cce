"""A model that draws whatever its grammar allows: random walks through the masks of one request, without any model.

A request goes through the server's own preparation, its grammar through the engine's, its tokens through the answer's
text, so that a walk sees what a client of a model with random weights would see, at thousands of tokens a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from driving import knowing
from fake_engine import FakeEngine
from serving import build

from server.api import chat, completions
from server.api.input import generic_tools
from server.api.input.sequences import Bounds
from server.engine.constraints import Matcher
from server.grammar import checker
from server.ipc.sequence import TokenSequence
from server.text.detokenizer import Answer, TextState
from server.text.tokenizer import Tokenizer

STEPS = 300
OFTEN = 0.2


class InProcess:
    """Checks grammars here: what is walked ends no process."""

    fault = staticmethod(checker.fault)

    def close(self) -> None:
        pass


@dataclass
class Walk:
    """What came of one: `finish` is "stop" or "length"."""

    answer: Answer
    finish: str
    ids: list[int]


class Walker:
    """Walks for one tokenizer, whose model has `rows` logits. `likely` are texts that it says often where it may, as a
    trained model says the end of a thought."""

    def __init__(self, tokenizer: Tokenizer, rows: int | None = None, likely: Iterable[str] = ()) -> None:
        self.tokenizer = generic_tools.with_format(tokenizer)
        self.rows = rows or self.tokenizer.vocab_size
        self._likely = [self._ids(text) for text in likely]
        served = build(FakeEngine(vocab_size=self.rows), self.tokenizer)
        self._served = replace(served, checker=InProcess())  # type: ignore[arg-type]
        self._grammars = knowing(self.tokenizer.token_table())
        self._grammars.rows = self.rows

    def _ids(self, text: str) -> list[int]:
        """Control tokens where the model has them, and else letter by letter."""
        ids: list[int] = []
        for part in self.tokenizer.tags(self.rows).tag(text):
            letters = [self.tokenizer.encode(letter, bos=False) for letter in (part if isinstance(part, str) else ())]
            ids += [part] if isinstance(part, int) else [token for letter in letters for token in letter]
        return ids

    def close(self) -> None:
        self._grammars.close()

    def prepare(self, **fields: Any) -> Any:
        """Raises what refuses the request."""
        path = completions if "prompt" in fields else chat
        asked = fields if "prompt" in fields else {"messages": [{"role": "user", "content": "hi"}], **fields}
        return path.prepare(self._served, json.dumps(asked).encode(), Bounds(self.rows, 4096))

    def walks(self, count: int = 1, **fields: Any) -> list[Walk]:
        """Raises ValueError when a grammar can't go on, as it fails a row."""
        prepared = self.prepare(n=count, **fields)
        walks = [
            self._walk(*pair, seed) for seed, pair in enumerate(zip(prepared.sequences, prepared.texts, strict=True))
        ]
        resumed = self._grammars.compile(prepared.sequences[0], walks[0].ids[:-1])
        assert resumed.result(20), "the same tokens are taken again by a new engine"
        return walks

    def _walk(self, sequence: TokenSequence, text: TextState, seed: int) -> Walk:
        matcher = self._grammars.compile(sequence, []).result(20)
        random, answer = np.random.default_rng(seed), Answer()
        ids: list[int] = []
        said: list[int] = []  # the rest of a likely text that has been begun
        while len(ids) < STEPS and not (ids and ids[-1] in sequence.stop_ids):
            ids.append(self._draw(matcher, random, sequence.stop_ids, said))
            matcher.accept(ids[-1])
            answer.add(text.feed([ids[-1]]))
        answer.add(text.finish())
        return Walk(answer, "stop" if ids[-1] in sequence.stop_ids else "length", ids)

    def _draw(self, matcher: Matcher, random: np.random.Generator, stops: list[int], said: list[int]) -> int:
        allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
        assert len(allowed), "there is always something to draw"
        assert allowed.max() < self.rows, "and always something that the model has a logit for"
        if not said and random.random() < OFTEN:
            likely = [ids for ids in (*self._likely, stops[:1]) if ids and ids[0] in allowed]
            said[:] = likely[random.integers(len(likely))] if likely else []
        if said and said[0] in allowed:
            return said.pop(0)
        said.clear()
        return int(random.choice(allowed))
