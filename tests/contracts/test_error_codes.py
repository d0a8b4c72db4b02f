"""The table of error codes has exactly the codes that the gateway sends to clients."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from rootstock_llm.services.gateway.generation.errors import BATCH_CODES, CODES, ApiError

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "services/gateway/generation/errors.py"
# Functions that create an error → index of their argument `code`, and the HTTP status of the error.
MAKERS: dict[str, tuple[int, int]] = {
    "ApiError": (-1, 0),
    "bad_request": (2, 400),
    "unavailable": (2, 503),
    "self._refused": (1, 503),  # in dispatch/waiting.py
    "_not_found": (2, 404),  # in api/responses/records.py
    "BadLine": (0, 0),
    "not_executed": (1, 0),
}
BATCHES = ("BadLine", "not_executed")
# Permitted expressions for a code without a constant text: they forward the code of another error, an argument or a table entry.
PASSED_ON = frozenset(("error.code", "code", "reason", "why", "code or 'invalid_value'"))


class Use(NamedTuple):
    """A call that creates an error with a constant code."""

    where: str  # file and line
    maker: str  # called function
    code: str
    status: int  # HTTP status; 0 if the call does not contain it


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / "services/gateway").rglob("*.py"))}


@cache
def constants() -> dict[str, str]:
    """Returns the texts of the gateway's string constants by name."""
    assigned = [node for tree in trees().values() for node in tree.body if isinstance(node, ast.Assign)]
    found: dict[str, str] = {}
    for node in assigned:
        target, value = node.targets[0], node.value
        pairs = (
            zip(target.elts, value.elts, strict=True)
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            else [(target, value)]
        )
        for name, text in pairs:
            if isinstance(name, ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[name.id] = text.value
    return found


def texts_of(node: ast.expr) -> list[str] | None:
    """Returns the possible values of an expression of constant texts, or None for any other expression."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.Name | ast.Attribute):
        name = node.id if isinstance(node, ast.Name) else node.attr
        return [constants()[name]] if name in constants() else None
    if isinstance(node, ast.IfExp):
        both = [texts_of(node.body), texts_of(node.orelse)]
        return None if None in both else [text for texts in both for text in texts or ()]
    return None


def codes_of(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    maker = ast.unparse(call.func)
    if maker not in MAKERS:
        return
    index = MAKERS[maker][0]
    yield from ((maker, keyword.value) for keyword in call.keywords if keyword.arg == "code")
    if 0 <= index < len(call.args):
        yield maker, call.args[index]


def status_of(maker: str, call: ast.Call) -> int:
    first = call.args[0] if call.args else None
    if maker == "ApiError" and isinstance(first, ast.Constant) and isinstance(first.value, int):
        return first.value
    return MAKERS[maker][1]


def uses() -> Iterator[Use]:
    for path, tree in trees().items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            for maker, node in codes_of(call):
                where = f"{path.relative_to(ROOT)}:{call.lineno}"
                texts = texts_of(node)
                if texts is None:
                    assert ast.unparse(node) in PASSED_ON, f"{where}: the code is no constant text: {ast.unparse(node)}"
                yield from (Use(where, maker, text, status_of(maker, call)) for text in texts or ())


def test_every_error_code_in_use_is_in_the_table() -> None:
    wrong = []
    for use in uses():
        row = (BATCH_CODES if use.maker in BATCHES else CODES).get(use.code)
        if row is None or (use.status and use.status not in row.statuses):
            wrong.append(use)
    assert not wrong


def test_every_error_code_of_the_table_is_in_use() -> None:
    texts = [
        {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        for path, tree in trees().items()
        if path != TABLE
    ]
    made_here = {use.code for use in uses() if use.where.startswith(str(TABLE.relative_to(ROOT)))}
    makers = [node for node in ast.walk(trees()[TABLE]) if isinstance(node, ast.FunctionDef)]
    defaults = {each.value for maker in makers for each in maker.args.defaults if isinstance(each, ast.Constant)}
    assert {*CODES, *BATCH_CODES} - made_here - defaults - set().union(*texts) == set()


def test_every_error_code_has_statuses_and_a_meaning_and_a_remedy() -> None:
    for rows in (CODES, BATCH_CODES):
        assert all(row.meaning.endswith(".") and row.remedy.endswith(".") for row in rows.values())
    assert all(row.statuses for row in CODES.values()) and not any(row.statuses for row in BATCH_CODES.values())


@pytest.mark.parametrize(("status", "code"), [(400, "made_up"), (500, "queue_full")])
def test_error_with_a_code_outside_the_table_cannot_be_made(status: int, code: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        ApiError(status, "of a test", code=code)
