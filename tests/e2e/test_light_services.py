"""Gateway, tokenizer and detokenizer need less than 200 MiB of memory each, and no torch."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.system import ROOT, System

BLOCKER = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("torch is not installed", name="torch")
sys.meta_path.insert(0, Block())
"""
LIGHT = ("gateway", "tokenizer", "detokenizer")


def test_light_services_run_without_torch_in_under_200_mib(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    system = System(tmp_path / "logs")
    for name in LIGHT:
        system.parts[name].command.env["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    with system:
        for index in range(20):
            body = {"model": "demo", "messages": [{"role": "user", "content": f"Count from {index} to 40."}], "max_tokens": 64}
            status, answer = system.post("/v1/chat/completions", body)
            assert status == 200, answer
        for name in LIGHT:
            assert system.resident_mb(name) < 200, f"{name}: {system.resident_mb(name):.0f} MiB"
