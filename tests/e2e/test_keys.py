"""API keys with permitted models and an expiry, created by `rootstock keys` and used on a whole system."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.system import ROOT, System

FLAGS = {"demo": ("--models", "demo"), "other": ("--models", "other"), "old": ("--expires", "2026-01-31T00:00:00Z"), "free": ()}
CHAT = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 4}


def keys(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs `rootstock keys`."""
    command = [sys.executable, "-m", "rootstock_llm.services.cli", "keys", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)


def test_api_key_is_limited_to_listed_models_and_to_a_lifetime(tmp_path: Path) -> None:
    made = {name: keys("new", name, *flags) for name, flags in FLAGS.items()}
    secrets = {name: each.stderr.strip().rpartition(" ")[2] for name, each in made.items()}
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [json.loads(each.stdout) for each in made.values()]}))
    listed = {row.split()[0]: row.split()[1] for row in keys("list", str(path)).stdout.splitlines()[1:]}
    assert listed == {"demo": "valid", "other": "valid", "old": "expired", "free": "valid"}
    with System(tmp_path, gateway_flags=f"--api-keys-file {path}") as system:
        found = {name: system.post("/v1/chat/completions", {"model": "demo", **CHAT}, key=key) for name, key in secrets.items()}
        codes = {name: (status, body.get("error", {}).get("code")) for name, (status, body) in found.items()}
        log = system.log("access")
    assert codes == {
        "demo": (200, None),
        "other": (403, "model_not_allowed"),
        "old": (401, "api_key_expired"),
        "free": (200, None),
    }
    assert {json.loads(line)["key"] for line in log.splitlines()} == {"demo", "other", "", "free"}
    assert not [name for name, secret in secrets.items() if secret in log or secret in path.read_text()]
