"""Checks the cost of tokens that grammars force. The scheduler computes them in the steps that delay other requests least."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rootstock_llm.services.sim.core.report.report import Report, make_report
from rootstock_llm.services.sim.core.run.simulation import Outcome, Simulation
from rootstock_llm.services.sim.core.run.time_models import PRESETS, load_time_model
from rootstock_llm.services.sim.core.trace.arrivals import ClosedLoop, OpenLoop
from rootstock_llm.services.sim.core.trace.trace import Trace, TraceRequest, read_trace, write_trace
from rootstock_llm.services.sim.core.trace.workloads import grammars
from rootstock_llm.services.worker.core.contracts.plan import ForwardMode
from rootstock_llm.services.worker.exec.fake import TimeModel
from tests.sim.deployed_worker import on_gpu

H200 = PRESETS["h200-8b"]
RUNS = (2, 4, 8, 16)
PLAIN = on_gpu(50_000, 4096)


def outcomes(trace: Trace) -> dict[str, Outcome]:
    """Returns three outcomes: forced tokens are sampled, computed in eager steps, or computed as the scheduler decides."""
    runs = {
        "sampled": (PLAIN, replace(H200, graph_rereads=0), False),
        "eager": (PLAIN, replace(H200, graph_rereads=0), True),
        "graph": (on_gpu(50_000, 4096, H200.graphs), H200, True),
    }
    return {
        name: Simulation(config, trace, OpenLoop(trace), times, jumps=jumps).run()
        for name, (config, times, jumps) in runs.items()
    }


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("share", [0.5, 0.05])
def test_itl_and_tpot_are_not_higher_with_the_graph_limits(share: float) -> None:
    trace = grammars(200, share, 512, 256, 8, RUNS, rate=16.0, seed=0)
    found = outcomes(trace)
    said = [outcome.requests.output_tokens.tolist() for outcome in found.values()]
    assert said[0] == said[1] == said[2] == [256] * 200
    reports: dict[str, Report] = {name: make_report(outcome, 1.0) for name, outcome in found.items()}
    ours = reports["graph"]
    for name, other in reports.items():
        assert ours.itl.p50 <= other.itl.p50, name
        # The runs compute the prompts in different steps. The tolerances of 1 % and 2 % allow for the effect on these figures.
        assert ours.grammar_tpot.p50 <= 1.01 * other.grammar_tpot.p50, name
        assert ours.grammar_tokens_per_s >= 0.99 * other.grammar_tokens_per_s and ours.itl.p99 <= 1.02 * other.itl.p99, name
    assert ours.grammar_tpot.p50 < 0.7 * reports["sampled"].grammar_tpot.p50


def test_run_of_forced_tokens_takes_one_graph_step() -> None:
    """A single request takes 4 steps: for its prompt, for its second token, for 10 forced tokens, and for the end token.

    Only the step of the prompt has no graph.
    """
    times = TimeModel(base=1.0, per_context_token=0.001, eager_step=0.5, graph_rows=16, graph_rereads=500)
    trace = Trace(64, (TraceRequest(0.0, (), 20, 14, 14, forced=((2, 10),)),))
    for config in (on_gpu(50_000, 4096, times.graphs), PLAIN):
        outcome = Simulation(config, trace, OpenLoop(trace), times, overlap=False).run()
        contexts = 20 + 21 + sum(range(22, 33)) + 33
        assert outcome.steps.column("mode").tolist() == [
            ForwardMode.EXTEND,
            ForwardMode.DECODE,
            ForwardMode.EXTEND,
            ForwardMode.DECODE,
        ]
        assert outcome.seconds == pytest.approx(4.5 + 0.001 * contexts)


def test_step_that_fills_the_graph_runs_eagerly_only_when_eager_steps_are_cheap() -> None:
    """The batch fills the largest graph. An eager step would save time for one row and cost more time for the 31 other rows."""
    times = TimeModel(base=1.0, eager_step=0.4, graph_rows=32, graph_rereads=1 << 30)
    trace = grammars(32, 1 / 32, 64, 64, 8, (8,), rate=0.0, seed=0)
    config = on_gpu(50_000, 4096, times.graphs, max_running_requests=32)
    outcome = Simulation(config, trace, ClosedLoop(trace, 32), times).run()
    begun = outcome.steps.column("prefill_tokens") >= 64
    lasted = outcome.steps.column("end") - outcome.steps.column("begin")
    assert lasted[~begun].max() == pytest.approx(1.0) and lasted[begun].min() == pytest.approx(1.4)
    cheap = replace(times, eager_step=0.1)
    eager = Simulation(replace(config, eager_step_cost=0.1), trace, ClosedLoop(trace, 32), cheap).run()
    held = outcome.requests.constrained
    assert float(eager.requests.ended[held][0]) < 0.8 * float(outcome.requests.ended[held][0])


def test_trace_files_keep_forced_runs_and_model_files_keep_graph_limits(tmp_path) -> None:  # type: ignore[no-untyped-def]
    trace = grammars(5, 0.5, 64, 40, 4, RUNS, 0.0, 1)
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace and any(request.forced for request in trace.requests)
    (tmp_path / "model.json").write_text('{"base": 1, "graph_rows": 8, "graph_rereads": 9, "eager_step": 0.5}')
    assert load_time_model(str(tmp_path / "model.json")) == TimeModel(1.0, eager_step=0.5, graph_rows=8, graph_rereads=9)


@pytest.mark.parametrize("forced", [((0, 0),), ((4, 3), (6, 2)), ((-1, 2),)])
def test_trace_request_rejects_invalid_forced_runs(forced: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="forced runs"):
        TraceRequest(0.0, (), 8, 20, 20, forced=forced)
