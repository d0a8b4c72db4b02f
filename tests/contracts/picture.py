"""Writes diagrams of packages and their imports to docs/design/architecture.md: python -m tests.contracts.picture."""

from __future__ import annotations

from collections.abc import Iterable

from tests.contracts import imports

PAGE = imports.ROOT / "docs/design/architecture.md"
BEGIN, END = "<!-- packages: begin (made by `make docs`) -->", "<!-- packages: end -->"
DRAWN = {
    "The gateway": ("services.gateway",),
    "The worker": ("services.worker",),
    "Between services": ("services", "kernels"),
}
APART = ("services.shared", "protos", "kernels")  # nearly every package imports them, so only the last diagram shows them


def rendered() -> str:
    house = imports.house()
    parts = [f"{title}:\n\n{_diagram(_drawn(house, title))}" for title in DRAWN]
    return "\n\n".join([BEGIN, *parts, END])


def _drawn(house: imports.Imports, title: str) -> dict[str, frozenset[str]]:
    packages = house.packages()
    if title == "Between services":
        return _merged(packages)
    inside = DRAWN[title]
    return dict(imports.subgraph(packages, lambda name: name.startswith(inside) and not name.startswith(APART)))


def _merged(packages: imports.Graph) -> dict[str, frozenset[str]]:
    """Returns the graph with one node per service instead of its packages, and one node for all packages of `kernels`."""
    found: dict[str, set[str]] = {}
    for name, others in packages.items():
        if _whole(name):
            found.setdefault(_whole(name), set()).update(filter(None, map(_whole, others)))
    return {name: frozenset(others - {name}) for name, others in found.items()}


def _whole(name: str) -> str:
    parts = name.split(".")
    return parts[0] if parts[0] == "kernels" else ".".join(parts[:2]) if len(parts) > 1 else ""


def _diagram(graph: dict[str, frozenset[str]]) -> str:
    """Returns a diagram with an arrow for each import between packages. An import that other arrows imply is omitted."""
    root = min(graph, key=len) if len({name.split(".")[1] for name in graph if "." in name}) == 1 else ""
    lines = [f"  {_id(name)}[{_label(name, root)}]" for name in sorted(graph)]
    lines += [f"  {_id(name)} --> {_id(other)}" for name in sorted(graph) for other in sorted(_nearest(graph, name))]
    return "\n".join(["<!-- output: diagram -->", "```mermaid", "flowchart TD", *lines, "```"])


def _nearest(graph: dict[str, frozenset[str]], name: str) -> Iterable[str]:
    direct = graph[name]
    further = {far for near in direct for far in imports.reached(graph, near)}
    return direct - further


def _id(name: str) -> str:
    return name.replace(".", "_")


def _label(name: str, root: str) -> str:
    return name.removeprefix(f"{root}.") if root and name != root else name


def main() -> None:
    head, begin, rest = PAGE.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    assert begin and tail, f"{PAGE} must have the comments {BEGIN} and {END} around the diagrams"
    PAGE.write_text(head + rendered() + tail)


if __name__ == "__main__":
    main()
