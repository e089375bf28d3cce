"""A real server over a real engine whose model says scripts, for the tests of every protocol.

`loadtests.zoo.scripted` writes the model; a turn's pieces are tokens, so what is cut where is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtests import harness
from loadtests.zoo import scripted

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"key": "oslo"}}\n</tool_call>'
SCRIPTS: dict[str, list[list[str]]] = {
    "dd": [["Hello", " there,", " friend."]],
    # A thought, words, a call; then another thought and the end.
    "ab": [
        ["<think>", "I look", " it up.", "</think>", "One", " moment.", *CALL.partition("look_up")],
        ["<think>I have", " it now.", "</think>It", " is", " Oslo."],
    ],
    # Long enough to be struck in the middle.
    "lo": [[f" word{n}" for n in range(120)]],
}


@contextmanager
def scripted_server(
    folder: Path, scripts: scripted.Scripts | None = None, *, strict: bool = True, **options: object
) -> Iterator[harness.Server]:
    """A server on a free port; `options` are those of `marathon serve`."""
    model = scripted.write(folder / "model", scripts or SCRIPTS, strict=strict)
    with harness.marathon(model, folder / "log", **{"spare_engine": False} | options) as server:
        yield server
