"""Rules for imports: for some packages, NEVER lists the packages that none of their files may import."""

from __future__ import annotations

import ast

import pytest

from tests.contracts import imports

PACKAGES_OF_THE_WORKER = ("control", "core", "exec", "front", "grammar", "identity", "index", "loop", "metrics", "text")
OTHER_SERVICES = ("gateway", "tokenizer", "detokenizer", "worker", "local", "sim")
IO = ("asyncio", "grpc", "redis", "socket", "threading", "time", "kubernetes", "prometheus_client", "os", "subprocess")
WEB = ("starlette", "uvicorn", "services.gateway.http")
NEVER = {
    "services.worker.core": (
        *(f"services.worker.{package}" for package in PACKAGES_OF_THE_WORKER if package != "core"),
        *IO,
        "torch",
    ),
    "services.worker.core.kv": ("services.worker.core.requests",),
    "services.worker.core.contracts": ("services.worker.core.requests", "services.worker.core.kv"),
    "services.worker.exec.models": ("services.worker.exec.sampling",),
    "services.gateway": ("services.worker", "services.tokenizer", "services.detokenizer", "torch", "transformers"),
    "services.tokenizer": ("services.gateway", "services.worker", "services.detokenizer", "torch"),
    "services.detokenizer": ("services.gateway", "services.worker", "services.tokenizer", "torch"),
    "services.worker": ("services.gateway", "services.tokenizer", "services.detokenizer"),
    "services.gateway.service": WEB,
    "services.gateway.dispatch": WEB,
    "services.gateway.generation": WEB,
    "services.gateway.batches": WEB,
    "services.gateway.background": WEB,
    "services.gateway.routing": IO,
    "services.gateway.output": IO,
    "services.cli": (*(f"services.{other}" for other in OTHER_SERVICES), "torch", "protos", "grpc"),
    "kernels": ("services",),
    "services.shared": ("services.gateway", "services.worker", "services.tokenizer", "services.detokenizer", "services.local"),
}
# Imports that are permitted for commands of operators. Such a command runs code of another service and imports it only then.
OPERATORS_COMMANDS = {
    "services.cli.commands": (
        *("services.gateway.keys.flags", "services.gateway.keys.__main__"),
        *("services.worker.control.flags", "services.worker.control.__main__"),
        "services.local.__main__",
        *("services.sim.flags", "services.sim.core.__main__", "services.sim.fleet.__main__"),
    )
}
SIMULATORS = ("services.sim",)


def below(name: str, folders: tuple[str, ...]) -> bool:
    return any(name == folder or name.startswith(f"{folder}.") for folder in folders)


@pytest.mark.parametrize("folder", NEVER)
def test_package_imports_no_forbidden_package(folder: str) -> None:
    inside = {name: found for name, found in imports.house().names.items() if below(name, (folder,))}
    assert inside, folder
    broken = [
        f"{name} imports {other}"
        for name, found in inside.items()
        for other in found - {*OPERATORS_COMMANDS.get(name, ())}
        if below(other, NEVER[folder])
    ]
    assert not broken


def test_product_imports_neither_simulators_nor_tests() -> None:
    product = {name: found for name, found in imports.house().names.items() if not below(name, SIMULATORS)}
    broken = [
        f"{name} imports {other}"
        for name, found in product.items()
        for other in found - {*OPERATORS_COMMANDS.get(name, ())}
        if below(other, (*SIMULATORS, "tests"))
    ]
    assert not broken


def test_code_imports_no_module_by_a_string() -> None:
    found = [f"{path}:{line}" for path in imports.house().modules.values() for line in imports.by_string(path)]
    assert not found


def test_modules_of_an_import_cycle_are_found() -> None:
    graph = {"a": frozenset("b"), "b": frozenset("cd"), "c": frozenset("b"), "d": frozenset("e"), "e": frozenset[str]()}
    assert imports.circles(graph) == [["b", "c"]]
    assert imports.circles(imports.subgraph(graph, lambda name: name != "c")) == []


@pytest.mark.parametrize("service", ["gateway", "tokenizer", "detokenizer", "worker", "local", "sim", "cli"])
def test_class_names_are_unique_within_a_service_and_the_shared_package(service: str) -> None:
    """Names that differ only by a leading underscore count as equal."""
    found: dict[str, list[str]] = {}
    for name, path in imports.house().modules.items():
        if below(name, (f"services.{service}", "services.shared")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name.lstrip("_"), []).append(name)
    assert found
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_only_the_http_package_of_the_gateway_builds_asgi_scopes() -> None:
    """Batch lines, background responses and the health probe call GenerationService.run instead of forging an HTTP request."""
    outside = {
        name: path
        for name, path in imports.house().modules.items()
        if below(name, ("services.gateway",)) and not below(name, ("services.gateway.http",))
    }
    built = [name for name, path in outside.items() if any(map(_is_scope, ast.walk(ast.parse(path.read_text()))))]
    assert outside and not built


def _is_scope(node: ast.AST) -> bool:
    """Whether the node is a dict literal or a call of `dict` with two keys that occur together only in an ASGI scope."""
    keys: set[object] = set()
    if isinstance(node, ast.Dict):
        keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
        keys = {keyword.arg for keyword in node.keywords}
    return len(keys & {"type", "query_string", "raw_path", "http_version", "root_path", "asgi", "extensions"}) >= 2
