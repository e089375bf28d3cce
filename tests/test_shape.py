"""The shape of the code stays within the bounds of the house style."""

import pytest

from scripts import shape

# Named here, since each process of a run collects this file, and measuring takes seconds.
NAMES = [
    "files at the top of server/",
    "files in the largest folder",
    "median lines of a function",
    "95th percentile of them",
    "functions of more than 50 lines",
    "conditional expressions in 1,000 lines",
    "conditional expressions in others",
    "tuple = tuple assignments in 1,000 lines",
    "class names in two modules",
    "participles as class names",
    "methods of Loop",
    "attributes of Loop",
    "class names in two modules of loadtests",
    "participles as class names of loadtests",
    "private members used in tests",
]


@pytest.fixture(scope="module")
def figures():
    return {figure.name: figure for figure in shape.figures()}


def test_every_figure_is_held_to_its_bound(figures):
    assert list(figures) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_of_the_shape_is_within_its_bound(figures, name):
    figure = figures[name]
    assert figure.is_met, f"{figure.value:g}, at most {figure.bound:g}: {', '.join(figure.places)}"


def test_a_figure_beyond_its_bound_is_missed():
    assert not shape.Figure("lines", 7, bound=6).is_met
    assert shape.Figure("lines", 6, bound=6).is_met


def test_what_the_figures_count_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(shape, "ROOT", tmp_path)
    code = (
        "class BodyWritten:\n    def one(self):\n        a, b = 1, 2\n"
        "        setattr(a, '_hidden', 1)\n        return a if b else (b if a else Other()._hidden)\n"
    )
    (tmp_path / "server").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "server" / "a.py").write_text(code)
    (tmp_path / "server" / "a.cpp").write_text("")
    (tmp_path / "server" / "py.typed").write_text("")
    (tmp_path / "server" / "b.py").write_text(code + "    x = 1\n" * 60)
    (tmp_path / "tests" / "test_a.py").write_text(code)
    (tmp_path / "server" / "__pycache__").mkdir()
    found = {figure.name: figure.value for figure in shape.figures()}
    assert found["files at the top of server/"] == 3
    assert found["class names in two modules"] == 1
    assert found["participles as class names"] == 1
    assert found["private members used in tests"] == 2
    assert found["conditional expressions in others"] == 2
    assert found["conditional expressions in 1,000 lines"] > 10
    assert found["tuple = tuple assignments in 1,000 lines"] > 2
