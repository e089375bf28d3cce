"""Text → token ids, with control tokens only where they may be.

Owns the border between text that a user typed and text that structures a prompt: `Shield` marks what looks like a
special token in typed text, `Encoder` turns it into ordinary tokens. Runs in the server's worker thread. Never renders
a template, never touches MLX.

A shielded text has an invisible mark at every character that could help to spell a control token. Templates may
trim, split and join such texts as they like. Where marks are left in the end, the text is encoded by a copy of the
tokenizer that matches no special token at all; the true ones are put to it as stand-ins. So the text between two true
ones is one run for the tokenizer, as if the special token it spells didn't exist.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

from server.errors import ContextLengthError
from server.text.tokens.encode_cache import EncodeCache, common_prefix, may_cut
from server.text.tokens.least import Least
from server.text.tokens.pieces import PIECE, Cuts, measured
from server.text.tokens.vocabulary import Vocabulary
from server.text.tokens.words import any_of

# Code points that Unicode reserves for a program's own use; in foreign text they are replaced, like lone surrogates.
_FOREIGN = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # around a stand-in's number
_BEHIND, _BEFORE = "\ufdd2", "\ufdd4"  # marks of typed text
_MARKS = re.compile(f"[{_BEHIND}{_BEFORE}]")
PROBE = "\ufdd3"  # a text that no message contains, for finding a message's place in a rendered prompt


def clean(text: str) -> str:
    """Text that can be encoded as UTF-8 and holds none of our marks."""
    return _FOREIGN.sub("\ufffd", text)


class Shield:
    """Finds what spells a special token. Immutable."""

    def __init__(self, specials: Sequence[str]) -> None:
        words = list(filter(None, specials))
        self.pattern = re.compile(f"{any_of(words)}(?!{_BEHIND})")  # the look-ahead is for words of one character
        self._broken = {word: "".join(char + _BEHIND for char in word) for word in words}
        self._longest = max(map(len, words), default=0)
        self._beginnings = {word[:n] for word in words for n in range(1, len(word))}
        self._endings = {word[n:] for word in words for n in range(1, len(word))}

    def hide(self, text: str) -> str:
        """`text` with every special token in it broken, and with edges that can't complete one next door."""
        marked = self.pattern.sub(lambda match: self._broken[match[0]], clean(text))
        inner = marked.strip()  # templates trim
        head, _, tail = marked.partition(inner) if inner else ("", "", marked)
        reach = range(1, min(self._longest, len(inner) + 1))
        before = ""
        if any(inner[:n] in self._endings for n in reach):
            before = _BEFORE
        after = ""
        if any(inner[-n:] in self._beginnings for n in reach):
            after = _BEHIND
        return f"{head}{before}{inner}{after}{tail}"

    @staticmethod
    def shown(text: str) -> str:
        """The text that was hidden."""
        return _MARKS.sub("", text)

    def hide_all(self, value: Any) -> Any:
        """`hide` for every string in a JSON value, keys included."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {self.hide_all(key): self.hide_all(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide_all(item) for item in value]
        return value


class Encoder:
    """Encodes with one Hugging Face tokenizer, which it leaves as it is.

    Attributes:
        control: the control tokens' texts: those of the special tokens, and of others that structure a chat.
        shield: what hides control tokens in typed text.
        opening: ids that the tokenizer puts before every bare text, such as a begin-of-sequence token.
    """

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary, markers: frozenset[int] = frozenset()) -> None:
        """`markers`: added tokens that are control although they aren't special."""
        self._tokenizer = tokenizer
        self._control = (vocabulary.special | markers) - {tokenizer.unk_token_id}
        added = tokenizer.added_tokens_decoder
        control = vocabulary.special | markers
        self._entries = {i: entry for i, entry in added.items() if i in control}
        self._ids = {entry.content: i for i, entry in self._entries.items()}
        self._stand_ins = {content: _stand_in(i) for content, i in self._ids.items()}
        self.control = frozenset(self._ids)
        self.shield = Shield(list(self._ids))
        self.backend = backend(tokenizer)
        self._cuts = Cuts(self.backend, vocabulary.spellings)
        self._least = Least(self.backend, vocabulary.spellings)
        # A normalizer can make a special token of text that isn't spelled like one.
        named = any(entry.normalized for entry in self._entries.values())
        self._always_guard = named and _normalizes(self.backend)
        self.opening = self._find_opening()

    def encode(self, text: str, *, special: bool, bos: bool, most: int | None = None) -> list[int]:
        """Ids of a bare text; what spells a special token in it is one only when `special`. `most`: see below."""
        ids, _ = self.encode_marked(clean(text) if special else self.shield.hide(text), most=most)
        if bos and ids[:1] != self.opening[:1]:
            return [*self.opening, *ids]
        return ids

    def encode_marked(
        self, text: str, positions: Sequence[int] = (), *, most: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids of a text whose typed parts are shielded, and how many of them lie wholly before each position.

        `most`: tokens that there is room for. Raises ContextLengthError for a text that is far too long for them,
        before it is read to its end.
        """
        marked = self._always_guard or _MARKS.search(text) is not None
        if most is not None and len(text) > PIECE:
            self.check_length(_MARKS.sub("", text) if marked else text, most)
        if marked:
            return self._encode_guarded(text, positions, most) or self._encode_in_bits(text, positions)
        if self.backend is None:
            return self._encode_in_bits(text, positions)
        ids, ends = self.cache.encode(text, most)
        return ids, [bisect_right(ends, position) for position in positions]

    def check_length(self, text: str, most: int) -> None:
        """Raises ContextLengthError for a long text that has too many tokens whatever they are."""
        if len(text) <= max(PIECE, most):
            return
        if self.backend is not None and (fewest := self._least.tokens(text)) > most:
            raise ContextLengthError.of(fewest, most, at_least=True)

    def _encode_guarded(
        self, text: str, positions: Sequence[int], most: int | None
    ) -> tuple[list[int], list[int]] | None:
        """None when the tokenizer can't be copied, or makes control tokens of plain text nevertheless."""
        if self._guard is None:
            return None
        guard, true_ids = self._guard
        places = [len(self._with_stand_ins(text[:position])) for position in positions]
        ids, ends = measured(guard, self._cuts, self._with_stand_ins(text), most)
        if not self._control.isdisjoint(set(ids) - true_ids.keys()):  # the copy counts its added tokens otherwise
            return None
        return [true_ids.get(token, token) for token in ids], [bisect_right(ends, place) for place in places]

    def _encode_in_bits(self, text: str, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """The text cut at each mark: borders that the tokenizer wouldn't choose, but no control token."""

        def whole(text: str) -> list[int]:
            bits = (self._tokenizer.encode(bit, add_special_tokens=False) for bit in _MARKS.split(text) if bit)
            return [token for bit in bits for token in bit]

        ids = whole(text)
        return ids, [common_prefix(ids, whole(text[:position])) for position in positions]

    def _with_stand_ins(self, text: str) -> str:
        return _MARKS.sub("", self.shield.pattern.sub(lambda match: self._stand_ins[match[0]], text))

    @cached_property
    def cache(self) -> EncodeCache:
        encode = partial(measured, self.backend, self._cuts)
        plain = {i: e for i, e in self._entries.items() if not (e.lstrip or e.single_word or e.normalized)}
        cuts = {token: entry.content for token, entry in plain.items() if may_cut(encode, entry.content, token)}
        longest = max((len(entry.content) for entry in self._tokenizer.added_tokens_decoder.values()), default=0)
        return EncodeCache(encode, cuts, longest)

    @cached_property
    def _guard(self) -> tuple[Any, dict[int, int]] | None:
        """The copy that matches no control token, and which of its ids mean others. The model itself is shared: only
        the added tokens differ."""
        import tokenizers

        if self.backend is None:
            return None
        copy = tokenizers.Tokenizer(self.backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (used := getattr(self.backend, part)) is not None:
                setattr(copy, part, used)
        added = self.backend.get_added_tokens_decoder()
        names = {i: _stand_in(i) if i in self._entries else entry.content for i, entry in added.items()}
        copy.add_tokens([_renamed(entry, names[i]) for i, entry in sorted(added.items())])
        vocabulary: Any = copy.token_to_id  # every name is one by now
        true_ids = {vocabulary(name): i for i, name in names.items()}
        strangers = (i for i, true in true_ids.items() if i != true and self.backend.model.id_to_token(i) is not None)
        if next(strangers, None) is None:
            return (copy, true_ids)
        return None

    def _find_opening(self) -> list[int]:
        bare = self._tokenizer.encode("a", add_special_tokens=False)
        full = self._tokenizer.encode("a")
        starts = (n for n in range(len(full)) if full[n : n + len(bare)] == bare)
        return list(full[: next(starts, 0)])


def _stand_in(token: int) -> str:
    return f"{_OPEN}{token}{_CLOSE}"


def _renamed(entry: Any, name: str) -> Any:
    """An added token under another name, which no normalizer touches; the same one under its own."""
    import tokenizers

    if name == entry.content:
        return tokenizers.AddedToken(
            name, lstrip=entry.lstrip, rstrip=entry.rstrip, normalized=entry.normalized, single_word=entry.single_word
        )
    return tokenizers.AddedToken(name, lstrip=entry.lstrip, rstrip=entry.rstrip, normalized=False)


def _normalizes(backend: Any) -> bool:
    normalizer = None
    if backend is not None:
        normalizer = backend.normalizer
    return normalizer is not None and json.loads(normalizer.__getstate__()).get("normalizers") != []


def backend(tokenizer: Any) -> Any:
    """The Rust tokenizer, when the Python one adds nothing to it."""
    from transformers import PreTrainedTokenizerBase

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(tokenizer).encode is not PreTrainedTokenizerBase.encode:
        return None
    backend.no_truncation()
    backend.no_padding()
    return backend
