"""The process in which large requests are prepared.

Owns nothing that outlives it: it loads the tokenizer once and then answers one request after the other, until its
socket closes. A request that takes too long ends it by an alarm, for no code here could, and so does memory that it
wouldn't give back: the server starts another one. It runs at a lower priority than streams, and never touches MLX.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import IO, Any

from server import settings
from server.api.context import Recipe, ServedModel, within_depth
from server.api.input import generic_tools
from server.api.input.large_requests import START_SECONDS, Packer, read
from server.api.output.respond import PreparedRequest
from server.errors import InternalError, RequestError
from server.telemetry import logs
from server.telemetry.footprint import footprint, give_back
from server.text.tokenizer import Tokenizer

NICENESS = 5
GROWN_BYTES = 256 << 20  # memory beyond what it had at first: then this answer is its last

log = logging.getLogger("marathon.api")


def loaded(recipe: Recipe) -> ServedModel:
    chosen = settings.from_json(recipe.settings)
    logs.configure(chosen.log_level, chosen.log_format, "large requests")
    tokenizer = Tokenizer.load(recipe.folder, trust_remote_code=chosen.trust_remote_code)
    return ServedModel(chosen, recipe.name, recipe.created, generic_tools.with_format(tokenizer))


def outcome(model: ServedModel, work: Callable[..., Any], content: bytes, more: Sequence[object]) -> tuple[str, Any]:
    """What came of one request: a result, or the error that refuses it."""
    try:
        result = within_depth(work, model, content, *more)
        return "done", result.lean() if isinstance(result, PreparedRequest) else result
    except RequestError as error:
        return "failed", error
    except Exception:
        log.exception("preparing a request of %d bytes failed", len(content))
        return "failed", InternalError("The server made a mistake; its log knows more.")


def serve(peer: socket.socket) -> None:
    """Answers until there are no more requests."""
    with peer, peer.makefile("rb") as requests, peer.makefile("wb") as answers:
        (recipe, seconds), _ = read(requests)
        signal.alarm(seconds + START_SECONDS)
        model = loaded(recipe)
        gc.freeze()
        gc.disable()  # looking through ten million new lists again and again takes longer than making them
        slim = footprint()
        while True:
            signal.alarm(0)
            (work, more), content = read(requests)
            signal.alarm(seconds)
            kind, value = outcome(model, work, content, more)
            del content
            _send(answers, (kind, value, _has_grown(slim)), model.tokenizer)
            del value
            _tidy()


def _has_grown(slim: int) -> bool:
    if footprint() <= slim + GROWN_BYTES:
        return False
    _tidy()
    return footprint() > slim + GROWN_BYTES


def _tidy() -> None:
    gc.collect()
    give_back()


def _send(answers: IO[bytes], answer: tuple[str, Any, bool], tokenizer: Tokenizer) -> None:
    Packer(answers, tokenizer).dump(answer)
    answers.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the socket to the server")
    peer = socket.socket(fileno=parser.parse_args().fd)
    os.nice(NICENESS)
    try:
        serve(peer)
    except (EOFError, OSError):  # the server has closed the socket, or has ended
        return


if __name__ == "__main__":
    main()
