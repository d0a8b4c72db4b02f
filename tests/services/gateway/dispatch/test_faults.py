"""Tests of faults of the services: broken streams, absent services, refusals and limits."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import grpc
import httpx
import pytest

from rootstock_llm.protos import common_pb2 as pb
from tests.services.gateway.fakes import MODEL, ids_of
from tests.services.gateway.system import RawClient, System, chat_body, events, wait_until

CHAT = "/v1/chat/completions"
ANSWER = "Hello, world!"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class Pending:
    """A chat request that runs in a separate thread."""

    def __init__(self, system: System, **body: Any) -> None:
        self.answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._run, args=(system, body))
        self._thread.start()

    def _run(self, system: System, body: dict[str, Any]) -> None:
        self.answer = system.chat(**body)

    def result(self) -> httpx.Response:
        self._thread.join(30)
        assert self.answer is not None, "the request has no response after the time limit"
        return self.answer


def content_of(stream: str) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events(stream))


class TestWorker:
    def test_request_without_streaming_continues_when_the_worker_is_lost_and_returns(self, system: System) -> None:
        system.do(lambda: system.worker.allow(5))
        whole = Pending(system)
        wait_until(lambda: system.has_tokens(5), "five tokens")
        system.call(system.workers[0].stop())
        wait_until(lambda: system.gateway.dispatcher.connected() == 0, "the disconnection")
        system.do(lambda: system.worker.allow(None))
        system.call(system.workers[0].start())
        answer = whole.result().json()
        assert answer["choices"][0]["message"]["content"] == ANSWER
        assert answer["usage"]["completion_tokens"] == len(ANSWER) + 1
        assert system.metric("rootstock_gateway_moves_total", cause="lost", state="begun") == 1
        assert list(system.worker.submits[1].output_ids) == ids_of(ANSWER[:5])

    def test_stream_without_a_token_moves_to_another_worker(self) -> None:
        with System(workers=2) as system:
            for host in system.workers:
                system.do(lambda host=host: host.servicer.allow(0))
            pending = Pending(system, stream=True)
            wait_until(lambda: any(host.servicer.running for host in system.workers), "the submit")
            first, second = sorted(system.workers, key=lambda host: not host.servicer.running)
            system.do(lambda: second.servicer.allow(None))
            system.call(first.stop())
            assert content_of(pending.result().text) == ANSWER
            assert len(first.servicer.submits) == len(second.servicer.submits) == 1

    def test_stream_with_tokens_continues_on_another_worker(self) -> None:
        with System(workers=2) as system:
            for host in system.workers:
                system.do(lambda host=host: host.servicer.allow(5))
            client = RawClient(system, CHAT, chat_body(stream=True, n=2))
            client.read_until(b'o"}')  # the end of an event; a late detokenizer may have added letters
            for host in system.workers:
                system.do(lambda host=host: host.servicer.allow(None))
            first = max(system.workers, key=lambda host: len(host.servicer.submits))
            system.call(first.stop())
            text = client.read_to_end_of_stream().decode()
            assert b"[DONE]" in text.encode() and "error" not in text

    def test_stream_does_not_repeat_text_when_the_worker_is_lost(self, system: System) -> None:
        system.do(lambda: system.worker.allow(5))
        pending = Pending(system, stream=True, stream_options={"include_usage": True})
        wait_until(lambda: system.worker.steps_left == 0, "five tokens")
        system.call(system.workers[0].stop())
        system.do(lambda: system.worker.allow(None))
        system.call(system.workers[0].start())
        text = pending.result().text
        chunks = events(text)
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]) == ANSWER
        usage = chunks[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(system.worker.submits[0].prompt_ids), len(ANSWER) + 1)

    def test_request_fails_after_several_crashed_workers(self, system: System) -> None:
        system.do(lambda: system.worker.allow(0))
        pending = Pending(system)
        for attempt in (1, 2, 3, 4):
            wait_until(lambda attempt=attempt: len(system.worker.submits) == attempt, f"submit {attempt}")
            system.call(system.workers[0].stop())
            system.call(system.workers[0].start())
        answer = pending.result()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "worker_lost"
        assert len(system.worker.submits) == 4

    def test_request_fails_with_503_without_a_worker(self) -> None:
        with System(down=("worker",), queue_timeout_s=1.0) as system:
            wait_until(lambda: system.gateway.tokenizer.connected() == 1, "the connection of the tokenizer")
            answer = system.chat()
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "no_worker"

    def test_request_waits_for_a_worker(self) -> None:
        with System(down=("worker",)) as system:
            pending = Pending(system)
            wait_until(lambda: system.total("rootstock_gateway_queue_length") == 1, "the queued request")
            system.call(system.workers[0].start())
            assert pending.result().json()["choices"][0]["message"]["content"] == ANSWER

    def test_request_is_refused_when_the_queue_is_full(self) -> None:
        with System(down=("worker",), max_waiting_requests=1) as system:
            first = RawClient(system, CHAT, chat_body())
            wait_until(lambda: system.total("rootstock_gateway_queue_length") == 1, "the queued request")
            answer = system.chat()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "queue_full" and "retry-after" in answer.headers
            first.vanish()

    def test_choices_of_one_request_are_spread_evenly_over_workers(self) -> None:
        with System(workers=2) as system:
            for host in system.workers:
                system.do(lambda host=host: host.servicer.allow(0))
            client = RawClient(system, CHAT, chat_body(n=10))
            wait_until(lambda: sum(len(host.servicer.running) for host in system.workers) == 10, "the submits")
            assert [len(host.servicer.running) for host in system.workers] == [5, 5]
            client.vanish()

    def test_request_moves_to_the_other_worker_when_the_queue_of_the_worker_is_full(self) -> None:
        with System(workers=2) as system:
            for host in system.workers:
                system.do(lambda host=host: host.servicer.refuse.append((pb.ERROR_CODE_QUEUE_FULL, "full")))
            assert system.chat().status_code == 200, "the request is sent to the other worker"
            assert sum(len(host.servicer.submits) for host in system.workers) == 3
            system.do(lambda: system.workers[0].servicer.refuse.append((pb.ERROR_CODE_QUEUE_FULL, "full")))
            assert [system.chat().status_code for _ in range(2)] == [200, 200]

    def test_draining_worker_gets_no_request(self) -> None:
        with System(workers=2) as system:
            for host in system.workers:
                system.do(lambda host=host: host.servicer.refuse.append((pb.ERROR_CODE_UNAVAILABLE, "draining")))
            pending = Pending(system)
            wait_until(lambda: system.total("rootstock_gateway_queue_length") == 1, "the queued request")
            system.call(system.workers[0].stop())
            system.call(system.workers[0].start())
            assert pending.result().status_code == 200
            assert len(system.workers[1].servicer.submits) == 1

    @pytest.mark.parametrize(
        ("code", "status", "stream"),
        [
            (pb.ERROR_CODE_INVALID_ARGUMENT, 400, False),
            (pb.ERROR_CODE_INVALID_ARGUMENT, 400, True),
            (pb.ERROR_CODE_OUT_OF_MEMORY, 400, False),
            (pb.ERROR_CODE_CANCELLED, 503, True),
            (pb.ERROR_CODE_TIMEOUT, 504, False),
            (pb.ERROR_CODE_INTERNAL, 500, True),
            (pb.ERROR_CODE_UNSPECIFIED, 500, False),
        ],
    )
    def test_error_of_a_worker_becomes_an_http_error(self, shared: System, code: int, status: int, stream: bool) -> None:
        shared.do(lambda: shared.worker.refuse.append((code, "refused by the worker")))
        answer = shared.chat(stream=stream)
        assert answer.status_code == status and answer.json()["error"]["message"]
        assert ("retry-after" in answer.headers) == (status == 503)

    def test_failed_choice_ends_the_request(self, system: System) -> None:
        system.do(lambda: system.worker.refuse.append((pb.ERROR_CODE_INTERNAL, "NaN")))
        system.do(lambda: setattr(system.worker, "answer", lambda submit: "x" * 400))
        assert system.chat(n=3).status_code == 500
        wait_until(lambda: not system.worker.running, "the aborts")
        assert len(system.worker.aborted) == 2

    def test_worker_of_another_model_is_not_used(self) -> None:
        with System(workers=2, down=("worker",)) as system:
            system.workers[1].servicer.info.model = "another"
            system.call(system.workers[0].start())
            wait_until(lambda: system.get("/readiness").status_code == 200, "readiness")
            system.call(system.workers[1].start())
            wait_until(lambda: len(system.workers[1].servicer.contexts) == 1, "the stream to the second worker")
            assert [system.chat().status_code for _ in range(4)] == [200] * 4
            assert system.workers[1].servicer.submits == []


def num_ids(system: System) -> int:
    """Returns the number of ids at the detokenizers. Ids of several steps may share a message."""
    return sum(len(batch.token_ids) for host in system.detokenizers for batch in host.servicer.batches)


class TestDetokenizer:
    @pytest.mark.by_day(one_in=2)
    @pytest.mark.parametrize("replicas", [1, 2])
    def test_text_has_every_character_once_after_a_broken_stream(self, replicas: int) -> None:
        """The stream breaks while text is delivered, held back and in transit."""
        with System(detokenizers=replicas) as system:
            system.do(lambda: setattr(system.worker, "answer", lambda submit: ALPHABET))
            system.do(lambda: system.worker.allow(10))
            pending = Pending(system, stream=True, stop=["hijk-no", "zzz"])
            wait_until(lambda: num_ids(system) == 10, "ten ids")
            used = next(host for host in system.detokenizers if host.servicer.batches)
            system.do(used.servicer.gate.clear)
            system.do(lambda: system.worker.allow(5))
            wait_until(lambda: system.worker.steps_left == 0, "five more ids")
            system.call(used.stop())
            system.do(used.servicer.gate.set)
            system.do(lambda: system.worker.allow(3))
            system.call(used.start())
            wait_until(lambda: system.worker.steps_left == 0, "more ids")
            system.do(lambda: system.worker.allow(None))
            assert content_of(pending.result().text) == ALPHABET
            assert system.metric("rootstock_gateway_retries_total", service="detokenizer") == 1

    def test_choice_that_ended_at_the_worker_waits_for_the_text(self, system: System) -> None:
        system.call(system.detokenizers[0].stop())
        wait_until(lambda: system.gateway.detoks.connected() == 0, "the disconnection")
        pending = Pending(system)
        wait_until(lambda: len(system.worker.submits) == 1 and not system.worker.running, "the end of the request at the worker")
        system.call(system.detokenizers[0].start())
        assert pending.result().json()["choices"][0]["message"]["content"] == ANSWER

    def test_decoding_that_the_detokenizer_forgot_is_opened_again(self, system: System) -> None:
        system.do(lambda: system.worker.allow(4))
        pending = Pending(system, stream=True)
        wait_until(lambda: num_ids(system) == 4, "four ids")
        system.do(lambda: setattr(system.detokenizer, "forget", 2))
        system.do(lambda: system.worker.allow(None))
        assert content_of(pending.result().text) == ANSWER
        assert len(system.detokenizer.contexts) == 1  # the gateway opens the handle again on the same stream

    def test_request_fails_when_the_token_ids_cannot_be_decoded(self, system: System) -> None:
        system.do(lambda: setattr(system.detokenizer, "forget", 1000))
        assert system.chat().status_code == 500
        wait_until(lambda: not system.worker.running, "the abort")
        system.do(lambda: setattr(system.detokenizer, "forget", 0))
        assert system.chat().status_code == 200

    def test_request_fails_without_a_detokenizer(self) -> None:
        with System(down=("detokenizer",), queue_timeout_s=1.0) as system:
            wait_until(
                lambda: system.gateway.tokenizer.connected() == system.gateway.dispatcher.connected() == 1,
                "the connections to the other services",
            )
            answer = system.chat()
            assert answer.status_code == 503 and "detokenizer" in answer.json()["error"]["message"]
            wait_until(lambda: not system.worker.running, "the abort")

    def test_malformed_text_batch_breaks_the_detokenizer_stream_but_not_the_request(self, system: System) -> None:
        answers = type(system.detokenizer)._answer
        system.do(lambda: setattr(system.detokenizer, "_answer", lambda rows, batch: answers(rows, type(batch)())))
        pending = Pending(system)
        wait_until(lambda: len(system.detokenizer.contexts) > 1, "a new stream")
        system.do(lambda: delattr(system.detokenizer, "_answer"))
        assert pending.result().json()["choices"][0]["message"]["content"] == ANSWER


class TestTokenizer:
    def test_tokenization_is_retried_on_another_tokenizer(self) -> None:
        with System(tokenizers=2) as system:
            for host in system.tokenizers:
                system.do(lambda host=host: host.servicer.failures.append((grpc.StatusCode.UNAVAILABLE, "")))
            assert system.chat().status_code == 200
            assert system.metric("rootstock_gateway_retries_total", service="tokenizer") >= 1

    def test_request_waits_for_a_tokenizer_longer_than_the_call_timeout(self) -> None:
        with System(tokenize_timeout_s=0.3) as system:
            system.call(system.tokenizers[0].stop())
            wait_until(lambda: system.gateway.tokenizer.connected() == 0, "the disconnection")
            pending = Pending(system)
            wait_until(lambda: system.metric("rootstock_gateway_requests_in_flight") == 1, "the request in flight")
            time.sleep(0.6)
            assert pending.answer is None
            system.call(system.tokenizers[0].start())
            assert pending.result().status_code == 200

    def test_request_fails_without_a_tokenizer_after_the_queue_timeout(self) -> None:
        with System(down=("tokenizer",), queue_timeout_s=0.3) as system:
            answer = system.chat()
            assert answer.status_code == 503 and "retry-after" in answer.headers

    def test_request_fails_when_the_tokenizer_is_too_slow(self) -> None:
        with System(tokenize_timeout_s=0.2) as system:
            system.do(system.tokenizer.gate.clear)
            assert system.chat().status_code == 504

    @pytest.mark.parametrize(
        ("code", "status"),
        [
            (grpc.StatusCode.INVALID_ARGUMENT, 400),
            (grpc.StatusCode.FAILED_PRECONDITION, 400),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, 413),
            (grpc.StatusCode.ABORTED, 503),
            (grpc.StatusCode.INTERNAL, 500),
            (grpc.StatusCode.UNKNOWN, 500),
        ],
    )
    def test_error_of_the_tokenizer_becomes_an_http_error(self, shared: System, code: grpc.StatusCode, status: int) -> None:
        shared.do(lambda: shared.tokenizer.failures.append((code, "refused by the tokenizer")))
        assert shared.chat().status_code == status
        assert shared.chat().status_code == 200


def test_readiness_names_missing_services() -> None:
    with System(down=("worker", "detokenizer")) as system:
        wait_until(
            lambda: system.get("/readiness").json()["missing"] == ["worker", "detokenizer"], "the connection of the tokenizer"
        )
        assert system.get("/readiness").status_code == 503
        assert system.get("/health").status_code == 200
        system.call(system.workers[0].start())
        system.call(system.detokenizers[0].start())
        wait_until(lambda: system.get("/readiness").status_code == 200, "readiness")


def test_gateway_refuses_requests_above_the_limit() -> None:
    with System(max_concurrent_requests=1) as system:
        system.do(lambda: system.worker.allow(0))
        first = RawClient(system, CHAT, chat_body())
        wait_until(lambda: len(system.worker.running) == 1, "the first request")
        answer = system.chat()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "queue_full"
        assert answer.headers["retry-after"] == "1"
        # Other routes respond without queueing.
        assert [system.get(path).status_code for path in ("/health", "/readiness", "/v1/models", "/metrics")] == [200] * 4
        first.vanish()
        wait_until(lambda: not system.worker.running, "the abort")
        system.do(lambda: system.worker.allow(None))
        assert system.chat().status_code == 200


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_request_fails_after_the_request_timeout(stream: bool) -> None:
    with System(request_timeout_s=1.5) as system:
        system.do(lambda: system.worker.allow(0))
        assert system.chat(stream=stream).status_code == 504
        wait_until(lambda: not system.worker.running, "the abort")
        system.do(lambda: system.worker.allow(3))
        client = RawClient(system, CHAT, chat_body(stream=True))
        assert b'"type":"timeout_error"' in client.read_to_end_of_stream()


async def cancelled(*_: object) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(("faulty", "log"), [(None, "request failed"), (cancelled, "a request was cancelled without a reason")])
def test_exception_in_the_gateway_fails_only_one_request_with_500(
    system: System, caplog: pytest.LogCaptureFixture, faulty: Any, log: str
) -> None:
    system.do(lambda: setattr(system.gateway.tokenizer, "encode_chat", faulty))
    assert system.chat().json()["error"]["type"] == "server_error"
    assert log in caplog.text
    assert system.complete(model=MODEL).status_code == 200
