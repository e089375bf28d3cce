"""Results of calls, in the order of the calls.

Owns that order. Many templates show no ids, so that the model takes the first result for that of the first call;
clients that run calls at once send results as they come. Runs in the server's worker thread; pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from server.text.templates.turn import Message

_RESULTS = ("tool", "function")


def in_call_order(messages: Iterable[Message]) -> Iterator[Message]:
    """The messages, results behind calls sorted as the calls are. A result whose id no call has comes last."""
    order: dict[str, int] = {}  # of the calls that wait for results
    results: list[Message] = []
    role = ""
    for message in messages:
        if message["role"] in _RESULTS:
            results.append(message)
            role = message["role"]
            continue
        yield from _sorted(results, order)
        results = []
        if message["role"] != "assistant" or role != "assistant":
            order = {}
        for call in message.get("tool_calls") or ():
            order.setdefault(call.get("id") or "", len(order))
        role = message["role"]
        yield message
    yield from _sorted(results, order)


def _sorted(results: list[Message], order: dict[str, int]) -> list[Message]:
    return sorted(results, key=lambda result: order.get(result.get("tool_call_id") or "", len(order)))
