"""A text that begins like an earlier one gets the ids that it would get alone, whatever the tokenizer."""

import pytest
import small_tokenizers as small
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from server.text.tokenizer import Tokenizer
from server.text.tokens import encode_cache
from server.text.tokens.encode_cache import EncodeCache, may_cut

EAGER = AddedToken("<eat>", lstrip=True, normalized=False, special=True)  # takes the blanks before it
GREEDY = AddedToken("<more>", rstrip=True, normalized=False, special=True)
LONGER = AddedToken("<|im_end|>!?!?!?!?", normalized=False)


@pytest.fixture(scope="module", params=["bytes", "pieces", "words"])
def encoder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    ends = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    make, fields = {
        "bytes": (small.byte_level(EAGER, GREEDY, LONGER), {"eos_token": "<|im_end|>"}),
        "pieces": (small.pieces(EAGER, GREEDY), ends),
        "words": (small.whole_words, {"unk_token": "[UNK]", "eos_token": "[END]"}),
    }[request.param]
    small.write(folder, make if callable(make) else lambda: make, None, **fields)
    return Tokenizer.load(folder, trust_remote_code=False).encoder


def alone(encoder, text):
    encoding = encoder.backend.encode(text, add_special_tokens=False)
    return encoding.ids, [end for _, end in encoding.offsets]


BITS = ["<|im_start|>", "<|im_end|>", "<|im_end|>!?!?!?!?", "<eat>", "<more>", "</s>", "<s>", "[END]", "<|im_"]
BITS += ["!?", "!?!?!?!", " ", "\n", "the quick", " fox", "é", "🎉", "user\n", "12"]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_conversations_that_grow_fork_and_shorten_get_the_ids_that_they_get_alone(encoder, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_cache, "SHORTEST", 0)
        patch.setattr(encode_cache, "MOST", 4)
        patch.setattr(encode_cache, "MOST_CHARACTERS", 600)
        known = encoder.__dict__.pop("cache", None) or encoder.cache
        memory = EncodeCache(lambda text, most=None: alone(encoder, text), known.cuts, known.longest)
        said = ""
        for _ in range(8):
            kept = data.draw(st.integers(0, len(said)))
            said = said[: data.draw(st.sampled_from([kept, len(said)]))]
            said += "".join(data.draw(st.lists(st.sampled_from(BITS), max_size=12)))
            assert memory.encode(said) == alone(encoder, said)


def test_only_the_end_of_a_grown_text_is_encoded(encoder, monkeypatch):
    monkeypatch.setattr(encode_cache, "SHORTEST", 0)
    asked = []

    def encode(text, most=None):
        asked.append(text)
        return alone(encoder, text)

    end = next(iter(encoder.cache.cuts.values()))
    memory = EncodeCache(encode, encoder.cache.cuts, encoder.cache.longest)
    turns = [f"the fox {i}{end} says {i}{end} " for i in range(30)]
    for i in range(1, 31):
        memory.encode("".join(turns[:i]))
    assert max(len(text) for text in asked[2:]) < 4 * len(turns[0])
    memory.encode("".join(turns[:5]) + "else")
    assert asked[-1].endswith("else")
    assert len(asked[-1]) < 3 * len(turns[0])


def test_what_is_kept_is_bounded(encoder, monkeypatch):
    memory = EncodeCache(lambda text, most=None: alone(encoder, text), encoder.cache.cuts, 5)
    monkeypatch.setattr(encode_cache, "MOST_CHARACTERS", 30_000)
    for i in range(100):
        memory.encode(f"{i} fox" * 1000)
        assert sum(len(text.text) for text in memory.texts) <= 30_000
    memory.encode("short")
    assert all(len(text.text) >= encode_cache.SHORTEST for text in memory.texts)
    assert len(memory.texts) <= encode_cache.MOST


def test_a_token_that_takes_the_blanks_before_it_is_no_place_to_cut(tmp_path):
    small.write(tmp_path, lambda: small.byte_level(EAGER, GREEDY), None, eos_token="<|im_end|>")
    encoder = Tokenizer.load(tmp_path, trust_remote_code=False).encoder
    cuts = encoder.cache.cuts.values()
    assert "<|im_end|>" in cuts
    assert "<eat>" not in cuts
    assert not may_cut(lambda text: alone(encoder, text), "<eat>", encoder.backend.token_to_id("<eat>"))
