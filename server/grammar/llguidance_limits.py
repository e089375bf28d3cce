"""What llguidance must not be given, for it wouldn't come back with an error, or not come back at all.

Owns the search of grammars for it. Runs in the server's worker thread; pure. Each hazard is one of llguidance 1.9's;
it may go from here once the test named after it passes without.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

# Compiling `multipleOf` takes time and memory with its digits: half a second at 100 003, for ever at 1 000 003.
MOST_MULTIPLE = 100_003
# A constant that is no 64-bit integer, or the lowest one, overflows the stack, and with it ends the process.
LOWEST = -9e18
HIGHEST = 2**63
_JSON = re.compile(r"%json\s*")
_JOINS = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if"})  # what can make two numbers bind one value


def hazard(lark: str) -> str:
    """What is dangerous in the JSON schemas of a grammar, in one line; empty if nothing is."""
    decoder = json.JSONDecoder()
    for place in _JSON.finditer(lark):
        try:
            schema, _ = decoder.raw_decode(lark, place.end())
            found = _lowest(schema) or _inexact(schema) or _multiples(schema)
        except RecursionError:
            return "it is nested too deeply"
        except ValueError:
            continue  # no JSON: llguidance will say so
        if found:
            return found
    return ""


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Every member of every object in a JSON value. A walk by recursion would take the square of its depth."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            yield from item.items()
            left += item.values()
        elif isinstance(item, list):
            left += item


def _lowest(schema: Any) -> str:
    for key, value in _members(schema):
        if key in ("const", "enum") and any(number < LOWEST for number in _numbers(value)):
            return f"{key} has a number below {LOWEST:g}"
    return ""


def _inexact(schema: Any) -> str:
    for key, value in _members(schema):
        if key in ("const", "enum"):
            for number in _numbers(value):
                if isinstance(number, int) and not _kept(number):
                    return f"{key} has the integer {str(number)[:60]}, of which the last digits would be lost"
    return ""


def _kept(number: int) -> bool:
    """Whether llguidance writes an integer of a constant as it is; it keeps a double, and 64 bits of integers."""
    if abs(number) < HIGHEST:
        return number == HIGHEST - 1 or int(float(number)) == number
    try:
        return int(Decimal(repr(float(number)))) == number
    except OverflowError:
        return False


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value


def _multiples(schema: Any) -> str:
    members = list(_members(schema))
    divisors = [v for k, v in members if k == "multipleOf" and isinstance(v, int | float) and not isinstance(v, bool)]
    numbers = {abs(Decimal(str(divisor))) for divisor in divisors if divisor}
    joined = any(key in _JOINS for key, _ in members)
    for group in [numbers] if joined else [{number} for number in numbers]:
        if _least_common(group) > MOST_MULTIPLE:
            return f"multipleOf has too many digits: {', '.join(sorted(format(number, 'f') for number in group))[:200]}"
    return ""


def _least_common(numbers: set[Decimal]) -> float:
    """Least common multiple, in units of the last digit that any of them has."""
    exponents = [number.normalize().as_tuple().exponent for number in numbers if number.is_finite()]
    if len(exponents) < len(numbers):
        return math.inf
    unit = min((e for e in exponents if isinstance(e, int)), default=0)
    if unit < -30 or any(number > MOST_MULTIPLE for number in numbers):
        return math.inf
    return math.lcm(*(int(number.scaleb(-min(unit, 0))) for number in numbers))
