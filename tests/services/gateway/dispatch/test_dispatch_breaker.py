"""Tests of circuit breakers: a worker that fails requests gets no request for a while, and then one."""

from __future__ import annotations

from collections.abc import Callable

from rootstock_llm.protos import common_pb2 as pb
from tests.services.gateway.dispatch.test_faults import Pending
from tests.services.gateway.fakes import FakeWorker
from tests.services.gateway.system import RawClient, System, chat_body, wait_until

COOLDOWN_S = 0.4  # in tests that wait for the end of the cooldown


def failing(times: int) -> Callable[[list[FakeWorker]], None]:
    def configure(workers: list[FakeWorker]) -> None:
        workers[0].refuse += [(pb.ERROR_CODE_INTERNAL, "fault")] * times

    return configure


def breaking(workers: int, times: int, cooldown_s: float = 60.0) -> System:
    return System(
        workers=workers,
        configure=failing(times),
        routing_policy="round_robin",
        breaker_faults=2,
        breaker_cooldown_s=cooldown_s,
    )


def end_cooldown(system: System) -> None:
    """Lets the first worker's breaker allow a request at once, as after its cooldown or after a probe without a result."""
    breaker = system.links[0].breaker
    system.do(lambda: setattr(breaker, "_until", 0.0))
    wait_until(lambda: len(system.gateway.dispatcher.fleet.usable()) == len(system.workers), "all workers to be usable")


def state(system: System) -> str:
    return system.links[0].breaker.state.value


def test_breaker_opens_after_faults_and_closes_after_a_successful_probe() -> None:
    with breaking(workers=2, times=3) as system:
        assert [system.chat().status_code for _ in range(8)] == [200] * 8
        assert state(system) == "open" and system.submits()[0] == 2
        assert system.metric("rootstock_gateway_breakers", state="open") == 1
        assert system.metric("rootstock_gateway_breakers", state="closed") == 1
        assert system.metric("rootstock_gateway_workers", state="unusable") == 1
        end_cooldown(system)
        assert [system.chat().status_code for _ in range(4)] == [200] * 4
        assert state(system) == "open" and system.submits()[0] == 3
        end_cooldown(system)
        assert [system.chat().status_code for _ in range(2)] == [200] * 2
        assert state(system) == "closed"
        before = system.submits()[0]
        assert [system.chat().status_code for _ in range(4)] == [200] * 4
        assert system.submits()[0] == before + 2


def test_breaker_sends_one_request_as_a_probe() -> None:
    with breaking(workers=2, times=2) as system:
        assert [system.chat().status_code for _ in range(4)] == [200] * 4
        assert state(system) == "open"
        system.allow(0)
        end_cooldown(system)
        client = RawClient(system, "/v1/chat/completions", chat_body(n=8))
        wait_until(lambda: sum(system.running()) == 8, "the submits")
        assert system.running() == [1, 7]
        client.vanish()


def test_worker_with_an_open_breaker_is_used_when_no_other_worker_is_connected() -> None:
    """The requests may be at fault, so breakers never exclude every worker."""
    with breaking(workers=1, times=2) as system:
        assert [system.chat().status_code for _ in range(2)] == [500, 500]
        assert state(system) == "open"
        assert system.chat().status_code == 200
        assert system.get("/readiness").status_code == 200


def test_breaker_ignores_errors_of_the_client() -> None:
    with System(breaker_faults=2) as system:
        for code in (pb.ERROR_CODE_INVALID_ARGUMENT, pb.ERROR_CODE_OUT_OF_MEMORY, pb.ERROR_CODE_TIMEOUT):
            system.do(lambda code=code: system.worker.refuse.extend([(code, "no")] * 3))
            assert all(system.chat().status_code >= 400 for _ in range(3))
        assert state(system) == "closed" and system.chat().status_code == 200


def test_breaker_probes_again_when_the_client_of_a_probe_leaves() -> None:
    """The breaker probes again, although the first probe has no result."""
    with breaking(workers=2, times=2) as system:
        assert [system.chat().status_code for _ in range(4)] == [200] * 4
        system.allow(0)
        end_cooldown(system)
        client = RawClient(system, "/v1/chat/completions", chat_body(n=2))
        wait_until(lambda: system.running() == [1, 1], "the probe")
        client.vanish()
        wait_until(lambda: system.running() == [0, 0], "the aborts")
        system.allow(None)
        assert state(system) == "half_open"
        end_cooldown(system)
        assert [system.chat().status_code for _ in range(2)] == [200] * 2
        assert state(system) == "closed"


def test_breaker_counts_the_loss_of_a_worker_as_a_fault() -> None:
    with System(breaker_faults=1) as system:
        system.allow(0)
        pending = Pending(system)
        wait_until(lambda: system.running() == [1], "the submit")
        system.call(system.workers[0].stop())
        wait_until(lambda: system.num_waiting == 1, "the request in the gateway's queue")
        assert state(system) == "open"
        system.allow(None)
        system.call(system.workers[0].start())
        assert pending.result().status_code == 200, "the only worker is used although its breaker is open"
