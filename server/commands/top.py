"""What `marathon top` shows: a server's state, live.

Owns the screen and the connection, which is made again whenever the server goes away. Runs in the main thread of a
process that lasts until Ctrl-C.
"""

from __future__ import annotations

import shutil
import sys
import time

import httpx

from server.commands import status
from server.commands.remote import Remote, check, events, sentence
from server.status.feed import Report

SILENCE_SECONDS = 10.0  # without a report, after which the connection is made again
RETRY_SECONDS = 1.0
HOME = "\033[H"
CLEAR_LINE = "\033[K"
CLEAR_BELOW = "\033[J"


def watch(remote: Remote) -> int:
    """Show the server's state each second until Ctrl-C, then return 0.

    In a terminal each report takes the place of the last one; elsewhere it is one line. A server that isn't ready is
    waited for. Raises StartupError where it answers and refuses.
    """
    try:
        while True:
            _follow(remote)
            time.sleep(RETRY_SECONDS)
    except KeyboardInterrupt:
        return 0


def _follow(remote: Remote) -> None:
    """Show the reports of one connection until it ends."""
    try:
        with remote.client(SILENCE_SECONDS) as client, client.stream("GET", "/status/events") as response:
            if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                _say([f"{sentence(response)} It is asked again each second."])
                return
            check(response)
            for name, data in events(response):
                if name == "report":
                    _show(status.read(data, remote))
        _say([f"The server at {remote.url} has ended; it is asked again each second."])
    except httpx.HTTPError:
        _say([f"No server answers at {remote.url}; it is asked again each second."])


def _show(report: Report) -> None:
    if sys.stdout.isatty():
        _say(status.lines(report, coloured=status.is_coloured(sys.stdout)))
    else:
        _say([line(report)])


def line(report: Report) -> str:
    """Write a report on one line."""
    state = report.status
    moment = time.strftime("%H:%M:%S", time.localtime(state.time))
    rest = "; ".join(f"{name} {words}" for name, words in status.figures(state))
    return f"{moment} {report.verdict.title}; {rest}"


def _say(lines: list[str]) -> None:
    if not sys.stdout.isatty():
        print(*lines, sep="\n", flush=True)
        return
    size = shutil.get_terminal_size()
    # Each line is cleared behind its text, which flickers less than an empty screen in between. The title may hold
    # colours, which take no room, and is never cut.
    first, *others = lines[: size.lines - 1]
    shown = "".join(f"{text}{CLEAR_LINE}\n" for text in (first, *(other[: size.columns] for other in others)))
    print(f"{HOME}{shown}{CLEAR_BELOW}", end="", flush=True)
