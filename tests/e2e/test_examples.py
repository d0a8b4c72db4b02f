"""The programs of examples/ print the right answers when they call a running system."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.system import ROOT, System

EXAMPLES = ROOT / "examples"
RESULTS = {
    "chat.py": "3, 4, 5, 6, 7, 8, 9\n",
    "structured_output.py": "name='Ada' age=36\n",
}


def printed_by(system: System, *command: str) -> str:
    environment = {**os.environ, "ROOTSTOCK_URL": system.url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", RESULTS)
def test_python_example_prints_the_right_answer(name: str, system: System) -> None:
    assert printed_by(system, sys.executable, str(EXAMPLES / name)) == RESULTS[name]


def test_curl_example_prints_the_models_and_the_answer_both_whole_and_streamed(system: System) -> None:
    models, whole, *stream = printed_by(system, str(EXAMPLES / "requests.sh")).splitlines()
    assert [model["id"] for model in json.loads(models)["data"]] == ["demo"]
    answer = json.loads(whole)["choices"][0]["message"]["content"]
    events = [line.removeprefix("data: ") for line in stream if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    deltas = [choice["delta"].get("content") or "" for event in events for choice in json.loads(event)["choices"]]
    assert answer == "".join(deltas) == "17 + 25 = 42."


def test_every_example_program_has_a_test() -> None:
    programs = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert programs == {*RESULTS, "requests.sh"}
