"""What a worker says in words is for people: the gateway passes it on, and goes by fields and codes."""

from __future__ import annotations

import ast
from pathlib import Path

GATEWAY = Path(__file__).resolve().parents[2] / "services" / "gateway"
READERS = {"partition", "rpartition", "split", "startswith", "endswith", "find", "index", "removeprefix", "match", "search"}


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_what_knows_workers_messages_has_no_regex() -> None:
    trees = {path: ast.parse(path.read_text()) for path in GATEWAY.rglob("*.py")}
    reading = {path for path, tree in trees.items() if "rootstock.v1.worker_pb2" in imported(tree)}
    assert any("finish.message" in ast.unparse(trees[path]) for path in reading), "one of them does read it"
    assert not [path for path in reading if "re" in imported(trees[path])]


def test_no_part_of_a_message_means_anything() -> None:
    for path in GATEWAY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READERS:
                said = [ast.unparse(part) for part in (node.func.value, *node.args)]
                assert not any(part.endswith(".message") for part in said), f"{path}:{node.lineno}"
