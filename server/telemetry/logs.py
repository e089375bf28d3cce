"""How log lines look, in every process.

Owns the formatters and the set-up of Python's logging, done once at a process's start, and makes a record of whatever
else a process has to say: warnings, tracebacks that reach the top, and in JSON also what libraries write to stderr past
the log. Text lines are for people, JSON lines for machines; both show the facts that a record carries
(`extra={"facts": {...}}`). All of it goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
import warnings
from typing import Any, TextIO

from server.telemetry.progress_bar import CLEAR, is_terminal

OURS = ("marathon", "server")
STRAY = "stderr"  # logger of the lines that came past the log
_STRAY_SECONDS = 2.0  # between two states of a progress bar
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Lines(logging.Formatter):
    """`2026-01-31 12:00:01 info    Marathon serves … key=value`; what isn't the server process names itself."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        if process:
            self._process = f"{process}: "
        else:
            self._process = ""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        facts = "".join(f" {name}={plain(value)}" for name, value in facts_of(record).items() if value is not None)
        line = f"{clock} {record.levelname.lower():7} {self._process}{one_line(record.getMessage())}{facts}"
        if record.exc_info:
            return f"{line}\n{self.formatException(record.exc_info)}"
        return line


class TerminalLines(Lines):
    """The same where a progress bar may stand in the line that is written to."""

    def format(self, record: logging.LogRecord) -> str:
        return CLEAR + super().format(record)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the process unless it is the server, the record's facts."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        if process:
            self._process = {"process": process}
        else:
            self._process = {}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
            **facts_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def facts_of(record: logging.LogRecord) -> dict[str, Any]:
    facts = getattr(record, "facts", None)
    if isinstance(facts, dict):
        return facts
    return {}


def one_line(message: str) -> str:
    """A message as text lines have it: it may quote a client, who could end the line and forge another one."""
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], message)


def plain(value: object) -> str:
    """One word of a text line; control characters of a client's can't break the line."""
    if isinstance(value, float):
        text = f"{value:g}"
    else:
        text = str(value)
    if text.isprintable() and " " not in text:
        return text
    return json.dumps(text)


# ---------------------------------------------------------------- set-up
def configure(level: str = "info", form: str = "text", process: str = "") -> None:
    """Send this process's own lines, the warnings of libraries and what ends a thread to stderr in one form."""
    root = logging.getLogger()
    root.handlers[:] = [handler(form, sys.stderr, process)]
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())
    warnings.showwarning = _warn
    sys.excepthook = _uncaught
    sys.unraisablehook = _unraisable
    threading.excepthook = _thread_ended


class _LossyHandler(logging.StreamHandler[TextIO]):
    """Loses the lines that can't be written. Where stderr is passed on as `StrayLines` does, a complaint of them would
    come back as one more line to write, and so for ever."""

    def handleError(self, record: logging.LogRecord) -> None:  # logging has that name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def handler(form: str, stream: TextIO, process: str = "") -> logging.Handler:
    """Writes records to `stream`, as `text` or `json`."""
    made = _LossyHandler(stream)
    made.setFormatter(_lines(form, stream)(process))
    return made


def _lines(form: str, stream: TextIO) -> type[Lines | JsonLines]:
    if form == "json":
        return JsonLines
    if is_terminal(stream):
        return TerminalLines
    return Lines


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    logging.getLogger("py.warnings").warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)


def _uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("marathon").critical("the process ends: %s", kind.__name__, exc_info=(kind, error, trace))


def _unraisable(fault: Any) -> None:
    logging.getLogger("marathon").error("ignored in %r", fault.object, exc_info=fault.exc_value)


def _thread_ended(fault: Any) -> None:
    name = "unknown"
    if fault.thread:
        name = fault.thread.name
    logging.getLogger("marathon").error("the thread %s ends", name, exc_info=fault.exc_value)


# ---------------------------------------------------------------- lines past the log
class StrayLines:
    """Makes JSON of what this process, its libraries and its children write to the descriptor of stderr.

    A line that is a JSON object already, of an engine's log, passes unchanged. Used as a context: at its end whatever
    was written is out, and stderr is what it was before.
    """

    def __enter__(self) -> StrayLines:
        sys.stderr.flush()
        self._real = os.dup(2)
        self._out = open(self._real, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        root = logging.getLogger()
        self._before = list(root.handlers)
        self._handler = handler("json", self._out)
        root.handlers[:] = [self._handler]
        ours, theirs = os.pipe()
        os.dup2(theirs, 2)
        os.close(theirs)
        self._ours = ours
        self._bar_shown = 0.0
        self._thread = threading.Thread(target=self._read, name="stray-lines", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        sys.stderr.flush()
        os.dup2(self._real, 2)  # the pipe has no writer left unless a child lives on
        self._thread.join(1.0)
        logging.getLogger().handlers[:] = self._before
        if not self._thread.is_alive():
            with contextlib.suppress(OSError):
                self._out.close()
            os.close(self._real)

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._ours, 1 << 16):
            *lines, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n")
            for line in lines:
                self._pass_on(line)
            rest = self._pass_on_bar(rest)
        self._pass_on(rest)
        os.close(self._ours)

    def _pass_on(self, line: bytes) -> None:
        text = line.rpartition(b"\r")[2].decode("utf-8", "backslashreplace").strip()
        if not text:
            return
        if is_object(text):
            self._write(text)
        else:
            logging.getLogger(STRAY).warning("%s", text)

    def _write(self, line: str) -> None:
        self._handler.acquire()
        try:
            self._out.write(line + "\n")
            self._out.flush()
        except OSError:
            pass  # as in the handler
        finally:
            self._handler.release()

    def _pass_on_bar(self, rest: bytes) -> bytes:
        """A progress bar writes over its line again and again: its state is a line every two seconds."""
        shown, _, newest = rest.rpartition(b"\r")
        if shown and time.monotonic() - self._bar_shown > _STRAY_SECONDS:
            self._bar_shown = time.monotonic()
            self._pass_on(shown)
        return newest


def is_object(text: str) -> bool:
    """Whether a line is a JSON object."""
    try:
        return text.startswith("{") and isinstance(json.loads(text), dict)
    except ValueError:
        return False
