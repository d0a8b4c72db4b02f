"""Runs python -m rootstock_llm.services.sim.core from end to end: generates, runs, prints and draws traces."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rootstock_llm.services.sim.core import __main__ as cli
from rootstock_llm.services.sim.core.report.timeline import BINS, mean_of_gauge, mean_of_intervals
from rootstock_llm.services.sim.core.run.config_flags import add_config_flags, settings_of, simulated_config, simulated_model
from rootstock_llm.services.worker.core.contracts.config import SchedulePolicy
from rootstock_llm.services.worker.core.contracts.graph_limits import GraphLimits
from rootstock_llm.services.worker.device_limits import resolved
from rootstock_llm.services.worker.scheduler_config import scheduler_config
from rootstock_llm.services.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
SMALL = ["--num-pages", "512", "--context-len", "4096", "--max-running-requests", "16"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    sizes = ["--groups", "4", "--per-group", "4", "--prefix", "256", "--suffix", "32", "--output", "20"]
    assert cli.main(["generate", "shared-prefix", str(path), *sizes, "--rate", "50"]) == 0
    return path


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main([*argv, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_command_runs_a_trace_and_draws_a_timeline(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "run.png"
    command = [sys.executable, "-m", "rootstock_llm.services.sim.core", str(trace), *SMALL, "--timeline", str(picture)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for word in ("16: 16 finished", "hit rate", "TTFT", "TPOT", "E2E", "retractions", "KV in use", "wall time"):
        assert word in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_json_has_every_figure_of_a_run(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, str(trace), *SMALL)
    assert report["requests"] == report["finished"] == 16
    assert report["prompt_tokens"] == 16 * 288 and report["output_tokens"] == 320
    assert 0 < report["hit_rate"] < 1 and report["ttft"]["p50"] <= report["ttft"]["p99"] <= report["e2e"]["p99"]
    assert set(report["steps"]) == {"extend", "decode"}
    assert report["counters"]["retractions"] == 0 and report["counters"]["generated_tokens"] == 320


def test_model_with_recurrent_states_hits_only_prefixes_with_a_stored_state(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {}
    for states in (0, 48, 400):
        report = run_json(capsys, str(trace), *SMALL, "--states", str(states), "--concurrency", "1")
        assert report["finished"] == 16
        rates[states] = report["hit_rate"]
        assert (report["counters"].get("state_missed_pages", 0) > 0) == (states > 0)
    assert 0 < rates[48] <= rates[400] < rates[0], (
        "the state of a prefix is stored when a second prompt branches off after the prefix"
    )


def test_window_flags_simulate_a_model_with_window_attention(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, str(trace), *SMALL, "--window", "128", "--chunked-prefill-size", "256", "--concurrency", "1")
    assert report["finished"] == 16 and 0 < report["hit_rate"] < 1
    assert cli.main([str(trace), *SMALL, "--window", "128", "--window-units", "4"]) == 1
    assert "the group window has 4 units; it needs at least" in capsys.readouterr().err


def test_flags_change_the_scheduler_and_the_time_model(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.json"
    model.write_text('{"base": 0.1}')
    slow = run_json(capsys, str(trace), *SMALL, "--time-model", str(model), "--no-enable-overlap", "--concurrency", "16")
    assert slow["tpot"]["p50"] == pytest.approx(0.1, rel=0.1), "a prefill step may run between two tokens"
    mixed = run_json(capsys, str(trace), *SMALL, "--enable-mixed-chunk", "--chunked-prefill-size", "64")
    assert mixed["steps"]["mixed"] > 0
    cold = run_json(capsys, str(trace), *SMALL, "--no-enable-radix-cache")
    assert cold["hit_rate"] == 0
    fast = run_json(capsys, str(trace), *SMALL, "--speed", "1000")
    assert fast["seconds"] < run_json(capsys, str(trace), *SMALL)["seconds"]


def settings_with(*flags: str) -> WorkerSettings:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return settings_of(parser.parse_args(flags))


@pytest.mark.by_day(one_in=2, seed=6)
@pytest.mark.parametrize(
    ("flags", "device_bytes"),
    [((), 140 * GIB), (("--device-gib", "24"), 24 * GIB), (("--device-gib", "0"), None)],
    ids=["an H200", "a small GPU", "a CPU"],
)
def test_default_flags_give_the_deployed_configuration(
    flags: tuple[str, ...], device_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed = resolved(WorkerSettings(), device_bytes)
    monkeypatch.setenv("ROOTSTOCK_MAX_QUEUED_REQUESTS", "7")  # the environment is not read
    settings = settings_with(*flags)
    assert settings == deployed
    simulated = simulated_config(settings, 512, GraphLimits(8, 100, 0.5))
    model = replace(simulated_model(settings, 512, GraphLimits()), graph_rows=(8,), graph_rereads=100, eager_step_cost=0.5)
    assert simulated == scheduler_config(deployed, model, bos_token_id=-1)


def test_flags_change_the_settings_of_the_simulated_worker() -> None:
    given = {"page_size": 32, "max_queued_requests": 7, "schedule_policy": SchedulePolicy.LPM, "enable_radix_cache": False}
    flags = ("--page-size", "32", "--max-queued-requests", "7", "--schedule-policy", "lpm", "--no-enable-radix-cache")
    assert settings_with(*flags) == settings_with().model_copy(update=given)


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("kind", ["shared-prefix", "random", "multi-turn", "storm", "grammars"])
def test_generate_command_makes_a_runnable_trace_of_each_kind(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    few = {"shared-prefix": ["--groups", "3", "--per-group", "2"], "multi-turn": ["--sessions", "3"]}
    assert cli.main(["generate", kind, str(path), *few.get(kind, ["--requests", "10"])]) == 0
    report = run_json(capsys, str(path), "--time-model", "zero")
    assert report["requests"] == report["finished"] == len(path.read_text().splitlines()) > 0


@pytest.mark.by_day(one_in=2, seed=10)
@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        pytest.param(["missing.jsonl"], "missing.jsonl", id="no such trace"),
        pytest.param(["{trace}", "--timeline", "run.bmp"], "run.bmp", id="a picture of another kind"),
        pytest.param(["{trace}", "--time-model", "missing.json"], "missing.json", id="no such time model"),
        pytest.param(["{trace}", "--page-size", "0"], "page_size", id="a setting out of range"),
        pytest.param(["{trace}", "--chunked-prefill-size", "8"], "chunked_prefill_size", id="settings that do not go together"),
        pytest.param(["{trace}", "--block-size", "0"], "block_size is 0", id="blocks without tokens"),
        pytest.param(["{trace}", "--plan-us", "-1"], "per plan", id="negative host time"),
        pytest.param(["fit", "missing.jsonl"], "missing.jsonl", id="nothing to fit"),
        pytest.param(["generate", "random", "{trace}", "--requests", "0"], "no request", id="a trace without requests"),
    ],
)
def test_command_reports_an_error_in_one_line(
    argv: list[str], reason: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.main([part.format(trace=trace) for part in argv]) == 1
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1
    assert trace.stat().st_size, "the trace is unchanged"


def test_fitted_time_model_determines_the_step_times_of_a_run(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timings, model = tmp_path / "timings.jsonl", tmp_path / "model.json"
    lines = [
        {"prefill_tokens": p, "rows": r, "context_tokens": 50 * r + p, "seconds": 0.05 + 0.001 * p}
        for p in (0, 100)
        for r in (1, 2, 9)
    ]
    timings.write_text("\n".join(map(json.dumps, lines)))
    capsys.readouterr()
    assert cli.main(["fit", str(timings)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.err)["r2"] == pytest.approx(1.0)
    model.write_text(printed.out)
    report = run_json(capsys, str(trace), *SMALL, "--time-model", str(model), "--concurrency", "1")
    assert report["tpot"]["p50"] == pytest.approx(0.05)


def test_simulation_run_imports_neither_torch_nor_matplotlib(trace: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = sys.modules["matplotlib"] = None
from rootstock_llm.services.sim.core.__main__ import main
assert main([{str(trace)!r}, "--num-pages", "512"]) == 0
sys.exit(main([{str(trace)!r}, "--timeline", "run.png"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "needs matplotlib" in done.stderr, done.stderr
    assert "16 finished" in done.stdout


def test_binned_mean_of_intervals_keeps_the_total() -> None:
    rng = np.random.default_rng(0)
    begins = np.cumsum(rng.uniform(1e-3, 2e-3, 100_000))
    ends = begins + 5e-4
    values = rng.integers(0, 100, len(begins)).astype(np.float64)
    edges = np.linspace(0.0, float(ends[-1]), BINS + 1)
    means = mean_of_intervals(begins, ends, values, edges)
    assert len(means) == BINS
    assert float((means * np.diff(edges)).sum()) == pytest.approx(float(values.sum() * 5e-4))


def test_binned_mean_of_a_gauge_keeps_a_value_until_the_next_value() -> None:
    at, values = np.array([1.0, 2.0]), np.array([10.0, 20.0])
    assert mean_of_gauge(at, values, np.array([0.0, 1.0, 1.5, 2.5, 4.0])).tolist() == [0.0, 10.0, 15.0, 20.0]
