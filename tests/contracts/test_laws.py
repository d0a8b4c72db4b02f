"""Code whose mistakes would show far from where they are made states what no input can break."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PER_THOUSAND_LINES = 12


def states_a_law(node: ast.AST) -> bool:
    """An assert; one that something is not None tells the type checker alone."""
    if not isinstance(node, ast.Assert):
        return False
    test = node.test
    return not (
        isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot) and ast.unparse(test.comparators[0]) == "None"
    )


@pytest.mark.parametrize("folder", ["services/worker/core", "services/worker/exec"])
def test_laws_are_stated(folder: str) -> None:
    texts = [path.read_text() for path in (ROOT / folder).rglob("*.py")]
    laws = sum(states_a_law(node) for text in texts for node in ast.walk(ast.parse(text)))
    lines = sum(text.count("\n") for text in texts)
    assert lines > 4000 and 1000 * laws >= PER_THOUSAND_LINES * lines, f"{laws} asserts in {lines} lines"
