"""Tests of routing without Redis. The prefix index has only the blocks of this gateway's requests."""

from __future__ import annotations

from rootstock_llm.services.gateway.dispatch.model_pool import TRIES_ONE_IN
from rootstock_llm.services.gateway.routing.config import RoutingPolicy
from rootstock_llm.services.shared.index.prefix_index import BlockTier, block_hashes, root_hash, split_hashes
from tests.services.gateway.dispatch.test_dispatch_lost import stopped
from tests.services.gateway.fakes import MODEL, FakeWorker
from tests.services.gateway.system import RawClient, System, wait_until

SHARED_PREFIX = "x" * 256


def decisions(system: System, reason: str) -> float:
    return system.metric("rootstock_gateway_routing_decisions_total", reason=reason)


def complete(system: System, prompt: str, **body: object) -> None:
    assert system.complete(prompt=prompt, max_tokens=1, **body).status_code == 200


def test_prompts_with_a_common_prefix_go_to_one_worker() -> None:
    with System(workers=2) as system:
        for i in range(6):
            complete(system, SHARED_PREFIX + str(i))
        assert sorted(system.submits()) == [0, 6]
        assert (decisions(system, "no_match"), decisions(system, "prefix")) == (1, 5)
        assert system.metric("rootstock_gateway_predicted_cached_tokens_total") == 5 * 256
        complete(system, SHARED_PREFIX + "n", n=3)
        assert system.metric("rootstock_gateway_predicted_cached_tokens_total") == 6 * 256, (
            "each prompt counts once, with its cached tokens"
        )


def test_prompts_with_different_cache_salts_do_not_match_in_the_prefix_index() -> None:
    with System(workers=2) as system:
        for i in range(12):
            complete(system, SHARED_PREFIX, cache_salt=f"tenant {i}")
        assert all(system.submits()) and (decisions(system, "no_match"), decisions(system, "prefix")) == (12, 0)
        complete(system, SHARED_PREFIX, cache_salt="tenant 0")
        assert decisions(system, "prefix") == 1


def test_prompts_shorter_than_a_block_spread_over_workers() -> None:
    with System(workers=2) as system:
        for _ in range(6):
            complete(system, "x" * 63)
        assert system.submits() == [3, 3]


def test_many_prompts_with_one_prefix_spread_over_workers() -> None:
    def configure(workers: list[FakeWorker]) -> None:
        stopped(workers)
        for worker in workers:
            worker.info.max_running_requests = 8

    with System(workers=2, configure=configure) as system:
        RawClient(system, "/v1/completions", {"prompt": SHARED_PREFIX, "n": 12})
        wait_until(lambda: sum(system.running()) == 12, "the submits")
        assert min(system.running()) >= 3
        assert decisions(system, "prefix_overflow") + decisions(system, "prefix") >= 10


def test_policy_round_robin_alternates_between_workers() -> None:
    with System(workers=3, routing_policy="round_robin") as system:
        for _ in range(6):
            complete(system, SHARED_PREFIX)
        assert system.submits() == [2, 2, 2] and decisions(system, "round_robin") == 6


def test_requests_are_served_with_every_routing_policy() -> None:
    for policy in (RoutingPolicy.RANDOM, RoutingPolicy.LEAST_TOKENS, RoutingPolicy.POWER_OF_TWO, RoutingPolicy.AFFINITY):
        with System(workers=2, routing_policy=policy) as system:
            for _ in range(2):
                complete(system, "Hi")
            assert sum(system.submits()) == 2


def test_requests_with_one_routing_key_go_to_one_worker() -> None:
    with System(workers=3) as system:
        for i in range(6):
            answer = system.post("/v1/completions", {"model": MODEL, "prompt": f"Hi {i}"}, headers={"x-smg-routing-key": "u1"})
            assert answer.status_code == 200
        assert sorted(system.submits()) == [0, 0, 6] and decisions(system, "affinity") == 6


def test_blocks_of_a_worker_are_removed_from_the_prefix_index_when_the_worker_reconnects() -> None:
    with System(workers=2) as system:
        complete(system, SHARED_PREFIX)
        index = system.gateway.dispatcher.fleet.index
        assert index is not None and index.num_blocks == 4
        used = next(host for host in system.workers if host.servicer.submits)
        system.call(used.stop())
        wait_until(lambda: system.gateway.dispatcher.connected() == 1, "the disconnection")
        system.call(used.start())
        wait_until(lambda: system.gateway.dispatcher.connected() == 2, "the reconnection")
        complete(system, SHARED_PREFIX)
        assert decisions(system, "prefix") == 0


def test_blocks_of_a_worker_are_removed_from_the_prefix_index_after_a_flush() -> None:
    """A new generation of a worker removes the earlier generation's blocks, and frees the earlier generation's owner number."""
    with System(workers=2) as system:
        index = system.gateway.dispatcher.fleet.index
        assert index is not None
        for generation in range(1, 6):
            for host in system.workers:
                system.do(lambda host=host, generation=generation: host.servicer.report_load(index_generation=generation))
            wait_until(lambda g=generation: index.find("worker-0", g) >= 0 and index.find("worker-1", g) >= 0, "the load reports")
            complete(system, SHARED_PREFIX)
            assert decisions(system, "prefix") == 0
        wait_until(lambda: index.num_retired == 0, "the sweep")
        assert [index.find("worker-0", generation) >= 0 for generation in range(6)] == [False] * 5 + [True]


def test_hits_in_lower_cache_tiers_are_weighted_by_the_savings_that_workers_report() -> None:
    """A worker that reports no savings counts with the defaults HOST_SAVES and STORAGE_SAVES. A reported NaN counts as 0."""
    with System(workers=2) as system:
        index = system.gateway.dispatcher.fleet.index
        assert index is not None
        complete(system, SHARED_PREFIX)
        info = system.workers[0].servicer.info
        ids = next(submit for host in system.workers for submit in host.servicer.submits).prompt_ids
        names = list(split_hashes(block_hashes(root_hash(info.model, info.revision, info.tokenizer, ""), ids)))

        def route_with_host_hits(generation: int, saves: tuple[float, float]) -> list[int]:
            """Sends one request. Returns the number of submits that each worker received for it."""
            before = system.submits()
            for host, share in zip(system.workers, saves, strict=True):
                load = {} if share < 0 else {"host_saves": share}
                system.do(lambda host=host, load=load: host.servicer.report_load(index_generation=generation, **load))
            owners = [lambda name=f"worker-{number}": index.find(name, generation) for number in range(2)]
            wait_until(lambda: all(owner() >= 0 for owner in owners), "the load reports")
            for owner in owners:
                system.do(lambda owner=owner: index.stored(owner(), names, BlockTier.HOST))
            complete(system, SHARED_PREFIX)
            return [after - count for after, count in zip(system.submits(), before, strict=True)]

        assert route_with_host_hits(2, (0.2, 0.9)) == [0, 1] and route_with_host_hits(3, (0.9, 0.2)) == [1, 0]
        assert route_with_host_hits(4, (0.7, -1.0)) == [0, 1] and route_with_host_hits(5, (-1.0, float("nan"))) == [1, 0]
        assert decisions(system, "prefix") == 4
        assert system.metric("rootstock_gateway_predicted_cached_tokens_total") == 4 * len(names) * 64
        assert sum(route_with_host_hits(6, (0.0, 0.0))) == 1 and decisions(system, "prefix") == 4
        requests = range(
            3, TRIES_ONE_IN + 1
        )  # requests with a hit in a tier that saves nothing; the assertions above sent the first two
        tried = [route_with_host_hits(4 + look, (0.0, 0.0)) and decisions(system, "prefix") for look in requests]
        assert tried == [4] * (len(requests) - 1) + [5], "the last request tries the tier that saved nothing"


def test_request_continues_when_a_worker_with_two_addresses_is_lost() -> None:
    """Both links break with the worker, and the requests move."""

    def configure(workers: list[FakeWorker]) -> None:
        stopped(workers)
        workers[1].info.worker_id = workers[0].info.worker_id

    with System(workers=2, configure=configure) as system:
        client = RawClient(system, "/v1/completions", {"prompt": "Hi", "n": 4})
        wait_until(lambda: system.running() == [2, 2], "the submits")
        for host in system.workers:
            system.call(host.stop())
        wait_until(lambda: system.num_waiting == 4, "the request in the gateway's queue")
        system.allow(None)
        system.call(system.workers[0].start())
        client.read_until(b'"usage"')
        assert client.received.count(b'"finish_reason":"stop"') == 4
