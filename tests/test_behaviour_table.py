"""Every numbered line of docs/behaviour.md has a test that is marked with it, or a reason."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "behaviour.md"
LAST = 185


def _lines(text: str) -> list[tuple[int, str]]:
    """Returns number and text of each entry; indented lines continue the one above."""
    entries = re.findall(r"^(\d+)\. (.*(?:\n +.*)*)", text, re.MULTILINE)
    return [(int(number), " ".join(entry.split())) for number, entry in entries]


def _marked(source: str, where: str) -> Iterator[int]:
    """Yields the numbers of all marks, which only test functions may carry."""
    tree = ast.parse(source)
    marks = {node for node in ast.walk(tree) if _is_mark(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for mark in marks.intersection(node.decorator_list):
                marks.remove(mark)
                assert not mark.keywords and mark.args, f"{where}: {ast.unparse(mark)}"
                yield from map(ast.literal_eval, mark.args)
    assert not marks, f"{where}: no test has the mark {ast.unparse(marks.pop())}"


def _is_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.behaviour"


def _faults(document: str, marked: set[int], last: int) -> list[str]:
    """Returns what is wrong, one line each."""
    entries = _lines(document)
    numbers = [number for number, _ in entries]
    faults = [f"{n} is not in its order" for n, m in pairwise(numbers) if n >= m]
    expected = set(range(1, last + 1))
    faults += [f"{n} is not in the document" for n in expected - set(numbers)]
    faults += [f"a test names {n}, which is unknown" for n in marked - expected]
    faults += [f"{n} is unknown" for n in set(numbers) - expected]
    for number, text in entries:
        excused = re.search(r"No test: \w", text) is not None
        if excused == (number in marked):
            has = "a test and a reason for having none" if excused else "no test and no reason"
            faults.append(f"{number} has {has}: {text}")
    return faults


def test_every_behaviour_has_a_test_or_a_reason():
    if not DOCUMENT.exists():
        pytest.skip("only in a checkout")
    files = sorted(TESTS.rglob("test_*.py"))
    marked = {n for file in files for n in _marked(file.read_text(), str(file.relative_to(TESTS)))}
    faults = _faults(DOCUMENT.read_text(), marked, LAST)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "document, marked, fault",
    [
        ("1. a\n3. c\n", {1, 3}, "2 is not in the document"),
        ("1. a\n3. c\n2. b\n", {1, 2, 3}, "3 is not in its order"),
        ("1. a\n2. b\n2. b\n3. c\n", {1, 2, 3}, "2 is not in its order"),
        ("1. a\n2. b\n3. c\n4. d\n", {1, 2, 3, 4}, "4 is unknown"),
        ("1. a\n2. b\n3. c\n", {1, 2, 3, 9}, "a test names 9, which is unknown"),
        ("1. a\n2. b\n3. c\n", {1, 3}, "2 has no test and no reason: b"),
        ("1. a\n2. b\n   No test: \n3. c\n", {1, 3}, "2 has no test and no reason: b No test:"),
        ("1. a\n2. b\n   No test: x.\n3. c\n", {1, 2, 3}, "2 has a test and a reason for having"),
    ],
)
def test_faults_are_found(document, marked, fault):
    assert any(found.startswith(fault) for found in _faults(document, marked, 3))
    assert not _faults("# t\n\n1. a\n2. b\n   more. No test: c.\n\n## s\n\n3. d", {1, 3}, 3)


def test_marks_belong_to_tests():
    mark = "@pytest.mark.behaviour(3, 4)\n"
    assert list(_marked(f"{mark}@other\ndef test_it(): pass", "")) == [3, 4]
    for source in (f"{mark}def helper(): pass", "pytest.param(1, marks=pytest.mark.behaviour(3))"):
        with pytest.raises(AssertionError, match="no test has the mark"):
            list(_marked(source, ""))
