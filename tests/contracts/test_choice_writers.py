"""Each part of a choice has one writer: only the module that defines the part's class assigns the fields of the class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

GATEWAY = Path(__file__).resolve().parents[2] / "services" / "gateway"
PARTS = ("Choice", "Placement")
MODULES = {path: ast.parse(path.read_text()) for path in sorted(GATEWAY.rglob("*.py"))}
# Field name → variables whose objects have a field of this name and are not of a class in PARTS.
OTHERS = {"handle": {"decoding"}, "seed": {"into"}, "model_version": {"link"}, "decoding": {"sink"}}


def class_of(name: str) -> tuple[Path, ast.ClassDef]:
    """Returns the module and definition of the class with this name and __slots__. There must be exactly one."""
    classes = [(path, node) for path, tree in MODULES.items() for node in tree.body if isinstance(node, ast.ClassDef)]
    found = [(path, node) for path, node in classes if node.name == name and slots_of(node)]
    assert len(found) == 1, f"{len(found)} classes with the name {name} have slots"
    return found[0]


def slots_of(part: ast.ClassDef) -> set[str]:
    """Returns the names in __slots__. Objects of a class without slots could get fields from any module."""
    values = [node.value for node in part.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__"]
    return {name for value in values for name in ast.literal_eval(value)}


def stores(tree: ast.AST, fields: set[str]) -> Iterator[ast.Attribute]:
    """Yields each store to or deletion of an attribute that has one of the names, also in loops and tuples."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and node.attr in fields:
            yield node


def is_elsewhere(node: ast.Attribute) -> bool:
    """Returns whether an attribute with a field's name belongs to another class, because its object is `self` or is in OTHERS.

    `node` is in a module other than that of the field's class.
    """
    owner = ast.unparse(node.value).rpartition(".")[2]
    return owner == "self" or owner in OTHERS.get(node.attr, set())


@pytest.mark.parametrize("name", PARTS)
def test_fields_of_each_part_are_assigned_in_one_module(name: str) -> None:
    home, part = class_of(name)
    fields = slots_of(part)
    assert {node.attr for node in stores(part, fields)} == fields, "the class must assign each of its fields"
    elsewhere = [
        f"{path.relative_to(GATEWAY)}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in MODULES.items()
        for node in stores(tree, fields)
        if path != home and not is_elsewhere(node)
    ]
    assert not elsewhere


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_choice_have_no_subclass_and_no_setattr_call(name: str) -> None:
    """test_fields_of_each_part_are_assigned_in_one_module does not find assignments by a subclass or by setattr."""
    for path, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                assert name not in {ast.unparse(base).partition("[")[0] for base in node.bases}, path
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "object.__setattr__"):
                assert ast.unparse(node.args[0]) in ("into", "self"), f"{path}:{node.lineno}"


def test_assignment_in_another_module_is_found() -> None:
    others = "self.link = 3\nlink.model_version = 4"
    tree = ast.parse(f"placement.link = None\n(a, choice.ending) = 1, 2\nplacement.charged += 1\n{others}")
    found = [ast.unparse(node) for node in stores(tree, {"link", "ending", "charged", "model_version"}) if not is_elsewhere(node)]
    assert sorted(found) == ["choice.ending", "placement.charged", "placement.link"]
