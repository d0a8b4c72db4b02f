"""The command `rootstock` on whole systems: every example of every --help, and `status --watch` while a worker is killed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rootstock_llm.services.cli.commands import COMMANDS, build_parser
from rootstock_llm.services.local.ports import free_ports
from tests.e2e.system import ROOT, System, wait_until
from tests.night import NIGHTLY

FAKE = "--executor fake"
LOST_S = 3.0 if NIGHTLY else 30.0  # time limit until the status shows a killed worker; longer by day, because other tests run
SHELL = f'rootstock() {{ {sys.executable} -m rootstock_llm.services.cli "$@"; }}; set -euo pipefail; '


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("system"), workers=3, worker_flags=FAKE) as started:
        yield started


def examples(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns the example commands that `--help` of a command prints."""
    with pytest.raises(SystemExit):
        build_parser().parse_args([command, "--help"])
    found = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    return [line.strip() for line in found if line.startswith("  ")]


def test_examples_in_the_help_texts_succeed(system: System, capsys: pytest.CaptureFixture[str]) -> None:
    # The excluded commands need files or a control port and have their own tests. A test of docs/reference/cli.md runs `serve`.
    for command in COMMANDS.keys() - {"batch", "keys", "control", "sim", "serve"}:
        found = examples(command, capsys)
        assert found and all(f"rootstock {command}" in line for line in found)
        for line in found:
            done = typed(line, system)
            assert (done.returncode, done.stderr) == (0, ""), line
            assert done.stdout or command == "completion", line


def test_examples_in_the_help_of_the_keys_command_succeed(
    system: System, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, listed = examples("keys", capsys)
    entry = typed(new, system, tmp_path)
    assert entry.returncode == 0 and entry.stderr.startswith("API key, give it to its owner only: rsk-")
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [json.loads(entry.stdout)]}))
    header, row = typed(listed, system, tmp_path).stdout.splitlines()
    assert header.split()[:3] == ["name", "state", "expires"]
    assert row.split()[:4] == ["team-a", "valid", "never", "all"] and "600" in row


def test_examples_in_the_help_of_the_sim_command_succeed(
    system: System, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in examples("sim", capsys):
        done = typed(line, system, tmp_path)
        assert done.returncode == 0 and done.stdout, (line, done.stderr)


def test_examples_in_the_help_of_the_control_command_succeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    with System(tmp_path, worker_flags=f"{FAKE} --control-port {port}") as controlled:
        for line in examples("control", capsys):
            done = typed(f"{line} --address 127.0.0.1:{port}", controlled)
            assert done.returncode == 0 and isinstance(json.loads(done.stdout), dict), (line, done.stderr)


def asked_of_the_demo() -> dict[str, str]:
    """Returns the right answers by question, for the demo model's questions in README, docs/, chart, CLI and playground."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "services" / "gateway" / "playground").glob("*.html")]
    pages += [ROOT / "charts" / "rootstock" / "templates" / "NOTES.txt", ROOT / "services" / "cli" / "commands.py"]
    text = "\n".join(page.read_text() for page in pages)
    found = {}
    for question, first, last in re.findall(r"(Count from (\d+) to (\d+)\.)", text):
        found[question] = ", ".join(map(str, range(int(first), int(last) + 1)))
    for question, first, last in re.findall(r"(What is (\d+) \+ (\d+)\?)", text):
        found[question] = f"{first} + {last} = {int(first) + int(last)}."
    return found


def test_documented_questions_and_examples_get_the_right_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with System(tmp_path) as demo:
        for question, answer in asked_of_the_demo().items():
            done = typed(f"rootstock chat -m {shlex.quote(question)} --temperature 0", demo)
            assert done.stdout.strip() == answer, question
        for command in ("chat", "complete"):
            for line in examples(command, capsys):
                (question,) = re.findall(r'"(.+?)"', line)
                answers = [typed(line, demo).stdout for _ in range(3)]
                assert all(asked_of_the_demo()[question] in answer for answer in answers), (line, answers)


def test_batch_commands_submit_a_batch_and_wait_and_fetch_the_results(
    system: System, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def line(number: int) -> dict[str, Any]:
        body = {"prompt": f"{number} + 30 =", "max_tokens": 4 if number else -1}
        return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", **body}}

    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line(number)) + "\n" for number in range(5)))
    for example in examples("batch", capsys):
        assert typed(example, system, tmp_path).returncode == 0, example
    (batch,) = json.loads(typed("rootstock batch list --json", system, tmp_path).stdout.splitlines()[0])["id"].split()
    for flag, expected in (("", {f"line-{number}" for number in range(1, 5)}), ("--errors", {"line-0"})):
        results = typed(f"rootstock batch results {batch} {flag}", system, tmp_path)
        assert {json.loads(each)["custom_id"] for each in results.stdout.splitlines()} == expected


def typed(line: str, system: System, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a line in a shell with the command `rootstock` and with the server's URL in ROOTSTOCK_URL."""
    environment = {**os.environ, "ROOTSTOCK_URL": system.url, "PYTHONPATH": str(ROOT)}
    words = ["bash", "--norc", "-c", SHELL + line]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)


class Watch:
    """A running `rootstock status --watch --json`. A thread reads its lines until `end`."""

    def __init__(self, url: str) -> None:
        command = [
            sys.executable,
            "-m",
            "rootstock_llm.services.cli",
            "status",
            "--watch",
            "--json",
            "--interval",
            "0.5",
            "--url",
            url,
        ]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    def states(self) -> dict[str, str]:
        """Returns the state of each worker in the last line that the command has printed."""
        status: dict[str, Any] = json.loads(self._lines[-1]) if self._lines else {}
        return {worker["name"]: worker["state"] for worker in status.get("workers", ())}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


def test_status_watch_shows_a_killed_worker_within_three_seconds(system: System) -> None:
    watch = Watch(system.url)
    try:
        names = ["worker-0", "worker-1", "worker-2"]
        wait_until(lambda: watch.states() == dict.fromkeys(names, "ready"), 60, "all workers to be shown as ready")
        system.kill("worker-1")
        wait_until(lambda: watch.states().get("worker-1") == "lost", LOST_S, "the loss to be shown")
        assert {watch.states()[name] for name in ("worker-0", "worker-2")} == {"ready"}
        system.start("worker-1")
        wait_until(lambda: watch.states() == dict.fromkeys(names, "ready"), 60, "the restarted worker to be shown as ready")
    finally:
        watch.end()


def test_bench_command_writes_its_results_when_it_runs_outside_a_checkout(system: System, tmp_path: Path) -> None:
    """bench writes its results to the working directory and finds its program on PATH."""
    words = [sys.executable, "-m", "rootstock_llm.services.cli", "bench", "--num-requests", "2", "--output-len", "4", "--json"]
    environment = {**os.environ, "ROOTSTOCK_URL": system.url, "PYTHONPATH": str(ROOT)}
    command = [*words, "--output-file", "results.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=True)
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(line) == json.loads(done.stdout)
    assert json.loads(line)["results"]["successful_requests"] == 2
