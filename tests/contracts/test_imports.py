"""Modules import successfully while packages that they must not need are blocked."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name + " is blocked", name=name)
sys.meta_path.insert(0, Block())
"""
HEAVY = ["torch", "flashinfer"]
NOT_IN_CORE = [*HEAVY, "grpc", "redis", "prometheus_client", "transformers", "pydantic", "uvloop", "starlette"]


def import_with_blocked(blocked: list[str], module: str) -> subprocess.CompletedProcess[str]:
    code = BLOCK.format(blocked=set(blocked)) + f"\nimport {module}"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def modules_below(folder: str) -> list[str]:
    """Returns the names of all modules in a folder and its subfolders."""
    paths = (path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / folder).rglob("*.py")))
    return [".".join(("rootstock_llm", *path.parts)) for path in paths if path.name != "__init__"]


def test_services_other_than_the_worker_can_be_imported_without_torch() -> None:
    names = []
    for service in ("gateway", "tokenizer", "detokenizer", "local", "shared", "cli"):
        found = modules_below(f"services/{service}")
        assert found, service
        names += found
    result = import_with_blocked([*HEAVY, "transformers"], ", ".join(names))
    assert result.returncode == 0, result.stderr


def test_core_and_fake_executor_need_only_numpy() -> None:
    names = modules_below("services/worker/core")
    assert names
    result = import_with_blocked(NOT_IN_CORE, ", ".join([*names, "rootstock_llm.services.worker.exec.fake"]))
    assert result.returncode == 0, result.stderr


def test_blocked_package_cannot_be_imported() -> None:
    assert import_with_blocked(["numpy"], "rootstock_llm.services.worker.core.scheduler").returncode != 0


def test_product_makes_no_unsafe_call() -> None:
    found = []
    for path in [*(ROOT / "services").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec", "torch.load", "os.system"):
                found.append(f"{path}:{node.lineno}")
    assert not found
