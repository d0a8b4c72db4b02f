"""Runs python -m rootstock_llm.services.sim.fleet from end to end: workloads and traces in, tables and JSON out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rootstock_llm.services.gateway.routing.config import RoutingPolicy
from rootstock_llm.services.sim.core.trace.trace import write_trace
from rootstock_llm.services.sim.core.trace.workloads import shared_prefix
from rootstock_llm.services.sim.fleet import __main__ as cli
from rootstock_llm.services.sim.fleet.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--workers", "3", "--kv-tokens", "16384"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, shared_prefix(6, 5, 256, 32, 20, 50.0, 0))
    return path


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main([*argv, "--json"]) == 0
    reports: dict[str, Any] = json.loads(capsys.readouterr().out)
    return reports


def test_command_prints_a_table_row_and_a_line_for_each_policy(trace: Path) -> None:
    command = [sys.executable, "-m", "rootstock_llm.services.sim.fleet", str(trace), *SMALL, "--policies", "all"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for policy in RoutingPolicy:
        assert f"| {policy} " in done.stdout and f"{policy}: 30 of 30 finished" in done.stdout
    for word in ("hit rate", "TTFT", "E2E", "max/mean", "predicted/cached", "3 workers", "16,384 tokens each"):
        assert word in done.stdout


def test_json_has_every_figure_of_a_fleet(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, str(trace), *SMALL)["prefix_aware"]
    assert report["requests"] == report["finished"] == 30 and report["errors"] == {}
    assert 0 < report["hit_rate"] < 1 and report["ttft"]["p50"] <= report["e2e"]["p99"]
    assert sum(report["reasons"].values()) == 30 and report["balance"]["tokens"] >= 1.0
    assert report["prediction"]["cached_tokens"] > 0 and report["steps"] > 0


@pytest.mark.by_day(one_in=3, seed=17)
@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_workload_size_follows_the_flag(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--workload", workload, "--workers", "3", "--size", "1", "--time-model", "zero", "--policies", "least_requests"]
    report = run_json(capsys, *argv)["least_requests"]
    assert report["finished"] == report["requests"] == (160 if workload == "multi-turn" else 128)


def test_flags_change_the_routing_and_the_fleet_and_the_scheduler(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(trace), *SMALL, "--policies", "prefix_aware", "--seed", "1"]

    def reasons(*flags: str) -> dict[str, int]:
        found: dict[str, int] = run_json(capsys, *argv, *flags)["prefix_aware"]["reasons"]
        return found

    assert set(reasons("--min-match-tokens", "100000")) == {"no_match"}
    assert reasons("--speculative-s", "0", "--index-delay-s", "1000")["prefix"] < reasons()["prefix"]
    one = run_json(capsys, *argv, "--max-running-requests", "1", "--slack", "0", "--gateways", "1")["prefix_aware"]
    assert one["max_queue"] > 0
    killed = run_json(capsys, *argv, "--kill", "0@0.2", "--kill", "1@0.2+0.5")["prefix_aware"]
    assert killed["resumed"] > 0 and killed["finished"] == 30


def test_prefill_workers_flag_simulates_each_policy_with_and_without_prefill_roles(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(trace), *SMALL, "--prefill-workers", "1", "--disaggregation-min-tokens", "64"]
    reports = run_json(capsys, *argv)
    assert set(reports) == {"prefix_aware", "round_robin", "prefix_aware, no roles", "round_robin, no roles"}
    roles = reports["prefix_aware"]["roles"]
    assert roles["handed_over"] > 0 and roles["read_bytes"] > 0 and 0 < roles["prefill_busy"] < 1
    assert reports["prefix_aware, no roles"]["roles"] is None and reports["prefix_aware, no roles"]["finished"] == 30
    plain = run_json(capsys, str(trace), *SMALL, "--policies", "prefix_aware")["prefix_aware"]
    assert {**plain, "policy": "", "wall_s": 0} == {**reports["prefix_aware, no roles"], "policy": "", "wall_s": 0}
    assert cli.main([*argv, "--policies", "prefix_aware"]) == 0
    out = capsys.readouterr().out
    for word in ("| prefix_aware, no roles ", "with / without roles", "handed over", "ahead / read / kept, GB", "prefill "):
        assert word in out


def test_transfer_flags_change_the_transfer_times_and_the_transferred_bytes(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(trace), *SMALL, "--policies", "prefix_aware", "--prefill-workers", "1", "--disaggregation-min-tokens", "64"]

    def roles(*flags: str) -> dict[str, Any]:
        found: dict[str, Any] = run_json(capsys, *argv, *flags)["prefix_aware"]["roles"]
        return found

    usual = roles()
    assert roles("--transfer-latency-ms", "20")["gap"]["p50"] > usual["gap"]["p50"] + 0.015
    assert roles("--kv-bytes-per-token", "1024")["kept_bytes"] * 128 == usual["kept_bytes"]
    assert roles("--transfer-gbs", "2")["gap"]["p90"] > usual["gap"]["p90"]
    assert roles("--disaggregation-min-tokens", "100000")["handed_over"] == 0


def test_kv_share_flag_is_relative_to_the_number_of_distinct_tokens(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(trace), "--workers", "2", "--kv-share", "0.5", "--policies", "random"]) == 0
    distinct = 6 * 256 + 30 * 32
    out = capsys.readouterr().out
    assert f"2 workers with KV for {distinct // 2:,} tokens each" in out and f"{distinct:,} of them distinct" in out


@pytest.mark.by_day(one_in=3, seed=23)
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        pytest.param([], "a trace file or --workload", id="nothing to run"),
        pytest.param(["/nowhere.jsonl"], "nowhere", id="no such file"),
        pytest.param(["--workload", "no-sharing", "--workers", "0"], "at least one worker", id="no worker"),
        pytest.param(["--workload", "chat", "--workers", "2", "--prefill-workers", "2"], "at least one other", id="no decoder"),
        pytest.param(
            ["--workload", "chat", "--prefill-workers", "1", "--transfer-gbs", "-1"], "not be negative", id="no bandwidth"
        ),
        pytest.param(["--workload", "no-sharing", "--size", "1", "--kill", "9@1"], "worker does not exist", id="no such worker"),
    ],
)
def test_command_reports_an_error_when_the_fleet_cannot_run(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 1
    assert says in capsys.readouterr().err


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize("argv", [["--policies", "best"], ["--kill", "0"], ["--kill", "a@1"]])
def test_parser_names_the_invalid_flag(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--workload", "no-sharing", *argv])
    assert argv[0] in capsys.readouterr().err
