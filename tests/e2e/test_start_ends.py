"""A process ends while the launcher starts the system. The launcher restarts it or, if it cannot run, names the cause."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rootstock_llm.services.local.ports import free_ports
from tests.e2e.launcher import Launcher
from tests.e2e.system import DEMO, wait_until

KINDS = ("redis", "state", "tokenizer", "detokenizer", "worker-0", "worker-1", "gateway")
PHASES = ("just started", "ready while others are awaited", "all ready")
ANSWER = "17 + 25 = 42."
LAST = "Ctrl-C stops everything."


def wait_until_ready(launcher: Launcher, name: str) -> None:
    """Waits until a process is ready.

    While the launcher waits for a stopped worker, it prints nothing about the processes that it lists after this worker. The
    function reads the logs of these processes instead.
    """
    if name in ("worker-1", "gateway"):
        line = "a step may take" if name == "worker-1" else '"listening"'
        wait_until(lambda: line in launcher.log(name), 120, f"{name} to be ready")
    else:
        launcher.read_until(f"  {name} ")


@pytest.mark.by_day(one_in=4, seed=17)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", KINDS)
def test_first_question_is_answered_when_a_process_is_killed_during_the_start(name: str, phase: str, tmp_path: Path) -> None:
    with Launcher(tmp_path, "--workers", "2") as launcher:
        if phase == "just started":
            victim = launcher.wait_for(name)
            victim.kill()
            launcher.wait_for(name, besides=victim.pid)
        elif phase == "ready while others are awaited":
            held = launcher.wait_for("worker-1" if name == "worker-0" else "worker-0")
            held.send_signal(signal.SIGSTOP)
            wait_until_ready(launcher, name)
            victim = launcher.wait_for(name)
            victim.kill()
            launcher.wait_for(name, besides=victim.pid)
            held.send_signal(signal.SIGCONT)
        else:
            launcher.read_until("  gateway       ready")
            victim = launcher.wait_for(name)
            victim.kill()
        text = launcher.read_until(LAST)
        if phase != "all ready":
            assert f"{name} was killed by SIGKILL" in text and "The process is restarted." in text
        assert ANSWER in text, text
        assert "Traceback" not in text
        wait_until(lambda: launcher.child(name) is not None, 60, f"{name} to be restarted")


def test_launcher_reports_the_cause_when_a_process_ends_twice(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (port,) = free_ports(1)
    (state / str(port) / "appendonlydir").mkdir(parents=True)
    (state / str(port) / "appendonlydir" / "appendonly.aof.manifest").write_text("this is no manifest\n")
    with Launcher(tmp_path, port=port) as launcher:
        text = launcher.read_all()
    assert launcher.process.returncode == 1
    assert "cannot serve: state ended with status 1: " in text and "manifest" in text
    assert f"Its log is {launcher.logs / 'state.log'}." in text and "Traceback" not in text
    assert text.count("The process is restarted.") == 1


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (("--worker-flags", "--no-such-flag 1"), "worker refuses its settings: unknown flag --no-such-flag; --help lists"),
        (("--worker-flags", "--page-size 0"), "worker refuses its settings: page_size: Input should be greater than"),
        (("--gateway-flags", "--retry-after-s x"), "gateway refuses its settings: retry_after_s: Input should"),
        (("--gateway-flags", "--tls-cert-file a.pem"), "gateway refuses its settings: tls_cert_file and tls_key_file must"),
        (("--no-such-flag", "1"), "local refuses its settings: unknown flag --no-such-flag; --help lists the flags."),
    ],
    ids=["unknown flag", "range", "type", "pair", "launcher's"],
)  # fmt: skip
def test_launcher_refuses_wrong_flags_before_a_process_starts(flags: tuple[str, ...], fault: str, tmp_path: Path) -> None:
    with Launcher(tmp_path, *flags) as launcher:
        text = launcher.read_all()
    assert launcher.process.returncode and text.startswith("cannot serve: ") and text.count("\n") == 1
    assert fault in text, text


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"a": ')


def unknown_kind(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "no-such-model"}
    (folder / "config.json").write_text(json.dumps(config))


def wrong_value(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"hidden_size": "many"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (broken_tokenizer, "tokenizer.json: "),
        (unknown_kind, "has model_type 'no-such-model', which transformers"),
        (wrong_value, "Field 'hidden_size' expected int, got str"),
    ],
)
def test_launcher_reports_the_fault_once_when_a_service_refuses_the_model(
    change: Callable[[Path], None], fault: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model"))
    change(folder)
    with Launcher(tmp_path, "--model", str(folder)) as launcher:
        text = launcher.read_all()
    assert launcher.process.returncode == 1 and "is restarted" not in text and "Traceback" not in text
    (line,) = [line for line in text.splitlines() if str(folder) in line]
    assert line.startswith("cannot serve: ") and fault in line and "ended with status 2: " in line, line


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A memory cgroup, of version 1 or 2, whose processes may use 120 MiB together."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"rootstock-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(120 << 20))
                yield group
                return
        finally:
            wait_until(lambda group=group: not (group / "cgroup.procs").read_text().strip(), 60, "the cgroup to be empty")
            group.rmdir()
    pytest.skip("no memory cgroup can be made here")


def test_launcher_reports_missing_memory_when_the_system_kills_the_worker(small_memory: Path, tmp_path: Path) -> None:
    with Launcher(tmp_path) as launcher:
        first = launcher.wait_for("worker-0")
        (small_memory / "cgroup.procs").write_text(str(first.pid))
        second = launcher.wait_for("worker-0", besides=first.pid)
        (small_memory / "cgroup.procs").write_text(str(second.pid))
        text = launcher.read_all()
    assert launcher.process.returncode == 1
    assert "worker-0 was killed by the system because memory ran out. The model's weights take 0.01 GB, and " in text, text
    assert "of memory was free at the start." in text
