"""Whether a user's grammar, as requests have it, allows a text."""

from __future__ import annotations

from llguidance import LLMatcher

from server.grammar import checker, user_grammar, walk

_NO_TOKENS = user_grammar.Tokens(lambda text: None, 256)


def accepts(lark: str, text: str) -> bool:
    """Whether `text` is a whole answer."""
    made = user_grammar.checked(lark, "grammar", _NO_TOKENS, checker.fault)
    matcher = LLMatcher(walk.tokenizer("")[0], LLMatcher.grammar_from_lark(made), log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    drawn = list(text.encode())
    return matcher.try_consume_tokens(drawn) == len(drawn) and matcher.is_accepting()
