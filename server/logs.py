"""How log lines look.

Owns the formatters and the set-up of Python's logging, done once at start. Runs in the server process. Text lines are
for people, JSON lines for machines; both show the facts that a record carries (`extra={"facts": {...}}`).
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from server.settings import Settings


class Lines(logging.Formatter):
    """`12:00:01 info    Marathon serves … key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        facts = "".join(f" {name}={plain(value)}" for name, value in facts_of(record).items() if value is not None)
        line = f"{clock} {record.levelname.lower():7} {record.getMessage()}{facts}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message and the record's facts."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **facts_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def facts_of(record: logging.LogRecord) -> dict[str, Any]:
    facts = getattr(record, "facts", None)
    return facts if isinstance(facts, dict) else {}


def plain(value: object) -> str:
    """One word of a text line; control characters of a client's can't break the line."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def configure(settings: Settings) -> None:
    """Sends our own lines, and uvicorn's warnings, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.log_format == "json" else Lines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("marathon", "server"):
        logging.getLogger(name).setLevel(settings.log_level.upper())
