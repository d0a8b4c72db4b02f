"""Tests of BackgroundRunner with a real store: leases, takeovers and drains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from rootstock_llm.services.gateway.background import background_runner
from rootstock_llm.services.gateway.background.background_run import BackgroundRun, FirstAttempt, RunPorts
from rootstock_llm.services.gateway.background.background_runner import BackgroundRunner
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.generation.origin import NOBODY
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.store.background_record import BackgroundOrder, BackgroundStatus, FinalRecords
from rootstock_llm.services.gateway.store.background_store import BackgroundLimits, BackgroundStore, Begun, new_lease
from rootstock_llm.services.gateway.store.lease import Lease
from rootstock_llm.services.gateway.store.owner import owner_of
from rootstock_llm.services.gateway.store.state_redis import StateRedis
from rootstock_llm.services.gateway.store.state_store import StoreAway
from tests.services.redis_server import RedisServer

ALICE = owner_of("alice")
LEASE_S = 0.6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    started = RedisServer(folder=tmp_path_factory.mktemp("state"))
    started.start()
    yield started
    started.kill()


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_runner, "LOOK_S", 0.05)


class Work:
    """A run that does not end."""

    is_stored, is_finishing, may_be_stored = True, False, False

    def __init__(self, lease: Lease, order: BackgroundOrder) -> None:
        self.lease, self.order = lease, order
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def begin(self) -> None:
        self.opened.set_result(None)
        await asyncio.Event().wait()

    async def resume(self) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


async def fail_unreadable(owner: str, response_id: str) -> bytes:
    raise AssertionError(f"{owner}:{response_id} was given up")


class Gateway:
    """A runner with a list of the responses that were taken over, in order."""

    def __init__(self, server: RedisServer, store: type[BackgroundStore] = BackgroundStore, lease_s: float = LEASE_S) -> None:
        self.redis = StateRedis(server.url, 0.1)
        self.store = store(self.redis, lease_s, BackgroundLimits(600, 60, 100, 1 << 20, 100))
        self.taken: list[str] = []
        metrics = GatewayMetrics(CollectorRegistry())
        self.runner = BackgroundRunner(self.store, self._take, fail_unreadable, 100, lambda: True, 1, metrics)

    def _take(self, lease: Lease, order: BackgroundOrder) -> Work:
        self.taken.append(order.id)
        return Work(lease, order)

    async def put(self, name: str) -> Work:
        now = int(time.time())
        order = BackgroundOrder(name, ALICE, "alice", "r", "", now, now + 60, "demo", {}, "", 0, "", ["", ""], [], 4096, {})
        work = Work(new_lease(ALICE, name), order)
        assert await self.store.begin(work.lease, order, b"{}", b"", [b"{}"]) is Begun.YES
        return work


class SlowTakes(BackgroundStore):
    async def take(self, owner: str, response_id: str) -> Lease | None:
        await asyncio.sleep(LEASE_S / 2)
        return await super().take(owner, response_id)


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_runner_takes_over_all_pending_responses_with_readable_orders(server: RedisServer) -> None:
    """The runner renews the leases of its own responses while slow takeovers continue."""

    async def run() -> None:
        server.client.flushall()
        gateway = Gateway(server, SlowTakes)
        own = await gateway.put("resp_own")
        others = [await gateway.put(f"resp_{number}") for number in range(5)]
        server.client.hset(f"state:background:{ALICE}:resp_0", "order", "{")
        server.client.delete(*(each.lease.key for each in others))
        running = asyncio.create_task(gateway.runner.run())
        await gateway.runner.begin(own)
        await until(lambda: len(gateway.taken) == 4)
        assert gateway.taken == [f"resp_{number}" for number in range(1, 5)] and not running.done()
        assert server.client.get(own.lease.key) == own.lease.token.encode()
        running.cancel()
        await asyncio.wait((running,))
        await gateway.redis.close()

    asyncio.run(run())


def test_responses_stay_at_the_gateway_after_a_store_outage_longer_than_the_lease(server: RedisServer) -> None:
    """The gateway continues its responses, although their leases expired during the outage.

    Another gateway takes over a response after its release, or when the lease of a stopped gateway expires.
    """

    async def run() -> None:
        server.client.flushall()
        one, other = (Gateway(server, lease_s=3.0) for _ in range(2))
        works = [await one.put("resp_a"), await one.put("resp_b")]
        leases = {work.lease: work.order for work in works}
        running = asyncio.create_task(other.runner.run())
        await until(lambda: other.runner._runs == {} and not running.done())
        server.client.delete(*(work.lease.key for work in works))  # the leases have expired during the outage
        server.wait_until_written()
        server.kill()
        await asyncio.to_thread(server.start)
        await asyncio.sleep(0.5)
        assert other.taken == [] and await one.store.renew(leases) == []
        await one.store.release(works[0].lease, ALICE, "resp_a")
        await until(lambda: other.taken == ["resp_a"])
        await until(lambda: other.taken == ["resp_a", "resp_b"])
        running.cancel()
        await asyncio.wait((running,))
        for gateway in (one, other):
            await gateway.redis.close()

    asyncio.run(run())


def test_background_run_is_not_cancelled_while_writing_the_final_records(server: RedisServer) -> None:
    """The store has the final records of both responses. Only the run whose `is_finishing` is set is not cancelled."""

    async def run() -> None:
        server.client.flushall()
        gateway = Gateway(server)
        works = [await gateway.put("resp_a"), await gateway.put("resp_b")]
        works[0].is_finishing = True
        for work in works:
            await gateway.runner.begin(work)
            await gateway.store.finish(work.lease, work.order, 1, BackgroundStatus.COMPLETED, FinalRecords(b"{}"), [b"{}"])
        running = asyncio.create_task(gateway.runner.run())
        await until(lambda: works[1] not in gateway.runner._runs)
        assert works[0] in gateway.runner._runs
        running.cancel()
        await asyncio.wait((running,))
        await gateway.redis.close()

    asyncio.run(run())


class FakeAdmission:
    """The admission of a request under the limits of its API key."""

    def __init__(self) -> None:
        self.ended = 0

    def reserve(self, tokens: int) -> None:
        raise AssertionError("the admission was reserved again")

    def end(self, used_tokens: int) -> None:
        self.ended += 1


def test_draining_runner_releases_each_response_once_and_refuses_responses_that_have_not_begun(server: RedisServer) -> None:
    """Two drains run at once, and a response was requested just before the drain."""

    async def run() -> None:
        server.client.flushall()
        gateway, admission = Gateway(server), FakeAdmission()
        works = [await gateway.put(f"resp_{number}") for number in range(4)]
        for work in works:
            await gateway.runner.begin(work)
        order = works[0].order
        stored = gateway.store.initial_state(order, b"", 0)
        first = FirstAttempt(stored, cast(Any, None), NOBODY, admission, cast(Any, None))
        late = BackgroundRun(cast(Any, None), new_lease(ALICE, "resp_late"), order, first)
        asking = asyncio.create_task(gateway.runner.begin(late))
        await asyncio.sleep(0)  # the task exists, but has not run its first step
        other = asyncio.create_task(gateway.runner.drain())
        await gateway.runner.drain()
        await other
        with pytest.raises(ApiError, match="shutting down"):
            await asking
        assert admission.ended == 1
        assert [server.client.hget(f"state:background:{ALICE}:{work.order.id}", "takes") for work in works] == [b"0"] * 4
        assert not server.client.exists(*(work.lease.key for work in works))
        await gateway.redis.close()

    asyncio.run(run())


@pytest.mark.parametrize("has_time", [True, False])
def test_error_names_the_failure_when_a_background_response_cannot_begin(
    server: RedisServer, caplog: pytest.LogCaptureFixture, has_time: bool
) -> None:
    """Either the time limit passes before a worker takes the request, or the attempt has a fault. Only the fault is logged."""

    async def served(call: object, sink: object) -> None:
        if has_time:
            raise LookupError("a fault")
        await asyncio.Event().wait()

    async def run() -> str | None:
        server.client.flushall()
        gateway, admission = Gateway(server), FakeAdmission()
        order = (await gateway.put("resp_a")).order
        order = replace(order, id="resp_b", ends_at=int(time.time()) + (60 if has_time else 1))
        stored = gateway.store.initial_state(order, b"", 0)
        first = FirstAttempt(stored, cast(Any, None), NOBODY, admission, cast(Any, None))
        answers, access = SimpleNamespace(record=len, event_renderer=len), SimpleNamespace(enabled=False)
        ports = RunPorts(gateway.store, *cast(Any, (answers, served, None, None, len, None, access)))
        work = BackgroundRun(ports, new_lease(ALICE, "resp_b"), order, first)
        with pytest.raises(ApiError) as refused:
            await gateway.runner.begin(work)
        await until(lambda: not gateway.runner._runs)
        assert admission.ended == 1
        await gateway.redis.close()
        return refused.value.code

    assert asyncio.run(run()) == ("internal_error" if has_time else "timeout")
    assert ("unexpected error" in caplog.text) is has_time


def test_store_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Only the search for unleased responses fails, because a gateway without a lease sends no other command."""

    class Away(BackgroundStore):
        async def find_unleased(self, most: int, released_only: bool = False) -> list[tuple[str, str]]:
            calls.append(most)
            raise StoreAway("it does not answer")

    calls: list[int] = []

    async def use() -> None:
        redis = StateRedis("redis://127.0.0.1:1", 0.1)
        store = Away(redis, LEASE_S, BackgroundLimits(600, 60, 100, 1 << 20, 100))
        runner = BackgroundRunner(store, Work, fail_unreadable, 100, lambda: True, 1, GatewayMetrics(CollectorRegistry()))
        running = asyncio.create_task(runner.run())
        async with asyncio.timeout(60):
            while len(calls) < 5:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await redis.close()

    asyncio.run(use())
    assert caplog.text.count("wait for the store") == 1
