"""Tests of the comparison of engines with a fake server and a fake driver. No engine is installed, and no speed is checked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks.engines import environment
from tests.benchmarks.engines.__main__ import parse
from tests.benchmarks.engines.catalogue import ENGINES, Variant, plan, variants
from tests.benchmarks.engines.drivers.job_lines import closed_loop
from tests.benchmarks.engines.environment import DRIVERS, Absent
from tests.benchmarks.engines.results import Measurement, Results
from tests.benchmarks.engines.running_engine import RunFailed, Running, Setup, check_lengths, driver, server, server_template
from tests.benchmarks.engines.workloads import SMOKE_WORKLOADS, WORKLOADS, Job, Workload, jobs

FAKE_SERVER = "{python} -m tests.services.cli.fake_server --port {port}"
FAKE_DRIVER = f"""
import sys
sys.path.insert(0, {str(DRIVERS)!r})
from job_lines import serve

class Fake:
    def __init__(self, start):
        assert start["kv_tokens"] > 0 and start["max_len"] == 20 and start["max_in_flight"] == 4
        print("a line of the engine")
        if start["bits"] == 8:
            sys.exit("no weights of 8 bits")

    def generate(self, prompts, output_len, in_flight):
        if in_flight == 3:
            sys.exit("out of memory")
        return [output_len - (in_flight == 2) for _ in prompts]

serve(Fake)
"""
OURS, VLLM, OPENVINO = Variant("rootstock", 16), Variant("vllm", 16), Variant("openvino", 16)


def setup(tmp_path: Path, bits: int = 16) -> Setup:
    return Setup(Variant("openvino", bits), Path(sys.executable), tmp_path, 1, tmp_path / "log")


@pytest.fixture
def fake_driver(tmp_path: Path) -> Iterator[Running]:
    (script := tmp_path / "fake.py").write_text(FAKE_DRIVER)
    with driver(setup(tmp_path), list(SMOKE_WORKLOADS.values())[:3], script) as running:
        yield running


@pytest.mark.parametrize(("name", "requests", "tokens"), [("1", 4, 256), ("32", 64, 4096), ("shared", 32, 32 * 1120)])
def test_workload_has_the_documented_requests_and_tokens(name: str, requests: int, tokens: int) -> None:
    workload = WORKLOADS[name]
    prompts = workload.draw(1000, (0, 1))
    assert len(prompts) == requests and {len(prompt) for prompt in prompts} == {workload.input_len}
    assert workload.tokens == tokens and max(map(max, prompts)) < 900
    assert prompts == workload.draw(1000, (0, 1)) != workload.draw(1000, (0, 2))


def test_shared_workload_has_groups_of_prompts_with_equal_starts() -> None:
    prompts = WORKLOADS["shared"].draw(1000, (0,))
    starts = [tuple(prompt[:1024]) for prompt in prompts]
    assert [starts.count(start) for start in set(starts)] == [8] * 4
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == 32
    assert starts != sorted(starts, key=starts.index), "prompts of different groups must be mixed"


def test_warm_up_shares_no_prefix_with_measured_prompts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    warm_up, job = jobs(WORKLOADS["shared"], tmp_path, (0, 0))
    assert len(warm_up.prompts) == 1 and len(warm_up.prompts[0]) == 1088
    assert all(prompt[:16] != warm_up.prompts[0][:16] for prompt in job.prompts)


@pytest.mark.parametrize("workload", [*WORKLOADS.values(), *SMOKE_WORKLOADS.values()])
def test_warm_up_is_no_longer_than_a_measured_request(workload: Workload, tmp_path: Path) -> None:
    """The context of an engine is as long as the longest measured request."""
    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    warm_up, job = jobs(workload, tmp_path, (0, 0))
    assert len(warm_up.prompts[0]) == workload.input_len and 0 < warm_up.output_len <= job.output_len


def test_plan_begins_each_round_with_another_variant() -> None:
    chosen = variants(["rootstock", "vllm", "llama.cpp"], [16, 4])
    assert chosen == [OURS, Variant("rootstock", 4), VLLM, Variant("llama.cpp", 4)]
    order = plan(chosen, 3)
    by_round = [[variant for number, variant in order if number == at] for at in range(3)]
    assert [first for first, *_ in by_round] == chosen[:3]
    assert all(len(each) == 4 and set(each) == set(chosen) for each in by_round)


def test_tables_have_medians_ratios_and_the_reasons_of_absent_variants() -> None:
    rates = {OURS: [60.0, 50.0, 70.0], VLLM: [20.0, 25.0, 30.0], OPENVINO: [40.0, 50.0, 45.0]}
    found = [
        Measurement(number, variant, "8", rate, memory=(number + 1) * 10**9)
        for variant, each in rates.items()
        for number, rate in enumerate(each)
    ]
    text = Results(found, {Variant("llama.cpp", 4): "no compiler"}).tables()
    assert "| tokens/s | 8 in flight | memory, MB |" in text
    assert "| Rootstock, 16 bits | 60.0 (50.0 to 70.0) | 2,000 (1,000 to 3,000) |" in text
    assert "| Rootstock ÷ best, 16 bits | 1.50 (1.00 to 1.56), OpenVINO GenAI 2026.4.1 |" in text
    assert text.endswith("Absent:\n- llama-cpp-python 0.3.36, 4 bits: no compiler")


def test_workload_that_failed_in_one_round_has_no_rate_and_no_ratio() -> None:
    found = [
        Measurement(0, OURS, "8", 60.0),
        Measurement(0, VLLM, "8", 20.0),
        Measurement(1, VLLM, "8", None, "63 tokens, not 64"),
    ]
    results = Results(found, {})
    assert results.failed and "| vLLM 0.32.0 for CPUs, 16 bits | failed | 0 (0 to 0) |" in results.tables()
    assert "| Rootstock ÷ best, 16 bits | – |" in results.tables()
    assert "- vLLM 0.32.0 for CPUs, 16 bits, 8, round 1: 63 tokens, not 64" in results.tables()


@pytest.mark.parametrize("lengths", [[4, 3], [4, 5], [4]], ids=["short", "long", "missing"])
def test_check_lengths_fails_when_a_request_is_missing_or_has_a_wrong_length(lengths: list[int]) -> None:
    job = Job([[1], [2]], 4, 1)
    check_lengths([4, 4], job)
    with pytest.raises(RunFailed):
        check_lengths(lengths, job)


def test_closed_loop_has_at_most_the_given_number_of_requests_in_flight() -> None:
    class Stepped:
        def __init__(self) -> None:
            self.left: dict[int, int] = {}
            self.most = 0

        def add(self, request: int, prompt: list[int], output_len: int) -> None:
            self.left[request] = output_len + len(prompt)
            self.most = max(self.most, len(self.left))

        def step(self) -> dict[int, int]:
            self.left = {request: tokens - 1 for request, tokens in self.left.items()}
            return {
                request: 10 + request
                for request in [r for r, tokens in self.left.items() if not tokens]
                if not self.left.pop(request)
            }

    engine = Stepped()
    assert closed_loop(engine, [[1] * (7 - at) for at in range(7)], 2, 3) == [10, 11, 12, 13, 14, 15, 16]
    assert engine.most == 3


def test_driver_returns_seconds_and_memory(fake_driver: Running) -> None:
    assert fake_driver.run(Job([[1], [2]], 4, 1)) > 0
    assert fake_driver.memory() > 1_000_000


def test_driver_job_fails_when_lengths_are_wrong_or_the_driver_ends(fake_driver: Running) -> None:
    with pytest.raises(RunFailed, match="1 of 1 requests"):
        fake_driver.run(Job([[1]], 4, 2))
    for _ in range(2):
        with pytest.raises(RunFailed, match="the driver ended: a line of the engine out of memory"):
            fake_driver.run(Job([[1]], 4, 3))


def test_driver_that_does_not_start_is_absent(tmp_path: Path) -> None:
    (script := tmp_path / "fake.py").write_text(FAKE_DRIVER)
    with (
        pytest.raises(Absent, match="no weights of 8 bits"),
        driver(setup(tmp_path, 8), list(SMOKE_WORKLOADS.values())[:3], script),
    ):
        pass


def test_server_gets_all_prompts_of_a_job(tmp_path: Path) -> None:
    with server(setup(tmp_path), [], FAKE_SERVER) as running:
        assert running.run(Job([[1], [2], [3]], 4, 2)) > 0
        assert running.memory() > 1_000_000


def test_server_that_does_not_start_is_absent(tmp_path: Path) -> None:
    with pytest.raises(Absent, match="no weights"), server(setup(tmp_path), [], "{python} -c 'raise SystemExit(\"no weights\")'"):
        pass


def test_install_reports_pips_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.venv, "create", lambda place, with_pip: fake_environment(place))
    with pytest.raises(Absent, match="no such version"):
        environment.install("vllm", tmp_path)
    assert not (tmp_path / "vllm" / environment.DONE).exists()


def fake_environment(place: Path) -> None:
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").write_text("#!/bin/sh\necho no such version\nexit 1\n")
    (place / "bin" / "python").chmod(0o755)


def test_default_arguments_select_the_full_comparison() -> None:
    args = parse([])
    assert (args.engines, args.bits, args.workloads) == (list(ENGINES), [16, 8, 4], ["1", "8", "32", "shared"])
    assert (args.rounds, args.cores, args.shape) == (3, 2, "qwen3-0.6b")
    assert server_template(4).endswith("--max-total-tokens 32768 --worker-flags='--quantization int4 --quantize-head'")
    assert isinstance(WORKLOADS["1"], Workload) and parse(["--smoke"]).rounds == 1
