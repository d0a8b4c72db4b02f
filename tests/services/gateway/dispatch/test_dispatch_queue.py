"""Tests of the gateway's queue of choices that wait for a free slot: order, bounds, deadlines and priorities."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.gateway.dispatch.test_faults import ANSWER, Pending
from tests.services.gateway.fakes import MODEL, FakeWorker, text_of
from tests.services.gateway.system import RawClient, System, chat_body, wait_until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LIMIT = 3  # requests that the gateway sends to a worker with max_running_requests 1


def with_one_slot(workers: list[FakeWorker]) -> None:
    for worker in workers:
        worker.info.max_running_requests = 1
        worker.allow(0)


def send(system: System, prompt: str, **body: Any) -> RawClient:
    """Sends a request and waits until it is at a worker or in the queue."""
    before = sum(system.submits()) + system.num_waiting
    client = RawClient(system, COMPLETIONS, {"prompt": prompt, **body})
    wait_until(lambda: sum(system.submits()) + system.num_waiting > before, f"the request {prompt} at a worker or in the queue")
    return client


def served(system: System) -> list[str]:
    """Returns the prompts in the order in which the first worker received them."""
    return [text_of(list(submit.prompt_ids)) for submit in system.worker.submits]


def status_of(client: RawClient) -> int:
    client.read_until(b"\r\n\r\n")
    return int(client.received.split()[1])


def fill_workers(system: System) -> list[RawClient]:
    """Sends LIMIT requests to each worker."""
    return [send(system, f"filler {i}") for i in range(LIMIT * len(system.workers))]


def test_queue_serves_requests_in_order_of_arrival() -> None:
    with System(configure=with_one_slot) as system:
        clients = fill_workers(system) + [send(system, str(i)) for i in range(4)]
        assert system.num_waiting == 4
        assert system.metric("rootstock_gateway_queue_length", model=MODEL) == 4
        assert system.metric("rootstock_gateway_queue_time_seconds_count") == 0
        system.allow(None)
        assert [status_of(client) for client in clients] == [200] * 7
        assert served(system)[LIMIT:] == ["0", "1", "2", "3"]
        assert system.metric("rootstock_gateway_queue_length", model=MODEL) == 0
        assert system.metric("rootstock_gateway_queue_time_seconds_count") == 4


def test_worker_never_exceeds_the_request_limit() -> None:
    def configure(workers: list[FakeWorker]) -> None:
        for worker in workers:
            worker.info.max_running_requests = 4
            worker.allow(0)

    with System(workers=2, configure=configure, worker_queue_slack=1.0) as system:
        client = RawClient(system, CHAT, chat_body(n=20))
        wait_until(lambda: system.num_waiting == 4, "the requests in the queue")
        wait_until(lambda: sum(system.running()) == 16, "the submits")
        assert system.running() == [8, 8]
        client.vanish()


def test_request_fails_after_the_queue_timeout() -> None:
    with System(configure=with_one_slot, queue_timeout_s=0.3) as system:
        fill_workers(system)
        answer = system.complete()
        assert answer.status_code == 503 and 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["code"] == "queue_timeout"
        assert system.num_waiting == 0 and system.submits() == [LIMIT]
        assert system.metric("rootstock_gateway_queue_time_seconds_count") == 1


def test_queue_refuses_requests_when_full() -> None:
    with System(configure=with_one_slot, max_waiting_requests=2) as system:
        clients = [*fill_workers(system), send(system, "0"), send(system, "1")]
        answer = system.complete()
        assert answer.status_code == 503 and 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["code"] == "queue_full"
        system.allow(None)
        assert [status_of(client) for client in clients] == [200] * 5


@pytest.mark.parametrize("low_first", [False, True])
def test_request_with_a_higher_priority_displaces_the_queued_request_with_the_lowest_priority(low_first: bool) -> None:
    sign = -1 if low_first else 1
    with System(
        configure=with_one_slot,
        max_waiting_requests=3,
        enable_priority_scheduling=True,
        schedule_low_priority_values_first=low_first,
    ) as system:
        fill_workers(system)
        clients = {value: send(system, str(value), priority=sign * value) for value in (2, 1, 3)}
        displacing = RawClient(system, COMPLETIONS, {"prompt": "5", "priority": 5 * sign})
        assert status_of(clients.pop(1)) == 503
        assert system.complete(priority=sign).json()["error"]["code"] == "queue_full"
        system.allow(None)
        assert [status_of(client) for client in (*clients.values(), displacing)] == [200] * 3
        assert served(system)[LIMIT:] == ["5", "3", "2"]


def test_queue_ignores_priorities_by_default() -> None:
    with System(configure=with_one_slot, max_waiting_requests=2) as system:
        clients = [*fill_workers(system), send(system, "0"), send(system, "9", priority=9)]
        assert system.complete(priority=20).json()["error"]["code"] == "queue_full"
        system.allow(None)
        assert [status_of(client) for client in clients] == [200] * 5
        assert served(system)[LIMIT:] == ["0", "9"]


def test_waiting_request_is_removed_when_the_client_leaves() -> None:
    with System(configure=with_one_slot) as system:
        fill_workers(system)
        gone = send(system, "gone", n=1)
        after = send(system, "after")
        gone.vanish()
        wait_until(lambda: system.num_waiting == 1, "the queued request")
        system.allow(None)
        assert status_of(after) == 200 and served(system)[LIMIT:] == ["after"]


def test_slot_of_a_running_request_is_reused_when_the_client_leaves() -> None:
    with System(configure=with_one_slot) as system:
        first, *_ = fill_workers(system)
        after = send(system, "after")
        first.vanish()
        wait_until(lambda: system.num_waiting == 0 and len(system.worker.submits) == LIMIT + 1, "the next submit")
        system.allow(None)
        assert status_of(after) == 200


def test_choices_of_one_request_are_placed_as_slots_become_free() -> None:
    with System(configure=with_one_slot) as system:
        pending = Pending(system, n=5)
        wait_until(lambda: system.num_waiting == 2 and system.running() == [LIMIT], "three placed and two queued choices")
        system.allow(None)
        answer = pending.result().json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == [ANSWER] * 5
        assert answer["usage"]["completion_tokens"] == 5 * (len(ANSWER) + 1)


def test_whole_request_fails_when_a_choice_exceeds_the_queue_timeout() -> None:
    with System(configure=with_one_slot, queue_timeout_s=0.3) as system:
        assert system.chat(n=5).json()["error"]["code"] == "queue_timeout"
        wait_until(lambda: len(system.worker.aborted) == LIMIT, "the aborts")
        assert system.num_waiting == 0


def test_request_is_refused_when_the_choices_exceed_the_capacity_of_the_queue() -> None:
    """The whole request is refused. The queue displaces no waiting request to accept only some of the choices."""
    with System(configure=with_one_slot, max_waiting_requests=2, enable_priority_scheduling=True) as system:
        assert system.chat(n=6).json()["error"]["code"] == "queue_full"
        wait_until(lambda: system.running() == [0], "the aborts")
        assert system.num_waiting == 0
        clients = [*fill_workers(system), send(system, "0"), send(system, "1")]
        assert system.chat(n=3, priority=9).json()["error"]["code"] == "queue_full"
        system.allow(None)
        assert [status_of(client) for client in clients] == [200] * 5


def test_requests_of_other_gateways_use_slots_of_a_worker() -> None:
    with System(configure=with_one_slot) as system:
        system.do(lambda: system.worker.report_load(num_open=LIMIT, used_tokens=100))
        wait_until(lambda: system.links[0].load is not None, "the load report")
        client = send(system, "0")
        assert system.num_waiting == 1 and system.submits() == [0]
        system.do(lambda: system.worker.report_load(num_open=LIMIT - 1))
        wait_until(lambda: system.submits() == [1], "the submit")
        system.allow(None)
        assert status_of(client) == 200
