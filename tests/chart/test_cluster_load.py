"""Tests the helpers of tests/cluster: the load clients against the gateway's HTTP server, and the page of a run's results."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import pytest

from rootstock_llm.services.gateway.http.http_server import HttpOptions, bind, build
from rootstock_llm.services.local.ports import HOST, free_ports
from tests.cluster.kubernetes import CommandFailed, until
from tests.cluster.load import Load
from tests.cluster.proof import gathered

Send = Callable[[MutableMapping[str, Any]], Any]
WORD = {"choices": [{"delta": {"content": "one "}}]}
HEAD_S = 2.0  # seconds in which a connection must send its request head
CLIENTS = 40


@contextmanager
def gateway(whole: bool = True) -> Iterator[str]:
    """Runs a server that streams one word, and yields its URL. Unless `whole`, the stream ends without [DONE]."""

    async def app(scope: MutableMapping[str, Any], receive: Callable[[], Any], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        end = "data: [DONE]\n\n" if whole else ""
        await send({"type": "http.response.body", "body": f"data: {json.dumps(WORD)}\n\n{end}".encode()})

    listener = bind(HOST, 0)
    server = build(app, HttpOptions(head_s=HEAD_S))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve([listener])))
    thread.start()
    try:
        yield f"http://{HOST}:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join()
        loop.close()


def test_load_clients_do_not_wait_for_a_slow_gateway_lookup() -> None:
    """All lookups together take four times HEAD_S. If they blocked the event loop, the server would time out request heads."""
    with gateway() as url:

        def look() -> list[str]:
            time.sleep(4 * HEAD_S / CLIENTS)
            return [url]

        with Load(CLIENTS, look) as load:
            until(lambda: load.ended >= 4 * CLIENTS, "answers", 60)
        assert load.check().startswith(f"{load.ended} requests, 0 failed")


def test_load_test_reports_the_gateway_and_the_time_of_a_cut_stream() -> None:
    with gateway(whole=False) as url, Load(2, lambda: [url], witness=lambda at: f"{at} was restarted once") as load:
        until(lambda: sum(load.failures.values()) > 2 and load.firsts, "failures", 60)
    with pytest.raises(AssertionError) as raised:
        load.check()
    (kind,) = load.failures
    assert kind == "ValueError: the stream ended without [DONE]"
    for part in (
        f"{load.failures[kind]} × {kind}",
        f"at {url}, ",
        "into the request, after 4 characters of text",
        f"{url} was restarted once",
    ):
        assert part in str(raised.value)


def test_refused_connection_is_a_failure_only_if_the_gateway_is_ready() -> None:
    (closed,) = free_ports(1)
    gone = f"http://{HOST}:{closed}"
    with gateway() as url:
        looks = iter([[gone]])
        with Load(1, lambda: next(looks, [url])) as load:
            until(lambda: load.ended, "an answer", 60)
        assert load.check().endswith(", 1 connections refused by terminated gateways")
        with Load(1, lambda: [gone]) as load:
            until(lambda: load.failures, "a failure", 60)
    (kind,) = load.failures
    assert kind.startswith("ClientConnectorError: ") and load.redirected == 0
    with Load(1, list) as load:
        until(lambda: load.failures, "a failure", 60)
    assert set(load.failures) == {"ConnectionError: no gateway is ready"}


def test_load_clients_stop_at_once_and_add_a_note_when_the_test_raises() -> None:
    with gateway() as url, pytest.raises(KeyError) as error, Load(2, lambda: [url]) as load:
        until(lambda: load.ended, "an answer", 60)
        raise KeyError
    (note,) = error.value.__notes__
    assert note.startswith("2 streams: ") and "requests completed, longest pause" in note
    ended = load.ended
    time.sleep(0.2)
    assert load.ended == ended


def test_until_retries_failed_checks_and_reports_the_last_failure() -> None:
    looks: Iterator[CommandFailed | bool] = iter([CommandFailed("kubectl get pods: no route"), False, True])

    def holds() -> bool:
        look = next(looks)
        if isinstance(look, CommandFailed):
            raise look
        return look

    assert until(holds, "pods", 60, 0.001) >= 0

    def fails() -> bool:
        raise CommandFailed("kubectl get pods: no route")

    with pytest.raises(AssertionError, match=r"waited 0 s for pods; the last check failed: CommandFailed: kubectl get pods"):
        until(fails, "pods", 0.01, 0.001)


def test_result_lines_of_a_cluster_run_are_grouped_by_test() -> None:
    entries = [
        {"file": "b.py", "test": "test_two", "line": "began"},
        {"file": "a.py", "test": "test_one", "outcome": "passed"},
        {"file": "a.py", "test": "test_one", "seconds": 3},
        {"file": "c.py", "test": "test_three", "outcome": "passed"},
        {"file": "c.py", "test": "test_three", "seconds": 5, "outcome": "failed"},
    ]
    assert gathered("\n".join(map(json.dumps, entries))) == [
        {"file": "a.py", "test": "test_one", "outcome": "passed", "seconds": 3, "lines": []},
        {"file": "b.py", "test": "test_two", "outcome": "not ended", "seconds": 0, "lines": ["began"]},
        {"file": "c.py", "test": "test_three", "outcome": "failed", "seconds": 5, "lines": []},
    ]
