"""Tests of return_routed_experts on /generate: responses, refusals, and requests that move between workers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.generation.request import UNLIMITED_ANSWER_TOKENS
from rootstock_llm.services.shared import limits
from tests.services.gateway.dispatch.test_dispatch_lost import begun, stopped
from tests.services.gateway.dispatch.test_dispatch_prefill import submits, with_roles
from tests.services.gateway.dispatch.test_faults import ANSWER
from tests.services.gateway.fakes import EOS, ROUTED_PER_TOKEN, FakeWorker, experts_of, ids_of
from tests.services.gateway.system import RawClient, System, events, wait_until

PROMPT = "Hello"
BODY = {"text": PROMPT, "return_routed_experts": True}


def return_experts(workers: list[FakeWorker]) -> None:
    for worker in workers:
        worker.info.routed_experts_per_token = ROUTED_PER_TOKEN


def stopped_with_experts(workers: list[FakeWorker]) -> None:
    stopped(workers)
    return_experts(workers)


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with System(configure=return_experts) as system:
        yield system


def experts_in(answer: dict[str, Any]) -> list[list[int]]:
    """Returns the routed experts of an output, as a client of SGLang decodes them."""
    ids = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"], validate=True), dtype=np.int32)
    return [list(map(int, row)) for row in ids.reshape(-1, ROUTED_PER_TOKEN)]


def computed(prompt: str, output: str = ANSWER, first: int = 0) -> list[list[int]]:
    """Returns the experts of all tokens from index `first` on, without those of the last output token, EOS."""
    tokens = [*ids_of(prompt), *ids_of(output)]
    return [experts_of(token, at) for at, token in enumerate(tokens)][first:]


@pytest.mark.parametrize("first", [0, 3, len(PROMPT)])
def test_output_has_the_experts_of_each_computed_token(system: System, first: int) -> None:
    system.worker.answer = lambda submit: ANSWER
    answer = system.post("/generate", {**BODY, "routed_experts_start_len": first}).json()
    assert answer["output_ids"] == [*ids_of(ANSWER), EOS]
    assert experts_in(answer) == computed(PROMPT, first=first)
    assert system.worker.submits[-1].routed_experts_from == first


def test_output_has_the_experts_of_the_whole_prompt_when_no_token_is_requested(system: System) -> None:
    answer = system.post("/generate", {**BODY, "sampling_params": {"max_new_tokens": 0}}).json()
    assert experts_in(answer) == computed(PROMPT, "")


def test_each_output_of_a_list_has_separate_experts(system: System) -> None:
    system.worker.answer = lambda submit: "x" * len(submit.prompt_ids)
    answers = system.post("/generate", {**BODY, "text": ["a", "bcd"], "sampling_params": {"n": 2}}).json()
    assert [experts_in(answer) for answer in answers] == [computed("a", "x")] * 2 + [computed("bcd", "xxx")] * 2


def test_only_the_last_event_of_a_stream_has_experts(system: System) -> None:
    system.worker.answer = lambda submit: ANSWER
    chunks = events(system.post("/generate", {**BODY, "stream": True}).text)
    assert ["routed_experts" in chunk["meta_info"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert experts_in(chunks[-1]) == computed(PROMPT)


def test_output_has_no_experts_when_the_client_does_not_request_them(system: System) -> None:
    answer = system.post("/generate", {**BODY, "return_routed_experts": False, "routed_experts_start_len": 2}).json()
    assert "routed_experts" not in answer["meta_info"]
    assert not system.worker.submits[-1].HasField("routed_experts_from")


def refused(system: System, **body: Any) -> str:
    """Returns the refused field after a check that no worker got the request."""
    before = len(system.worker.submits)
    answer = system.post("/generate", {**BODY, **body})
    assert answer.status_code == 400, answer.text
    assert len(system.worker.submits) == before
    param: str = answer.json()["error"]["param"]
    return param


def test_experts_are_refused_when_no_worker_returns_them(shared: System) -> None:
    assert refused(shared) == "return_routed_experts"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"routed_experts_start_len": len(PROMPT) + 1}, "routed_experts_start_len"),
        ({"routed_experts_start_len": -1}, "routed_experts_start_len"),
        ({"return_routed_experts": 1}, "return_routed_experts"),
        ({"session_params": {"id": "s"}}, "return_routed_experts"),
    ],
    ids=["beyond the prompt", "negative", "number", "session"],
)
def test_experts_are_refused_when_the_request_is_invalid(system: System, body: dict[str, Any], param: str) -> None:
    assert refused(system, **body) == param


def test_experts_of_more_than_32_mib_are_refused() -> None:
    def large(workers: list[FakeWorker]) -> None:
        workers[0].info.routed_experts_per_token = limits.MAX_ROUTED_EXPERT_IDS // 100
        workers[0].info.context_len = 4096

    with System(configure=large) as system:
        assert refused(system, sampling_params={"max_new_tokens": 96}) == "routed_experts_start_len"
        assert refused(system, sampling_params={"max_new_tokens": 48, "n": 2}) == "routed_experts_start_len"


def test_request_without_limit_of_output_tokens_is_refused_when_the_context_has_more_experts() -> None:
    """Without max_new_tokens, a worker counts the experts of the whole remaining context and would refuse the request."""

    def large(workers: list[FakeWorker]) -> None:
        workers[0].info.context_len = 2 * UNLIMITED_ANSWER_TOKENS
        workers[0].info.routed_experts_per_token = limits.MAX_ROUTED_EXPERT_IDS // (UNLIMITED_ANSWER_TOKENS + 100)

    with System(configure=large) as system:
        assert refused(system, sampling_params={"max_new_tokens": None}) == "routed_experts_start_len"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_experts_are_complete_and_unique_when_the_worker_is_lost(stream: bool) -> None:
    with System(workers=2, configure=stopped_with_experts) as system:
        client = RawClient(system, "/generate", {**BODY, "routed_experts_start_len": 2, "stream": stream})
        first = begun(system, 5)
        system.call(first.stop())
        system.allow(None)
        assert experts_in(last_answer(client, stream)) == computed(PROMPT, first=2)
        (moved,) = [submit for host in system.workers for submit in host.servicer.submits if submit.output_ids]
        assert moved.routed_experts_from == len(PROMPT) + 5 - 1


def last_answer(client: RawClient, stream: bool) -> dict[str, Any]:
    if stream:
        data = client.read_to_end_of_stream().decode()
        lines = [line for line in data.replace("\r\n", "\n").split("\n") if line.startswith("data: {")]
        answer: dict[str, Any] = json.loads(lines[-1][6:])
        return answer
    client.read_until(b"}}")
    answer = json.loads(client.received.partition(b"\r\n\r\n")[2])
    return answer


def test_request_for_experts_continues_only_on_workers_that_return_them() -> None:
    def configure(workers: list[FakeWorker]) -> None:
        stopped(workers)
        return_experts(workers[1:])

    with System(workers=3, configure=configure) as system:
        client = RawClient(system, "/generate", {**BODY, "text": [PROMPT] * 6, "stream": False})
        wait_until(lambda: sum(system.running()) == 6, "the submits")
        first = begun(system, 4)
        system.call(first.stop())
        system.allow(None)
        client.read_until(b"}}]")
        answers = json.loads(client.received.partition(b"\r\n\r\n")[2])
        assert [experts_in(answer) for answer in answers] == [computed(PROMPT)] * 6
        assert not system.workers[0].servicer.submits


def test_request_for_experts_goes_only_to_workers_with_the_same_number_of_ids_per_token() -> None:
    def configure(workers: list[FakeWorker]) -> None:
        return_experts(workers)
        workers[0].info.routed_experts_per_token = ROUTED_PER_TOKEN - 1

    with System(workers=2, configure=configure) as system:
        for host in system.workers:
            host.servicer.answer = lambda submit: ANSWER
        assert [experts_in(system.post("/generate", BODY).json()) for _ in range(4)] == [computed(PROMPT)] * 4
        assert not submits(system, 0)


def test_request_for_experts_gets_503_when_no_worker_is_connected() -> None:
    with System(configure=return_experts, queue_timeout_s=0.3) as system:
        assert system.post("/generate", BODY).status_code == 200
        system.call(system.workers[0].stop())
        (pool,) = system.gateway.dispatcher.fleet.pools.values()
        wait_until(lambda: not pool.links, "the loss")
        answer = system.post("/generate", BODY)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_worker"


def test_prefill_worker_returns_experts_when_the_decode_worker_is_lost() -> None:
    with System(workers=2, configure=with_roles(1, return_experts)) as system:
        system.workers[0].servicer.answer = lambda submit: ANSWER
        (pool,) = system.gateway.dispatcher.fleet.pools.values()
        system.call(system.workers[1].stop())
        wait_until(lambda: len(pool.links) == 1, "the loss")
        assert experts_in(system.post("/generate", BODY).json()) == computed(PROMPT)


def test_experts_are_refused_when_only_prefill_workers_return_them() -> None:
    with System(workers=2, configure=with_roles(1, lambda workers: return_experts(workers[:1]))) as system:
        assert refused(system) == "return_routed_experts"


def test_request_fails_when_the_worker_returns_too_few_experts() -> None:
    def forget(workers: list[FakeWorker]) -> None:
        return_experts(workers)
        (worker,) = workers
        whole = worker._step

        def incomplete(*args: Any) -> Any:
            step = whole(*args)
            if worker.steps == 3:
                step.ClearField("routed_experts")
            return step

        worker._step = incomplete  # type: ignore[method-assign]

    with System(configure=forget) as system:
        answer = system.post("/generate", BODY)
        assert answer.status_code == 500 and "routed experts" in answer.json()["error"]["message"]


def test_worker_stream_ends_and_request_moves_when_expert_ids_are_truncated() -> None:
    with System(workers=2, configure=stopped_with_experts) as system:
        client = RawClient(system, "/generate", {**BODY, "stream": False})
        wait_until(lambda: sum(system.running()) == 1, "the submit")
        at = system.running().index(1)
        worker = system.workers[at].servicer
        (running,) = worker.running.values()
        torn = worker_pb2.RoutedExperts(handle=running.submit.handle, ids=b"odd")
        running.routed_experts = lambda: [torn]
        system.allow(None)
        assert experts_in(last_answer(client, stream=False)) == computed(PROMPT)
        assert system.workers[1 - at].servicer.submits, "the request has moved"


def test_prefill_worker_gets_no_request_for_experts() -> None:
    settings = {"disaggregation_min_tokens": 2}
    with System(workers=2, configure=with_roles(1, return_experts), **settings) as system:
        for host in system.workers:
            host.servicer.answer = lambda submit: ANSWER
        assert experts_in(system.post("/generate", BODY).json()) == computed(PROMPT)
        (submit,) = submits(system, 1)
        assert not submits(system, 0) and not submit.hand_over
        system.post("/generate", {"text": PROMPT})
        assert submits(system, 0)[0].hand_over, "other requests use the prefill worker"


def test_hedged_request_has_the_experts_of_one_copy() -> None:
    with System(workers=2, configure=stopped_with_experts, hedge_after_s=0.02) as system:
        client = RawClient(system, "/generate", {**BODY, "stream": False})
        wait_until(lambda: sum(system.submits()) == 2, "the copy")
        system.allow(None)
        assert experts_in(last_answer(client, stream=False)) == computed(PROMPT)
