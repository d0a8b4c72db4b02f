"""Tests that docs/reference/kubernetes/features.md names only existing tests, and at least one test per row."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.chart.release import CI_FILES, REPO

INDEX = REPO / "docs" / "reference" / "kubernetes" / "features.md"
NAMED = re.compile(r"`([\w/]+\.py)::([\w:]+)(?:\[([^\]]+)\])?`")


@functools.cache
def functions_in(path: Path) -> dict[str, ast.AST]:
    """Returns the functions of a file by name, methods as CLASS::NAME."""
    body = ast.parse(path.read_text()).body
    inside = [(f"{each.name}::{one.name}", one) for each in body if isinstance(each, ast.ClassDef) for one in each.body
              if isinstance(one, ast.FunctionDef)]  # fmt: skip
    return {**{each.name: each for each in body if isinstance(each, ast.FunctionDef)}, **dict(inside)}


@functools.cache
def texts_of(folder: Path) -> set[str]:
    """Returns all strings in a folder's modules, and the names of the ci files. Together they include all case names."""
    trees = [ast.parse(path.read_text()) for path in folder.glob("*.py")]
    constants = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {each for each in constants if isinstance(each, str)} | {path.name.removesuffix("-values.yaml") for path in CI_FILES}


def faults(page: str, folder: str) -> Iterator[str]:
    """Yields the tests and cases that a page names although they do not exist.

    Args:
        folder: folder in tests/ for files that the page names without a folder.
    """
    for file, test, case in NAMED.findall(page):
        path = REPO / (file if "/" in file else f"tests/{folder}/{file}")
        found = functions_in(path).get(test) if path.is_file() else None
        if found is None:
            yield f"{file}::{test}"
        elif case and (case not in texts_of(path.parent) or not getattr(found, "decorator_list", [])):
            yield f"{file}::{test}[{case}]"


def test_features_page_mentions_only_existing_tests() -> None:
    text = INDEX.read_text()
    assert NAMED.search(text) and list(faults(text, "chart")) == []


def test_names_of_missing_tests_on_a_page_are_reported() -> None:
    case = "`test_templates.py::test_rendered_fields_have_the_expected_values[no such case]`"
    named = f"`test_index_docs.py::test_nothing`, `test_nowhere.py::test_x`, {case}"
    assert len(list(faults(named, "chart"))) == 3


def test_every_row_of_the_features_page_lists_a_test() -> None:
    rows = [line for line in INDEX.read_text().splitlines() if "::test_" in line]
    assert len(rows) == 12
    assert [row[:60] for row in rows if not re.search(r"`(tests/cluster/)?test_\w+\.py::", row) or "](" not in row] == []
