"""Tests that begun responses continue on another worker after the loss of their worker, without a change for the client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.services.gateway.dispatch.test_dispatch_queue import COMPLETIONS, LIMIT, send, status_of, with_one_slot
from tests.services.gateway.dispatch.test_faults import ALPHABET, ANSWER, Pending
from tests.services.gateway.fakes import FakeWorker, Host, ids_of, logprob_of
from tests.services.gateway.system import RawClient, System, events, wait_until


def stopped(workers: list[FakeWorker]) -> None:
    for worker in workers:
        worker.allow(0)


def begun(system: System, steps: int) -> Host:
    """Lets every worker compute `steps` tokens per request. Returns the worker with the most requests."""
    wait_until(lambda: sum(system.running()) > 0, "the submits")
    system.allow(steps)
    first = max(system.workers, key=lambda host: len(host.servicer.running))
    wait_until(lambda: first.servicer.steps_left == 0, "the tokens of the worker")
    return first


def test_stream_continues_on_another_worker_without_repeated_text() -> None:
    with System(workers=2, configure=stopped) as system:
        pending = Pending(system, stream=True, n=2, temperature=1.0, logprobs=True, stream_options={"include_usage": True})
        wait_until(lambda: sum(system.running()) == 2, "both choices at the workers")
        first = begun(system, 5)
        moved = len(first.servicer.running)
        wait_until(lambda: sum(sum(batch.counts) for batch in system.detokenizer.batches) == 10, "ten ids")
        system.call(first.stop())
        system.allow(None)
        chunks = events(pending.result().text)
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        for index in range(2):
            own = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["delta"].get("content", "") for choice in own) == ANSWER
            logprobs = [entry for choice in own if choice["logprobs"] for entry in choice["logprobs"]["content"]]
            assert [entry["logprob"] for entry in logprobs] == [logprob_of(token) for token in (*ids_of(ANSWER), 0)]
            assert [choice["finish_reason"] for choice in own].count("stop") == 1
        assert chunks[-1]["usage"]["completion_tokens"] == 2 * (len(ANSWER) + 1)
        assert chunks[-1]["usage"]["prompt_tokens"] == len(first.servicer.submits[0].prompt_ids)
        submits = [submit for host in system.workers for submit in host.servicer.submits]
        resumed = [submit for submit in submits if submit.output_ids]
        assert len(resumed) == moved and len(submits) == 2 + moved
        for submit in resumed:
            before = next(one for one in submits if one.request_id == submit.request_id and not one.output_ids)
            assert list(submit.output_ids) == ids_of(ANSWER[:5])
            assert submit.sampling == before.sampling and submit.sampling.HasField("seed")
            assert submit.prompt_ids == before.prompt_ids and submit.timeout_ms <= before.timeout_ms


@pytest.mark.parametrize(("stop", "text"), [(["hijk-no", "zzz"], ALPHABET), (["hijk"], "abcdefg")], ids=["no stop", "stop"])
def test_stream_has_the_text_held_back_for_a_stop_string_when_the_worker_is_lost(stop: list[str], text: str) -> None:
    def configure(workers: list[FakeWorker]) -> None:
        stopped(workers)
        for worker in workers:
            worker.answer = lambda submit: ALPHABET

    with System(workers=2, configure=configure) as system:
        pending = Pending(system, stream=True, stop=stop)
        first = begun(system, 9)  # up to the "i"
        system.call(first.stop())
        system.allow(None)
        choices = [chunk["choices"][0] for chunk in events(pending.result().text)]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text
        assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_generate_continues_when_the_worker_is_lost(stream: bool) -> None:
    with System(workers=2, configure=stopped) as system:
        body = {"text": "Hi", "stream": stream, "return_logprob": True, "logprob_start_len": 0}
        client = RawClient(system, "/generate", body)
        first = begun(system, 5)
        system.call(first.stop())
        system.allow(None)
        if stream:
            data = client.read_to_end_of_stream().decode()
            lines = [line for line in data.replace("\r\n", "\n").split("\n") if line.startswith("data: {")]
            answer: dict[str, Any] = json.loads(lines[-1][6:])
        else:
            client.read_until(b"}}")
            answer = json.loads(client.received.partition(b"\r\n\r\n")[2])
        meta = answer["meta_info"]
        assert answer["text"] == ANSWER
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (2, len(ANSWER) + 1)
        assert len(meta["output_token_logprobs"]) == len(ANSWER) + 1
        assert len(meta["input_token_logprobs"]) == 2


def test_stream_continues_when_all_workers_are_lost_and_one_returns() -> None:
    with System(workers=2, configure=stopped) as system:
        pending = Pending(system, stream=True)
        begun(system, 5)
        for host in system.workers:
            system.call(host.stop())
        wait_until(lambda: system.num_waiting == 1, "the request in the gateway's queue")
        assert system.metric("rootstock_gateway_moves_total", cause="lost", state="begun") >= 1
        system.allow(None)
        system.call(system.workers[1].start())
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in events(pending.result().text)) == ANSWER


def test_stream_fails_when_the_lost_worker_does_not_return() -> None:
    with System(configure=stopped, queue_timeout_s=0.3) as system:
        pending = Pending(system, stream=True)
        begun(system, 5)
        system.call(system.workers[0].stop())
        text = pending.result().text
        assert '"code":"no_worker"' in text and "[DONE]" not in text
        assert system.num_waiting == 0


def test_waiting_request_of_a_lost_worker_is_released_when_the_client_leaves() -> None:
    with System(configure=stopped) as system:
        client = send(system, "Hi", stream=True)
        begun(system, 5)
        system.call(system.workers[0].stop())
        wait_until(lambda: system.num_waiting == 1, "the request in the gateway's queue")
        client.vanish()
        wait_until(lambda: system.num_waiting == 0, "the release of the request")
        system.call(system.workers[0].start())
        wait_until(lambda: system.links[0].info is not None, "the hello of the worker")
        assert system.submits() == [1]


def test_choices_of_a_lost_worker_are_placed_before_queued_requests() -> None:
    with System(workers=2, configure=with_one_slot) as system:
        clients = [send(system, f"early {i}") for i in range(2 * LIMIT)]
        clients += [send(system, f"late {i}") for i in range(2)]
        first, second = system.workers
        lost = {submit.request_id for submit in first.servicer.submits}
        system.call(first.stop())
        wait_until(lambda: system.num_waiting == LIMIT + 2, "the request in the gateway's queue")
        system.allow(None)
        assert [status_of(client) for client in clients] == [200] * len(clients)
        order = [submit.request_id for submit in second.servicer.submits[LIMIT:]]
        assert set(order[:LIMIT]) == lost and len(order) == LIMIT + 2


def test_session_turn_fails_when_the_worker_is_lost() -> None:
    with System(workers=2, configure=stopped) as system:
        client = RawClient(system, "/generate", {"text": "Hi", "session_params": {"id": "mine"}})
        first = begun(system, 5)
        system.call(first.stop())
        client.read_until(b"session_unavailable")
        assert status_of(client) == 503
        assert sum(system.submits()) == 1


def test_choices_of_one_request_keep_the_prompts_when_the_worker_is_lost() -> None:
    def configure(workers: list[FakeWorker]) -> None:
        stopped(workers)
        for worker in workers:
            worker.answer = lambda submit: f"answer to {chr(submit.prompt_ids[0])}"

    with System(workers=2, configure=configure) as system:
        client = RawClient(system, COMPLETIONS, {"prompt": list("abcd"), "max_tokens": 50})
        wait_until(lambda: sum(system.running()) == 4, "the submits")
        first = begun(system, 5)
        system.call(first.stop())
        system.allow(None)
        client.read_until(b'"usage"')
        client.read_until(b"}}")
        answer = json.loads(client.received.partition(b"\r\n\r\n")[2])
        assert [choice["text"] for choice in answer["choices"]] == [f"answer to {letter}" for letter in "abcd"]
