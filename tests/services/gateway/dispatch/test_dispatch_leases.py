"""Tests of worker leases in Redis: a worker without its lease gets no requests, unless no worker has a lease."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rootstock_llm.services.gateway.index import mirror
from rootstock_llm.services.shared.index.prefix_index import lease_key, workers_key
from tests.services.gateway.fakes import MODEL, FakeWorker
from tests.services.gateway.system import System, wait_until
from tests.services.redis_server import RedisServer, redis_server

GENERATION = 7


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    monkeypatch.setattr(mirror, "LEASE_TTL_S", 0.1)
    monkeypatch.setattr(mirror, "POLL_S", 0.1)
    with redis_server() as server:
        yield server


def leased(workers: list[FakeWorker]) -> None:
    for worker in workers:
        worker.info.publishes_index = True
        worker.report_load(index_generation=GENERATION, lease_held=True)


def take(server: RedisServer, *workers: str) -> None:
    for worker in workers:
        server.client.set(lease_key(worker), GENERATION)
        server.client.sadd(workers_key(MODEL), worker)


def usable(system: System) -> list[bool]:
    usable = system.gateway.dispatcher.fleet.usable()
    return [link in usable for link in system.links]


def test_worker_without_a_lease_gets_requests_only_when_no_worker_has_a_lease(server: RedisServer) -> None:
    take(server, "worker-0", "worker-1")
    with System(workers=2, configure=leased, redis_url=server.url) as system:
        fleet_mirror = system.gateway.dispatcher.fleet.mirror
        assert fleet_mirror is not None
        wait_until(lambda: len(fleet_mirror.leases) == 2, "the leases")
        server.client.delete(lease_key("worker-0"))
        wait_until(lambda: usable(system) == [False, True], "the expired lease")
        assert [system.chat().status_code for _ in range(3)] == [200] * 3
        assert system.submits() == [0, 3]
        take(server, "worker-0")
        wait_until(lambda: usable(system) == [True, True], "the new lease")
        # No worker has a lease, so Redis has failed and not the workers.
        server.client.delete(lease_key("worker-0"), lease_key("worker-1"))
        wait_until(lambda: not fleet_mirror.leases, "the loss of all leases")
        assert [system.chat().status_code for _ in range(3)] == [200] * 3
        assert usable(system) == [True, True]


def test_worker_without_a_lease_is_used_when_the_load_report_confirms_the_missing_lease(server: RedisServer) -> None:
    take(server, "worker-0", "worker-1")
    with System(workers=2, configure=leased, redis_url=server.url) as system:
        fleet_mirror = system.gateway.dispatcher.fleet.mirror
        assert fleet_mirror is not None
        wait_until(lambda: len(fleet_mirror.leases) == 2, "the leases")
        server.client.delete(lease_key("worker-0"))
        wait_until(lambda: usable(system) == [False, True], "the expired lease")
        system.do(lambda: system.worker.report_load(index_generation=GENERATION, lease_held=False))
        wait_until(lambda: usable(system) == [True, True], "the load report")


def test_leases_are_ignored_when_redis_is_down(server: RedisServer) -> None:
    take(server, "worker-0", "worker-1")
    with System(workers=2, configure=leased, redis_url=server.url) as system:
        wait_until(lambda: system.metric("rootstock_gateway_index_up") == 1, "the connection to Redis")
        server.kill()
        wait_until(lambda: system.metric("rootstock_gateway_index_up") == 0, "the detected outage")
        assert [system.chat().status_code for _ in range(4)] == [200] * 4
        assert usable(system) == [True, True]
