"""Tests of HTTP on all routes: HEAD, OPTIONS, Allow, CORS, Retry-After, and the position of an error in JSON."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from rootstock_llm.services.gateway.api.openai.preparation import Preparer
from rootstock_llm.services.local.ports import free_ports
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.system import System, wait_until

CHAT = "/v1/chat/completions"
PAGE = "https://page.test"


@pytest.fixture(scope="module")
def restricted() -> Iterator[System]:
    settings = {"cors_allow_origins": PAGE, "metrics_port": free_ports(1)[0], "metrics_on_http": False, "docs_enabled": False}
    with System(**settings) as system:
        yield system


@pytest.mark.by_day(one_in=3, seed=4)
@pytest.mark.parametrize("path", ["/health", f"/v1/models/{MODEL}", "/metrics"])
def test_head_request_gets_the_headers_of_a_get_request_and_an_empty_body(shared: System, path: str) -> None:
    head, get = httpx.head(shared.url(path)), shared.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(("path", "shape"), [("/v1/messages/count_tokens", {"type"}), ("/v1/responses/input_tokens", set())])
def test_response_to_an_unexpected_exception_has_the_error_form_of_the_api(
    shared: System, path: str, shape: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def count(*_: object) -> int:
        raise RuntimeError("of a test")

    monkeypatch.setattr(Preparer, "count", count)
    body = {"model": MODEL, "input": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(shared.url(path), json={name: body[name] for name in ("model", "messages" if shape else "input")})
    assert answer.status_code == 500 and answer.headers["content-type"] == "application/json"
    assert shape <= answer.json().keys() and answer.json()["error"]["message"] == "Internal server error."
    assert answer.headers["x-request-id"]


@pytest.mark.by_day(one_in=2, seed=2)
@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (CHAT, "OPTIONS, POST"),
        ("/generate", "OPTIONS, POST, PUT"),
        ("/v1/models/a/b", "GET, HEAD, OPTIONS"),
        ("/health", "GET, HEAD, OPTIONS"),
    ],
)
def test_response_to_options_and_405_response_list_the_methods_of_the_path(shared: System, path: str, allowed: str) -> None:
    options = httpx.options(shared.url(path))
    assert (options.status_code, options.headers["allow"], options.content) == (204, allowed, b"")
    wrong = httpx.delete(shared.url(path))
    assert (wrong.status_code, wrong.headers["allow"]) == (405, allowed)
    assert wrong.json()["error"]["code"] == "method_not_allowed"


def test_options_request_for_an_unknown_path_gets_404(shared: System) -> None:
    answer = httpx.options(shared.url("/nowhere"))
    assert answer.status_code == 404 and "allow" not in answer.headers


@pytest.mark.parametrize(
    ("body", "line", "column"),
    [
        (b"", 1, 1),
        (b'{"model": "SECRET",\n "n": SECRET}', 2, 7),
        (b'{"prompt": "SECRET', 1, 19),
        (b'{"prompt": "\\ud800 SECRET"}', 1, 13),
    ],
    ids=["empty", "bare word", "cut off", "lone surrogate"],
)
def test_error_about_invalid_json_names_the_line_and_the_column(shared: System, body: bytes, line: int, column: int) -> None:
    error = shared.post(CHAT, body).json()["error"]
    assert error["code"] == "invalid_json" and "SECRET" not in str(error)
    begin, end = "The body is not valid JSON: ", f", at line {line}, column {column}."
    assert error["message"].startswith(begin) and error["message"].endswith(end)
    assert len(error["message"]) > len(begin + end)


class TestOrigins:
    def test_preflight_needs_no_api_key(self, restricted: System) -> None:
        asked = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization,x-a"}
        answer = httpx.options(restricted.url(CHAT), headers=asked)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()

    def test_cors_headers_allow_the_configured_origin_to_read_responses(self, restricted: System) -> None:
        answer = restricted.get("/v1/models", headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == PAGE
        exposed = answer.headers["access-control-expose-headers"]
        assert {"x-request-id", "request-id", "retry-after", "x-ratelimit-remaining-requests"} <= set(exposed.split(", "))

    def test_cors_headers_are_absent_for_other_origins(self, restricted: System) -> None:
        assert "access-control-allow-origin" not in restricted.get("/v1/models", headers={"origin": "https://other.test"}).headers

    def test_cors_is_off_by_default(self, shared: System) -> None:
        assert "access-control-allow-origin" not in shared.get("/v1/models", headers={"origin": PAGE}).headers


class TestSwitches:
    @pytest.mark.by_day(one_in=2, seed=4)
    @pytest.mark.parametrize("path", ["/metrics", "/docs", "/openapi.json"])
    def test_disabled_route_answers_404(self, restricted: System, path: str) -> None:
        assert restricted.get(path).status_code == 404

    def test_metrics_port_serves_metrics(self, restricted: System) -> None:
        port = restricted.gateway._settings.metrics_port
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics")
        assert answer.status_code == 200 and "rootstock_gateway_requests_total" in answer.text
        assert restricted.get("/server_info").json()["gateway"]["surroundings"]["scraped_s_ago"] < 60.0
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 404
        assert httpx.post(f"http://127.0.0.1:{port}/metrics").headers["allow"] == "GET, HEAD"


def test_response_with_status_503_has_a_retry_after_header() -> None:
    with System(down=("worker",), queue_timeout_s=0.1, models=MODEL, retry_after_s=3) as system:
        wait_until(lambda: system.get("/health").status_code == 200)
        for answer in (system.chat(), system.get("/readiness"), system.get("/health_generate")):
            assert answer.status_code == 503 and 3 <= int(answer.headers["retry-after"]) <= 60
