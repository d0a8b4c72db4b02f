"""Tests of `make gpu-check` without a GPU: selection, runs and resumption of its parts, and the report."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.gpu.journal import Journal
from tests.contracts.test_imports import BLOCK
from tests.gpu.check import COMPILERS, Check, arguments, compilers, exit_on_signal, main
from tests.gpu.flashinfer_folder import main as carry_flashinfer
from tests.gpu.image import differing, pins_of
from tests.gpu.parts import BENCHMARK, COMPILING, TESTS, Part, all_parts, chosen
from tests.gpu.report import write_report
from tests.gpu.results import Result, Source, State, Status, load_state
from tests.gpu.source import digest_of, source_of
from tests.gpu.targets import TARGETS, is_for, judge
from tests.gpu.wheels import install
from tests.night import NIGHTLY

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = [
    "grpc",
    "redis",
    "prometheus_client",
    "xgrammar",
    "orjson",
    "re2",
    "starlette",
    "uvloop",
    "opentelemetry",
    "kubernetes",
    "rootstock_llm.protos",
]
FACTS = {"device": "NVIDIA H200", "python": "3.12.3", "system": "Linux", "versions": {"torch": "2.11"}, "driver": "580.1"}
SOURCE = Source("abc", "0011")
LOST = """
import pytest, torch

@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

def test_wrong_but_alive(device): assert False
def test_right(device): pass

def test_lost(device, monkeypatch):
    def synchronize(): raise RuntimeError("an illegal address\\nand more")
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    synchronize()

def test_after(device): pass
"""


def script(tmp_path: Path, name: str, text: str, kind: str = BENCHMARK, limit_s: int = 20) -> Part:
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    return Part(name, kind, f"does {name}", limit_s, (str(path), "{out}"))


def outcome_script(figures: dict[str, Any], more: str = "") -> str:
    outcome = {"how": "as it is", "tables": [{"title": "t", "columns": ["a", "b"], "rows": [[1, 2.5]]}], "figures": figures}
    return f"import sys, json\nopen(sys.argv[1], 'w').write(json.dumps({outcome!r}))\n{more}"


@dataclass
class Reached:
    """A fake clock for tests of time limits. A wait for a part exceeds the time limit as soon as the part has created `file`."""

    file: Path
    now: float = 0.0  # seconds that the clock shows

    def clock(self) -> float:
        return self.now

    def wait(self, process: subprocess.Popen[bytes], limit_s: float) -> int | None:
        while not self.file.exists():
            assert process.poll() is None, "the part ended before it created the file"
            time.sleep(0.05)
        self.now += limit_s
        return None


def check(
    tmp_path: Path, parts: list[Part], source: Source = SOURCE, least_s: float = 1.0, reached: Reached | None = None
) -> tuple[Check, State]:
    state = load_state(tmp_path / "work/state.json", "2030-01-02", fresh=False)
    folders = tmp_path / "work", tmp_path / "out"
    wait = (reached.wait, reached.clock) if reached else ()
    return Check(*folders, FACTS, source, state, parts, dict(os.environ), tmp_path, least_s, *wait), state


def report_of(tmp_path: Path) -> str:
    return (tmp_path / "out/report-nvidia-h200-2030-01-02.md").read_text()


def test_every_part_has_a_limit_below_8_minutes_and_runs_existing_files() -> None:
    parts = all_parts(ROOT)
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        assert 0 < part.limit_s < 480, part.name
        assert sum("{out}" in word for word in part.command) == 1, part.name
        for word in part.command:
            assert not word.endswith(".py") or (ROOT / word).is_file(), word
            if word.startswith(("tests.", "kernels.")):
                assert (ROOT / f"{word.replace('.', '/')}.py").is_file(), word
    tested = {word for part in parts for word in part.command if word.startswith("tests/gpu/")}
    assert tested == {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
    measured = {part.name for part in parts if part.kind == BENCHMARK}
    assert {target.part for target in TARGETS} <= measured


def test_parts_with_key_figures_run_first_and_parts_that_compile_run_last() -> None:
    names = [part.name for part in all_parts(ROOT)]
    assert names[:3] == ["parity", "waits", "bench-throughput"]
    assert names[-4:] == ["kernels-layers", "kernels-attention", "kernels-sampling", "backends"]
    assert COMPILING * int(compilers()) <= COMPILERS and int(compilers()) <= COMPILERS // COMPILING


def test_commands_on_the_page_select_existing_parts() -> None:
    """Without this test, a wrong command on the page would be found only on a rented GPU machine."""
    page = (ROOT / "docs/reference/gpu/README.md").read_text()
    section = page.partition("## A first session of three commands")[2].partition("\n## ")[0].replace("\\\n", " ")
    each = (command.strip() for line in section.splitlines() for command in line.split(";"))
    commands = [shlex.split(command) for command in each if command.startswith("python3 -m tests.gpu.check")]
    named: list[str] = []
    for words in commands:
        options = arguments().parse_args(words[3:])
        named += [part.name for part in chosen(all_parts(ROOT, options.bench.split()), options.parts.split())]
        assert 0 < options.limit_s <= 560
    assert len(commands) == 5 and named[0] == "parity" and {target.part for target in TARGETS} <= set(named)


def test_parts_are_chosen_by_name_or_kind() -> None:
    parts = all_parts(ROOT)
    assert [part.name for part in chosen(parts, ["bench-nano", "parity", "bench-nano"])] == ["bench-nano", "parity"]
    assert len(chosen(parts, ["waits", "tests"])) == len(chosen(parts, ["tests"]))
    assert {part.kind for part in chosen(parts, ["tests"])} == {TESTS}
    assert chosen(parts, []) == parts
    with pytest.raises(ValueError, match="no part has the name nonsense; the parts are parity, waits, "):
        chosen(parts, ["nonsense"])


def test_make_gpu_check_reports_a_missing_gpu() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON_GPU": sys.executable}
    done = subprocess.run(
        ["make", "-s", "--no-print-directory", "gpu-check"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout.strip().startswith("The check found no usable GPU: torch ")
    assert len(done.stdout.strip().splitlines()) == 1


def test_list_of_parts_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--parts", "benchmark"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(part.kind == BENCHMARK for part in all_parts(ROOT))
    assert " 300 s  " in lines[0]


@pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1")
def test_gpu_check_needs_no_serving_dependencies(tmp_path: Path) -> None:
    """Collects all tests and imports all benchmarks without most dependencies.

    pydantic-settings, whose defaults tests use, and xxhash stay installed. The part `peers` is omitted, because it needs the
    generated protobuf messages.
    """
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(blocked=set(ELSEWHERE)))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    parts = [part for part in all_parts(ROOT) if part.name != "peers"]
    paths = sorted({word for part in parts for word in part.command if word.endswith(".py")})
    modules = [word for part in all_parts(ROOT) for word in part.command if word.startswith(("tests.", "kernels."))]
    flags = ["--collect-only", "-q", "-p", "no:timeout", "-p", "no:xdist"]
    code = f"import sys, pytest, {', '.join([*modules, 'tests.gpu.check'])}\nsys.exit(pytest.main({[*flags, *paths]!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    blocked = subprocess.run([sys.executable, "-c", "import redis"], env=environment, capture_output=True, timeout=60)
    assert blocked.returncode != 0


def test_passed_parts_are_not_run_again(tmp_path: Path) -> None:
    good = script(tmp_path, "good", outcome_script({}, "open('ran', 'a').write('x')"))
    bad = script(tmp_path, "bad", "print('first line')\nraise SystemExit('the reason')")
    runner, _ = check(tmp_path, [good, bad])
    assert runner.run([good, bad], None, keep=False) == 1
    text = report_of(tmp_path)
    assert "| good | does good | passed |" in text and "| bad | does bad | failed |" in text
    assert "the reason" in text and "| 1 | 2.5 |" in text
    bad = script(tmp_path, "bad", outcome_script({}))
    runner, _ = check(tmp_path, [good, bad])
    assert runner.run([good, bad], None, keep=False) == 0
    assert (tmp_path / "ran").read_text() == "x", "a passed part must not run a second time"
    assert "failed" not in report_of(tmp_path)


def test_tests_run_in_parallel_and_before_benchmarks(tmp_path: Path) -> None:
    """Each of two tests waits until the other test starts. A signal to the check ends both."""
    begun = "import time, pathlib\ndef test_it():\n    pathlib.Path({0!r}).touch()\n"
    begun += "    while not pathlib.Path({1!r}).exists(): time.sleep(0.01)\n"
    marks = [str(tmp_path / name) for name in ("first", "second")]
    parts = [script(tmp_path, "figure", outcome_script({}, f"import os\nassert all(map(os.path.exists, {marks!r}))"))]
    for name, (own, other) in {"a": marks, "b": marks[::-1]}.items():
        (tmp_path / f"test_{name}.py").write_text(begun.format(own, other))
        command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml={out}", str(tmp_path / f"test_{name}.py"))
        parts.append(Part(name, TESTS, f"does {name}", 60, command))
    runner, state = check(tmp_path, parts)
    assert runner.run(parts, None, keep=False, at_once=2) == 0
    assert [state.is_done(part, SOURCE, FACTS, keep=False) for part in parts] == [True] * 3
    pids = [tmp_path / f"pid-{name}" for name in "ab"]
    for name, pid in zip("ab", pids, strict=True):
        text = f"import os, pathlib, time\ndef test_it():\n    pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        text += "    time.sleep(600)\n"
        (tmp_path / f"test_{name}.py").write_text(text)

    over = threading.Event()

    def end_it() -> None:
        while not over.wait(0.02):
            if all(pid.exists() and pid.read_text() for pid in pids):
                os.kill(os.getpid(), signal.SIGTERM)
                return

    old_handler = signal.signal(signal.SIGTERM, exit_on_signal)
    ending = threading.Thread(target=end_it)
    ending.start()
    try:
        with pytest.raises(SystemExit):
            check(tmp_path, parts, Source("x", "y"))[0].run(parts, None, keep=False, at_once=2)
    finally:
        over.set()
        ending.join()
        signal.signal(signal.SIGTERM, old_handler)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def test_parts_run_again_when_the_source_has_changed(tmp_path: Path) -> None:
    part = script(tmp_path, "part", outcome_script({}, "open('ran', 'a').write('x')"))
    assert check(tmp_path, [part])[0].run([part], None, keep=False) == 0
    changed = Source("abc", "2233")
    assert check(tmp_path, [part], changed)[0].run([part], None, keep=True) == 0
    assert "passed (files 0011)" in report_of(tmp_path), "the report must name the digest of the tested files"
    assert check(tmp_path, [part], changed)[0].run([part], None, keep=False) == 0
    assert (tmp_path / "ran").read_text() == "xx"


def test_parts_run_again_when_versions_or_flags_have_changed(tmp_path: Path) -> None:
    part = script(tmp_path, "part", outcome_script({}, "open('ran', 'a').write('x')"))
    runner, state = check(tmp_path, [part])
    assert runner.run([part], None, keep=False) == 0
    newer = {**FACTS, "versions": {"torch": "2.12"}}
    assert state.is_done(part, SOURCE, FACTS, keep=False) and state.is_done(part, SOURCE, newer, keep=True)
    assert not state.is_done(part, SOURCE, newer, keep=False)
    path = write_report(tmp_path / "out", newer, SOURCE, state, [part], {})
    assert "passed (torch 2.11)" in path.read_text()
    otherwise = replace(part, command=(*part.command, "--no-graphs"))
    assert not state.is_done(otherwise, SOURCE, FACTS, keep=True)


def test_result_with_other_flags_is_added_to_earlier_results(tmp_path: Path) -> None:
    """A result with other flags or from another card replaces no earlier result.

    The report has the figures, logs and targets for all flags of a card.
    """
    part = script(tmp_path, "bench-throughput", outcome_script({"qwen3-8b.seconds": {"value": 26.0}}))
    text = (tmp_path / "bench-throughput.py").read_text().replace("26.0", "31.0")
    (tmp_path / "other.py").write_text(text)
    variant = replace(part, command=(str(tmp_path / "other.py"), "{out}", "--attention", "triton"), flags="--attention triton")
    assert check(tmp_path, [part])[0].run([part], None, keep=False) == 0
    runner, state = check(tmp_path, [part])
    assert runner.run([variant], None, keep=False) == 0
    assert runner.run([part], None, keep=False) == 0
    assert len(state.results) == 2 and len(list((tmp_path / "work").glob("bench-throughput*.json"))) == 2
    report = report_of(tmp_path)
    assert "| 8B shape, 256 × 1024/1024 | ≤ 28 s | 26 s | NVIDIA H200 | yes |" in report
    assert "| 8B shape, 256 × 1024/1024 --attention triton | ≤ 28 s | 31 s | NVIDIA H200 | no |" in report
    assert "## bench-throughput --attention triton\n" in report
    elsewhere = {**FACTS, "device": "NVIDIA H100 80GB HBM3"}
    other = Check(tmp_path / "work", tmp_path / "out", elsewhere, SOURCE, state, [part], dict(os.environ), tmp_path)
    assert other.run([part], None, keep=False) == 0
    assert len(state.results) == 3 and check(tmp_path, [part])[1].is_done(part, SOURCE, FACTS, keep=False)


def test_performance_target_applies_to_only_one_gpu_model(tmp_path: Path) -> None:
    elsewhere = {**FACTS, "device": "NVIDIA H100 80GB HBM3"}
    part = script(tmp_path, "bench-throughput", outcome_script({"qwen3-8b.seconds": {"value": 60.0}}))
    state = load_state(tmp_path / "work/state.json", "2030-01-02", fresh=False)
    runner = Check(tmp_path / "work", tmp_path / "out", elsewhere, SOURCE, state, [part], dict(os.environ), tmp_path)
    assert runner.run([part], None, keep=False) == 0
    report = (tmp_path / "out/report-nvidia-h100-80gb-hbm3-2030-01-02.md").read_text()
    assert "| ≤ 28 s | 60 s | NVIDIA H100 80GB HBM3 | not judged |" in report and "Missed" not in report
    assert "On NVIDIA H100 80GB HBM3." in report, "the report must name the card of each part's figures"
    assert [is_for(name) for name in ("NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA H100")] == [
        True,
        True,
        False,
        False,
    ]


def test_report_lists_versions_that_differ_from_the_image(tmp_path: Path) -> None:
    (tmp_path / "docker/requirements").mkdir(parents=True)
    (tmp_path / "docker/requirements/worker-cuda.txt").write_text("# written\ntorch==2.13.0\ntriton==3.7.1 ; x\nnumpy==2.5\n")
    part = script(tmp_path, "part", outcome_script({}))
    assert check(tmp_path, [part])[0].run([part], None, keep=False) == 0
    assert "| torch | 2.11 | 2.13.0 |" in report_of(tmp_path)
    assert "**Not what ships.** Measured with torch 2.11, not 2.13.0 as in the worker's image." in report_of(tmp_path)
    pins = pins_of(ROOT)
    assert {"torch", "triton", "flashinfer-python", "transformers", "numpy"} <= set(pins)
    measured = {"torch": f"{pins['torch']}+cu130", "triton": "1.0", "flashinfer-python": "not installed"}
    assert [phrase.split()[0] for phrase in differing(measured, pins)] == ["triton", "flashinfer-python"]


def test_failed_benchmark_with_figures_is_repeated_after_the_other_parts(tmp_path: Path) -> None:
    """Parts without figures run before the repetition. If the repetition fails with fewer figures, the earlier figures stay."""
    figures = {"a": {"value": 1.0}, "b": {"value": 2.0}}
    half = script(tmp_path, "half", outcome_script(figures, "open('ran', 'a').write('h')\nraise SystemExit(1)"))
    runner, state = check(tmp_path, [half])
    assert runner.run([half], None, keep=False) == 1
    result = state.of(half, FACTS)
    assert result is not None and result.status is Status.PARTLY and "| half | does half | partly |" in report_of(tmp_path)
    (tmp_path / "half.py").write_text(outcome_script({"a": {"value": 3.0}}, "open('ran', 'a').write('h')\nraise SystemExit(1)"))
    new = script(tmp_path, "new", outcome_script({}, "open('ran', 'a').write('n')"))
    runner, state = check(tmp_path, [half, new])
    assert runner.run([half, new], None, keep=False) == 1
    assert (tmp_path / "ran").read_text() == "hnh"
    result = state.of(half, FACTS)
    assert result is not None and result.outcome["figures"] == figures


def test_check_resumes_from_a_report(tmp_path: Path) -> None:
    """The check's working folder is lost, and only the report was copied back from the GPU machine."""
    good, bad = script(tmp_path, "good", outcome_script({})), script(tmp_path, "bad", "raise SystemExit('the reason')")
    assert check(tmp_path, [good, bad])[0].run([good, bad], None, keep=False) == 1
    report = tmp_path / "out/report-nvidia-h200-2030-01-02.json"
    state = load_state(tmp_path / "elsewhere/state.json", "2030-01-05", fresh=False, earlier=report)
    assert state.begun == "2030-01-02"
    assert state.is_done(good, SOURCE, FACTS, keep=False) and not state.is_done(bad, SOURCE, FACTS, keep=False)
    with pytest.raises(ValueError, match="so the check cannot continue from it"):
        load_state(tmp_path / "state.json", "2030-01-05", fresh=False, earlier=tmp_path / "none.json")


def test_part_over_the_time_limit_is_killed_with_all_child_processes(tmp_path: Path) -> None:
    child = "import subprocess, time\nsubprocess.Popen(['sleep', '60'])\n"
    slow = script(
        tmp_path,
        "slow",
        outcome_script({"a": {"value": 1.0}}, child + "print('so far', flush=True)\nopen('there', 'w')\ntime.sleep(600)"),
        limit_s=2,
    )
    runner, state = check(tmp_path, [slow], reached=Reached(tmp_path / "there"))
    assert runner.run([slow], None, keep=False) == 1
    result = state.results["slow", "", "NVIDIA H200"]
    assert result.status is Status.TIMED_OUT and "so far" in result.tail
    assert result.outcome["figures"] == {"a": {"value": 1.0}}, "the figures that were measured before the limit must be stored"


def test_check_stops_at_the_time_limit_of_all_parts(tmp_path: Path) -> None:
    """A part that the check's own limit ends is not reported as timed out. A part without enough time does not start."""
    slow = script(
        tmp_path, "slow", outcome_script({"a": {"value": 1.0}}, "import time\nopen('there', 'w')\ntime.sleep(600)"), limit_s=300
    )
    later = script(tmp_path, "later", outcome_script({}), limit_s=300)
    runner, state = check(tmp_path, [slow, later], least_s=1.5, reached=Reached(tmp_path / "there"))
    assert runner.run([slow, later], 2.5, keep=False) == 1
    assert (
        state.results["slow", "", "NVIDIA H200"].status is Status.CUT_OFF
        and state.results["slow", "", "NVIDIA H200"].outcome["figures"]
    )
    assert len(state.results) == 1 and "| later | does later | not run yet |" in report_of(tmp_path)


def test_pytest_outcomes_are_counted(tmp_path: Path) -> None:
    test_file = tmp_path / "test_some.py"
    test_file.write_text("import pytest\ndef test_a(): pass\n@pytest.mark.skip(reason='none')\ndef test_b(): pass\n")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml={out}", str(test_file))
    some = Part("some", TESTS, "tests", 60, command)
    runner, state = check(tmp_path, [some])
    assert runner.run([some], None, keep=False) == 0
    assert state.results["some", "", "NVIDIA H200"].counts == {"passed": 1, "skipped": 1}
    test_file.write_text("def test_a(): assert False\n")
    runner, state = check(tmp_path, [some], Source("x", "y"))
    assert runner.run([some], None, keep=False) == 1
    assert state.results["some", "", "NVIDIA H200"].status is Status.FAILED and state.results[
        "some", "", "NVIDIA H200"
    ].counts == {"failure": 1}


def test_interrupted_test_part_reports_earlier_failures(tmp_path: Path) -> None:
    test_file = tmp_path / "test_some.py"
    lines = [
        "import time",
        "def test_a(): assert 'this' == 'that'",
        "def test_b(): pass",
        "def test_c(): open('there', 'w'); time.sleep(600)",
    ]
    test_file.write_text("\n".join(lines))
    command = ("-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "--junitxml={out}", str(test_file))
    some = Part("some", TESTS, "tests", 8, command)
    runner, state = check(tmp_path, [some], reached=Reached(tmp_path / "there"))
    old_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a check that a shell runs in the background
    try:
        assert runner.run([some], None, keep=False) == 1
    finally:
        signal.signal(signal.SIGINT, old_handler)
    result = state.results["some", "", "NVIDIA H200"]
    assert result.status is Status.TIMED_OUT
    assert result.counts["failure"] == 1 and result.counts["passed"] >= 1
    assert result.tail.startswith("First failed test: test_some.test_a") and "'this' == 'that'" in result.tail


def test_journal_continues_after_a_failed_part(tmp_path: Path) -> None:
    journal = Journal("as it is", tmp_path / "out.json")
    for name in ("one", "two"):
        with journal.apart(name):
            if name == "one":
                raise RuntimeError("no such kernel\nand more")
            journal.figure(name, 1.0)
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["failed"], list(found["figures"])) == (["one"], ["two"])
    assert found["notes"] == ["one failed: RuntimeError: no such kernel"]


def test_tests_fail_at_once_after_the_device_is_lost(tmp_path: Path) -> None:
    """From the test `test_lost` on, all calls of the fake device fail, like those of a GPU after an illegal address."""
    (tmp_path / "test_some.py").write_text(LOST)
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.lost_device", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "2 failed, 1 passed" in done.stdout, done.stdout
    assert "the device is lost since test_some.py::test_lost: an illegal address" in done.stdout


def test_error_for_a_broken_state_file_suggests_a_fresh_start(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="start again with --fresh"):
        load_state(path, "2030-01-02", fresh=False)
    assert load_state(path, "2030-01-02", fresh=True).results == {}


def test_missed_target_is_explained_by_the_profile() -> None:
    kernels = [["gemm", 0.7], ["attention", 0.2]]
    outcome = {
        "figures": {"qwen3-8b.seconds": {"value": 29.5, "unit": "s"}},
        "profiles": {"qwen3-8b": {"idle_share": 0.01, "kernels": kernels}},
    }
    card = "NVIDIA H200"
    result = Result("bench-throughput", Status.PASSED, 1.0, SOURCE, card, "t", outcome=outcome)
    judged = {entry.target.figure: entry for entry in judge([result], card)}
    assert judged["qwen3-8b.seconds"].is_met is False
    assert judged["qwen3-8b.seconds"].next_step.startswith("gemm takes 70%")
    assert judged["nano.speedup"].is_met is None
    outcome["profiles"] = {"qwen3-8b": {"idle_share": 0.2, "kernels": kernels}}
    assert "waits for launches 20%" in judge([result], card)[0].next_step
    outcome["figures"] = {"qwen3-8b.seconds": {"value": 27.9, "unit": "s"}}
    assert judge([result], card)[0].is_met is True


def test_report_shows_a_missed_target(tmp_path: Path) -> None:
    profile = {"qwen3-0.6b": {"idle_share": 0.0, "kernels": [["attention | kernel", 0.6, 28, 4.25]]}}
    text = outcome_script({"qwen3-0.6b.speedup": {"value": 1.01, "unit": "×"}})
    text = text.replace("'how'", f"'profiles': {profile!r}, 'how'")
    part = script(tmp_path, "bench-overlap", text)
    assert check(tmp_path, [part])[0].run([part], None, keep=False) == 0
    report = report_of(tmp_path)
    assert "| overlap on against off, 0.6B shape | ≥ 1.1 × | 1.01 × | NVIDIA H200 | no |" in report
    assert "### Missed: overlap on against off" in report and "| attention \\| kernel | 60.0% | 28 | 4.25 |" in report
    found = json.loads((tmp_path / "out/report-nvidia-h200-2030-01-02.json").read_text())
    assert [entry["met"] for entry in found["targets"] if entry["target"]["part"] == "bench-overlap"] == [False]


def test_source_version_has_the_commit_and_a_digest_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/a.py").write_text("a = 1\n")
    before = source_of(tmp_path)
    assert before.commit == "unknown" and before.digest == digest_of(tmp_path)
    assert source_of(tmp_path, given_commit="abc").commit == "abc"
    (tmp_path / "kernels/notes.md").write_text("no code")
    assert source_of(tmp_path) == before
    (tmp_path / "kernels/a.py").write_text("a = 2\n")
    assert source_of(tmp_path).digest != before.digest


def test_installation_uses_wheels_and_needs_no_network(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with pytest.raises(ValueError, match="has no wheels"):
        install(wheels, site)
    info = "gpu_check_probe-1.0.dist-info"
    with zipfile.ZipFile(wheels / "gpu_check_probe-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("gpu_check_probe.py", "value = 7\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: gpu-check-probe\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    assert install(wheels, site).startswith("installed gpu_check_probe-1.0")
    assert (site / "gpu_check_probe.py").is_file()
    assert "already" in install(wheels, site)


def test_flashinfer_folder_omits_compiler_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, kept = "flashinfer/data", "flashinfer/data/csrc"
    names = {
        "flashinfer/__init__.py": True,
        f"{kept}/batch_prefill.cu": True,
        f"{kept}/batch_decode_config.inc": True,
        f"{kept}/nv_internal/common.h": True,
        f"{kept}/tvm_ffi_utils.h": True,
        f"{data}/include/flashinfer/page.cuh": True,
        f"{kept}/gemm.cu": False,
        f"{data}/cutlass/include/cute/tensor.hpp": False,
        f"{data}/cccl/a/b.h": False,
    }
    wheels = tmp_path / "flashinfer_python-0.7-py3-none-any.whl", tmp_path / "apache_tvm_ffi-0.1-py3-none-any.whl"
    for wheel, members in zip(wheels, (names, {"tvm_ffi/csrc/whole.cu": True}), strict=True):
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in members:
                archive.writestr(name, name)
    modules, out = tmp_path / "aot", tmp_path / "fi"
    (modules / "decode").mkdir(parents=True)
    (modules / "decode/decode.so").write_bytes(b"compiled")
    out.mkdir()
    (out / "stale").touch()
    assert carry_flashinfer([*map(str, wheels), "--out", str(out), "--modules", str(modules)]) == 0
    there = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert there == {name for name, left in names.items() if left} | {"tvm_ffi/csrc/whole.cu", f"{data}/aot/decode/decode.so"}
    assert carry_flashinfer([str(wheels[0]), "--out", str(out), "--modules", str(tmp_path / "none")]) == 1
    assert "has no NAME/NAME.so" in capsys.readouterr().err
