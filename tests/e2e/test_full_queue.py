"""A worker that runs one request and queues two: order by priority, and refusals that do not affect accepted requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from rootstock_llm.services.local.ports import free_ports
from tests.e2e.system import System, wait_until

FLAGS = "--enable-priority-scheduling --max-running-requests 1 --max-queued-requests 2"
LONG = 600  # output tokens of a request that runs longer than its test


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    flags = {"worker_flags": FLAGS, "gateway_flags": "--max-waiting-requests 0"}
    admin_port = free_ports(1)[0]
    with System(tmp_path_factory.mktemp("full"), dtype="float32", admin_port=admin_port, **flags) as running:
        yield running


def slow_down(system: System, seconds: float | None) -> None:
    """Makes the worker wait after each step, so that a running request outlasts its test.

    Args:
        seconds: duration of the wait; None restores full speed.
    """
    admin = f"http://127.0.0.1:{system.parts['gateway'].settings.admin_port}"
    httpx.post(f"{admin}/slow_down", json={"forward_sleep_time": seconds}, timeout=60).raise_for_status()


class Crowd:
    """Runs requests in threads. `ended` has the names of the completed requests in order of completion."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.ended: list[str] = []
        self.texts: dict[str, str] = {}
        self._threads: list[threading.Thread] = []

    def ask(self, name: str, priority: int, max_tokens: int, until: Callable[[], bool]) -> None:
        """Starts a request and waits until the condition `until` is true, for example until the request runs or is queued."""
        thread = threading.Thread(target=self._ask, args=(name, priority, max_tokens))
        self._threads.append(thread)
        thread.start()
        wait_until(until, 60, f"{name} to run or wait")

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def _ask(self, name: str, priority: int, max_tokens: int) -> None:
        text = completion(self.system, name, priority, max_tokens)
        self.ended.append(name)
        self.texts[name] = text


def completion(system: System, prompt: str, priority: int, max_tokens: int) -> str:
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "priority": priority,
    }
    status, answer = system.post("/v1/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def gauge(system: System, name: str, value: float) -> Callable[[], bool]:
    return lambda: system.metric("worker-0", f"sglang:num_{name}_reqs") == value


def test_worker_preempts_and_orders_requests_by_priority(system: System) -> None:
    alone = {name: completion(system, name, 0, tokens) for name, tokens in (("low", LONG), ("middle", 8))}
    crowd = Crowd(system)
    before = system.metric("worker-0", "rootstock_worker_preempted_requests_total")
    crowd.ask("low", -1, LONG, gauge(system, "running", 1))
    crowd.ask("urgent", 9, LONG // 2, lambda: system.metric("worker-0", "rootstock_worker_preempted_requests_total") > before)
    crowd.ask("middle", 3, 8, gauge(system, "queue", 2))
    crowd.join()
    assert crowd.ended == ["urgent", "middle", "low"]
    assert {name: crowd.texts[name] for name in alone} == alone


def test_worker_serves_equal_priorities_in_order_of_arrival(system: System) -> None:
    crowd = Crowd(system)
    crowd.ask("running", 0, LONG, gauge(system, "running", 1))
    crowd.ask("first", 0, 4, gauge(system, "queue", 1))
    crowd.ask("second", 0, 4, gauge(system, "queue", 2))
    crowd.join()
    assert crowd.ended == ["running", "first", "second"]


def test_worker_metrics_count_routing_keys(system: System) -> None:
    def ask(key: str, tokens: int) -> None:
        sampling = {"max_new_tokens": tokens, "ignore_eos": True}
        httpx.post(f"{system.url}/generate", json={"text": "x", "routing_key": key, "sampling_params": sampling}, timeout=60)

    def keys(name: str, **bucket: str) -> float:
        return system.metric("worker-0", f"sglang:{name}", **bucket)

    threads = [threading.Thread(target=ask, args=("first", LONG))]
    threads[0].start()
    wait_until(gauge(system, "running", 1), 60, "the first request to run")
    threads += [threading.Thread(target=ask, args=(key, 4)) for key in ("first", "second")]
    for thread in threads[1:]:
        thread.start()
    wait_until(gauge(system, "queue", 2), 60, "two requests to be queued")
    assert (keys("num_unique_running_routing_keys"), keys("routing_keys_active")) == (1, 2)
    assert (keys("routing_key_running_req_count", gt="0", le="1"), keys("routing_key_running_req_count")) == (1, 1)
    assert (keys("routing_key_all_req_count", gt="0", le="1"), keys("routing_key_all_req_count", gt="1", le="2")) == (1, 1)
    for thread in threads:
        thread.join(120)
    wait_until(lambda: keys("routing_keys_active") == 0, 60, "no active routing key")
    assert keys("routing_key_all_req_count") == keys("num_unique_running_routing_keys") == 0


class TestFull:
    @pytest.fixture
    def full(self, system: System) -> Iterator[System]:
        """A system with one running and two queued requests. After the test, restores the worker's full speed."""
        crowd = Crowd(system)
        slow_down(system, 0.5)
        try:
            crowd.ask("runs", 0, LONG, gauge(system, "running", 1))
            for waiting in (1, 2):
                crowd.ask(f"waits {waiting}", 0, 4, gauge(system, "queue", waiting))
            yield system
        finally:
            slow_down(system, None)
        crowd.join()
        assert sorted(crowd.ended) == ["runs", "waits 1", "waits 2"], "the accepted requests must complete"

    def test_request_gets_503_with_retry_after_when_the_worker_is_full(self, full: System) -> None:
        for path, body in (("/v1/completions", {"model": "demo", "prompt": "x"}), ("/generate", {"text": "x"})):
            answer = httpx.post(full.url + path, json=body, timeout=60)
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        with openai.OpenAI(base_url=f"{full.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as refusal:
                client.completions.create(model="demo", prompt="x", stream=True)
            assert refusal.value.status_code == 503

    def test_health_responds_without_queueing_when_the_worker_is_full(self, full: System) -> None:
        for path in ("/health", "/health_generate", "/readiness", "/v1/models"):
            assert httpx.get(full.url + path, timeout=60).status_code == 200
        assert gauge(full, "queue", 2)() and gauge(full, "running", 1)(), "the worker must be full during the health check"

    def test_openai_client_gets_a_completion_by_retries_when_the_worker_was_full(self, full: System) -> None:
        """The official client retries after the time in the header retry-after."""
        slow_down(full, None)
        with openai.OpenAI(base_url=f"{full.url}/v1", api_key="none", max_retries=30, timeout=60) as client:
            answer = client.completions.create(model="demo", prompt="x", max_tokens=2)
        assert answer.choices[0].finish_reason in ("length", "stop"), json.dumps(answer.model_dump())


def test_worker_refuses_every_request_immediately_when_the_queue_length_is_0(tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = {"worker_flags": "--max-queued-requests 0", "gateway_flags": "--queue-timeout-s 600"}
    with System(tmp_path_factory.mktemp("closed"), **flags) as running:
        for path, body in {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
            "/v1/completions": {"prompt": "x"},
            "/generate": {"text": "x"},
            "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
            "/v1/responses": {"input": "x", "store": False},
        }.items():
            status, answer = running.post(path, body if path == "/generate" else {"model": "demo", **body}, timeout=60)
            assert status in (503, 529) and "max_queued_requests" in answer["error"]["message"], answer
