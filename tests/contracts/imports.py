"""Reads the imports of modules and packages from the code, including imports in functions and under TYPE_CHECKING."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREES = ("services", "kernels", "tests", "protos")
PACKAGE = "rootstock_llm."  # prefix that is removed from module names
BY_STRING = ("importlib.import_module", "import_module", "__import__", "runpy.run_module", "pkgutil.resolve_name")

Graph = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Imports:
    """The imports of some modules."""

    modules: Mapping[str, Path]  # file of each module by its dotted name; a package's file is its __init__.py
    names: Mapping[str, frozenset[str]]  # by module: dotted names that it imports from any library

    def own(self) -> Graph:
        """Returns the imports between these modules."""
        return {name: frozenset(found & self.modules.keys()) - {name} for name, found in self.names.items()}

    def packages(self) -> Graph:
        """Returns the imports between packages."""
        found: dict[str, set[str]] = {self.folder(name): set() for name in self.modules}
        for name, others in self.own().items():
            found[self.folder(name)] |= {self.folder(other) for other in others}
        return {name: frozenset(others - {name}) for name, others in found.items()}

    def folder(self, name: str) -> str:
        return name if self.modules[name].name == "__init__.py" else name.rpartition(".")[0]


@cache
def house() -> Imports:
    """Returns the imports of services and kernels. The first call reads them, so that collecting tests stays fast."""
    return read(ROOT, ("services", "kernels"))


def read(root: Path, trees: Iterable[str]) -> Imports:
    """Returns the imports of all files below the given folders of root."""
    files = {path.relative_to(root).with_suffix(""): path for tree in trees for path in sorted((root / tree).rglob("*.py"))}
    modules = {".".join(part for part in stem.parts if part != "__init__"): path for stem, path in files.items()}
    return Imports(modules, {name: frozenset(_imported(ast.parse(path.read_text()), modules)) for name, path in modules.items()})


def _imported(tree: ast.AST, modules: Mapping[str, Path]) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix(PACKAGE) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports must be absolute"
            module = f"{node.module}.".removeprefix(PACKAGE).removesuffix(".")
            for alias in node.names:
                inner = f"{module}.{alias.name}".removeprefix(".")
                yield inner if inner in modules else module


def by_string(path: Path) -> list[int]:
    """Returns the numbers of lines that import a module by a string instead of an import statement."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return [node.lineno for node in calls if ast.unparse(node.func) in BY_STRING]


def subgraph(graph: Graph, wanted: Callable[[str], bool]) -> Graph:
    """Returns a graph with only the nodes for which `wanted` is true."""
    return {name: frozenset(filter(wanted, others)) for name, others in graph.items() if wanted(name)}


def circles(graph: Graph) -> list[list[str]]:
    """Returns the cycles: groups of nodes that reach each other."""
    ways = {name: reached(graph, name) for name in graph}
    inside = sorted(name for name in graph if name in ways[name])
    groups: list[list[str]] = []
    for name in inside:
        group = next((group for group in groups if name in ways[group[0]] and group[0] in ways[name]), None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return groups


def reached(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    left = list(graph[start])
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left.extend(graph[name])
    return seen
