"""Tests of retries on another worker: a request is retried once, and only before its first token."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rootstock_llm.protos import common_pb2 as pb
from tests.services.gateway.dispatch.test_dispatch_lost import begun, stopped
from tests.services.gateway.dispatch.test_dispatch_queue import LIMIT, send, status_of
from tests.services.gateway.dispatch.test_faults import Pending
from tests.services.gateway.fakes import MODEL, FakeWorker
from tests.services.gateway.system import System, wait_until


def failing(*indices: int, code: int = pb.ERROR_CODE_INTERNAL) -> Callable[[list[FakeWorker]], None]:
    def configure(workers: list[FakeWorker]) -> None:
        for index in indices:
            workers[index].refuse.append((code, "refused by the worker"))

    return configure


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_request_is_retried_after_a_fault_before_the_first_token(stream: bool) -> None:
    with System(workers=2, configure=failing(0), routing_policy="round_robin") as system:
        assert [system.chat(stream=stream).status_code for _ in range(2)] == [200, 200]
        assert sum(system.submits()) == 3
        assert system.metric("rootstock_gateway_moves_total", cause="retry", state="new") == 1


def test_request_is_retried_once() -> None:
    with System(workers=3, configure=failing(0, 1, 2), routing_policy="round_robin") as system:
        answer = system.chat()
        assert answer.status_code == 500 and answer.json()["error"]["message"] == "refused by the worker"
        assert sum(system.submits()) == 2


def test_request_is_tried_on_each_worker_until_a_worker_is_not_full() -> None:
    with System(workers=3, configure=failing(0, 1, code=pb.ERROR_CODE_QUEUE_FULL)) as system:
        assert [system.chat().status_code for _ in range(3)] == [200] * 3
        assert sum(system.submits()) == 5


def test_refusal_by_a_full_worker_does_not_count_as_a_retry() -> None:
    def configure(workers: list[FakeWorker]) -> None:
        workers[0].refuse.append((pb.ERROR_CODE_QUEUE_FULL, "full"))
        workers[1].refuse.append((pb.ERROR_CODE_INTERNAL, "fault"))

    with System(workers=3, configure=configure, routing_policy="least_requests") as system:
        for load, host in enumerate(system.workers):  # workers are tried in the order of their load
            system.do(lambda host=host, load=load: host.servicer.report_load(num_open=load))
        wait_until(lambda: all(link.load is not None for link in system.links), "the load reports")
        assert system.chat().status_code == 200
        assert system.submits() == [1, 1, 1]


def test_request_is_not_retried_after_a_token() -> None:
    with System(workers=2, configure=stopped) as system:
        pending = Pending(system, stream=True)
        first = begun(system, 3)
        wait_until(lambda: sum(sum(batch.counts) for batch in system.detokenizer.batches) == 3, "three ids")
        system.do(lambda: first.servicer.end_running(pb.ERROR_CODE_INTERNAL, "NaN in the logits"))
        text = pending.result().text
        assert '"message":"NaN in the logits"' in text and "[DONE]" not in text
        assert sum(system.submits()) == 1


def test_request_returns_to_a_worker_that_refused_when_no_other_worker_is_left() -> None:
    """The first worker refuses the request. The request waits for the second worker, which is lost."""

    def configure(workers: list[FakeWorker]) -> None:
        stopped(workers)
        for worker in workers:
            worker.info.max_running_requests = 1
        workers[0].report_load(num_open=LIMIT)

    with System(workers=2, configure=configure, routing_policy="least_requests") as system:
        first, second = system.workers
        wait_until(lambda: system.links[0].load is not None, "the load report")
        clients = [send(system, str(i)) for i in range(LIMIT)]
        assert system.submits() == [0, LIMIT]
        system.do(lambda: first.servicer.refuse.append((pb.ERROR_CODE_QUEUE_FULL, "full")))
        system.do(first.servicer.report_load)
        wait_until(lambda: system.gateway.dispatcher.fleet.pools[MODEL].has_free_slot(), "a free slot")
        clients.append(send(system, "refused"))
        wait_until(lambda: system.submits() == [1, LIMIT] and system.num_waiting == 1, "the refusal")
        system.call(second.stop())
        system.allow(None)
        assert [status_of(client) for client in clients] == [200] * (LIMIT + 1)
