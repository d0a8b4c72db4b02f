"""Tests of the comparison's parts, with a fake server instead of Rootstock and a tiny model. No speed is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rootstock_llm.services.cli.bench.client import Outcome
from tests.benchmarks.compare_transformers import MeasurementFailed, Pair, check, draw_prompts, parse, table
from tests.benchmarks.machine import busy_cores, busy_ticks
from tests.benchmarks.server_process import ServerFailed, answers, running_server, server_command
from tests.night import NIGHTLY

FAKE = "{python} -m tests.services.cli.fake_server --port {port}"


def test_table_has_medians_over_the_rounds() -> None:
    pairs = [Pair(1, 0, 10.0, 5.0), Pair(8, 0, 30.0, 10.0), Pair(1, 1, 20.0, 5.0), Pair(1, 2, 12.0, 4.0)]
    rows = ["| 1 | 12.0 | 5.0 | 3.00 | 2.00 to 4.00 |", "| 8 | 30.0 | 10.0 | 3.00 | 3.00 to 3.00 |"]
    assert table(pairs).splitlines()[2:] == rows


def test_drawn_prompts_depend_on_the_seed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    prompts = draw_prompts(tmp_path, 32, 256, (0, 1, 32))
    assert prompts == draw_prompts(tmp_path, 32, 256, (0, 1, 32)) != draw_prompts(tmp_path, 32, 256, (0, 2, 32))
    assert len({tuple(p[:4]) for p in prompts}) == 32
    assert {len(p) for p in prompts} == {256} and max(max(p) for p in prompts) < 900


@pytest.mark.parametrize(("error", "tokens"), [("timeout", 64), (None, 63)], ids=["failed", "short"])
def test_measurement_fails_when_a_request_fails_or_has_too_few_tokens(error: str | None, tokens: int) -> None:
    with pytest.raises(MeasurementFailed):
        check(Outcome(0.0, 0.0, completion_tokens=tokens, error=error), 64)


def test_default_arguments_select_qwen3_0_6b_at_1_8_and_32_in_flight() -> None:
    args = parse([])
    assert (args.shape, args.concurrency, args.input_len, args.output_len, args.cores) == ("qwen3-0.6b", [1, 8, 32], 256, 64, 2)
    command = server_command(args.server_command, Path("/m"), 81)
    assert command[1:] == [
        "-m",
        "rootstock_llm.services.local",
        "--model",
        "/m",
        "--port",
        "81",
        "--dtype",
        "bfloat16",
        "--no-demo",
    ]


def test_running_server_stops_on_exit(tmp_path: Path) -> None:
    with running_server(FAKE, tmp_path, tmp_path / "log") as url:
        assert answers(url + "/readiness")
    assert not answers(url + "/readiness")


def test_running_server_raises_an_error_with_the_log_when_the_server_ends(tmp_path: Path) -> None:
    ends = "{python} -c 'print(\"no weights\"); raise SystemExit(3)'"
    with pytest.raises(ServerFailed, match="no weights"), running_server(ends, tmp_path, tmp_path / "log"):
        pass


def test_running_server_kills_remaining_children(tmp_path: Path) -> None:
    """The server is a shell that starts the real server as its child and does not stop this child."""
    with running_server(f"sh -c '{FAKE} & wait'", tmp_path, tmp_path / "log") as url:
        pass
    assert not answers(url + "/readiness")


@pytest.mark.skipif(not NIGHTLY, reason="takes half a minute; runs only with ROOTSTOCK_TEST_NIGHTLY=1")
@pytest.mark.timeout(300)
def test_comparison_prints_a_table_and_appends_a_json_line(tmp_path: Path) -> None:
    flags = ["--shape", "tiny", "--model", str(tmp_path / "tiny"), "--concurrency", "2", "--input-len", "16", "--output-len", "4"]
    flags += ["--rounds", "1", "--cores", "1", "--server-command", FAKE, "--output-file", str(tmp_path / "out.jsonl")]
    command = [sys.executable, "-m", "tests.benchmarks.compare_transformers", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("| in flight | rootstock tok/s |")
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    (pair,) = json.loads(line)["rounds"]
    assert pair["concurrency"] == 2 and pair["rootstock"] > 0 and pair["reference"] > 0


def test_busy_ticks_exclude_idle_and_io_wait(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 2 4 800 1600 8 16 0 0 0\ncpu0 9 9 9 9 9 9 9 0 0 0\n")
    assert busy_ticks(stat) == 31
    assert busy_cores(0.01, stat) == 0.0 == busy_cores(0.01, tmp_path / "absent")
