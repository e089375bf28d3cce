"""Grammar rows draw texts of their grammar, end properly, resume where they were, and fail alone."""

import json
from concurrent.futures import Future

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from driving import Rig, knowing, prompt, row
from tokenizers import Tokenizer

from loadtests import zoo
from server.engine.constraints import Grammars, Matcher
from server.grammar.build import answer
from server.ipc.sequence import MAX_GRAMMAR_SIZE, Grammar
from server.text.tokenizer import Tokenizer as ServerTokenizer

END = 2  # the tokenizer's <|im_end|> and the model's eos
PADDED = 2100  # logits beyond the tokenizer's 2,048 ids

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
SCHEMAS = [
    POINT,
    {"enum": ["red", "green", "blå"]},
    {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 2, "maxItems": 3},
    {"type": "array", "items": POINT, "minItems": 1, "maxItems": 1},
    {"type": "string", "maxLength": 6},
    {"const": {"a": [None, 1.5]}},
]


def is_valid(value, schema):
    """Enough of JSON Schema for the schemas above."""
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if schema["type"] == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if schema["type"] == "array":
        inside = schema["minItems"] <= len(value) <= schema["maxItems"]
        return inside and all(is_valid(item, schema["items"]) for item in value)
    return value.keys() == {"x", "on"} and 0 <= value["x"] <= 99 and isinstance(value["on"], bool)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(zoo.TOKENIZER / "tokenizer.json"))


@pytest.fixture(scope="module")
def table():
    return msgspec.structs.replace(
        ServerTokenizer.load(zoo.TOKENIZER, trust_remote_code=False).token_table(), ends=[END]
    )


def opened(table, rows=PADDED):
    grammars = knowing(table) if table else Grammars(Future())
    grammars.rows = rows
    return grammars


@pytest.fixture(scope="module")
def grammars(table):
    made = opened(table)
    yield made
    made.close()


@pytest.fixture
def rig(monkeypatch):
    made = Rig("llama")
    padding = mx.full((1, 1, PADDED - 2048), 50.0)  # ids without a piece, which the model likes best of all
    plain = made.model.inner

    def padded(inputs, cache=None):
        logits = plain(mx.minimum(inputs, 2047), cache=cache)  # the embedding has no rows beyond; mlx would read on
        return mx.concatenate([logits, mx.broadcast_to(padding, (*logits.shape[:2], PADDED - 2048))], axis=-1)

    made.model.inner = padded
    return made


def constrained(grammars, seq, grammar, *, generated=(), stop_ids=(END,), max_tokens=60, **options):
    options = {"temperature": 1.0, "seed": seq} | options
    one = row(seq, prompt(3 + seq), generated=generated, grammar=grammar, stop_ids=list(stop_ids),
              max_tokens=max_tokens, **options)  # fmt: skip
    one.constraint = grammars.compile(one.sequence, list(generated)).result(20)
    return one


def test_finished_answers_of_a_random_model_are_valid_beside_free_rows(rig, grammars, tokenizer):
    rows = {seq: constrained(grammars, seq, answer(schema)) for seq, schema in enumerate(SCHEMAS)}
    batch = rig.batch()
    rig.join(batch, *rig.read(rows[0], rows[1], rows[2], row(90, prompt(9), max_tokens=30)))
    rig.step(batch, 3)
    rig.join(batch, *rig.read(rows[3], rows[4], rows[5]))
    rig.run(batch)
    assert not rig.failed
    for seq, schema in enumerate(SCHEMAS):
        assert rig.finish[seq] == "stop"
        assert rig.tokens[seq][-1] == END
        assert is_valid(json.loads(tokenizer.decode(rig.tokens[seq][:-1])), schema)
    assert min(rig.tokens[90]) >= 2048, "a free row is free"


def test_a_greedy_row_is_constrained_too_and_a_lone_one(rig, grammars, tokenizer):
    one = constrained(grammars, 0, answer(POINT), temperature=0.0)
    batch = rig.batch()
    batch.join(rig.read(one))
    rig.run(batch)
    assert is_valid(json.loads(tokenizer.decode(rig.tokens[0][:-1])), POINT)


def test_a_resumed_row_goes_on_where_it_was(rig, grammars):
    whole, cut = (constrained(grammars, 7, answer(SCHEMAS[3])) for _ in range(2))
    batch = rig.batch()
    batch.join(rig.read(whole))
    rig.run(batch)
    text = rig.tokens.pop(7)
    rig.finish.clear()
    cut = constrained(grammars, 7, answer(SCHEMAS[3]), generated=text[:6])
    batch.join(rig.read(cut))
    rig.run(batch)
    assert rig.tokens[7] == text[6:]


def test_a_resume_with_tokens_that_the_grammar_forbids_is_refused(grammars):
    with pytest.raises(ValueError, match="satisfy"):
        constrained(grammars, 0, answer(POINT), generated=[77, 78])


def test_a_grammar_that_does_not_compile_says_why_in_one_line(grammars):
    with pytest.raises(ValueError, match="Expected token") as caught:
        constrained(grammars, 0, Grammar("start: ("))
    assert "\n" not in str(caught.value)


def test_a_grammar_beyond_the_limit_fails_its_row(grammars):
    numbers = range(MAX_GRAMMAR_SIZE)
    rules = "\n".join(f'a{number}: "{number}"' for number in numbers)
    with pytest.raises(ValueError, match="too big"):
        constrained(grammars, 0, Grammar(f"start: {' | '.join(f'a{number}' for number in numbers)}\n{rules}"))


def allowed(matcher):
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def matcher_after(grammars, tokenizer, text, **options):
    one = constrained(grammars, 0, answer(SCHEMAS[1]), **options)
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        one.constraint.accept(token)
    return one.constraint


def test_ids_without_a_piece_are_never_allowed(grammars):
    free = constrained(grammars, 0, Grammar("start: /(?s:.*)/"))
    assert max(allowed(free.constraint)) < 2048
    assert len(allowed(free.constraint)) > 1500


def test_only_the_rows_own_stop_ids_end_a_complete_text(grammars, tokenizer):
    assert allowed(matcher_after(grammars, tokenizer, '"red"')) == {END}
    assert allowed(matcher_after(grammars, tokenizer, '"red"', stop_ids=[77, 2000])) == {77, 2000}
    assert END not in allowed(matcher_after(grammars, tokenizer, '"re', stop_ids=[END]))


def test_the_first_requests_stop_ids_are_not_taken_for_the_models_end(table, tokenizer):
    """A stop id that is an ordinary token must not be lost to every later grammar."""
    grammars = opened(table)
    quote = tokenizer.encode('"', add_special_tokens=False).ids[0]
    constrained(grammars, 0, answer(SCHEMAS[1]), stop_ids=[quote])
    assert allowed(matcher_after(grammars, tokenizer, '"red')) >= {quote}
    assert allowed(matcher_after(grammars, tokenizer, '"red"')) == {END}
    grammars.close()


def test_a_text_that_may_end_or_go_on_allows_both(grammars, tokenizer):
    one = constrained(grammars, 0, Grammar("start: /[0-9]+/"))
    one.constraint.accept(tokenizer.encode("1", add_special_tokens=False).ids[0])
    both = allowed(one.constraint)
    assert END in both
    assert len(both) > 10
    one.constraint.accept(END)


def test_a_row_without_stop_ids_fills_up_with_the_end_id_once_its_text_is_complete(rig, grammars, tokenizer):
    one = constrained(grammars, 0, answer(SCHEMAS[1]), stop_ids=(), max_tokens=20)
    batch = rig.batch()
    batch.join(rig.read(one))
    rig.run(batch)
    assert (rig.finish, rig.failed) == ({0: "length"}, {})
    first = rig.tokens[0].index(END)
    assert set(rig.tokens[0][first:]) == {END}
    assert is_valid(json.loads(tokenizer.decode(rig.tokens[0][:first])), SCHEMAS[1])


def test_min_tokens_does_not_starve_a_complete_text(rig, grammars):
    one = constrained(grammars, 0, answer(SCHEMAS[1]), min_tokens=30, max_tokens=40)
    batch = rig.batch()
    batch.join(rig.read(one))
    rig.run(batch)
    assert (rig.finish, rig.failed) == ({0: "stop"}, {})


def test_a_token_that_is_not_allowed_is_an_error_in_one_line(grammars, tokenizer):
    matcher = matcher_after(grammars, tokenizer, '"re')
    with pytest.raises(ValueError, match="satisfy") as caught:
        matcher.accept(100)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="satisfy"):
        matcher.mask()
    assert isinstance(matcher, Matcher)


def test_an_engine_that_does_not_know_its_tokens_fails_the_row_and_not_itself():
    grammars = opened(None)
    with pytest.raises(ValueError, match="what the model's tokens say"):
        constrained(grammars, 0, answer(POINT))
    grammars.close()
