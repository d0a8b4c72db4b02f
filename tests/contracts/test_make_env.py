"""`make env` installs the extra `protos`, and `make dev-env` also `dev`. Without a GPU, torch comes from PyTorch's CPU index."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEX = "https://torch.example/cpu"
# A fake Python: creates an environment, reaches the index unless UNREACHED is 1, and records the calls of pip.
STUB = """#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip "*) echo "$@" >> "$PIP_LOG" ;;
  *urlopen*) echo "$@" >> "$PIP_LOG.asked"; exit "$UNREACHED" ;;
esac
"""


def test_dev_extra_includes_the_protos_extra_of_the_server() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["dev"][0] == "rootstock-llm[protos]"
    assert [word.split(">")[0] for word in extras["protos"]] == ["grpcio-tools"]


@pytest.mark.parametrize(
    ("goal", "extras"), [("env", ["protos"]), ("run", ["protos"]), ("bench", ["protos"]), ("test", ["protos", "dev"])]
)
def test_make_installs_the_extras_that_a_goal_needs(goal: str, extras: list[str], tmp_path: Path) -> None:
    """Runs make as on a clean clone, with the environment in another folder."""
    asked = ["make", "-n", goal, f"VENV={tmp_path / 'venv'}"]
    output = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    installed = [line.rpartition(" -e ")[2] for line in output.splitlines() if " -m pip install " in line]
    assert installed == [f"'.[{extra}]'" for extra in extras]


@pytest.mark.parametrize(
    ("system", "gpu", "reached", "index", "used"),
    [
        ("Linux", False, True, INDEX, True),
        ("Linux", False, False, INDEX, False),
        ("Linux", True, True, INDEX, False),
        ("Darwin", False, True, INDEX, False),
        ("Linux", False, True, "", False),
    ],
    ids=["reached", "not reached", "gpu", "macos", "none"],
)
def test_torch_comes_from_the_cpu_index_when_the_index_is_reached(
    system: str, gpu: bool, reached: bool, index: str, used: bool, tmp_path: Path
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in {"python": STUB, "uname": f"#!/bin/sh\necho {system}\n"}.items():
        (programs / name).write_text(text)
    if gpu:
        (programs / "nvidia-smi").write_text("#!/bin/sh\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    log, ready = tmp_path / "pip", tmp_path / "venv" / ".ready-run"
    env = {**os.environ, "PATH": f"{programs}:{without_nvidia()}", "PIP_LOG": str(log), "UNREACHED": str(int(not reached))}
    asked = ["make", "-s", str(ready), f"VENV={tmp_path / 'venv'}", f"PYTHON={programs / 'python'}", f"TORCH_INDEX={index}"]
    subprocess.run(asked, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
    installed, *removed = log.read_text().splitlines()
    assert [line.split()[-1] for line in removed] == ([] if gpu else ["triton"]), (
        "triton must be removed exactly on machines without a GPU"
    )
    assert (f"--extra-index-url {INDEX}" in installed) == used and installed.endswith("-e .[protos]")
    assert ready.exists()
    if not (gpu or index == "" or system != "Linux"):
        assert "timeout=3" in log.with_suffix(".asked").read_text(), (
            "the index must be tried with a short timeout, because pip would retry for minutes"
        )


def without_nvidia() -> str:
    """Returns PATH without the folders that contain nvidia-smi."""
    return os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if not (Path(each) / "nvidia-smi").exists())
