"""What a client may send, and how it learns what it may not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from serving import settings, tokenizer

from server.api.input import body, refusals
from server.api.input.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from server.api.input.sequences import Bounds, sampling, seed, stop_ids
from server.errors import InvalidValue, RequestError, UnsupportedParameter

USER = [{"role": "user", "content": "hi"}]
BOUNDS = Bounds(vocabulary=2048, context=4096)


def chat(**fields: Any) -> ChatRequest:
    return body.validate(ChatRequest, json.dumps({"messages": USER, **fields}).encode())


def fault(model: type[BaseModel], /, **fields: Any) -> InvalidValue:
    with pytest.raises(InvalidValue) as caught:
        body.validate(model, json.dumps(fields).encode())
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "messages[0].content[0].type"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stop": 7}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": [["5", 1]]}, "logit_bias"),
        ({"logit_bias": [[5, 101]]}, "logit_bias.5"),
        ({"n_predict": 0}, "n_predict"),
        ({"n_predict": -2}, "n_predict"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"reasoning_effort": "vast"}, "reasoning_effort"),
        ({"model": 5}, "model"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str) -> None:
    error = fault(ChatRequest, **{"messages": USER, **fields})
    assert (error.status, error.param) == (400, param)
    assert param in error.message


@pytest.mark.parametrize(("seed", "bound"), [(2**63, "less_than_equal"), (-(2**63) - 1, "greater_than_equal")])
def test_a_value_out_of_range_is_described_in_a_programs_words_too(seed: int, bound: str) -> None:
    assert fault(ChatRequest, messages=USER, seed=seed).message.endswith(f"({bound})")


def test_a_number_without_a_fraction_is_an_integer_however_it_is_spelled() -> None:
    for model, options in ((ChatRequest, {"messages": USER}), (CompletionRequest, {"prompt": "a"})):
        document = model.model_json_schema()["properties"]
        integers = {name for name, field in document.items() if {"type": "integer"}.items() <= _only(field).items()}
        assert len(integers) > 5
        for name in integers:
            sent = json.dumps({**options, name: 5.0, "top_p": 1.0}).encode()
            request = body.validate(model, sent)
            assert (getattr(request, name), type(getattr(request, name))) == (5, int)
            assert fault(model, **options, **{name: 5.5}).param == name


def _only(field: dict[str, Any]) -> dict[str, Any]:
    """What a field is when it isn't null."""
    return next((kind for kind in field.get("anyOf", []) if kind.get("type") != "null"), field)


def test_null_means_absent_in_every_field() -> None:
    nulls = dict.fromkeys(ChatRequest.model_fields)
    request = chat(**nulls | {"messages": USER})
    assert request.model_dump(exclude_none=True) == {"messages": USER}
    assert request.model_extra == {}


def test_null_does_not_stand_in_for_a_required_field() -> None:
    assert fault(ChatRequest, messages=None).param == "messages"
    assert fault(CompletionRequest, prompt=None).param == "prompt"


def test_unknown_fields_are_kept_aside() -> None:
    assert chat(frobnicate=1, top_a=None).model_extra == {"frobnicate": 1}


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]], [[1], "a", [2]]])
def test_a_prompt_has_four_forms_and_several_may_differ(prompt: Any) -> None:
    assert body.validate(CompletionRequest, json.dumps({"prompt": prompt}).encode()).prompt == prompt


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (5, "prompt"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([[1], 2], "prompt[1]"),
        ([True], "prompt[0]"),
        ([-1], "prompt[0]"),
        ([None], "prompt[0]"),
    ],
    ids=str,
)
def test_a_prompt_of_another_form_is_refused(prompt: Any, param: str) -> None:
    assert fault(CompletionRequest, prompt=prompt).param == param


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b'"x"', b"\x00\x01", b'{"a": \xff}', b'{"a": NaN}', b'{"a":', b"[" * 100_000]
)
def test_a_body_that_is_no_json_object_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidValue):
        body.parse(content)


def test_half_of_a_surrogate_pair_is_replaced_and_whole_pairs_are_kept() -> None:
    assert body.parse(rb'{"a\ud83d": ["x\ud83d", "\ud83d\ude00"]}') == {"a\ufffd": ["x\ufffd", "\U0001f600"]}


def test_a_deeply_nested_body_is_refused_not_a_crash() -> None:
    for depth in (5_000, 100_000):
        nest = b"[" * depth + b"]" * depth
        deep = b'{"messages": [{"role": "user", "content": "\\\\ud83d"}], "metadata": %b}' % nest
        with pytest.raises(InvalidValue, match="nested"):
            body.validate(ChatRequest, deep)


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_every_field_says_what_it_does(model: type[BaseModel]) -> None:
    schema = model.model_json_schema()
    for part in [schema, *schema.get("$defs", {}).values()]:
        for name, field in part.get("properties", {}).items():
            assert field.get("description"), f"{part['title']}.{name}"


# ---------------------------------------------------------------- what isn't offered
@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"audio": {"voice": "x"}}, UnsupportedParameter, "audio"),
        ({"modalities": ["text", "audio"]}, UnsupportedParameter, "modalities"),
        ({"web_search_options": {}}, UnsupportedParameter, "web_search_options"),
        ({"functions": [{"name": "f"}]}, UnsupportedParameter, "functions"),
        ({"function_call": {"name": "f"}}, UnsupportedParameter, "function_call"),
        ({"n": 17}, UnsupportedParameter, "n"),
        ({"use_beam_search": True}, UnsupportedParameter, "use_beam_search"),
        ({"top_logprobs": 2}, InvalidValue, "top_logprobs"),
        ({"stream_options": {}}, InvalidValue, "stream_options"),
        ({"stream": False, "stream_options": {"include_usage": True}}, InvalidValue, "stream_options"),
        ({"logit_bias": {"five": 1}}, InvalidValue, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, InvalidValue, "logit_bias"),
        ({"tools": [{"type": "custom"}]}, UnsupportedParameter, "tools[0]"),
        ({"tools": [{"type": "function"}]}, InvalidValue, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, InvalidValue, "tools[1]"),
        ({"stream": True, "prompt_logprobs": 1}, UnsupportedParameter, "prompt_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, InvalidValue, "add_generation_prompt"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            UnsupportedParameter,
            "messages[0].content[0]",
        ),
        ({"messages": [*USER, {"role": "tool", "content": "x"}]}, InvalidValue, "messages[1].tool_call_id"),
        ({"messages": [{"role": "user"}]}, InvalidValue, "messages[0].content"),
    ],
    ids=str,
)
def test_a_wish_that_cannot_be_fulfilled_is_refused(fields: dict[str, Any], kind: type, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        refusals.check_chat(chat(**fields), settings())
    assert type(caught.value) is kind
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"modalities": ["text"]},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        {"n": 16, "use_beam_search": False},
        {"logprobs": True, "top_logprobs": 0},
        {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "prediction": {}},
        {"messages": [{"role": "assistant"}, *USER]},
        {"messages": [{"role": "user", "content": []}]},
    ],
    ids=str,
)
def test_neutral_values_are_accepted(fields: dict[str, Any]) -> None:
    refusals.check_chat(chat(**fields), settings())


def test_every_wrong_key_of_a_bias_is_named() -> None:
    with pytest.raises(InvalidValue, match="'bad1', 'bad2'"):
        refusals.check_chat(chat(logit_bias={"bad1": 1, "bad2": 1, "3": 1}), settings())


def test_a_bias_of_an_id_with_thousands_of_digits_is_refused() -> None:
    for bias in ({"9" * 5000: 1}, [[int("9" * 4000), 1]], {"0" * 5000: 1}):
        with pytest.raises(InvalidValue, match="no token id"):
            refusals.check_chat(chat(logit_bias=bias), settings())


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"best_of": 2}, UnsupportedParameter),
        ({"suffix": "x"}, UnsupportedParameter),
        ({"prompt_embeds": ["AAAA"]}, UnsupportedParameter),
        ({"max_tokens": 0}, InvalidValue),
    ],
)
def test_completion_options_that_cannot_be_fulfilled_are_refused(fields: dict[str, Any], kind: type) -> None:
    request = CompletionRequest.model_validate({"prompt": "x", **fields})
    with pytest.raises(RequestError) as caught:
        refusals.check_completion(request, settings())
    assert type(caught.value) is kind


# ---------------------------------------------------------------- into the engine's terms
def draws(**fields: Any) -> Any:
    return sampling(GenerationRequest.model_validate(fields), tokenizer(), BOUNDS)


def test_open_values_are_filled_in() -> None:
    one = draws()
    assert (one.temperature, one.top_p, one.top_k, one.min_p, one.repetition_penalty) == (1.0, 1.0, 0, 0.0, 1.0)
    assert one.seed != draws().seed, "absent seeds are drawn anew"


def test_top_p_of_nothing_is_greedy() -> None:
    assert (draws(top_p=0).temperature, draws(top_p=0).top_p) == (0.0, 1.0)


def test_minus_one_draws_a_seed_as_if_none_were_given() -> None:
    assert draws(seed=-1).seed != draws(seed=-1).seed
    assert draws(seed=-2).seed == draws(seed=-2).seed


def test_every_other_int64_is_a_seed_of_its_own() -> None:
    seeds = [seed(value) for value in (0, 1, -2, 2**63 - 1, -(2**63))]
    assert len(set(seeds)) == 5
    assert all(0 <= value < 2**64 for value in seeds)


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_ids_beyond_the_vocabulary_are_refused(field: str) -> None:
    build, value = (sampling, {"2048": 1}) if field == "logit_bias" else (stop_ids, [2048])
    request = GenerationRequest.model_validate({field: value})
    with pytest.raises(InvalidValue, match="2048") as caught:
        build(request, tokenizer(), BOUNDS)
    assert caught.value.param == field


def test_ignore_eos_leaves_only_the_stops_that_were_asked_for() -> None:
    def ends(**fields: Any) -> list[int]:
        return stop_ids(GenerationRequest.model_validate(fields), tokenizer(), BOUNDS)

    assert set(ends(stop_token_ids=[9])) == {9, *tokenizer().eos_ids}
    assert ends(stop_token_ids=[9], ignore_eos=True) == [9]
    assert ends(ignore_eos=True) == []


def test_an_answer_is_cut_to_what_the_context_leaves() -> None:
    assert BOUNDS.room(4000, None) == 96
    assert BOUNDS.room(4000, 5000) == 96
    assert BOUNDS.room(4000, 5) == 5
    assert BOUNDS.room(5000, 5) == 1  # opening it is refused with both numbers


def test_validation_faults_speak_of_one_branch_of_a_union() -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": [1, 2, "x"]})
    assert len(caught.value.errors()) == 1


@pytest.mark.parametrize(
    "form", [{"type": "json_schema", "json_schema": {"schema": []}}, {"type": "json_object", "schema": 5}]
)
def test_a_schema_of_a_wrong_type_is_named_by_its_field(form: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        body.validate(ChatRequest, json.dumps({"messages": USER, "response_format": form}).encode())
    assert str(caught.value.param).endswith("schema")
