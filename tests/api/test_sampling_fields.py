"""Penalties, bias, seeds and logprobs through HTTP and a real engine equal the plainest loop over the same model."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from driving import Rig, prompt, row
from penalty_reference import reference

from loadtests import harness

WARM = {"temperature": 0.9, "seed": 5}
COLD = {"temperature": 0.0}
WISHES: list[tuple[int, int, dict[str, Any]]] = [  # prompt's length, tokens, wishes
    (4, 16, {"repetition_penalty": 1.5, **COLD}),
    (12, 9, {"presence_penalty": 2.0, "frequency_penalty": 1.0, **WARM}),
    (30, 14, {"logit_bias": {9: 8.0, 11: 8.0, 13: -100.0}, **WARM}),
    (7, 12, COLD),
    (57, 10, {"frequency_penalty": -1.5, "repetition_penalty": 0.7, **COLD}),
]


def body(length: int, tokens: int, wishes: dict[str, Any], number: int) -> dict[str, Any]:
    bias = {str(token): value for token, value in wishes.get("logit_bias", {}).items()}
    asked = {"prompt": prompt(length), "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
    return asked | wishes | {"logit_bias": bias, "logprobs": 4, "prompt_logprobs": 2 if number % 2 else None}


def plain_loop(length: int, tokens: int, wishes: dict[str, Any]) -> tuple[list[int], list[Any]]:
    one = row(0, prompt(length), max_tokens=tokens, **wishes)
    return Rig("llama").alone(one, reference(one.sequence))


def assert_equal(answer: dict[str, Any], length: int, drawn: list[int], logits: list[Any]) -> None:
    choice = answer["choices"][0]
    assert choice["token_ids"] == drawn
    plain = [np.float64(line) - np.logaddexp.reduce(np.float64(line)) for line in logits]
    scores = choice["logprobs"]
    assert scores["token_logprobs"] == pytest.approx([line[token] for line, token in zip(plain, drawn, strict=True)],
                                                     abs=1e-3)  # fmt: skip
    for line, reported in zip(plain, scores["top_logprobs"], strict=True):
        assert sorted(reported.values(), reverse=True)[:1] == pytest.approx([line.max()], abs=1e-3)
    if (scored := choice["prompt_logprobs"]) is not None:
        assert scored[0] is None
        for token, entry in zip(prompt(length)[1:], scored[1:], strict=True):
            assert str(token) in entry
            assert 2 <= len(entry) <= 3
            assert max(entry.values(), key=lambda value: value["logprob"])["rank"] == 1


def test_what_is_asked_for_alone_and_in_an_uneven_batch_is_what_the_plain_loop_gives(tiny, tmp_path) -> None:
    async def ask(url: str) -> tuple[list[Any], list[Any]]:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            bodies = [body(*options, number) for number, options in enumerate(WISHES)]
            alone = [(await client.post("/v1/completions", json=one)).json() for one in bodies]
            together = await asyncio.gather(*[client.post("/v1/completions", json=one) for one in bodies])
            return alone, [answer.json() for answer in together]

    with harness.marathon(tiny("llama"), tmp_path / "log", prefix_cache=0, spare_engine=False) as server:
        alone, together = asyncio.run(ask(f"http://127.0.0.1:{server.port}"))
    for options, one, other in zip(WISHES, alone, together, strict=True):
        wanted = plain_loop(*options)
        assert_equal(one, options[0], *wanted)
        assert_equal(other, options[0], *wanted)
