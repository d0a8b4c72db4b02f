"""Tests that a fault affects only its own request: client errors, lost workers, full workers and bad entries in Redis."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.services.gateway.dispatch.placement import Link, Placement
from rootstock_llm.services.gateway.index.mirror import IndexMirror
from rootstock_llm.services.gateway.routing.policies import Pick
from rootstock_llm.services.gateway.routing.prefix_index import PrefixIndex
from rootstock_llm.services.shared.index.prefix_index import lease_key, own_key, workers_key
from tests.services.gateway.fakes import FakeWorker, ids_of
from tests.services.gateway.system import RawClient, System, wait_until
from tests.services.redis_server import redis_server

GENERATE, COMPLETIONS = "/generate", "/v1/completions"


def turn(mark: str) -> dict[str, Any]:
    """Returns the fields of a session turn. `mark` is the part of the session id that names the worker."""
    return {"text": "Hi", "sampling_params": {"max_new_tokens": 2}, "session_params": {"id": f"s-{'0' * 32}-{mark}"}}


def stopped_workers(workers: list[FakeWorker]) -> None:
    for worker in workers:
        worker.allow(0)


def test_session_turns_that_wait_for_a_lost_worker_do_not_block_other_requests() -> None:
    with System(workers=2, max_waiting_requests=4) as system:
        for _ in range(4):
            RawClient(system, GENERATE, turn("deadbeef"))
        (pool,) = system.gateway.dispatcher.fleet.pools.values()
        wait_until(lambda: len(pool.parked) == 4, "the parked turns")
        assert system.complete(max_tokens=2).status_code == 200


def test_choices_of_a_lost_worker_are_not_all_tried_when_the_other_worker_is_full() -> None:
    def small(workers: list[FakeWorker]) -> None:
        for worker in workers:
            worker.info.max_running_requests = 8
            worker.allow(0)

    with System(workers=2, configure=small) as system:
        for i in range(20):
            RawClient(system, COMPLETIONS, {"prompt": f"prompt {i}", "max_tokens": 4, "stream": True})
        wait_until(lambda: sum(system.running()) == 20, "two full workers")
        system.call(system.workers[0].stop())
        pool = next(iter(system.gateway.dispatcher.fleet.pools.values()))
        wait_until(lambda: len(pool.moved) == 10, "the moved choices in the queue")
        asked: list[Placement] = []
        pick = pool.pick

        def count_pick(placement: Placement, now: float, without: Link | None = None) -> Pick | None:
            asked.append(placement)
            return pick(placement, now, without)

        pool.pick = count_pick  # type: ignore[method-assign]
        system.do(lambda: system.workers[1].servicer.report_load(num_open=10, num_open_here=10, lease_held=True))
        time.sleep(0.3)  # longer than a tick of the fleet, which is 0.25 seconds
        assert len(asked) < 10


def test_failing_requests_of_one_client_do_not_exclude_all_workers() -> None:
    with System(workers=2, queue_timeout_s=0.5) as system:
        for worker in system.workers:
            worker.servicer.refuse = [(pb.ERROR_CODE_INTERNAL, "the model's logits for this request were not finite")] * 5
        assert [system.complete().status_code for _ in range(5)] == [500] * 5
        assert system.complete(max_tokens=2).status_code == 200


def test_token_ids_of_one_model_do_not_reach_another_model() -> None:
    with System(workers=1, model_name="m", queue_timeout_s=0.5) as system:
        system.do(system.tokenizer.gate.clear)
        answers: list[httpx.Response] = []
        body = {"model": "m", "prompt": "Hi", "max_tokens": 3}
        client = threading.Thread(target=lambda: answers.append(system.post(COMPLETIONS, body)))
        client.start()
        wait_until(lambda: len(system.tokenizer.calls) == 1, "the tokenizer's call")
        system.call(system.workers[0].stop())
        system.worker.info.model, system.worker.info.worker_id = "another", "worker-9"
        system.call(system.workers[0].start())
        wait_until(
            lambda: (info := system.links[0].info) is not None and info.model == "another", "the hello with the other model"
        )
        system.do(system.tokenizer.gate.set)
        client.join(60)
        assert [list(submit.prompt_ids) for submit in system.worker.submits] != [ids_of("Hi")], answers[0].text


def test_request_with_running_choices_waits_longer_than_the_queue_timeout() -> None:
    def one(workers: list[FakeWorker]) -> None:
        workers[0].info.max_running_requests = 1
        workers[0].allow(0)

    with System(configure=one, queue_timeout_s=2.0) as system:
        client = RawClient(system, COMPLETIONS, {"prompt": "Hi", "max_tokens": 50, "n": 4, "stream": True})
        wait_until(lambda: system.num_waiting == 1, "the fourth request in the queue")
        system.do(lambda: system.worker.allow(3))
        client.read_until(b'"H')
        time.sleep(2.3)
        system.allow(None)
        assert b"queue_timeout" not in client.read_to_end_of_stream()


def test_request_waits_for_a_full_worker() -> None:
    with System() as system:
        system.worker.refuse = [(pb.ERROR_CODE_QUEUE_FULL, "the request queue is full")]
        assert system.complete(max_tokens=2).status_code == 200


def test_session_turn_at_a_drained_worker_ends_with_a_documented_error() -> None:
    with System(configure=stopped_workers) as system:
        answers: list[httpx.Response] = []
        body = {**turn("x"), "session_params": {"id": "abc"}}
        client = threading.Thread(target=lambda: answers.append(system.post(GENERATE, body)))
        client.start()
        wait_until(lambda: system.running() == [1], "the turn at the worker")
        system.do(lambda: system.worker.end_running(pb.ERROR_CODE_UNAVAILABLE))
        client.join(60)
        assert answers[0].json()["error"]["code"] == "session_unavailable"


def test_index_mirror_continues_after_a_block_without_a_name() -> None:
    async def scenario(url: str) -> bool:
        mirror = IndexMirror(url, PrefixIndex(), lambda: None)
        mirror.watch_model("m")
        task = asyncio.create_task(mirror.run())
        await asyncio.wait([task], timeout=1.5)
        ended = task.done()
        task.cancel()
        await asyncio.wait([task])
        return ended

    with redis_server() as server:
        server.client.set(lease_key("w"), 5)
        server.client.sadd(workers_key("m"), "w")
        server.client.sadd(own_key("w", 5), b"")
        assert not asyncio.run(scenario(server.url))
