"""Tests the fields of an access log line for each way in which a request can end, and that no line has a text of the client."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from rootstock_llm.services.gateway.observe.access_log import AccessLog
from rootstock_llm.services.gateway.store.owner import owner_of
from rootstock_llm.services.shared.limits import MAX_HEAD_BYTES
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.http.test_slow_readers import LARGE, SlowReader
from tests.services.gateway.system import RawClient, System, wait_until
from tests.services.redis_server import redis_server

SECRET = "s3cr3t-of-alice"
KEYS = [{"name": "alice", "key": SECRET}]
KEY = {"authorization": f"Bearer {SECRET}"}
UNKNOWN = b'{"model": "absent", "messages": [{"role": "user", "content": "Hi"}]}'
STREAMED = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


class Logged:
    """A system whose access log is read as JSON."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.path = folder / "access.log"
        self.system = System(access_log_file=str(self.path), **settings)

    def __enter__(self) -> Logged:
        self.system.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.system.__exit__(*error)

    def lines(self) -> list[dict[str, Any]]:
        text = self.path.read_bytes() if self.path.exists() else b""
        return [orjson.loads(line) for line in text.splitlines()]

    def line(self, count: int = 1) -> dict[str, Any]:
        """Waits until the log has `count` lines. Returns the newest line."""
        wait_until(lambda: len(self.lines()) >= count, f"{count} lines in the access log")
        lines = self.lines()
        assert len(lines) == count
        return lines[-1]


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Logged]:
    with Logged(tmp_path) as each:
        yield each


def test_access_log_has_tokens_and_times_of_a_whole_response(logged: Logged) -> None:
    response = logged.system.chat()
    line = logged.line()
    usage = response.json()["usage"]
    assert (line["route"], line["method"], line["status"], line["end"], line["code"]) == (
        "/v1/chat/completions",
        "POST",
        200,
        "complete",
        "",
    )
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert line["bytes"] == len(response.content)
    assert 0 <= line["ttft_ms"] <= line["total_ms"] and line["queue_ms"] >= 0
    assert line["request_id"] == response.headers["x-request-id"]
    assert line["model"] == response.json()["model"] and line["source"] == "http"


def test_access_log_counts_bytes_of_a_stream(logged: Logged) -> None:
    response = logged.system.chat(stream=True)
    line = logged.line()
    assert (line["end"], line["status"], line["bytes"]) == ("complete", 200, len(response.content))
    assert line["output_tokens"] > 0


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/chat/completions", b"{", 400, "invalid_json"),
        (
            "POST",
            "/v1/chat/completions",
            UNKNOWN,
            404,
            "model_not_found",
        ),
        ("GET", "/nowhere?secret=word", b"", 404, "not_found"),
        ("GET", "/v1/chat/completions", b"", 405, "method_not_allowed"),
    ],
    ids=["bad JSON", "unknown model", "unknown path", "other method"],
)
def test_access_log_has_refused_requests(logged: Logged, method: str, path: str, body: bytes, status: int, code: str) -> None:
    response = logged.system.request(method, path, content=body)
    assert response.status_code == status
    line = logged.line()
    assert (line["status"], line["end"], line["code"]) == (status, "refused", response.json()["error"]["code"])
    assert line["code"] == code
    assert line["route"] in ("/v1/chat/completions", "other")
    assert not line["output_tokens"]


def test_access_log_has_the_names_of_api_keys_but_no_secrets(tmp_path: Path) -> None:
    with Logged(tmp_path, keys=KEYS) as logged:
        assert logged.system.chat().status_code == 401
        assert (logged.line()["code"], logged.line()["key"]) == ("invalid_api_key", "")
        body = {"model": MODEL, **STREAMED}
        assert logged.system.post("/v1/chat/completions?key=word", body, headers=KEY).status_code == 200
        assert logged.line(2)["key"] == "alice"
        text = logged.path.read_text()
    assert SECRET not in text and "word" not in text and "Hi" not in text


def test_access_log_has_requests_whose_client_left(logged: Logged) -> None:
    system = logged.system
    system.do(lambda: system.worker.allow(1))
    client = RawClient(system, "/v1/chat/completions", STREAMED)
    client.read_until(b"data: ")
    client.vanish()
    line = logged.line()
    assert (line["status"], line["end"], line["code"]) == (499, "client_gone", "client_gone")
    assert line["output_tokens"] == 1 and line["prompt_tokens"] > 0


def test_access_log_has_aborted_requests(logged: Logged) -> None:
    system = logged.system
    system.do(lambda: system.worker.allow(1))
    responses: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: responses.append(system.complete(rid="mine")))
    asking.start()
    wait_until(lambda: system.has_tokens(1), "the first token")
    assert system.post("/abort_request", {"rid": "mine"}).json()["aborted"] == 1
    asking.join()
    wait_until(lambda: len(logged.lines()) == 2, "two lines")
    (line,) = [line for line in logged.lines() if line["route"] == "/v1/completions"]
    assert (line["status"], line["end"], line["output_tokens"]) == (200, "aborted", 1)


def test_access_log_has_requests_that_timed_out(tmp_path: Path) -> None:
    with Logged(tmp_path, request_timeout_s=0.3) as logged:
        logged.system.do(lambda: logged.system.worker.allow(0))
        assert logged.system.chat().status_code == 504
        line = logged.line()
        assert (line["status"], line["end"], line["code"]) == (504, "refused", "timeout")


def test_access_log_has_streams_that_failed(tmp_path: Path) -> None:
    with Logged(tmp_path, request_timeout_s=1.0) as logged:
        logged.system.do(lambda: logged.system.worker.allow(1))
        assert '"timeout"' in logged.system.chat(stream=True).text
        line = logged.line()
        assert (line["status"], line["end"], line["code"]) == (200, "failed", "timeout")


def test_access_log_has_requests_whose_connection_the_gateway_closed(tmp_path: Path) -> None:
    with Logged(tmp_path, request_timeout_s=4.0) as logged:
        server = logged.system.gateway._http
        logged.system.do(lambda: server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096))
        reader = SlowReader(logged.system, {**LARGE, "stream": True})
        line = logged.line()
        assert (line["status"], line["end"], line["code"]) == (200, "cut", "timeout")
        reader.close()


def test_access_log_has_background_responses_that_other_gateways_continue(tmp_path: Path) -> None:
    with redis_server() as store, Logged(tmp_path, state_redis_url=store.url) as logged:
        system = logged.system
        system.allow(4)
        response = system.openai().responses.create(model=MODEL, input="Hi", background=True)
        wait_until(lambda: bool(system.worker.submits), "the submit")
        store.client.set(f"state:lease:background:{owner_of('')}:{response.id}", "another", px=2000)
        line = logged.line(2)
    assert (line["source"], line["route"], line["end"]) == ("background", "/v1/responses", "interrupted")


def test_access_log_has_requests_with_an_invalid_head(logged: Logged) -> None:
    with socket.create_connection(("127.0.0.1", logged.system.port)) as client:
        client.sendall(b"GET /" + b"a" * MAX_HEAD_BYTES)
        assert b" 431 " in client.recv(4096)
    line = logged.line()
    assert (line["status"], line["code"], line["route"], line["end"]) == (431, "head_too_large", "other", "refused")


def test_access_log_writes_all_lines_of_an_event_loop_iteration_together(tmp_path: Path) -> None:
    path = tmp_path / "access.log"

    def ids() -> list[str]:
        return [orjson.loads(line)["request_id"] for line in path.read_bytes().splitlines()]

    async def run() -> None:
        log = AccessLog("json", str(path))
        for name in ("a", "b"):
            log.ended("http", "GET", "/v1/models", {"request_id": name}, 200, 1, 0.1)
        assert ids() == []
        await asyncio.sleep(0)
        assert ids() == ["a", "b"]
        log.ended("http", "GET", "/v1/models", {"request_id": "c"}, 200, 1, 0.1)
        log.close()
        assert ids() == ["a", "b", "c"]
        await asyncio.sleep(0)

    asyncio.run(run())


def test_access_log_omits_health_checks_and_metrics_requests(logged: Logged) -> None:
    assert logged.system.get("/health").status_code == logged.system.get("/metrics").status_code == 200
    assert logged.system.get("/v1/models").status_code == 200
    assert logged.line()["route"] == "/v1/models"


def test_access_log_writes_text_lines(tmp_path: Path) -> None:
    with Logged(tmp_path, access_log="text") as logged:
        logged.system.chat()
        wait_until(lambda: bool(logged.path.read_text()), "a line in the access log")
        line = logged.path.read_text()
    assert " POST /v1/chat/completions 200 complete " in line
    assert " output_tokens=" in line and " ttft_ms=" in line and line.count("\n") == 1


def test_access_log_writes_nothing_when_off(tmp_path: Path) -> None:
    with Logged(tmp_path, access_log="off") as logged:
        assert logged.system.chat().status_code == 200
        assert not logged.path.exists()


def test_access_log_makes_a_new_file_when_the_old_file_was_renamed(logged: Logged) -> None:
    logged.system.chat()
    logged.line()
    logged.path.rename(logged.path.with_suffix(".1"))

    def has_lines() -> bool:
        logged.system.chat()
        return bool(logged.lines())

    wait_until(has_lines, "a line in the new file")
    assert logged.lines()[0]["end"] == "complete"


def test_gateway_serves_requests_when_the_disk_of_the_access_log_is_full(caplog: pytest.LogCaptureFixture) -> None:
    with System(access_log_file="/dev/full") as system:
        assert [system.chat().status_code for _ in range(3)] == [200] * 3
    assert sum(record.getMessage() == "could not write the access log" for record in caplog.records) == 1
