"""Tests of prefetches: a decode worker reads pages of a prompt while a prefill worker computes it."""

from __future__ import annotations

from typing import Any

import pytest

from rootstock_llm.protos import worker_pb2
from tests.services.gateway.dispatch.test_dispatch_prefill import submits, system_of, text_of_answer
from tests.services.gateway.dispatch.test_dispatch_queue import COMPLETIONS
from tests.services.gateway.dispatch.test_faults import ANSWER, Pending
from tests.services.gateway.fakes import SECRET, FakeWorker
from tests.services.gateway.system import RawClient, System, wait_until

AFTER_S = 0.1  # seconds until a hedge copy


def with_stopped(*stopped: int, **more: Any) -> Any:
    """Returns arguments of system_of() with which the workers in `stopped` compute no step until allow()."""

    def configure(workers: list[FakeWorker]) -> None:
        for at in stopped:
            workers[at].allow(0)

    return {"then": configure, **more}


def prefetches(system: System, worker: int) -> list[worker_pb2.Prefetch]:
    return [each for message in system.workers[worker].servicer.messages for each in message.prefetches]


def announced(system: System, worker: int) -> list[tuple[int, int]]:
    """Returns the handle and the number of computed pages of each PagesReady message that the worker received."""
    messages = system.workers[worker].servicer.messages
    return [(each.handle, each.room.pages) for message in messages for each in message.ready]


def announce(system: System, pages: int, worker: int = 0) -> None:
    servicer = system.workers[worker].servicer
    wait_until(lambda: bool(servicer.running), "the prompt at the prefill worker")
    system.do(lambda: servicer.announce(pages))


def reader_of(system: System, workers: tuple[int, ...]) -> int:
    wait_until(lambda: any(prefetches(system, at) for at in workers), "a prefetch")
    return next(at for at in workers if prefetches(system, at))


def test_decode_worker_prefetches_pages_while_the_prompt_is_computed() -> None:
    with system_of(**with_stopped(0)) as system:
        pending = Pending(system, stream=False)
        announce(system, 2)
        wait_until(lambda: len(prefetches(system, 1)) == 1, "the first pages")
        announce(system, 3)
        (prefetch,) = prefetches(system, 1)
        wait_until(lambda: announced(system, 1) == [(prefetch.handle, 3)], "the next announcement")
        system.allow(None)
        assert text_of_answer(pending.result()) == ANSWER
        (first,), (second,) = submits(system, 0), submits(system, 1)
        host = system.workers[0].address.rpartition(":")[0]
        assert prefetch.prompt_ids == first.prompt_ids and prefetch.cache_salt == first.cache_salt
        assert (prefetch.source.address, prefetch.source.room.pages) == (f"{host}:7103", 2)
        assert prefetch.source.room.secret == SECRET and prefetch.source.room.room == second.source.room.room
        assert second.handle == prefetch.handle and second.source.room.pages == len(first.prompt_ids) // 4
        assert system.workers[1].servicer.aborted == []
        assert system.metric("rootstock_gateway_prefetches_total") == 1
        assert system.metric("rootstock_gateway_routing_decisions_total", reason="reader") == 1


def test_submit_after_a_prefetch_has_the_priority_and_counts_the_predicted_cached_tokens() -> None:
    """The predicted tokens are the tokens that the decode worker had cached before the prefetch."""
    with system_of(**with_stopped(0)) as system:
        for count, prompt in enumerate(("x" * 256, "x" * 256 + "another end"), 1):
            client = RawClient(system, COMPLETIONS, {"prompt": prompt, "priority": 3})
            announce(system, 2)
            wait_until(lambda count=count: len(prefetches(system, 1)) == count, "the first pages")  # type: ignore[misc]
            system.allow(None)
            client.read_until(b'"usage"')
            system.do(lambda: system.workers[0].servicer.allow(0))
        assert system.metric("rootstock_gateway_routing_decisions_total", reason="reader") == 2
        assert system.metric("rootstock_gateway_predicted_cached_tokens_total") == 256
        assert [each.priority for each in prefetches(system, 1)] == [3, 3] == [each.priority for each in submits(system, 1)]


@pytest.mark.parametrize("why", ["client", "prefill worker", "first token"])
def test_prefetch_is_released_when_the_decode_worker_does_not_get_the_request(why: str) -> None:
    """The client leaves, the prefill worker dies, or the completion ends with its first token."""
    with system_of(**with_stopped(0)) as system:
        body: dict[str, Any] = {"prompt": "a long enough prompt"} | ({"max_tokens": 1} if why == "first token" else {})
        client = RawClient(system, COMPLETIONS, body)
        announce(system, 2)
        reader = system.workers[1].servicer
        wait_until(lambda: len(prefetches(system, 1)) == 1, "the first pages")
        if why == "client":
            client.vanish()
        elif why == "prefill worker":
            system.call(system.workers[0].stop())
        else:
            system.allow(None)
        wait_until(lambda: reader.aborted != [], "the abort at the decode worker")
        assert reader.aborted == [prefetches(system, 1)[0].handle]
        if why != "client":
            client.read_until(b'"usage"')
            assert [submit.HasField("source") for submit in submits(system, 1)] == ([False] if why == "prefill worker" else [])


def load_of(system: System, worker: int) -> tuple[int, int]:
    """Returns the number of the worker's requests in the routing columns, and the number of prefetches among them."""
    (pool,) = system.gateway.dispatcher.fleet.pools.values()
    row = pool.row_of(system.links[worker])
    return int(pool.columns.requests[row]), int(pool.columns.prefetches[row])


def test_prefetches_count_as_requests_and_spread_over_decode_workers() -> None:
    """Each decode worker has a request from the beginning, because an idle decode worker computes a prompt itself."""
    with system_of(workers=4, **with_stopped(0, 1, 2, 3)) as system:
        pending = []
        for count in range(1, 8):
            pending.append(Pending(system, stream=False))
            wait_until(lambda count=count: sum(system.submits()) == count, "the submit")  # type: ignore[misc]
        client = RawClient(system, COMPLETIONS, {"prompt": "a long enough prompt"})
        wait_until(lambda: sum(system.submits()) == 8, "the submit")
        pending.append(Pending(system, stream=False))
        wait_until(lambda: system.submits() == [6, 1, 1, 1], "six prompts at the prefill worker")
        announce(system, 2)
        wait_until(lambda: sum(len(prefetches(system, at)) for at in (1, 2, 3)) == 6, "the six prefetches")
        assert [len(prefetches(system, at)) for at in (1, 2, 3)] == [2, 2, 2]
        assert [load_of(system, at) for at in (1, 2, 3)] == [(3, 2)] * 3
        client.vanish()
        wait_until(lambda: sum(load_of(system, at)[0] for at in (1, 2, 3)) == 8, "the release of one prefetch")
        system.allow(None)
        assert all(text_of_answer(each.result()) == ANSWER for each in pending)
        assert system.metric("rootstock_gateway_routing_decisions_total", reason="reader") == 5
        assert [load_of(system, at) for at in (1, 2, 3)] == [(0, 0)] * 3


def test_decode_worker_reserves_the_last_slot_for_a_prefetch() -> None:
    """The slot also stays reserved while requests with computed prompts wait at the gateway."""

    def configure(workers: list[FakeWorker]) -> None:
        workers[0].allow(0)
        for worker in workers[1:]:
            worker.info.max_running_requests = 1  # the gateway sends up to three requests to such a worker

    with system_of(workers=3, then=configure) as system:
        system.do(lambda: system.workers[2].servicer.report_load(num_open=3))
        wait_until(lambda: load_of(system, 2) == (3, 0), "the load report")
        pending = []
        for count in (1, 2, 3):
            pending.append(Pending(system, stream=False))
            wait_until(lambda count=count: len(submits(system, 0)) == count, "the prompt at the prefill worker")  # type: ignore[misc]
            announce(system, 2)
            wait_until(lambda count=count: load_of(system, 1) == (count, count), "the prefetch")  # type: ignore[misc]
        system.do(lambda: system.workers[1].servicer.report_load(paused=True))
        wait_until(lambda: system.links[1].paused, "the load report")
        system.allow(None)
        (pool,) = system.gateway.dispatcher.fleet.pools.values()
        wait_until(lambda: len(pool.moved) == 3, "all prompts computed")
        system.do(lambda: system.workers[1].servicer.report_load(paused=False))
        assert all(text_of_answer(each.result()) == ANSWER for each in pending)
        assert system.metric("rootstock_gateway_routing_decisions_total", reason="reader") == 3


@pytest.mark.parametrize("how", ["dies", "drains"])
def test_another_decode_worker_prefetches_when_the_first_one_is_lost(how: str) -> None:
    """The first decode worker dies or drains before the prompt is computed."""
    with system_of(workers=3, **with_stopped(0, 1, 2)) as system:
        pending = Pending(system, stream=False)
        announce(system, 2)
        lost = reader_of(system, (1, 2))
        other = 3 - lost
        if how == "dies":
            system.call(system.workers[lost].stop())
            wait_until(lambda: system.links[lost].info is None, "the disconnection")
            announce(system, 3)
            wait_until(lambda: len(prefetches(system, other)) == 1, "a prefetch at the other worker")
            assert prefetches(system, other)[0].source.room.pages == 3
        else:
            system.workers[lost].servicer.report_load(draining=True)
            wait_until(lambda: system.links[lost].draining, "the load report")
        system.do(lambda: system.workers[0].servicer.allow(None))
        wait_until(lambda: len(submits(system, other)) == 1, "the submit to the other decode worker")
        (second,) = submits(system, other)
        assert second.HasField("source")
        if how == "dies":
            assert second.handle == prefetches(system, other)[0].handle
        else:
            wait_until(lambda: system.workers[lost].servicer.aborted != [], "the abort at the decode worker")
            assert system.workers[lost].servicer.aborted == [prefetches(system, lost)[0].handle]
        system.allow(None)
        assert text_of_answer(pending.result()) == ANSWER


def test_worker_that_cannot_continue_the_request_does_not_prefetch() -> None:
    """One worker has another model version than the prefill worker. Another worker is not a decode worker."""

    def configure(workers: list[FakeWorker]) -> None:
        workers[0].allow(0)
        workers[2].info.revision = "other"
        workers[3].info.role = ""

    with system_of(workers=4, then=configure, routing_policy="round_robin") as system:
        pending = [Pending(system, stream=False) for _ in range(9)]
        wait_until(lambda: len(system.workers[0].servicer.running) >= 2, "two prompts at the prefill worker")
        announce(system, 2)
        wait_until(lambda: bool(prefetches(system, 1)), "a prefetch")
        system.allow(None)
        assert all(text_of_answer(each.result()) == ANSWER for each in pending)
        assert not prefetches(system, 2) and not prefetches(system, 3)


@pytest.mark.parametrize("how", ["slow", "lost"])
def test_prefetch_of_the_losing_hedge_copy_is_released_before_the_request_ends(how: str) -> None:
    """The request and its hedge copy have different prefill workers and KV reservations. One prefill worker is slow or lost."""
    with system_of(workers=4, prefill=2, hedge_after_s=AFTER_S, **with_stopped(0, 1, 2, 3)) as system:
        pending = Pending(system, stream=False)
        wait_until(lambda: all(submits(system, at) for at in (0, 1)), "the hedge copy")
        (original,), (copy,) = submits(system, 0), submits(system, 1)
        assert original.hand_over and copy.hand_over and original.handle != copy.handle
        for at in (0, 1):
            announce(system, 2, at)
        wait_until(lambda: len(prefetches(system, 2) + prefetches(system, 3)) == 2, "both prefetches")
        read = {each.source.address: (at, each.handle) for at in (2, 3) for each in prefetches(system, at)}
        host = system.workers[0].address.rpartition(":")[0]
        (loser, lost_handle), (winner, handle) = read[f"{host}:7103"], read[f"{host}:7104"]
        if how == "lost":
            system.call(system.workers[0].stop())
            wait_until(lambda: system.workers[loser].servicer.aborted == [lost_handle], "the release of the loser's prefetch")
        system.do(lambda: system.workers[1].servicer.allow(None))
        wait_until(lambda: len(submits(system, winner)) == 1, "the submit to the decode worker")
        (second,) = submits(system, winner)
        assert second.handle == handle and second.source.address == f"{host}:7104"
        wait_until(lambda: system.workers[loser].servicer.aborted == [lost_handle], "the release of the loser's prefetch")
        if how == "slow":
            wait_until(lambda: not system.workers[0].servicer.running, "the abort at the losing prefill worker")
            assert system.workers[0].servicer.aborted == [original.handle]
        assert system.workers[1].servicer.aborted == []
        system.allow(None)
        assert text_of_answer(pending.result()) == ANSWER
