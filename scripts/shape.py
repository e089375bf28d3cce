"""Measures the shape of the code and holds it to the bounds of the house style.

`python scripts/shape.py` prints one line a figure, its bound and what exceeds it, and exits with 1 when a bound is
missed. Reads source files as text and runs none of them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeVar

ROOT = Path(__file__).parent.parent
LAST_WORD = re.compile(r"[A-Z]+[a-z0-9]*$")
PARTICIPLE = re.compile(r"[a-z](ed|en|wn|ung|ept|ing)$")
NOUNS = {  # they end like a participle and are none: names of things, and of HTTP's and the field's own
    *("Speed", "Feed", "Seed", "Need", "Token", "String"),
    *("Coding", "Finding", "Opening", "Reading", "Reasoning", "Rendering", "Sampling", "Timing"),
    *("Forbidden", "Draining"),  # errors with a status of their own
}
PRIVATE = re.compile(r"(?:server\.[\w.]+\.)?_[a-z]\w*")
NAMING = {"setattr", "getattr", "delattr", "hasattr"}  # they take a member by its name
MARKER = "py.typed"
PUBLIC_OWNERS = {"self", "cls", "os", "sys"}  # of the last two some public functions begin with an underscore

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure: its name, its value, the largest value allowed, and where to look."""

    name: str
    value: float
    bound: float
    places: list[str] = field(default_factory=list)

    @property
    def is_met(self) -> bool:
        return self.value <= self.bound


@dataclass(frozen=True, slots=True)
class Source:
    """A file: its nodes are listed once, since every figure looks through them."""

    path: Path
    lines: int
    every: list[ast.AST]

    @classmethod
    def read(cls, path: Path) -> Source:
        text = path.read_text(encoding="utf-8")
        return cls(path, text.count("\n"), list(ast.walk(ast.parse(text))))

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    def nodes(self, kind: type[Node]) -> list[Node]:
        return [node for node in self.every if isinstance(node, kind)]

    def functions(self) -> list[Function]:
        return [node for node in self.every if isinstance(node, Function)]

    def classes(self) -> list[ast.ClassDef]:
        return self.nodes(ast.ClassDef)


def sources(folder: str) -> list[Source]:
    return [Source.read(path) for path in sorted((ROOT / folder).rglob("*.py"))]


def length(function: Function) -> int:
    """Lines from `def` to the end, a docstring not counted."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring


def rate(code: list[Source], found: list[str]) -> float:
    """Occurrences in a thousand lines."""
    return round(1000 * len(found) / sum(source.lines for source in code), 1)


def folders(code: list[Source]) -> Iterator[Figure]:
    """Every file counts, native sources and pages too, but not the marker that says that the package has types."""
    rooms = {source.path.parent for source in code}
    counts = Counter({room: sum(path.is_file() and path.name != MARKER for path in room.iterdir()) for room in rooms})
    top = counts.pop(ROOT / "server", 0)
    yield Figure("files at the top of server/", top, 12)
    largest, count = counts.most_common(1)[0] if counts else (ROOT, 0)
    yield Figure("files in the largest folder", count, 25, [largest.relative_to(ROOT).as_posix()])


def functions(code: list[Source]) -> Iterator[Figure]:
    lengths = sorted((length(node), f"{s.name}:{node.lineno} {node.name}") for s in code for node in s.functions())
    values = [value for value, _ in lengths]
    yield Figure("median lines of a function", median(values), 6)
    yield Figure("95th percentile of them", values[int(0.95 * len(values))], 22)
    long = [f"{place} ({value})" for value, place in lengths if value > 50]
    yield Figure("functions of more than 50 lines", len(long), 0, long)


def sentences(code: list[Source]) -> Iterator[Figure]:
    conditional = [f"{s.name}:{node.lineno}" for s in code for node in s.nodes(ast.IfExp)]
    yield Figure("conditional expressions in 1,000 lines", rate(code, conditional), 10, densest(conditional))
    nested = [f"{s.name}:{node.lineno}" for s in code for outer in s.nodes(ast.IfExp) for node in nested_in(outer)]
    yield Figure("conditional expressions in others", len(nested), 0, nested)
    tuples = [f"{s.name}:{node.lineno}" for s in code for node in s.nodes(ast.Assign) if is_tuple_assignment(node)]
    yield Figure("tuple = tuple assignments in 1,000 lines", rate(code, tuples), 2, densest(tuples))


def nested_in(outer: ast.IfExp) -> list[ast.IfExp]:
    return [node for node in ast.walk(outer) if isinstance(node, ast.IfExp) and node is not outer]


def is_tuple_assignment(node: ast.Assign) -> bool:
    """Tell whether several values are assigned at once; a swap counts too, since swaps are rare."""
    return any(isinstance(target, ast.Tuple) for target in node.targets) and isinstance(node.value, ast.Tuple)


def densest(places: list[str]) -> list[str]:
    counts = Counter(place.rpartition(":")[0] for place in places)
    return [f"{name} ({count})" for name, count in counts.most_common(5)]


def class_names(code: list[Source], suffix: str = "") -> Iterator[Figure]:
    where: dict[str, list[str]] = defaultdict(list)
    for source in code:
        for node in source.classes():
            where[node.name].append(source.name)
    twice = [f"{name}: {', '.join(files)}" for name, files in where.items() if len(set(files)) > 1]
    yield Figure(f"class names in two modules{suffix}", len(twice), 0, twice)
    participles = [f"{name} ({files[0]})" for name, files in where.items() if is_participle(name)]
    yield Figure(f"participles as class names{suffix}", len(participles), 0, participles)


def is_participle(name: str) -> bool:
    last = LAST_WORD.search(name)
    return last is not None and bool(PARTICIPLE.search(last[0])) and last[0] not in NOUNS


def loop(code: list[Source]) -> Iterator[Figure]:
    found = [node for source in code for node in source.classes() if node.name == "Loop"]
    for node in found:
        methods = [member for member in node.body if isinstance(member, Function)]
        yield Figure("methods of Loop", len(methods), 20)
        yield Figure("attributes of Loop", len(attributes(node)), 15, sorted(attributes(node)))


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that the class's methods assign on `self`."""
    stores = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {store.attr for store in stores if isinstance(store.value, ast.Name) and store.value.id == "self"}


def private_uses(tests: list[Source]) -> Iterator[Figure]:
    """Members with a leading underscore that a test takes from something other than itself, also by their names."""
    places = [
        f"{source.name}:{node.lineno}"
        for source in tests
        for node in source.every
        if isinstance(node, ast.expr) and is_foreign_private(node)
    ]
    yield Figure("private members used in tests", len(places), 25, densest(places))


def is_foreign_private(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return any(names_private(node, argument) for argument in node.args[:2])
    if not isinstance(node, ast.Attribute):
        return False
    own = isinstance(node.value, ast.Name) and node.value.id in PUBLIC_OWNERS
    return node.attr.startswith("_") and not node.attr.startswith("__") and not own


def names_private(call: ast.Call, argument: ast.expr) -> bool:
    """Tell whether `setattr`, its like or `monkeypatch.setattr` gets a private member's name."""
    text = argument.value if isinstance(argument, ast.Constant) else None
    if not isinstance(text, str) or not PRIVATE.fullmatch(text):
        return False
    return ast.unparse(call.func).rpartition(".")[2] in NAMING


def figures() -> list[Figure]:
    code = sources("server")
    measures = (folders, functions, sentences, class_names, loop)
    found = [figure for measure in measures for figure in measure(code)]
    return [*found, *class_names(sources("loadtests"), " of loadtests"), *private_uses(sources("tests"))]


def main() -> int:
    missed = 0
    for figure in figures():
        mark = "ok" if figure.is_met else "MISSED"
        missed += not figure.is_met
        print(f"{figure.name:44} {figure.value:>8g}  at most {figure.bound:<4g} {mark}")
        for place in [] if figure.is_met else figure.places:
            print(f"    {place}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
