"""Tests of the order in which queued requests of several API keys are served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.services.gateway.dispatch.test_dispatch_queue import COMPLETIONS, LIMIT, status_of, with_one_slot
from tests.services.gateway.fakes import FakeWorker, text_of
from tests.services.gateway.system import RawClient, System, wait_until


class Keyed:
    """Clients with several API keys. The first letter of a prompt is its API key."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.clients: list[RawClient] = []

    def send(self, key: str, count: int, prompt: Callable[[int], str] = lambda i: str(i), **body: Any) -> RawClient:
        for i in range(count):
            before = len(self.system.worker.submits) + self.system.num_waiting
            self.clients.append(RawClient(self.system, COMPLETIONS, {"prompt": key + prompt(i), "max_tokens": 1, **body}, key))
            arrived = before + 1
            wait_until(
                lambda arrived=arrived: len(self.system.worker.submits) + self.system.num_waiting == arrived,
                "the arrival of the request",
            )
        return self.clients[-1]

    def served(self) -> str:
        """Waits until all requests are served. Returns the API key of each request, in the order of serving."""
        self.system.allow(None)
        assert {status_of(client) for client in self.clients} == {200}
        return "".join(text_of(list(submit.prompt_ids))[0] for submit in self.system.worker.submits)


def test_api_key_with_few_requests_does_not_wait_for_an_api_key_with_many_requests() -> None:
    with System(configure=with_one_slot, keys="ab") as system:
        keyed = Keyed(system)
        keyed.send("a", 50)
        keyed.send("b", 3)
        # The worker already has LIMIT requests of `a`. Then `a` and `b` take turns, so all three of `b` are among the next eight.
        assert keyed.served().rindex("b") < LIMIT + 8


def test_api_keys_are_served_in_proportion_to_weights() -> None:
    with System(configure=with_one_slot, keys=[{"name": "a", "key": "a", "weight": 3}, "b", "c"]) as system:
        keyed = Keyed(system)
        keyed.send("c", LIMIT)
        keyed.send("a", 24)
        keyed.send("b", 24)
        shared = keyed.served()[LIMIT : LIMIT + 16]
        assert 11 <= shared.count("a") <= 13 and shared.count("b") == 16 - shared.count("a")


def test_shares_of_api_keys_are_measured_in_tokens_instead_of_requests() -> None:
    with System(configure=with_one_slot, keys="abc") as system:
        keyed = Keyed(system)
        keyed.send("c", LIMIT)
        keyed.send("a", 4, lambda i: "x" * 200)
        keyed.send("b", 30, lambda i: "x" * 20)
        order = keyed.served()[LIMIT:]
        between = order[order.index("a") + 1 :].partition("a")[0]
        # Requests of API key `b` are served until they have as many tokens as the first request of `a`.
        assert len(between) >= 7, order


def test_requests_are_served_in_order_of_arrival_when_no_api_keys_are_configured() -> None:
    with System(configure=with_one_slot) as system:
        keyed = Keyed(system)
        for key in "abcabcaabb":
            keyed.send(key, 1)
        assert keyed.served() == "abcabcaabb"


def test_queued_request_that_never_reaches_a_worker_is_not_charged_to_the_api_key() -> None:
    with System(configure=with_one_slot, keys="abc") as system:
        keyed = Keyed(system)
        keyed.send("c", LIMIT)
        keyed.send("b", 1)
        keyed.send("a", 1, lambda i: "x" * 400).vanish()
        keyed.clients.pop()
        wait_until(lambda: system.num_waiting == 1, "the request in the gateway's queue")
        keyed.send("a", 5)
        keyed.send("b", 5)
        assert "a" in keyed.served()[LIMIT : LIMIT + 4]


def test_shares_of_api_keys_include_output_tokens() -> None:
    """The API keys `a` and `b` have sent equal prompts. The responses to `a` are longer."""

    def configure(workers: list[FakeWorker]) -> None:
        with_one_slot(workers)
        workers[0].answer = lambda submit: "y" * 100

    with System(configure=configure, keys="abc") as system:
        keyed = Keyed(system)
        keyed.send("c", LIMIT)
        keyed.send("a", 8, max_tokens=60)
        keyed.send("b", 8)
        order = keyed.served()[LIMIT:]
        assert order.rindex("b") < order.rindex("a") and "bbb" in order


def test_submit_message_has_the_tenant_and_the_batch() -> None:
    with System(keys=[{"name": "a", "key": "a", "weight": 3}, "b"]) as system:
        keyed = Keyed(system)
        for key, prompt in (("a", ["x", "y"]), ("a", "x"), ("b", ["x", "y"])):
            expected = len(system.worker.submits) + 2 * len(prompt)
            keyed.clients.append(RawClient(system, COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "n": 2}, key))
            wait_until(lambda expected=expected: len(system.worker.submits) == expected, "the arrival of the request")
        keyed.served()
        submits = system.worker.submits
        batches = [submit.batch for submit in submits]
        assert batches[0] and batches[6] and batches == [batches[0]] * 4 + [0] * 2 + [batches[6]] * 4
        assert batches[0] != batches[6]
        tenants = [submit.tenant for submit in submits]
        assert tenants == [tenants[0]] * 6 + [tenants[6]] * 4 and tenants[0] != tenants[6] and len(tenants[0]) == 16
        assert [submit.tenant_weight for submit in submits] == [3.0] * 6 + [1.0] * 4


def test_submit_message_has_no_tenant_without_api_keys() -> None:
    with System() as system:
        keyed = Keyed(system)
        keyed.clients.append(RawClient(system, COMPLETIONS, {"prompt": "x", "max_tokens": 1}))
        keyed.served()
        assert [(s.tenant, s.batch, s.tenant_weight) for s in system.worker.submits] == [(b"", 0, 1.0)]
