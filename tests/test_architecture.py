"""The shape of the package, held to the rooms in docs/structure.md."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"^([SEB]) (\S+) +\S", re.MULTILINE)
ROOMS = LINE.findall((ROOT / "docs" / "structure.md").read_text(encoding="utf-8"))
KIND = {name: kind for kind, name in ROOMS}
ORDER = {name: place for place, (_, name) in enumerate(ROOMS)}
MAY_IMPORT = {"S": "SB", "E": "EB", "B": "B"}
PULL_MLX_IN = {"text/tokenizer", "model_files/hub"}  # for what mlx-lm knows of files; each pins MLX to the CPU first
PYTHON = ("server", "loadtests", "scripts", "tests")


def modules() -> dict[str, Path]:
    """`api/chat` → its file; a package's own `__init__` is left out."""
    files = (ROOT / "server").rglob("*.py")
    return {p.relative_to(ROOT / "server").with_suffix("").as_posix(): p for p in files if p.stem != "__init__"}


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all that is imported anywhere in the module, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(name: str) -> str | None:
    """`server.api.chat.router` → `api/chat`; None for other packages and for the packages' `__init__`."""
    parts = name.split(".")
    if parts[0] != "server":
        return None
    known = ["/".join(parts[1:end]) for end in range(len(parts), 1, -1)]
    return next((path for path in known if path in MODULES), None)


def room(module: str) -> str:
    """The most particular line that a module belongs to: its own, or its folder's, or one further up."""
    parts = module.split("/")
    names = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next(name for name in names if name in ORDER)


MODULES = modules()


@functools.cache
def tree(module: str) -> ast.Module:
    """Parsed when a test asks for it: each process of a run collects this file, and one runs its tests."""
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def others(module: str) -> set[str]:
    return {other for other in map(own, imported(tree(module))) if other and other != module}


def test_every_module_has_a_room_and_every_room_a_module():
    rooms = [room(module) for module in MODULES]
    assert set(rooms) == set(ORDER)
    assert len(ROOMS) == len(ORDER), "a room is listed twice"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_imports_only_from_its_room_and_from_rooms_below(name):
    mine = room(name)
    above = {other for other in others(name) if ORDER[room(other)] < ORDER[mine]}
    assert above == set()


def test_no_import_goes_in_a_circle():
    order = TopologicalSorter({name: others(name) for name in MODULES}).static_order()
    assert len(list(order)) == len(MODULES)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_process_imports_what_belongs_to_the_other(name):
    foreign = {other for other in others(name) if KIND[room(other)] not in MAY_IMPORT[KIND[room(name)]]}
    assert foreign == set()


@pytest.mark.parametrize("name", sorted(name for name in MODULES if KIND[room(name)] != "E"))
def test_only_engine_modules_touch_mlx(name):
    touched = {other for other in imported(tree(name)) if other.split(".")[0] in {"mlx", "mlx_lm"}}
    if name not in PULL_MLX_IN:
        assert touched == set()
        return
    assert touched, f"{name} needs no exception any more"
    for function in functions_that_import_mlx(tree(name)):
        first, second, *rest = [node for node in function.body if not isinstance(node, ast.Expr) or not is_text(node)]
        assert ast.unparse(first) == "import mlx.core as mx"
        assert ast.unparse(second) == "mx.set_default_device(mx.cpu)"
        assert "mx" not in {node.id for line in rest for node in ast.walk(line) if isinstance(node, ast.Name)}


def functions_that_import_mlx(tree: ast.Module) -> list[ast.FunctionDef]:
    """The functions in which mlx or mlx-lm is imported. There may be no such import outside of one."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    guilty = [f for f in functions if any(name.startswith("mlx") for name in imported(f))]
    outside = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert not any(name.startswith("mlx") for node in outside for name in imported(node))
    return guilty


def is_text(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_each_room_says_what_it_is():
    packages = (ROOT / "server").rglob("__init__.py")
    assert [path.as_posix() for path in packages if not ast.get_docstring(ast.parse(path.read_text("utf-8")))] == []


def named_modules(text: str) -> set[str]:
    """Modules that prose, command lines and scripts within strings speak of."""
    return set(re.findall(r"(?:-m |^\"?from |`)((?:server|loadtests|scripts)(?:\.[a-z_0-9]+)+)", text, re.MULTILINE))


def test_modules_that_are_spoken_of_exist():
    texts = [*(path for folder in PYTHON for path in (ROOT / folder).rglob("*.py")), *(ROOT / "docs").glob("*.md")]
    for path in (*texts, *ROOT.glob("*.md"), ROOT / "Makefile"):
        for name in named_modules(path.read_text(encoding="utf-8")):
            module = ROOT / name.replace(".", "/")
            found = module.is_dir() or module.with_suffix(".py").is_file() or is_member(name)
            assert found, f"{path.relative_to(ROOT)} speaks of {name}"


def test_paths_that_the_plan_of_the_rooms_names_exist():
    """`supervision/scheduler.Scheduler.steps` is the module `server/supervision/scheduler` and what it defines."""
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+)((?:\.\w+)*)`", text))
    assert len(named) > 50
    own = [(path, members) for path, members in named if not path.startswith("tests/")]
    wrong = [path + members for path, members in own if not defines(ROOT / "server" / path, members.split(".")[1:])]
    assert wrong == []


def defines(module: Path, members: list[str]) -> bool:
    if module.is_dir():
        return not members
    file = module.with_suffix(".py")
    return file.is_file() and all(re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) for name in members)


def test_the_walk_goes_through_functions_that_are_defined():
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    walk = text[text.index("## The walk of a prompt") : text.index("## Where do I find")]
    hops = re.findall(r"`([a-z_]+(?:/[a-z_]+)*)\.((?:[A-Z]\w+\.)?[a-z_]+)`", walk)
    assert len(hops) > 20
    assert [f"{module}.{hop}" for module, hop in hops if hop not in functions(ROOT / "server" / f"{module}.py")] == []


def functions(file: Path) -> set[str]:
    """`step` of a module, `Batch.step` of a class; functions within functions too, as routes are."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return found | {f"{one.name}.{node.name}" for one in classes for node in one.body if isinstance(node, kinds)}


RETIRED = re.compile(
    r"(?<![a-z])(whoever|nobody|somebody|everybody|befall\w*|(?:fore|re|un)?told|convict\w*|acquit\w*|cohort\w*|roster"
    r"|succession|rehears\w*|sentinel|prover)(?![a-z])",
    re.IGNORECASE,
)


def test_no_retired_word_comes_back():
    """docs/structure.md has a glossary; these had been words of the code beside it. Underscores part words, too."""
    files = [
        *(ROOT / "server").rglob("*.py"),
        *(ROOT / "loadtests").rglob("*.py"),
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]
    found = [(path.name, word) for path in files for word in RETIRED.findall(path.read_text(encoding="utf-8"))]
    assert found == []


def test_no_test_is_named_with_a_retired_word():
    names = {name for path in (ROOT / "tests").rglob("*.py") for name in functions(path)}
    assert len(names) > 2000
    assert [name for name in names if RETIRED.search(name)] == []


def is_member(name: str) -> bool:
    """Tell whether `name` is something that its module defines."""
    module, _, member = name.rpartition(".")
    path = ROOT / module.replace(".", "/")
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return any(re.search(rf"\b{member}\b", file.read_text(encoding="utf-8")) for file in files)


def dependencies() -> set[str]:
    """Names of all that pyproject.toml asks for, extras apart."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = project["dependency-groups"]
    wanted = [*project["project"]["dependencies"], *groups["tests"], *groups["lint"], *groups["lab"]]
    return {re.split(r"[^\w-]", requirement)[0] for requirement in wanted}


def test_each_dependency_says_why_it_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| ([\w, -]+) \| [^|]+ \|$", text, re.MULTILINE)
    explained = {name for row in table for name in row.split(", ")} - {"package"}
    assert explained == dependencies()


def test_every_dependency_is_pinned():
    pins = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert {name for name in dependencies() if not re.search(rf"^{name}==", pins, re.MULTILINE)} == set()
    assert re.search(r"^mlx-metal==\S+ ; sys_platform == 'darwin'", pins, re.MULTILINE)
    assert re.search(r"^mlx-cpu==\S+ ; sys_platform == 'linux'", pins, re.MULTILINE)
    named = re.findall(r"^[\w.-]+==.*\\\n    --hash=sha256:", pins, re.MULTILINE)
    assert len(named) == len(re.findall(r"^[\w.-]+==", pins, re.MULTILINE)), "each pin names the hashes of its files"
    assert "://" not in pins


def test_pins_with_hashes_are_installed_as_they_stand():
    """Asked for what a pin needs in turn, pip 23 refuses them once there is a newer release; as constraints, always."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    installs = [line for line in lines if line.startswith("\t") and re.search(r"install.*requirements\.lock", line)]
    assert installs
    assert all("--no-deps" in line and "--constraint" not in line for line in installs), installs
