"""What went wrong when a library fails to load a model, in words for who named the model.

Owns the reading of exceptions that mlx-lm and transformers raise over files that they don't expect: many are no
sentences but Python's own words for a key that isn't there. Runs in both processes; pure functions. Never loads
anything.
"""

from __future__ import annotations

import re

from server.errors import StartupError, one_line

_LACKS = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.*)")
_OF_PYTHON = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, UnicodeError)


def in_words(error: Exception, library: str) -> str:
    """`error`, which `library` raised over a model's files, as one line that doesn't end at a colon."""
    words = one_line(error)
    if isinstance(error, StartupError):
        return words
    if lacks := _LACKS.search(str(error)):
        names = re.findall(r"'(\w+)'", lacks[1])
        return f"config.json lacks {', '.join(names)}"
    if "trust_remote_code" in str(error):
        return "it brings Python code of its own, which is run with --trust-remote-code alone"
    if "Validation error for field" in str(error) or "rope_parameters" in str(error):
        return f"config.json: {words}"
    if isinstance(error, _OF_PYTHON):
        return f"{library} can't make sense of its files: {type(error).__name__}: {words}"
    return words
