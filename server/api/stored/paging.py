"""Lists of which clients get a page at a time.

Owns the form of OpenAI's lists. Runs on the event loop; pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from server.errors import InvalidValue

Order = Literal["asc", "desc"]
MOST = 100  # items a page
USUAL = 20

Item = dict[str, Any]


def page(items: Sequence[Item], *, limit: int, order: Order, after: str | None) -> Item:
    """A page of items that are all at hand, given in ascending order. Raises for an `after` that isn't among them."""
    listed = list(items)
    if order == "desc":
        listed.reverse()
    if after is not None:
        places = [place for place, item in enumerate(listed) if item.get("id") == after]
        if not places:
            raise InvalidValue("after names no item of this list", param="after")
        listed = listed[places[0] + 1 :]
    return listing(listed[:limit], len(listed) > limit)


def listing(items: Sequence[Item], has_more: bool) -> Item:
    """The list object."""
    first, last = None, None
    if items:
        first = items[0].get("id")
        last = items[-1].get("id")
    return {"object": "list", "data": list(items), "first_id": first, "last_id": last, "has_more": has_more}
