"""Paths as a user writes them.

Owns what `~` means in one: no shell expands it in a settings file, in a service's environment or behind an `=`. Runs in
the process that the user began. Looks at nothing but the homes of users.
"""

from __future__ import annotations

import argparse
from pathlib import Path


class NoSuchHome(ValueError, argparse.ArgumentTypeError):
    """A path begins with the home of a user that this machine doesn't have. Both pydantic and argparse show the
    message."""


def user_path(written: str | Path) -> Path:
    """Put the home of the user in the place of `~`, and that of another in the place of `~name`. Raises NoSuchHome."""
    path = Path(written)
    try:
        return path.expanduser()
    except RuntimeError:
        raise NoSuchHome(f"no home is known for {path.parts[0]}; ./{path.parts[0]} is a folder of that name") from None
