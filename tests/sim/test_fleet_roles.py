"""Checks fleets of prefill and decode workers: requests end once with their tokens when workers die and networks are slow.

The last tests compare them with fleets without roles, as docs/design/prefill-and-decode.md does.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, replace
from typing import Any

import pytest

from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.routing.config import RoutingConfig, RoutingPolicy
from rootstock_llm.services.sim.core.run.remote_reads import Wire
from rootstock_llm.services.sim.core.run.time_models import PRESETS
from rootstock_llm.services.sim.core.trace.arrivals import ClosedLoop, OpenLoop
from rootstock_llm.services.sim.core.trace.script import EOS_ID, VOCAB_SIZE, Script
from rootstock_llm.services.sim.core.trace.trace import Trace, TraceRequest
from rootstock_llm.services.sim.core.trace.workloads import random_lengths, shared_prefix, two_lengths
from rootstock_llm.services.sim.fleet.config import FleetConfig, Kill, Roles
from rootstock_llm.services.sim.fleet.logs import HandoverLog
from rootstock_llm.services.sim.fleet.report import FleetReport, make_report
from rootstock_llm.services.sim.fleet.simulation import FleetOutcome, FleetSimulation
from rootstock_llm.services.worker.core.contracts.messages import Finish, FinishReason, PeerOutput
from rootstock_llm.services.worker.exec.fake import TimeModel
from tests.core.deployed_config import deployed_config
from tests.sim.deployed_worker import on_gpu

PREFIX_AWARE = str(RoutingPolicy.PREFIX_AWARE)
SCHEDULER = deployed_config(1024, 16, 4096, VOCAB_SIZE, eos_token_ids=(EOS_ID,), max_running_requests=16)
FAST = Wire(40e9, 0.0002)
ROLES = Roles(prefill_workers=2, wire=FAST, kv_bytes_per_token=131_072, min_tokens=256)
FLEET = FleetConfig(SCHEDULER, PRESETS["h200-like"], RoutingConfig(), workers=4, roles=ROLES)
TRACE = random_lengths(48, 500, 20, 0.8, 60.0, 1)


class RecordingFleet(FleetSimulation):
    """Records the tokens that clients get."""

    def __init__(self, *args: Any) -> None:
        self.received: dict[int, list[int]] = defaultdict(list)
        super().__init__(*args)

    def _output_received(self, output: PeerOutput) -> None:
        at = 0
        for handle, count in zip(output.handles, output.counts, strict=True):
            self.received[handle] += output.tokens[at : at + count]
            at += count
        super()._output_received(output)


def fleet_of(trace: Trace, policy: str = PREFIX_AWARE, concurrency: int = 0, **changes: Any) -> RecordingFleet:
    arrivals = ClosedLoop(trace, concurrency) if concurrency else OpenLoop(trace)
    return RecordingFleet(replace(FLEET, **changes), policy, trace, arrivals)


def report_of(outcome: FleetOutcome) -> FleetReport:
    return make_report("any", outcome, 10, 1.0)


def check_outputs(trace: Trace, fleet: RecordingFleet, outcome: FleetOutcome) -> None:
    log, script = outcome.log.requests, Script(trace)
    assert log.finished.all(), log.errors()
    for index, request in enumerate(trace.requests):
        assert fleet.received[index] == script.output(index)[: request.max_new_tokens].tolist()
    assert (log.streamed_tokens == log.output_tokens).all(), "the tokens in the steps' outputs add up to the number in the finish"
    assert not fleet._log.handovers._since and not fleet._log.handovers._first, "every handover continued"


def check_pages_are_free(fleet: FleetSimulation, seconds: float = 15.0) -> None:
    """Advances the clock by `seconds`, in which reads end and KV reservations expire. Then checks that all pages are free."""
    until = fleet._clock.now + seconds
    while fleet._clock.now < until:
        fleet._clock.step()
    for worker in (worker for worker in fleet.workers if worker.alive):
        core = worker._sim.core
        assert not worker.self_check()
        assert core.memory.num_available == core.memory.pages.num_pages, "no page is leaked"
        assert not len(core.reservations) and not core.memory.quarantined
        assert not fleet._reservations.count(worker.name)


@pytest.mark.by_day(one_in=3, seed=2)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", [PREFIX_AWARE, str(RoutingPolicy.POWER_OF_TWO), str(RoutingPolicy.ROUND_ROBIN)])
def test_handed_over_requests_end_once_with_scripted_tokens(policy: str, overlap: bool) -> None:
    fleet = fleet_of(TRACE, policy, overlap=overlap)
    outcome = fleet.run()
    check_outputs(TRACE, fleet, outcome)
    roles = report_of(outcome).roles
    assert roles is not None and roles.handed_over >= 20, "many requests are handed over"
    assert 0 < roles.read_bytes <= roles.kept_bytes and 0 < roles.prefill_busy < 1 and 0 < roles.decode_busy < 1
    check_pages_are_free(fleet, 3.0)


def test_prefill_workers_hand_over_long_prompts() -> None:
    outcome = fleet_of(TRACE).run()
    log = outcome.log
    assert set(log.placements.worker.tolist()) == {2, 3}, "requests end at decode workers"
    long = [request.input_len >= ROLES.min_tokens for request in TRACE.requests]
    assert ((log.handovers.count == 0) | long).all(), "decode workers compute short prompts"
    assert [tally.read_bytes > 0 for tally in outcome.tallies] == [False, False, True, True]


def test_fleet_with_roles_is_reproducible() -> None:
    def once() -> dict[str, Any]:
        return asdict(report_of(fleet_of(TRACE, kills=(Kill(1, 0.3, 0.2),)).run()))

    assert once() == once()


@pytest.mark.by_day(one_in=3, seed=17)
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param((Kill(0, 0.3),), id="a prefill worker"),
        pytest.param((Kill(0, 0.3), Kill(1, 0.3)), id="all prefill workers"),
        pytest.param((Kill(0, 0.2, 0.2), Kill(1, 0.25, 0.2)), id="all prefill workers for a while"),
        pytest.param((Kill(2, 0.3),), id="a decode worker"),
        pytest.param((Kill(2, 0.3), Kill(3, 0.3)), id="all decode workers"),
        pytest.param((Kill(2, 0.2, 0.2), Kill(3, 0.25, 0.2)), id="all decode workers for a while"),
        pytest.param((Kill(0, 0.3, 0.2), Kill(3, 0.32, 0.2)), id="one of each"),
    ],
)
@pytest.mark.parametrize("wire", [pytest.param(FAST, id="fast"), pytest.param(Wire(2e9, 0.01), id="slow")])
def test_fleet_with_roles_resumes_requests_when_workers_die(kills: tuple[Kill, ...], wire: Wire) -> None:
    fleet = fleet_of(TRACE, kills=kills, roles=replace(ROLES, wire=wire))
    outcome = fleet.run()
    check_outputs(TRACE, fleet, outcome)
    assert outcome.log.handovers.count.any() and report_of(outcome).resumed > 0, "the killed workers had requests"
    check_pages_are_free(fleet)


def test_prefill_workers_serve_whole_requests_when_no_decode_worker_is_alive() -> None:
    fleet = fleet_of(TRACE, kills=(Kill(2, 0.0), Kill(3, 0.0)))
    outcome = fleet.run()
    check_outputs(TRACE, fleet, outcome)
    late = outcome.log.requests.sent > 0.1
    assert set(outcome.log.placements.worker[late].tolist()) == {0, 1} and not outcome.log.handovers.count[late].any()


def test_decode_worker_computes_the_prompt_when_the_read_fails() -> None:
    trace = Trace(64, tuple([TraceRequest(2.0 * at, (), 400 + 16 * at, 20, 20) for at in range(10)]))
    fleet = fleet_of(trace, roles=replace(ROLES, wire=Wire(0.0, 0.0)))
    outcome = fleet.run()
    check_outputs(trace, fleet, outcome)
    roles = report_of(outcome).roles
    assert roles is not None and roles.handed_over == 10 and roles.read_bytes == 0
    assert roles.gap.p99 < 1.5, "a failed read delays a request only until it is noticed"
    check_pages_are_free(fleet, 60.0)


@pytest.mark.parametrize("chunk", [256, 2048])
def test_decode_worker_prefetches_pages_during_prefill(chunk: int) -> None:
    """As in production, only the last chunk's pages are read after the first token. With one chunk, these are all pages."""
    trace = Trace(64, tuple([TraceRequest(4.0 * at, (), 1032, 20, 20) for at in range(6)]))
    scheduler, wire = replace(SCHEDULER, chunked_prefill_size=chunk), Wire(10e9, 0.0002)
    model = TimeModel(base=0.001, per_prefill_token=20e-6)
    fleet = fleet_of(trace, scheduler=scheduler, time_model=model, roles=replace(ROLES, wire=wire))
    outcome = fleet.run()
    check_outputs(trace, fleet, outcome)
    roles, whole_s = report_of(outcome).roles, wire.seconds(1024 * ROLES.kv_bytes_per_token)
    assert roles is not None and roles.handed_over == 6 and roles.read_bytes == roles.kept_bytes
    if chunk == 256:
        assert roles.ahead_bytes >= roles.read_bytes / 2 and roles.gap.p50 < whole_s / 2
    else:
        assert not roles.ahead_bytes and roles.gap.p50 > whole_s
    check_pages_are_free(fleet, 3.0)


def test_decode_worker_caches_read_pages() -> None:
    same = TraceRequest(0.0, (1, 2, 3, 4, 5, 6, 7, 8), 530, 4, 4)
    trace = Trace(64, tuple(replace(same, arrival=1.0 * at) for at in range(6)))
    fleet = fleet_of(trace, workers=2, gateways=1, roles=replace(ROLES, prefill_workers=1), speculative_s=0.0)
    outcome = fleet.run()
    check_outputs(trace, fleet, outcome)
    assert outcome.log.handovers.count.tolist() == [1, 0, 0, 0, 0, 0]
    assert outcome.log.requests.cached_tokens.tolist() == [0, 512, 512, 512, 512, 512]


def test_handover_log_keeps_the_prompt_figures_of_the_first_worker() -> None:
    log = HandoverLog(2)
    handed = Finish(FinishReason.HANDED_OVER, 1, "one", cached_tokens=64, queue_s=0.5, reserved_pages=3)
    log.handed_over(handed, 1.0)
    log.add_outputs([0, 1], 1.25)
    log.handed_over(replace(handed, cached_tokens=320, queue_s=0.0), 2.0)  # the decode worker died
    log.add_outputs([1], 2.5)
    whole = log.whole(Finish(FinishReason.LENGTH, 1, "one", cached_tokens=336, queue_s=0.1, completion_tokens=9))
    assert (whole.cached_tokens, whole.queue_s, whole.completion_tokens) == (64, 0.5, 9)
    assert log.count.tolist() == [0, 2] and log.pages == 6 and log.gaps().tolist() == [0.25, 0.5]


def test_default_minimum_prompt_length_for_a_handover_equals_the_gateways_default() -> None:
    assert GatewaySettings.model_fields["disaggregation_min_tokens"].default == Roles(1, FAST, 1).min_tokens


@pytest.mark.by_day(one_in=2, seed=13)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda: replace(FLEET, workers=2), id="no decode worker"),
        pytest.param(lambda: replace(ROLES, prefill_workers=0), id="no prefill worker"),
        pytest.param(lambda: replace(ROLES, kv_bytes_per_token=0), id="KV of no bytes"),
        pytest.param(lambda: replace(ROLES, min_tokens=0), id="prompts of no tokens"),
        pytest.param(lambda: Wire(-1.0, 0.0), id="a negative bandwidth"),
        pytest.param(lambda: Wire(1.0, -1.0), id="a negative latency"),
    ],
)
def test_roles_reject_impossible_values(change: Any) -> None:
    with pytest.raises(ValueError):
        change()


# Comparisons with fleets without roles


def compare(trace: Trace, workers: int, prefill: int, concurrency: int = 0, rate: float = 0.0) -> tuple[FleetReport, FleetReport]:
    """Runs a trace on a fleet with prefill and decode workers and on a fleet without roles. Returns both reports."""
    roles = Roles(prefill, Wire(10e9, 0.0002), 131_072)
    given = {"scheduler": on_gpu(50_000, 8192), "workers": workers}
    with_roles, both = (fleet_of(trace, concurrency=concurrency, roles=found, **given).run() for found in (roles, None))
    return report_of(with_roles), report_of(both)


def test_prefill_and_decode_roles_lower_the_itl_when_prompts_are_long() -> None:
    trace = two_lengths(requests=120, share=0.4, long=(4096, 32), short=(96, 128), spread=0.25, rate=30.0, seed=0)
    with_roles, both = compare(trace, workers=4, prefill=2)
    assert with_roles.roles is not None and with_roles.roles.handed_over == 48
    assert with_roles.itl.p99 < both.itl.p99 / 4 and with_roles.itl.p50 < 1.1 * both.itl.p50
    assert with_roles.e2e.p50 < both.e2e.p50 and with_roles.e2e.p99 < both.e2e.p99
    assert with_roles.ttft.p99 > both.ttft.p99, "two workers compute prompts instead of four"


def test_prefill_and_decode_roles_lower_the_throughput_when_prompts_are_short() -> None:
    with_roles, both = compare(random_lengths(192, 192, 64, 0.5, 0.0, 0), workers=3, prefill=1, concurrency=96)
    assert with_roles.roles is not None and with_roles.roles.handed_over == 0 and with_roles.roles.prefill_busy == 0
    assert with_roles.requests_per_s < 0.95 * both.requests_per_s and with_roles.e2e.p50 > both.e2e.p50


def test_prefill_and_decode_roles_do_not_raise_the_throughput_when_the_load_is_low() -> None:
    with_roles, both = compare(random_lengths(24, 2048, 64, 0.5, 0.0, 0), workers=2, prefill=1, concurrency=2)
    assert with_roles.roles is not None and with_roles.roles.handed_over > 12
    assert with_roles.requests_per_s <= both.requests_per_s and with_roles.itl.p50 >= 0.99 * both.itl.p50


def test_prefill_workers_reuse_shared_prefixes() -> None:
    trace = shared_prefix(4, 8, 512, 64, 16, 30.0, 3)
    fleet = fleet_of(trace, roles=replace(ROLES, min_tokens=64))
    outcome = fleet.run()
    check_outputs(trace, fleet, outcome)
    report = report_of(outcome)
    assert report.roles is not None and report.roles.handed_over > 12 and report.hit_rate > 0.5
