"""Tests of several models behind one gateway."""

from __future__ import annotations

from collections.abc import Callable

from tests.services.gateway.dispatch.test_dispatch_queue import status_of
from tests.services.gateway.fakes import CONTEXT_LEN, FakeWorker
from tests.services.gateway.system import RawClient, System, chat_body, wait_until

CHAT = "/v1/chat/completions"


def serving(*models: str) -> Callable[[list[FakeWorker]], None]:
    def configure(workers: list[FakeWorker]) -> None:
        for worker, model in zip(workers, models, strict=True):
            worker.info.model = model
            worker.answer = lambda submit, model=model: f"I am {model}"

    return configure


def answer_of(system: System, model: str) -> str:
    text: str = system.chat(model=model).json()["choices"][0]["message"]["content"]
    return text


def ask(system: System, model: str) -> RawClient:
    """Sends a request and waits until it is in the queue of this model."""
    before = system.num_waiting
    client = RawClient(system, CHAT, chat_body(model=model))
    wait_until(lambda: system.num_waiting == before + 1, "the request in the gateway's queue")
    return client


def test_request_goes_to_a_worker_of_the_model() -> None:
    with System(workers=3, configure=serving("a", "b", "b")) as system:
        assert [answer_of(system, model) for model in "abab"] == ["I am a", "I am b"] * 2
        assert system.submits() == [2, 1, 1]
        cards = system.get("/v1/models").json()["data"]
        assert sorted(card["id"] for card in cards) == ["a", "b"]
        assert [system.get(f"/v1/models/{name}").status_code for name in "abc"] == [200, 200, 404]
        assert system.metric("rootstock_gateway_workers", model="b", state="usable") == 2
        unknown = system.chat(model="c")
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"


def test_request_waits_for_the_first_worker_of_an_expected_model() -> None:
    with System(configure=serving("a"), models="a,b", queue_timeout_s=0.3) as system:
        answer = system.chat(model="b")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_worker"
        assert answer.headers["retry-after"] == "1"
        assert system.chat(model="c").status_code == 404
        assert answer_of(system, "a") == "I am a"


def test_expected_models_are_listed_and_counted_without_a_worker() -> None:
    """Before any request, the queue length of an expected model is exported as 0, so that an autoscaler can see its rise."""
    length, workers = "rootstock_gateway_queue_length", "rootstock_gateway_workers"
    with System(workers=2, down=("worker",), configure=serving("a", "b"), models="b,a") as system:
        cards = system.get("/v1/models").json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [("b", None), ("a", None)]
        assert system.get("/v1/models/a").status_code == 200 and system.get("/readiness").status_code == 503
        lines = system.get("/metrics").text.splitlines()
        assert {f'{length}{{model="{name}"}} 0.0' for name in ("a", "b", "other")} <= set(lines)
        assert {f'{workers}{{model="{name}",state="usable"}} 0.0' for name in "ab"} <= set(lines)
        assert system.post(CHAT, chat_body()).json()["error"]["code"] == "missing_required_parameter"
        client = ask(system, "a")
        wait_until(lambda: system.metric(length, model="a") == 1, "the request in the gateway's queue")
        assert system.metric(length, model="b") == 0
        system.call(system.workers[0].start())
        assert status_of(client) == 200
        assert system.metric(length, model="a") == 0 and system.metric(workers, model="a", state="usable") == 1
        cards = system.get("/v1/models").json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [("b", None), ("a", CONTEXT_LEN)]


def test_request_without_a_model_waits_for_the_first_expected_model() -> None:
    with System(down=("worker",), configure=serving("a"), models="a,b") as system:
        client = RawClient(system, "/generate", {"text": "Hi", "model": None})
        wait_until(lambda: system.metric("rootstock_gateway_queue_length", model="a") == 1, "the request in the gateway's queue")
        system.call(system.workers[0].start())
        assert status_of(client) == 200


def test_waiting_request_is_served_when_the_model_appears() -> None:
    """Without expected models, a request can wait for any model until the first worker has connected."""
    for promised in ("a,b", ""):
        with System(workers=2, down=("worker",), configure=serving("a", "b"), models=promised) as system:
            system.call(system.workers[0].start())
            wait_until(lambda: system.gateway.dispatcher.connected() == 1, "the first worker")
            client = ask(system, "b")
            assert answer_of(system, "a") == "I am a"
            system.call(system.workers[1].start())
            assert status_of(client) == 200 and len(system.workers[1].servicer.submits) == 1


def test_models_of_a_fleet_have_separate_queues() -> None:
    with System(workers=2, configure=serving("a", "b")) as system:
        system.call(system.workers[1].stop())
        wait_until(lambda: system.gateway.dispatcher.connected() == 1, "the disconnection")
        client = ask(system, "b")
        assert system.metric("rootstock_gateway_queue_length", model="b") == 1
        assert system.metric("rootstock_gateway_queue_length", model="a") == 0
        assert answer_of(system, "a") == "I am a"
        system.call(system.workers[1].start())
        assert status_of(client) == 200


def test_number_of_waiting_requests_for_a_model_without_a_worker_is_limited() -> None:
    with System(configure=serving("a"), models="b", max_waiting_requests=2) as system:
        clients = [ask(system, "b"), ask(system, "b")]
        assert system.chat(model="b").json()["error"]["code"] == "queue_full"
        clients[0].vanish()
        wait_until(lambda: system.num_waiting == 1, "the request in the gateway's queue")


def test_generate_goes_to_a_worker_of_the_model() -> None:
    with System(workers=2, configure=serving("a", "b")) as system:
        assert system.post("/generate", {"text": "Hi", "model": "b"}).json()["text"] == "I am b"
        assert system.post("/generate", {"text": "Hi"}).status_code == 200
        assert system.post("/generate", {"text": "Hi", "model": "c"}).status_code == 404


def test_model_name_refers_to_another_model_when_the_old_workers_have_left() -> None:
    with System(workers=2, down=("worker",), configure=serving("a", "b"), model_name="ours") as system:
        for host in system.workers:
            system.call(host.start())
            wait_until(lambda host=host: len(host.servicer.contexts) == 1, "the stream to a worker")
        wait_until(lambda: all(link.info is not None for link in system.links), "the hellos")
        assert [answer_of(system, "ours") for _ in range(3)] == ["I am a"] * 3
        system.call(system.workers[0].stop())
        lost, other = system.links
        wait_until(
            lambda: lost.info is None and system.gateway.dispatcher.fleet.pool_of(other) is not None,
            "the hello with the other model",
        )
        assert answer_of(system, "ours") == "I am b"
        assert system.get("/readiness").status_code == 200
        system.call(system.workers[0].start())
        wait_until(lambda: system.links[0].info is not None, "the reconnection")
        assert [answer_of(system, "ours") for _ in range(3)] == ["I am b"] * 3


def test_context_length_is_the_shortest_of_the_connected_workers() -> None:
    def configure(workers: list[FakeWorker]) -> None:
        workers[0].info.context_len = 100

    with System(workers=2, configure=configure) as system:

        def length() -> int:
            return int(system.get("/v1/models").json()["data"][0]["max_model_len"])

        assert length() == 100
        system.call(system.workers[0].stop())
        wait_until(lambda: length() == CONTEXT_LEN, "the context length of the other worker")
