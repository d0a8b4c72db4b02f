"""Tests of the report about a request. The gateway sends it if the client requests it and the playground is served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.services.gateway.dispatch.test_dispatch_lost import stopped
from tests.services.gateway.dispatch.test_dispatch_queue import fill_workers, with_one_slot
from tests.services.gateway.dispatch.test_faults import ANSWER
from tests.services.gateway.documented import Answered, Documented
from tests.services.gateway.fakes import MODEL, FakeWorker
from tests.services.gateway.system import System, chat_body, events, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, **chat_body()},
    COMPLETIONS: {"model": MODEL, "prompt": ["Hi", "you"]},
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
REPORT_HEADERS = {"x-rootstock-report": "1"}


def busy(workers: list[FakeWorker]) -> None:
    for worker in workers:
        worker.by_tier = {"queue_ms": 1500, "retractions": 2, "drafted_tokens": 8, "accepted_tokens": 5}


def chunks_of(system: System) -> list[Any]:
    """Returns the chunks of a streamed chat with a report."""
    return events(system.post(CHAT, BODIES[CHAT] | STREAM, headers=REPORT_HEADERS).text)


@pytest.fixture(scope="module")
def served() -> Iterator[System]:
    with System(playground=True, configure=busy) as system:
        yield system


def stable_content(system: System, path: str, headers: dict[str, str], **fields: Any) -> bytes:
    """Returns the content of a response without its creation time.

    For a stream, only the events with usage and the final event are returned, because the other chunks depend on time.
    """
    answer = system.post(path, BODIES[path] | fields, headers={"x-request-id": "same", **headers})
    assert answer.status_code == 200
    content = re.sub(rb'"created":\d+', b'"created":0', answer.content)
    return b"".join(each for each in content.splitlines(True) if b'"usage":{' in each or b"[DONE]" in each)


@pytest.mark.by_day(one_in=2, seed=4)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("fields", [{}, STREAM], ids=["whole", "stream"])
def test_response_is_unchanged_without_the_report_header_or_the_playground_setting(
    served: System, path: str, fields: dict[str, Any]
) -> None:
    with System(configure=busy) as off:
        plain = [
            stable_content(served, path, {}, **fields),
            stable_content(off, path, {}, **fields),
            stable_content(off, path, REPORT_HEADERS, **fields),
        ]
        assert plain[0] == plain[1] == plain[2] and b'"usage":{' in plain[0]
    assert stable_content(served, path, {"x-rootstock-report": "0"}, **fields) == plain[0]
    assert stable_content(served, path, REPORT_HEADERS, **fields) == re.sub(
        rb'("usage":\{[^}]*\}\})', lambda usage: usage[1] + b',"rootstock":' + report_of(served, path, fields), plain[0]
    )


def report_of(system: System, path: str, fields: dict[str, Any]) -> bytes:
    found = re.search(rb'"rootstock":(\{[^}]*\})', stable_content(system, path, REPORT_HEADERS, **fields))
    assert found is not None
    return found[1]


def test_report_has_the_queue_times_and_the_workers_and_the_draft_counts(served: System) -> None:
    answer = served.post(CHAT, BODIES[CHAT] | {"n": 2}, headers=REPORT_HEADERS)
    assert answer.json()["rootstock"] == {
        "gateway_queue_s": 0.0,
        "worker_queue_s": 1.5,
        "cached_tokens": answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"],
        "workers": ["worker-0"],
        "retractions": 4,
        "drafted_tokens": 16,
        "accepted_tokens": 10,
    }
    assert not Documented(served.get("/openapi.json").json()).faults(Answered.of(answer))


def test_stream_has_the_report_only_when_the_client_requests_the_usage(served: System) -> None:
    *chunks, last = chunks_of(served)
    assert last["choices"] == [] and last["rootstock"]["workers"] == ["worker-0"]
    assert not [chunk for chunk in chunks if "rootstock" in chunk]
    without = events(served.post(CHAT, BODIES[CHAT] | {"stream": True}, headers=REPORT_HEADERS).text)
    assert not [chunk for chunk in without if "rootstock" in chunk]


@pytest.mark.by_day(one_in=2)
@pytest.mark.parametrize("body", [{"top_k": "x"}, {"model": "unknown"}], ids=["invalid field", "unknown model"])
def test_error_has_no_report(served: System, body: dict[str, Any]) -> None:
    answer = served.post(CHAT, BODIES[CHAT] | body, headers=REPORT_HEADERS)
    assert answer.status_code in (400, 404) and list(answer.json()) == ["error"]


def test_report_has_the_time_in_the_gateway_queue() -> None:
    with System(playground=True, configure=with_one_slot) as system, ThreadPoolExecutor(1) as pool:
        fill_workers(system)
        waiting = pool.submit(chunks_of, system)
        wait_until(lambda: system.num_waiting == 1, "the request in the gateway's queue")
        system.allow(None)
        assert waiting.result()[-1]["rootstock"]["gateway_queue_s"] > 0


def test_report_lists_a_lost_worker_before_the_next_worker() -> None:
    with System(workers=2, playground=True, configure=stopped) as system, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(chunks_of, system)
        wait_until(lambda: sum(system.running()) == 1, "the submit")
        first = next(host for host in system.workers if host.servicer.running)
        system.allow(5)
        wait_until(lambda: first.servicer.steps_left == 0, "the tokens of the worker")
        system.call(first.stop())
        system.allow(None)
        other = next(host for host in system.workers if host is not first)
        chunks = asking.result()
        assert chunks[-1]["rootstock"]["workers"] == [first.servicer.info.worker_id, other.servicer.info.worker_id]
        assert "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]) == ANSWER
