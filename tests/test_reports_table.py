"""Every row of docs/reports.md has tests that exist and are marked with its reports, and back."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"


def marks_in(source):
    """Returns the reports of each test function, by name."""
    marks = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            reports = marks.setdefault(node.name, set())
            for decorator in node.decorator_list:
                if ast.unparse(decorator).startswith("pytest.mark.report("):
                    reports.update(argument.value for argument in decorator.args)
    return marks


def rows_of(text):
    """Returns the reports and the tests of each row."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return [(first.split(", "), last.replace("`", "").split(", ")) for first, *_, last in cells]


MARKS = {
    str(path.relative_to(TESTS)): marks_in(path.read_text()) for path in TESTS.rglob("test_*.py")
}
ROWS = rows_of((ROOT / "docs" / "reports.md").read_text())


@pytest.mark.parametrize("reports, tests", ROWS, ids=[reports[0] for reports, _ in ROWS])
def test_a_row_has_tests_that_name_its_reports(reports, tests):
    marked = set()
    for test in tests:
        file, _, name = test.partition("::")
        if file.startswith("bench/"):
            assert (ROOT / file).is_file(), test
        elif file.startswith("cpp/"):
            assert f"TEST({name})" in (TESTS / file).read_text(), test
        else:
            assert name in MARKS[file], test
            marked |= MARKS[file][name]
    if any(test.startswith("test_") for test in tests):
        assert set(reports) <= marked


def test_every_mark_has_a_row():
    listed = {(report, test) for reports, tests in ROWS for report in reports for test in tests}
    marked = {
        (report, f"{file}::{name}")
        for file, tests in MARKS.items()
        for name, reports in tests.items()
        for report in reports
    }
    assert marked - listed == set()


def test_the_parsers():
    source = """
@pytest.mark.report("a#1", "b#2")
@pytest.mark.slow
def test_one(): pass
def test_two(): pass
"""
    assert marks_in(source) == {"test_one": {"a#1", "b#2"}, "test_two": set()}
    text = "text\n\n| r | s | o | t |\n|---|---|---|---|\n| a#1, b#2 | x | y | `t.py::u`, `v` |\n"
    assert rows_of(text) == [(["a#1", "b#2"], ["t.py::u", "v"])]
