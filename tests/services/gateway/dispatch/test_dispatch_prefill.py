"""Tests of separate prefill and decode workers: the use of a prefill worker, and the loss of either worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.dispatch.model_pool import TRIES_ONE_IN
from tests.services.gateway.dispatch.test_dispatch_queue import COMPLETIONS, LIMIT
from tests.services.gateway.dispatch.test_faults import ANSWER, Pending
from tests.services.gateway.fakes import MODEL, SECRET, FakeWorker, logprob_of
from tests.services.gateway.system import RawClient, System, events, wait_until

LAYOUT, OTHER_LAYOUT = b"0" * 16, b"1" * 16
SHORT = 4  # disaggregation_min_tokens here: smallest prompt in tokens that a prefill worker computes


def with_roles(
    prefill: int = 1, then: Callable[[list[FakeWorker]], None] = lambda workers: None
) -> Callable[[list[FakeWorker]], None]:
    """Returns a function that makes the first `prefill` workers prefill workers and the others decode workers.

    The function then calls `then`.
    """

    def configure(workers: list[FakeWorker]) -> None:
        for at, worker in enumerate(workers):
            worker.info.role, worker.info.kv_layout = ("prefill", LAYOUT) if at < prefill else ("decode", LAYOUT)
            worker.info.kv_port = 7103 + at if at < prefill else 0
        then(workers)

    return configure


def submits(system: System, worker: int) -> list[worker_pb2.Submit]:
    return system.workers[worker].servicer.submits


def ask(system: System, **body: Any) -> Any:
    return Pending(system, **{"stream": False, **body}).result()


def system_of(
    workers: int = 2, prefill: int = 1, then: Callable[[list[FakeWorker]], None] = lambda workers: None, **settings: Any
) -> System:
    return System(workers=workers, configure=with_roles(prefill, then), **{"disaggregation_min_tokens": SHORT, **settings})


def text_of_answer(result: Any) -> str:
    text: str = result.json()["choices"][0]["message"]["content"]
    return text


def test_request_moves_from_the_prefill_worker_to_the_decode_worker() -> None:
    with system_of() as system:
        result = ask(system)
        assert text_of_answer(result) == ANSWER
        (first,), (second,) = submits(system, 0), submits(system, 1)
        assert first.hand_over and not first.HasField("source")
        host = system.workers[0].address.rpartition(":")[0]
        assert not second.hand_over and second.source.address == f"{host}:7103"
        assert second.source.room.secret == SECRET and second.source.room.room == first.handle + 1
        assert list(second.output_ids) and list(second.prompt_ids) == list(first.prompt_ids)
        usage = result.json()["usage"]
        assert usage["completion_tokens"] == len(ANSWER) + 1 and usage["prompt_tokens"] == len(first.prompt_ids)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_logprobs_and_usage_are_complete_when_two_workers_compute_the_response(stream: bool) -> None:
    with system_of() as system:
        more = {"stream_options": {"include_usage": True}} if stream else {}
        result = ask(system, stream=stream, logprobs=True, temperature=1.0, n=2, **more)
        if not stream:
            for choice in result.json()["choices"]:
                assert choice["message"]["content"] == ANSWER
                assert len(choice["logprobs"]["content"]) == len(ANSWER) + 1
            return
        chunks = events(result.text)
        for index in range(2):
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert "".join(choice["delta"].get("content", "") for choice in own) == ANSWER
            logprobs = [entry["logprob"] for choice in own if choice["logprobs"] for entry in choice["logprobs"]["content"]]
            assert logprobs[0] == logprob_of(ord(ANSWER[0])) or len(logprobs) == len(ANSWER) + 1
        assert chunks[-1]["usage"]["completion_tokens"] == 2 * (len(ANSWER) + 1)


def test_number_of_cached_tokens_comes_from_the_prefill_worker() -> None:
    def configure(workers: list[FakeWorker]) -> None:
        workers[0].by_tier = {"cached_device_tokens": 3}
        workers[1].by_tier = {"cached_peer_tokens": 3}

    with system_of(then=configure) as system:
        details = ask(system, return_cached_tokens_details=True).json()
        assert details["usage"]["prompt_tokens_details"] == {
            "cached_tokens": 3,
            "cached_tokens_details": {"device": 3, "host": 0, "storage": 0},
        }


class TestUseOfPrefillWorkers:
    def test_decode_worker_computes_a_short_prompt(self) -> None:
        with system_of(disaggregation_min_tokens=10_000) as system:
            assert text_of_answer(ask(system)) == ANSWER
            assert not submits(system, 0) and not submits(system, 1)[0].hand_over

    @pytest.mark.parametrize("cause", ["layout", "weights", "no port", "no reader"])
    def test_decode_worker_computes_the_prompt_when_pages_cannot_be_read(self, cause: str) -> None:
        def configure(workers: list[FakeWorker]) -> None:
            if cause == "layout":
                workers[0].info.kv_layout = OTHER_LAYOUT
            elif cause == "weights":
                workers[0].info.revision = "other"
            elif cause == "no port":
                workers[0].info.kv_port = 0
            else:
                workers[1].info.role = ""

        with system_of(then=configure) as system:
            assert text_of_answer(ask(system)) == ANSWER
            assert not any(submit.hand_over for submit in submits(system, 0))

    def test_prefill_worker_is_used_only_for_decode_workers_of_the_same_model_version(self) -> None:
        def configure(workers: list[FakeWorker]) -> None:
            for worker in (workers[0], workers[2]):
                worker.info.revision = "other"

        with system_of(workers=3, then=configure, routing_policy="round_robin") as system:
            for _ in range(6):
                assert text_of_answer(ask(system)) == ANSWER
            whole = [submit for submit in submits(system, 1) if not submit.output_ids]
            assert len(whole) == 3 == len(submits(system, 0)) == len(submits(system, 2))

    def test_prefill_worker_is_tried_sometimes_when_decode_workers_report_no_saved_time(self) -> None:
        with system_of() as system:
            system.workers[1].servicer.report_load(pulls_lose=True)
            wait_until(lambda: system.links[1].load is not None, "the load report")
            for _ in range(2 * TRIES_ONE_IN):
                assert text_of_answer(ask(system)) == ANSWER
            assert len(submits(system, 0)) == 2

    def test_embedding_uses_no_prefill_worker(self) -> None:
        with system_of() as system:
            answer = system.post("/v1/embeddings", {"model": MODEL, "input": "a long enough text"})
            assert answer.status_code == 200
            assert not submits(system, 0)

    def test_request_with_one_output_token_ends_at_the_prefill_worker(self) -> None:
        with system_of() as system:
            result = ask(system, max_tokens=1)
            assert result.json()["choices"][0]["finish_reason"] == "length"
            assert len(submits(system, 0)) == 1 and not submits(system, 1)

    def test_prompt_without_a_full_page_moves_to_the_decode_worker_with_the_first_token(self) -> None:
        with system_of(disaggregation_min_tokens=1) as system:
            answer = system.post("/v1/completions", {"model": MODEL, "prompt": [5, 6], "max_tokens": 40})
            assert answer.status_code == 200
            (second,) = submits(system, 1)
            assert list(second.output_ids) and not second.HasField("source")


@pytest.mark.parametrize("layout", [b"", OTHER_LAYOUT], ids=["no layout", "other layout"])
def test_handed_over_request_moves_to_a_worker_that_can_read_the_pages(layout: bytes) -> None:
    """Only a decode worker with the page layout of the prefill worker can read the pages. Layouts differ during a rollout."""

    def configure(workers: list[FakeWorker]) -> None:
        workers[2].info.kv_layout, workers[2].info.role = layout or LAYOUT, "decode" if layout else ""

    with system_of(workers=3, then=configure, routing_policy="random") as system:
        for _ in range(24):
            assert text_of_answer(ask(system)) == ANSWER
        handed = [submit for worker in (1, 2) for submit in submits(system, worker) if submit.output_ids]
        assert handed and not [submit for submit in submits(system, 2) if submit.output_ids]
        assert all(submit.HasField("source") for submit in handed)


class TestLostWorkers:
    def test_prefill_worker_serves_whole_requests_without_a_decode_worker(self) -> None:
        with system_of() as system:
            system.call(system.workers[1].stop())
            wait_until(lambda: system.links[1].info is None, "the disconnection")
            assert text_of_answer(ask(system)) == ANSWER
            assert not submits(system, 0)[-1].hand_over

    def test_decode_worker_serves_whole_requests_without_a_prefill_worker(self) -> None:
        with system_of() as system:
            system.call(system.workers[0].stop())
            wait_until(lambda: system.links[0].info is None, "the disconnection")
            assert text_of_answer(ask(system)) == ANSWER
            assert not submits(system, 1)[-1].hand_over

    def test_request_restarts_when_the_prefill_worker_is_lost(self) -> None:
        with system_of(then=lambda workers: workers[0].allow(0)) as system:
            pending = Pending(system, stream=True)
            wait_until(lambda: bool(system.workers[0].servicer.running), "the prompt at the prefill worker")
            system.call(system.workers[0].stop())
            text = "".join(c["delta"].get("content", "") for chunk in events(pending.result().text) for c in chunk["choices"])
            assert text == ANSWER and not submits(system, 1)[0].output_ids

    def test_request_is_computed_again_when_the_decode_worker_is_lost(self) -> None:
        """The request goes to the prefill worker again, with its output, and then to the remaining decode worker."""
        with system_of(workers=3, then=lambda workers: [worker.allow(0) for worker in workers[1:]]) as system:
            pending = Pending(system, stream=True)
            wait_until(lambda: any(len(host.servicer.running) for host in system.workers[1:]), "the hand-over")
            at = next(i for i in (1, 2) if system.workers[i].servicer.running)
            system.workers[at].servicer.allow(3)
            wait_until(lambda: system.workers[at].servicer.steps_left == 0, "the tokens of the worker")
            wait_until(lambda: sum(sum(batch.counts) for batch in system.detokenizer.batches) >= 4, "the tokens at the gateway")
            system.workers[3 - at].servicer.allow(None)
            system.call(system.workers[at].stop())
            text = "".join(c["delta"].get("content", "") for chunk in events(pending.result().text) for c in chunk["choices"])
            assert text == ANSWER
            again, last = submits(system, 0)[1], submits(system, 3 - at)[0]
            assert again.hand_over and len(again.output_ids) == 4
            assert len(last.output_ids) == 5 and last.HasField("source")

    def test_kv_reservation_is_released_when_the_client_leaves(self) -> None:
        """The client leaves while the request waits for a free slot of a decode worker."""

        def configure(workers: list[FakeWorker]) -> None:
            workers[1].info.max_running_requests = 1
            for worker in workers:
                worker.allow(0)

        with system_of(then=configure, worker_queue_slack=0.0) as system:
            first, second = system.workers[0].servicer, system.workers[1].servicer
            client = RawClient(system, COMPLETIONS, {"prompt": "a long enough prompt"})
            wait_until(lambda: len(first.running) == 1, "the prompt at the prefill worker")
            handle = next(iter(first.running))
            full = [RawClient(system, COMPLETIONS, {"prompt": "ab"}) for _ in range(LIMIT)]
            wait_until(lambda: len(second.running) == len(full), "a decode worker without free slots")
            first.allow(None)
            wait_until(lambda: system.num_waiting == 1, "the hand-over")
            client.vanish()
            wait_until(lambda: first.aborted != [], "the abort at the prefill worker")
            assert first.aborted == [handle]

    def test_kv_reservation_is_released_when_no_worker_can_read_the_pages(self) -> None:
        with system_of(then=lambda workers: workers[0].allow(0)) as system:
            first, second = system.workers[0].servicer, system.workers[1].servicer
            pending = Pending(system, stream=True)
            wait_until(lambda: len(first.running) == 1, "the prompt at the prefill worker")
            handle = next(iter(first.running))
            second.info.role = ""
            second.renew("")
            wait_until(lambda: system.links[1].info is not None and not system.links[1].info.role, "the new hello")
            first.allow(None)
            wait_until(lambda: first.aborted == [handle], "the abort at the prefill worker")
            assert pending.result().status_code == 200

    def test_link_to_the_prefill_worker_stays_open_while_pages_are_reserved(self) -> None:
        def configure(workers: list[FakeWorker]) -> None:
            workers[0].info.kv_hold_ms = 600_000

        with system_of(then=configure) as system:
            assert not system.links[0].reserved_until
            assert text_of_answer(ask(system)) == ANSWER
            assert system.links[0].reserved_until > 0 and not system.links[0].open

    def test_request_refused_by_the_prefill_worker_goes_to_the_decode_worker(self) -> None:
        def configure(workers: list[FakeWorker]) -> None:
            workers[0].refuse = [(pb.ERROR_CODE_QUEUE_FULL, "full")]

        with system_of(then=configure) as system:
            assert text_of_answer(ask(system)) == ANSWER

    def test_request_that_waits_for_a_decode_worker_keeps_the_kv_reservation(self) -> None:
        def configure(workers: list[FakeWorker]) -> None:
            workers[1].info.max_running_requests = 1
            workers[1].allow(0)

        with system_of(then=configure, worker_queue_slack=0.0) as system:
            waiting = [Pending(system, stream=True) for _ in range(5)]
            wait_until(lambda: len(system.workers[1].servicer.running) >= 1, "a request at the decode worker")
            system.workers[1].servicer.allow(None)
            for pending in waiting:
                text = "".join(c["delta"].get("content", "") for chunk in events(pending.result().text) for c in chunk["choices"])
                assert text == ANSWER
            handed = [submit for submit in submits(system, 1) if submit.output_ids]
            assert handed and all(submit.HasField("source") for submit in handed)


def test_session_turns_are_sent_to_decode_workers() -> None:
    with system_of() as system:
        for name in "abcdefgh":
            answer = system.post("/generate", {"text": "a long enough text", "session_params": {"id": name}})
            assert answer.status_code == 200
        assert not submits(system, 0) and len(submits(system, 1)) == 8
        assert not any(submit.hand_over for submit in submits(system, 1))


def test_session_turns_are_sent_to_prefill_workers_when_no_other_worker_ever_connected() -> None:
    with system_of(workers=1) as system:
        answer = system.post("/generate", {"text": "a long enough text", "session_params": {"id": "early"}})
        assert answer.status_code == 200 and len(submits(system, 0)) == 1
