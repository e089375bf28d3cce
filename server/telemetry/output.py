"""What a command prints, and how it ends where that can't be written.

Owns the standard output of a command while it runs. Runs in the main thread of a short-lived process. Never catches
anything but a failure to write.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from server.errors import StartupError

EXIT_CLOSED = 128 + signal.SIGPIPE  # what a shell reports of programs that end as soon as `head` has enough


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Let nothing printed in this context get lost unnoticed, to its last byte.

    Raises StartupError where it can't be written, and SystemExit, which needs no words, where its reader has gone.
    Neither is an OSError, which argparse ignores and commands take for a failure of their own files.
    """
    output = Output(sys.stdout or NoOutput())
    with contextlib.redirect_stdout(cast(TextIO, output)):
        try:
            yield
        finally:
            output.flush()


class NoOutput(io.TextIOBase):
    """The standard output of a process that was started without one."""

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


class Output:
    """A text stream that says what became of a write; all else is the stream's own."""

    def __init__(self, stream: TextIO | NoOutput) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._judged():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._judged():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._discard()
            raise SystemExit(EXIT_CLOSED) from None
        except OSError as error:
            self._discard()
            raise StartupError(f"standard output can't be written: {error.strerror}") from None

    def _discard(self) -> None:
        """Lead what is still buffered nowhere: Python would try it again at its end, and complain."""
        with contextlib.suppress(OSError):
            place = self._stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, place)
            os.close(nowhere)
