"""Compares routing policies by simulation: 8 workers, two gateways, the time model `h200-like` (an assumption about an H200).

To keep runs short, outputs are shorter than in the figures of docs/how-to/simulator.md, and requests arrive faster than the
workers can serve them with round robin.
"""

from __future__ import annotations

import pytest

from rootstock_llm.services.gateway.routing.config import RoutingConfig, RoutingPolicy
from rootstock_llm.services.sim.core.run.time_models import PRESETS
from rootstock_llm.services.sim.core.trace.arrivals import OpenLoop
from rootstock_llm.services.sim.core.trace.trace import Trace
from rootstock_llm.services.sim.core.trace.workloads import hot_prefix, random_lengths, shared_prefix
from rootstock_llm.services.sim.fleet.config import FleetConfig
from rootstock_llm.services.sim.fleet.report import FleetReport, make_report
from rootstock_llm.services.sim.fleet.simulation import FleetSimulation
from tests.night import NIGHTLY
from tests.sim.deployed_worker import on_gpu

WORKERS, PAGE_SIZE = 8, 16
SAMPLES_PER_WINDOW = 20  # samples in 2 s


def compare(trace: Trace, kv_tokens: int, *policies: RoutingPolicy) -> list[FleetReport]:
    """Returns a report per policy. Chunk sizes do not depend on time, so policies differ by their placements only."""
    scheduler = on_gpu(kv_tokens // PAGE_SIZE, 4096, page_size=PAGE_SIZE, adaptive_chunk_s=0.0)
    config = FleetConfig(scheduler, PRESETS["h200-like"], RoutingConfig(), workers=WORKERS)
    reports = []
    for policy in policies:
        outcome = FleetSimulation(config, policy, trace, OpenLoop(trace)).run()
        reports.append(make_report(policy, outcome, SAMPLES_PER_WINDOW, 1.0))
        assert reports[-1].finished == len(trace.requests)
    return reports


def test_prefix_aware_routing_triples_the_hit_rate_of_round_robin_when_prefixes_are_shared() -> None:
    """The trace has 64 groups of 16 requests. Each worker's KV pool has space for an eighth of the distinct prompt tokens."""
    trace = shared_prefix(groups=64, per_group=16, prefix=2048, suffix=128, output=64, rate=250.0, seed=0)
    assert trace.unique_block_tokens == 64 * 2048 + 1024 * 128
    kv_tokens = trace.unique_block_tokens // WORKERS
    aware, blind = compare(trace, kv_tokens, RoutingPolicy.PREFIX_AWARE, RoutingPolicy.ROUND_ROBIN)
    assert aware.hit_rate >= 3 * blind.hit_rate > 0
    assert aware.total_tokens_per_s >= 1.8 * blind.total_tokens_per_s
    assert aware.balance.tokens < 1.5 and aware.balance.worst_open < 1.5
    assert aware.prediction.mean_error < 0.1


@pytest.mark.parametrize(("requests", "rate"), [(576, 60.0), *([(1024, 150.0)] if NIGHTLY else ())])
def test_prefix_aware_routing_equals_least_requests_routing_when_no_prefix_is_shared(requests: int, rate: float) -> None:
    """The first placements may differ, because the gateways have not seen yet that no prefix is shared."""
    trace = random_lengths(requests=requests, input_len=2176, output=64, spread=0.5, rate=rate, seed=0)
    aware, least = compare(trace, 65_536, RoutingPolicy.PREFIX_AWARE, RoutingPolicy.LEAST_REQUESTS)
    assert aware.total_tokens_per_s == pytest.approx(least.total_tokens_per_s, rel=0.02)
    assert aware.e2e.p50 == pytest.approx(least.e2e.p50, rel=0.02) and aware.e2e.p99 < 1.02 * least.e2e.p99
    assert aware.ttft.p99 < 1.1 * least.ttft.p99, "the p99 is the sixth slowest of 576 requests, which a few placements change"
    assert aware.reasons == {"no_match": requests}


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize(("requests", "rate"), [(256, 60.0), (512, 200.0)])
def test_prefix_aware_routing_balances_the_load_when_one_prefix_is_hot(requests: int, rate: float) -> None:
    trace = hot_prefix(requests=requests, share=0.6, prefix=2048, suffix=128, output=64, rate=rate, seed=0)
    (aware,) = compare(trace, 65_536, RoutingPolicy.PREFIX_AWARE)
    assert aware.hit_rate > 0.45, "the largest possible hit rate is 0.56"
    assert aware.balance.tokens < 1.5 and aware.balance.open < 1.5 and aware.balance.worst_open < 1.5
