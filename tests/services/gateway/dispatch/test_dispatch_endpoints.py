"""Tests of workers that discovery removes or reports as not ready."""

from __future__ import annotations

from tests.services.gateway.dispatch.test_dispatch_lost import begun, stopped
from tests.services.gateway.dispatch.test_dispatch_queue import send, status_of
from tests.services.gateway.dispatch.test_faults import ANSWER, Pending, content_of
from tests.services.gateway.fakes import FakeWorker
from tests.services.gateway.system import System, wait_until

LONG_S = 600.0  # long, so that no request ends by a timeout


def discover(system: System, **ready: bool) -> None:
    """Sets the endpoints of the fleet. The keys of `ready` are "w0", "w1", … for the index of the worker."""
    endpoints = {system.workers[int(name[1:])].address: value for name, value in ready.items()}
    system.do(lambda: system.gateway.dispatcher.fleet.set_endpoints(endpoints))


def with_two_versions(workers: list[FakeWorker]) -> None:
    """Gives the workers two model versions. They compute no step until allow()."""
    stopped(workers)
    for worker, revision in zip(workers, "ab", strict=True):
        worker.info.revision = revision


def test_removed_worker_completes_running_requests_before_the_link_is_closed() -> None:
    with System(workers=2, configure=stopped, routing_policy="round_robin") as system:
        pending = Pending(system)
        first = begun(system, 3)
        fleet = system.gateway.dispatcher.fleet
        index = system.workers.index(first)
        discover(system, **{f"w{1 - index}": True})
        assert set(fleet.links) == {host.address for host in system.workers}
        system.do(lambda: system.workers[1 - index].servicer.allow(None))
        assert [system.chat().status_code for _ in range(3)] == [200] * 3
        assert len(first.servicer.submits) == 1
        system.do(lambda: first.servicer.allow(None))
        assert pending.result().status_code == 200
        wait_until(lambda: first.address not in fleet.links, "the removal of the link")
        wait_until(lambda: first.servicer.ended == 1, "the end of the stream")
        assert len(fleet.pools["test-model"].links) == 1


def test_removed_worker_is_not_dialled_again_when_the_stream_breaks() -> None:
    with System(workers=2, configure=stopped) as system:
        pending = Pending(system)
        first = begun(system, 3)
        index = system.workers.index(first)
        discover(system, **{f"w{1 - index}": True})
        system.call(first.stop())
        system.allow(None)
        assert pending.result().status_code == 200
        assert len(system.workers[1 - index].servicer.submits) == 1
        wait_until(lambda: first.address not in system.gateway.dispatcher.fleet.links, "the removal of the link")


def test_address_that_returns_before_the_link_is_closed_keeps_the_link() -> None:
    with System(configure=stopped) as system:
        pending = Pending(system)
        begun(system, 3)
        discover(system)
        discover(system, w0=True)
        system.allow(None)
        assert [pending.result().status_code, system.chat().status_code] == [200, 200]
        assert len(system.worker.contexts) == 1


def test_address_that_returns_after_the_link_is_closed_gets_a_new_link() -> None:
    with System() as system:
        discover(system)
        wait_until(lambda: not system.gateway.dispatcher.fleet.links, "the removal of the link")
        assert system.get("/readiness").json()["missing"] == ["worker"]
        client = send(system, "Hi")
        discover(system, w0=True)
        assert status_of(client) == 200


def test_request_continues_on_a_new_worker_at_a_reused_address_when_the_model_version_is_equal() -> None:
    """The earlier worker at the address had another model version. In a rollout, a new pod can get the address of an old pod."""
    with System(workers=2, configure=with_two_versions, queue_timeout_s=LONG_S) as system:
        first, second = system.workers
        fleet = system.gateway.dispatcher.fleet
        discover(system, w1=True)
        wait_until(lambda: first.address not in fleet.links, "the removal of the link")
        system.call(first.stop())
        pending = Pending(system, stream=True)
        assert begun(system, 3) is second
        discover(system, w0=True)
        system.call(second.stop())
        wait_until(lambda: system.num_waiting == 1, "the request in the gateway's queue")
        system.do(system.gateway.dispatcher._on_tick)
        assert system.num_waiting == 1
        first.servicer.info.revision = second.servicer.info.revision
        system.call(first.start())
        system.allow(None)
        assert content_of(pending.result().text) == ANSWER


def test_address_that_returns_after_the_link_is_lost_gets_a_link_without_a_model_version() -> None:
    with System(workers=2, configure=with_two_versions) as system:
        pending = Pending(system)
        first = begun(system, 3)
        index = system.workers.index(first)
        link = system.links[index]
        discover(system, **{f"w{1 - index}": True})
        system.call(first.stop())
        wait_until(lambda: link.info is None, "the disconnection")
        discover(system, w0=True, w1=True)
        assert system.links[index] is not link and system.links[index].model_version is None
        discover(system, **{f"w{1 - index}": True})
        assert pending.result().json()["error"]["code"] == "weights_not_served"


def test_worker_gets_no_new_request_while_not_ready() -> None:
    with System(workers=2) as system:
        discover(system, w0=False, w1=True)
        assert [system.chat().status_code for _ in range(3)] == [200] * 3
        assert system.submits() == [0, 3]
        discover(system, w0=False, w1=False)
        client = send(system, "Hi")
        assert system.num_waiting == 1
        discover(system, w0=True, w1=False)
        assert status_of(client) == 200 and system.submits() == [1, 3]
