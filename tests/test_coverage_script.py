"""What `make test` prints of lines and branches that no test takes."""

import json

import pytest

from scripts import coverage


def found(covered, missing, branches, missing_branches):
    summary = {"covered_lines": covered, "missing_lines": len(missing)}
    summary |= {"covered_branches": branches, "missing_branches": len(missing_branches)}
    return {"missing_lines": missing, "missing_branches": missing_branches, "summary": summary}


@pytest.fixture
def report(tmp_path):
    files = {
        "server/cli.py": found(10, [], 0, []),
        "server/api/routes.py": found(50, [7, 8], 10, [[6, 7]]),
        "server/api/stored/answers.py": found(30, [], 10, []),
        "server/apia.py": found(4, [3], 0, []),
    }
    path = tmp_path / "coverage.json"
    path.write_text(json.dumps({"meta": {}, "files": files, "summary": {}}))
    return str(path)


def test_each_room_has_a_row_and_so_has_the_whole(report, capsys):
    assert coverage.main([report]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [
        ["server", "15", "1", "0", "0", "93.3", "%"],
        ["server/api", "82", "2", "21", "1", "97.1", "%"],
        ["all", "97", "3", "21", "1", "96.6", "%"],
    ]


def test_below_the_floor_it_fails_and_says_by_how_much(report, capsys):
    assert coverage.main([report, "--floor", "96.6"]) == 0
    assert coverage.main([report, "--floor", "97"]) == 1
    assert capsys.readouterr().err == "96.6 % is taken; the floor is 97 %\n"


@pytest.mark.parametrize(
    ("place", "lines"),
    [
        ("server/api", ["server/api/routes.py: 7, 8, 6->7"]),
        ("server/apia.py", ["server/apia.py: 3"]),
        ("server", ["server/api/routes.py: 7, 8, 6->7", "server/apia.py: 3"]),
        ("tests", [""]),
    ],
)
def test_lines_without_a_test_are_named(report, capsys, place, lines):
    assert coverage.main([report, place]) == 0
    assert capsys.readouterr().out.splitlines() == lines
