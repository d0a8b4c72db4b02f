"""Tests of comments in silent streams: they reset idle timeouts, clients ignore them, and a later error is an event."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import orjson
import pytest

from rootstock_llm.protos import common_pb2 as pb
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.http.test_disconnects import idle
from tests.services.gateway.system import RawClient, System, chat_body, events, wait_until

CHAT = "/v1/chat/completions"
COMMENT = ": waiting"
ANSWER = "Hello, world!"
SILENCE_S = 0.03  # seconds without output after which a stream sends a comment


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with System(sse_comment_s=SILENCE_S, request_timeout_s=30.0) as system:
        yield system


def streamed(system: System, path: str, body: dict[str, Any], on_line: Callable[[list[str]], None], idle_s: float = 15) -> str:
    """Returns the whole response. `on_line` is called for each line with all lines so far."""
    lines: list[str] = []
    with httpx.stream("POST", system.url(path), json={"model": MODEL, **body, "stream": True}, timeout=idle_s) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            lines.append(line)
            on_line(lines)
    return "\n".join([*lines, ""])


def read_comments(client: RawClient, number: int) -> None:
    """Waits for the given number of new comments."""
    client.received = b""
    for _ in range(number):
        client.read_until(b": waiting")
        client.received = client.received.partition(b": waiting")[2]


@pytest.mark.by_day(one_in=2, seed=1)
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), ("/generate", {"text": "Hi"})], ids=["openai", "sglang"])
def test_stream_has_comments_before_and_between_events(system: System, path: str, body: dict[str, Any]) -> None:
    system.allow(0)

    def on_line(lines: list[str]) -> None:
        begun = any(line.startswith("data:") for line in lines)
        if lines[-1] == COMMENT and (begun or lines.count(COMMENT) == 2):
            system.allow(None if begun else 3)

    text = streamed(system, path, body, on_line)
    assert text.startswith(f"{COMMENT}\n\n{COMMENT}\n\n")
    last_comment = text.rindex(COMMENT)
    assert "data: " in text[:last_comment] and "data: " in text[last_comment:]
    if path == CHAT:
        assert "".join(each["choices"][0]["delta"].get("content", "") for each in events(text)) == ANSWER
    else:
        assert events(text)[-1]["text"] == ANSWER


def test_openai_client_ignores_comments_in_a_stream_and_a_whole_response_has_no_comments(system: System) -> None:
    system.allow(0)
    watching = RawClient(system, CHAT, chat_body(stream=True))
    whole = RawClient(system, CHAT, chat_body())

    def release() -> None:
        wait_until(lambda: len(system.worker.running) == 3, "three requests at the worker")
        read_comments(watching, 3)
        system.allow(None)

    releasing = threading.Thread(target=release)
    releasing.start()
    chunks = list(system.openai().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True))
    releasing.join()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    whole.read_until(b'"usage"')
    assert b"waiting" not in whole.received and b"application/json" in whole.received
    assert events(watching.read_to_end_of_stream().decode().replace("\r\n", "\n\n"))


def test_comments_reset_the_idle_timeout_of_a_client(system: System) -> None:
    idle_s = 1.5
    begun = time.monotonic()
    system.allow(0)

    def on_line(lines: list[str]) -> None:
        if time.monotonic() - begun > 2 * idle_s:
            system.allow(None)

    assert len(events(streamed(system, CHAT, chat_body(), on_line, idle_s))) > 1
    with System() as silent:
        silent.allow(0)
        with pytest.raises(httpx.ReadTimeout):
            streamed(silent, CHAT, chat_body(), on_line, idle_s)


def test_error_before_the_first_comment_is_a_plain_response(system: System) -> None:
    assert system.chat(stream=True, temperature=-1).status_code == 400
    assert system.post(CHAT, chat_body(model="nobody", stream=True)).status_code == 404


def refused_by_worker(system: System) -> None:
    system.do(lambda: system.worker.end_running(pb.ERROR_CODE_INVALID_ARGUMENT, "a broken grammar"))


def stop(system: System) -> None:
    system.do(system.stop.set)


FAILURES: dict[str, tuple[dict[str, Any], Callable[[System], None], str]] = {
    "refusal by the worker": ({}, refused_by_worker, "invalid_request_error"),
    "no worker until queue_timeout_s": ({"down": ("worker",), "queue_timeout_s": 2.0}, lambda system: None, "server_error"),
    "no tokenizer until queue_timeout_s": ({"down": ("tokenizer",), "queue_timeout_s": 2.0}, lambda system: None, "server_error"),
    "request_timeout_s": ({"request_timeout_s": 2.0}, lambda system: None, "timeout_error"),
    "stop of the gateway": ({}, stop, "server_error"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_error_after_a_comment_is_the_last_event(name: str) -> None:
    settings, fail, kind = FAILURES[name]
    with System(sse_comment_s=SILENCE_S, **settings) as system:
        if "worker" not in system._down:
            system.allow(0)

        def on_line(lines: list[str]) -> None:
            if lines.count(COMMENT) == 3 and lines[-1] == COMMENT:
                fail(system)

        text = streamed(system, CHAT, chat_body(), on_line)
        *comments, last = [line for line in text.splitlines() if line]
        assert set(comments) == {COMMENT} and len(comments) >= 3
        assert orjson.loads(last.removeprefix("data: "))["error"]["type"] == kind
        wait_until(lambda: idle(system), "the end of the request")


def test_openai_client_raises_an_error_after_a_comment(system: System) -> None:
    system.allow(0)
    watching = RawClient(system, CHAT, chat_body(stream=True))

    def fail() -> None:
        wait_until(lambda: len(system.worker.running) == 2, "two requests at the worker")
        read_comments(watching, 3)
        refused_by_worker(system)

    failing = threading.Thread(target=fail)
    failing.start()
    with pytest.raises(openai.APIError):
        list(system.openai().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True))
    failing.join()
    system.allow(None)


def test_stream_of_a_failed_response_begins_with_created_after_a_comment(system: System) -> None:
    system.allow(0)
    with system.openai().responses.stream(model=MODEL, input="Hi") as stream:  # returns after the first comment
        wait_until(lambda: len(system.worker.running) == 1, "the request at the worker")
        refused_by_worker(system)
        found = [(event.type, event.sequence_number) for event in stream]
    assert found == [("response.created", 0), ("response.in_progress", 1), ("response.failed", 2)]
    system.allow(None)


def test_request_is_released_when_the_client_leaves_between_comments(system: System) -> None:
    system.allow(0)
    before = system.metric("rootstock_gateway_aborts_total", phase="submitted")
    client = RawClient(system, CHAT, chat_body(stream=True))
    client.read_until(b": waiting")
    client.vanish()
    wait_until(
        lambda: system.metric("rootstock_gateway_aborts_total", phase="submitted") == before + 1 and idle(system),
        "the end of the request",
    )
    wait_until(lambda: not system.worker.running, "the abort")
    system.allow(None)
    assert system.chat(stream=True).status_code == 200
