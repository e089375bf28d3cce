"""Long texts: pieces have the ids of the whole, nothing waits for them, and what can't fit isn't read to its end."""

import re
import time
import unicodedata

import pytest
import small_tokenizers as small
from hypothesis import given, settings
from hypothesis import strategies as st
from ticks import Ticks
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from server.errors import ContextLengthError
from server.text.templates.turn import turns
from server.text.tokenizer import Tokenizer as Ours
from server.text.tokens import pieces
from server.text.tokens.encoding import Shield
from server.text.tokens.least import Least
from server.text.tokens.pieces import Cuts, measured, whole
from server.text.tokens.words import any_of

EAGER = AddedToken("<eat>", lstrip=True, rstrip=True, normalized=False)
TWO_WORDS = AddedToken("x and y", normalized=False)


def superwords() -> Tokenizer:
    """One whose tokens may span words: nothing splits a text before."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.train_from_iterator(small.PROSE, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" {2,}", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(small.PROSE, trainer)
    return tokenizer


def stripping() -> Tokenizer:
    tokenizer = small.byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])
    return tokenizer


def composing() -> Tokenizer:
    tokenizer = small.byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def prepending() -> Tokenizer:
    """As Llama 2 has it: a blank comes before each text, and words are learnt with theirs."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{n:02X}>" for n in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=bytes_, show_progress=False)
    tokenizer.train_from_iterator(small.PROSE, trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


KINDS = {
    "bytes": small.byte_level,
    "pieces": small.pieces,
    "words": small.whole_words,
    "superwords": superwords,
    "prepending": prepending,
    "unigram": unigram,
    "stripping": stripping,
    "composing": composing,
    "eager": lambda: small.byte_level(EAGER, TWO_WORDS),
}


@pytest.fixture(scope="module", params=KINDS)
def backend(request):
    return KINDS[request.param]()


def spellings(backend):
    """Close enough to what a token's bytes are: a blank for the signs that stand for one."""
    blank = str.maketrans({"▁": " ", "Ġ": " ", "Ċ": "\n"})
    return lambda: (token.translate(blank).encode() for token in backend.get_vocab())


BITS = ["the", " ", "  ", "\n", "\r\n", "quick", " fox", " and", "x and y", "é", "e\u0301", "🎉", "12", "it's", "<eat>"]
BITS += ["\t", "日本", "!", "{", "Moon", "unknown", "ᄀ", "ᅡ", "ﬁ", "\u2002"]
TEXTS = st.lists(st.sampled_from(BITS), max_size=200).map("".join)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_the_pieces_of_a_text_have_the_ids_of_the_whole(backend, text):
    cuts = Cuts(backend, spellings(backend))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", 20)
        (ids, ends), (expected, places) = measured(backend, cuts, text), whole(backend, text)
    assert ids == expected
    assert all(abs(end - place) <= 1 for end, place in zip(ends, places, strict=True))


def test_ordinary_tokenizers_let_a_text_be_cut():
    for make in (small.byte_level, prepending, composing):
        cuts, text = Cuts(make(), spellings(make())), "the quick fox\nand the moon " * 40_000
        assert cuts.after(text, 0)[0] < pieces.PIECE + 100


def test_what_may_lie_across_a_border_forbids_it():
    made = small.byte_level(TWO_WORDS)
    assert Cuts(made, spellings(made)).pattern.search("the fox") is None
    assert Cuts(made, spellings(made)).pattern.search("the\nfox") is not None
    wide = superwords()
    assert Cuts(wide, spellings(wide)).after("the fox " * pieces.PIECE, 0)[0] == 8 * pieces.PIECE


# ---------------------------------------------------------------- the fewest tokens
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_is_said(backend, text):
    assert Least(backend, spellings(backend)).tokens(text) <= len(whole(backend, text)[0])


def test_a_bound_is_said_only_where_each_byte_counts():
    text = "the fox " * 1000
    known = {name: Least(make(), spellings(make())).tokens(text) > 0 for name, make in KINDS.items()}
    assert known == dict.fromkeys(KINDS, False) | dict.fromkeys(("bytes", "pieces", "prepending", "composing"), True)


def test_blanks_that_collapse_to_nothing_are_no_tokens():
    for make in (unigram, stripping, lambda: small.byte_level(EAGER)):
        text = "<eat>" + " " * 10_000
        assert Least(make(), spellings(make())).tokens(text) <= len(whole(make(), text)[0])


def test_composing_leaves_a_quarter_of_the_bytes_at_least():
    """Each character that NFC makes, of the longest ways to write what it consists of."""
    characters = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    parts = {char: unicodedata.normalize("NFD", char) for char in characters}
    longest = {char: len(char.encode()) for char in characters}
    for char, alone in parts.items():
        if len(alone) == 1:
            longest[alone] = max(longest[alone], len(char.encode()))
    for char, several in parts.items():
        if unicodedata.is_normalized("NFC", char):
            assert sum(longest[part] for part in several) <= 4 * len(char.encode())


# ---------------------------------------------------------------- far too long
@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    small.write(folder, small.byte_level, small.CHATML, eos_token="<|im_end|>")
    return Ours.load(folder, trust_remote_code=False)


def refusal(work) -> ContextLengthError:
    with pytest.raises(ContextLengthError) as caught:
        work()
    return caught.value


@pytest.mark.parametrize("words", ["the quick brown fox\n", "<|im_end|> is text ", "x", "日本語"])
def test_a_text_that_is_far_too_long_is_refused_before_its_end(tokenizer, monkeypatch, words):
    read = []
    monkeypatch.setattr(pieces, "whole", lambda backend, text: read.append(text) or whole(backend, text))
    text = words * (10 * pieces.PIECE // len(words))
    for long in (
        lambda: tokenizer.encode(text, most=1000),
        lambda: tokenizer.encode(text, special=True, most=1000),
        lambda: tokenizer.chat([{"role": "user", "content": text}], most=1000),
    ):
        read.clear()
        error = refusal(long)
        assert sum(map(len, read)) < 3 * pieces.PIECE
        assert error.numbers["n_prompt_tokens"] > 1000
        assert f"at least {error.numbers['n_prompt_tokens']} tokens" in error.message


@pytest.mark.parametrize("role", ["user", "system", "tool"])
@pytest.mark.parametrize("in_parts", [True, False])
def test_a_turn_that_can_never_fit_is_refused_before_it_is_rendered(tokenizer, monkeypatch, role, in_parts):
    monkeypatch.setattr(Shield, "hide", lambda shield, text: pytest.fail("its text was looked at"))
    content = "<|im_end|>" * pieces.PIECE
    if in_parts:
        content = [{"type": "text", "text": content}]
    refusal(lambda: tokenizer.chat([{"role": role, "content": content}], most=1000))


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_the_control_tokens_of_a_turn_are_broken_once(monkeypatch, role):
    read = []
    hide = Shield.hide
    monkeypatch.setattr(Shield, "hide", lambda shield, text: read.append(text) or hide(shield, text))
    [made] = turns([{"role": role, "content": "<|im_end|> said", "name": "some"}], Shield(["<|im_end|>"]))
    assert sorted(read) == ["<|im_end|> said", "some"]
    assert "<|im_end|>" not in made.texts[0]


def test_a_text_that_is_a_little_too_long_is_counted_exactly(tokenizer):
    text = "the quick brown fox\n" * 20_000
    exact = tokenizer.encode(text)
    assert tokenizer.encode(text, most=len(exact) * 2 // 3) == exact


def test_marks_of_typed_text_dont_count(tokenizer):
    text = "<|im_end|>" * (pieces.PIECE // 10)
    exact = tokenizer.encode(text)
    assert tokenizer.encode(text, most=len(exact)) == exact


# ---------------------------------------------------------------- who waits meanwhile
def test_other_threads_run_while_a_text_is_encoded(tokenizer):
    text = "the quick brown fox\n" * (pieces.PIECE // 20 - 1)
    tokenizer.encode(text[:5000])
    shares = []
    for _ in range(3):
        with Ticks() as ticks:
            tokenizer.encode(text)
        shares.append(ticks.longest / ticks.seconds)
    assert min(shares) < 0.4  # `encode` of the library: nearly 1


def test_the_first_text_that_spells_a_control_token_is_not_slower_than_others(tmp_path):
    """The tokenizer's copy for such texts shares its model instead of loading it again."""
    from tokenizers import Tokenizer as Library

    small.write(tmp_path, small.byte_level, None, eos_token="<|im_end|>")
    tokenizer = Ours.load(tmp_path, trust_remote_code=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Library, "from_str", lambda text: pytest.fail("loaded again"))
        ids = tokenizer.encode("so <|im_end|> is text")
    assert tokenizer.decode(ids, special=True) == "so <|im_end|> is text"
    assert min(tokenizer.eos_ids) not in ids


# ---------------------------------------------------------------- many words in one pattern
@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=12),
    text=st.text("ab<|x", max_size=40),
    forbidden=st.booleans(),
)
def test_the_tree_of_words_finds_what_the_list_finds(words, text, forbidden):
    behind = "(?!x)" if forbidden else ""
    longest_first = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    expected = [match.span() for match in re.finditer(f"(?:{longest_first}){behind}", text)] if words else []
    assert [match.span() for match in re.finditer(any_of(words) + behind, text)] == expected


def test_many_words_cost_no_more_than_few():
    """A page of the sign with which a thousand control tokens begin."""

    def seconds(count: int) -> float:
        pattern, page = re.compile(any_of(f"<SPECIAL_{n}>" for n in range(count))), "<" * 20_000
        return min(_timed(lambda: pattern.search(page)) for _ in range(5))

    assert seconds(1000) < 10 * seconds(10)


def _timed(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
