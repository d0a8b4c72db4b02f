"""Draining workers get no new requests, and the requests that they abort move to other workers."""

from __future__ import annotations

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.services.gateway.dispatch.dispatcher import MAX_CRASHES
from tests.services.gateway.dispatch.test_dispatch_lost import begun, stopped
from tests.services.gateway.dispatch.test_dispatch_queue import send, status_of
from tests.services.gateway.dispatch.test_faults import ANSWER, Pending, content_of
from tests.services.gateway.fakes import ids_of
from tests.services.gateway.system import RawClient, System, wait_until


def content(pending: Pending) -> str:
    text: str = pending.result().json()["choices"][0]["message"]["content"]
    return text


def test_draining_worker_completes_running_requests_and_gets_no_new_requests() -> None:
    with System(workers=2, configure=stopped) as system:
        pending = Pending(system)
        first = begun(system, 3)
        system.do(lambda: first.servicer.report_load(draining=True))
        wait_until(lambda: system.gateway.dispatcher.connected() == 1, "the drain")
        system.allow(None)
        assert [system.chat().status_code for _ in range(4)] == [200] * 4
        assert content(pending) == ANSWER
        assert len(first.servicer.submits) == 1 and sum(system.submits()) == 5
        system.do(lambda: first.servicer.report_load(draining=False))
        wait_until(lambda: system.gateway.dispatcher.connected() == 2, "the end of the drain")
        assert [system.chat().status_code for _ in range(4)] == [200] * 4
        assert len(first.servicer.submits) > 1


def test_requests_wait_and_gateway_is_not_ready_when_all_workers_drain() -> None:
    with System(configure=stopped) as system:
        system.do(lambda: system.worker.report_load(draining=True))
        wait_until(lambda: system.get("/readiness").json()["missing"] == ["worker"], "the drain")
        client = send(system, "Hi")
        assert system.num_waiting == 1 and system.submits() == [0]
        system.allow(None)
        system.call(system.workers[0].stop())
        system.do(lambda: setattr(system.worker, "load", None))
        system.call(system.workers[0].start())
        assert status_of(client) == 200


def test_choice_moves_any_number_of_times_when_workers_drain() -> None:
    """The choice moves more than MAX_CRASHES times between two workers."""
    with System(workers=2, configure=stopped) as system:
        pending = Pending(system, stream=True)
        for hop in range(MAX_CRASHES + 2):
            wait_until(lambda hop=hop: sum(system.submits()) == hop + 1 and sum(system.running()) == 1, f"submit {hop}")
            here = next(host.servicer for host in system.workers if host.servicer.running)
            other = next(host.servicer for host in system.workers if host.servicer is not here)
            system.do(lambda here=here: here.allow(1))
            wait_until(lambda here=here: here.steps_left == 0, "the token of the worker")
            system.do(lambda other=other: other.report_load(draining=False))
            wait_until(lambda: system.gateway.dispatcher.connected() == 2, "the end of the drain of the other worker")
            system.do(lambda here=here: here.end_running(pb.ERROR_CODE_UNAVAILABLE, "draining"))
        system.allow(None)
        assert content_of(pending.result().text) == ANSWER
        last = max((host.servicer.submits[-1] for host in system.workers), key=lambda submit: len(submit.output_ids))
        assert list(last.output_ids) == ids_of(ANSWER[: MAX_CRASHES + 2])
        moves = system.metric("rootstock_gateway_moves_total", cause="drain", state="begun")
        assert moves == MAX_CRASHES + 2
        assert system.metric("rootstock_gateway_breakers", state="closed") == 2


def test_loss_of_a_draining_worker_does_not_count_as_a_crash() -> None:
    with System(configure=stopped, breaker_faults=2) as system:
        pending = Pending(system)
        for restart in range(MAX_CRASHES + 1):
            wait_until(lambda restart=restart: system.submits() == [restart + 1], f"submit {restart}")
            system.do(lambda: system.worker.report_load(draining=True))
            wait_until(lambda: system.links[0].draining, "the drain")
            system.call(system.workers[0].stop())
            system.do(lambda: setattr(system.worker, "load", None))
            system.call(system.workers[0].start())
        system.allow(None)
        assert content(pending) == ANSWER


def test_session_turn_fails_when_the_worker_drains() -> None:
    with System(workers=2, configure=stopped) as system:
        client = RawClient(system, "/generate", {"text": "Hi", "session_params": {"id": "mine"}})
        first = begun(system, 5)
        system.do(lambda: first.servicer.end_running(pb.ERROR_CODE_UNAVAILABLE, "draining"))
        client.read_until(b"session_unavailable")
        assert status_of(client) == 503 and sum(system.submits()) == 1
