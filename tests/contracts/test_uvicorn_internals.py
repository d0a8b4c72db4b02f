"""Lists the internals of uvicorn that the gateway uses. uvicorn does not document these attributes and may rename them.

Before you change the pin in pyproject.toml, read uvicorn's changes to the attributes that are listed here.
"""

from __future__ import annotations

import ast
import inspect
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tests.contracts import imports

ROOT = Path(__file__).resolve().parents[2]
HTTP = "services/gateway/http"
USED: Mapping[type, frozenset[str]] = {
    HttpToolsProtocol: frozenset(
        (
            # attributes of the connection
            *("app", "connection_lost", "connection_made", "data_received", "flow", "loop", "parser", "pipeline", "shutdown"),
            *("timeout_keep_alive", "timeout_keep_alive_handler", "timeout_keep_alive_task", "transport"),
            "_unset_keepalive_if_required",
            # attributes of the request that is being parsed
            *("cycle", "expect_100_continue", "headers", "scope", "url"),
            *("on_body", "on_header", "on_headers_complete", "on_message_begin", "on_message_complete", "on_url"),
            # attributes of the response
            *("_start_asgi_task", "on_response_complete"),
        )
    ),
    RequestResponseCycle: frozenset(
        (
            *("chunked_encoding", "disconnected", "expected_content_length", "keep_alive", "message_event"),
            *("response_complete", "response_started", "scope", "transport"),
        )
    ),
    FlowControl: frozenset(("pause_reading", "resume_reading")),
    uvicorn.Server: frozenset(
        (
            *("capture_signals", "config", "force_exit", "main_loop", "on_tick", "server_state", "servers", "should_exit"),
            *("shutdown", "started", "startup"),
        )
    ),
    ServerState: frozenset(("connections", "tasks")),
    uvicorn.Config: frozenset(("http_protocol_class",)),
}
# Gateway's class → uvicorn's class that it extends. In such a class, attributes of `self` and `super()` may be uvicorn's.
EXTENDED = {"Connection": HttpToolsProtocol, "ReadingFlow": FlowControl, "HttpServer": uvicorn.Server}
# By file and by expression: uvicorn's class of the expression's value. An attribute after the expression counts as a use of this
# class.
EXPRESSIONS: Mapping[str, Mapping[str, type]] = {
    f"{HTTP}/connection.py": {
        "cycle": RequestResponseCycle,
        "self._connection": HttpToolsProtocol,
        "self._running": RequestResponseCycle,
        "self.cycle": RequestResponseCycle,
        "self.flow": FlowControl,
    },
    f"{HTTP}/http_server.py": {
        "connection": HttpToolsProtocol,
        "each": HttpToolsProtocol,
        "self.config": uvicorn.Config,
        "self.server_state": ServerState,
    },
}


def members(kind: type) -> set[str]:
    """Returns the names of a class's methods, and of the attributes that its methods assign to `self`."""
    tree = ast.parse(inspect.getsource(kind))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return {*dir(kind), *(node.attr for node in nodes if ast.unparse(node.value) == "self")}


def uses_in(path: str, text: str) -> Iterator[tuple[type, str]]:
    """Yields (uvicorn's class, name) for each use of one of its attributes, and for each override of one of its methods."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (kind := EXPRESSIONS[path].get(ast.unparse(node.value))) is not None:
            yield kind, node.attr
    for ours in tree.body:
        if not isinstance(ours, ast.ClassDef) or ours.name not in EXTENDED:
            continue
        kind = EXTENDED[ours.name]
        methods = {each.name for each in ours.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        attributes = [node for node in ast.walk(ours) if isinstance(node, ast.Attribute)]
        accessed = {node.attr for node in attributes if ast.unparse(node.value) in ("self", "super()")} | methods
        yield from ((kind, name) for name in accessed & members(kind) - {"__init__"})


def uses() -> dict[type, set[str]]:
    found: dict[type, set[str]] = {kind: set() for kind in USED}
    for path in EXPRESSIONS:
        for kind, name in uses_in(path, (ROOT / path).read_text()):
            found[kind].add(name)
    return found


@pytest.mark.parametrize("kind", USED, ids=lambda kind: kind.__name__)
def test_installed_uvicorn_has_each_listed_attribute(kind: type) -> None:
    assert not USED[kind] - members(kind)


@pytest.mark.parametrize("kind", USED, ids=lambda kind: kind.__name__)
def test_gateway_uses_only_the_listed_attributes(kind: type) -> None:
    assert uses()[kind] == USED[kind]


def test_calls_and_assignments_and_overrides_count_as_uses() -> None:
    text = """
class Connection(HttpToolsProtocol):
    def on_body(self):
        self.url = super().on_url(0)
        self.cycle.body = self._own
"""
    found = set(uses_in(f"{HTTP}/connection.py", text))
    names = {(HttpToolsProtocol, name) for name in ("on_body", "url", "on_url", "cycle")}
    assert found == {*names, (RequestResponseCycle, "body")}


def test_only_the_listed_files_import_uvicorn() -> None:
    house = imports.house()
    files = {
        str(Path(path).resolve().relative_to(ROOT)) for name, path in house.modules.items() if _imports_uvicorn(house.names[name])
    }
    assert files == {*EXPRESSIONS}


def test_pyproject_pins_the_installed_uvicorn() -> None:
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (pin,) = (requirement for requirement in map(Requirement, lines) if requirement.name == "uvicorn")
    assert str(pin.specifier) == f"=={version('uvicorn')}"


def _imports_uvicorn(names: frozenset[str]) -> bool:
    return any(name.partition(".")[0] == "uvicorn" for name in names)
