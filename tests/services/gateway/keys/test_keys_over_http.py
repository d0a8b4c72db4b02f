"""Tests of API keys over HTTP: authentication, models, limits and ownership."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rootstock_llm.services.gateway.admin.operations import ROUTES
from rootstock_llm.services.gateway.http.http_server import CannotListen
from rootstock_llm.services.gateway.keys import key_table
from rootstock_llm.services.shared.index.prefix_index import block_hashes
from tests.services.gateway.api.test_sessions import SessionWorker
from tests.services.gateway.dispatch.test_dispatch_models import serving
from tests.services.gateway.fakes import MODEL, ids_of
from tests.services.gateway.system import RawClient, System, chat_body, wait_until
from tests.services.redis_server import redis_server

CHAT, MODELS = "/v1/chat/completions", "/v1/models"
ALICE, BOB = {"authorization": "Bearer alice"}, {"x-api-key": "bob"}


def limited(name: str, **limits: int) -> dict[str, Any]:
    return {"name": name, "key": name, **limits}


@pytest.fixture(scope="module")
def shared() -> Iterator[System]:
    keys = ["alice", "bob", limited("two", requests_per_minute=2), limited("few", tokens_per_minute=100)]
    with System(keys=[*keys, limited("one", max_concurrent=1)], control_token="admin") as system:
        yield system


CREDENTIALS: dict[str, tuple[dict[str, str], int]] = {
    "bearer": (ALICE, 200),
    "x-api-key": (BOB, 200),
    "both headers, same key": ({**ALICE, "x-api-key": "alice"}, 200),
    "both headers, different keys": ({**ALICE, **BOB}, 401),
    "other scheme": ({"authorization": "Basic alice"}, 401),
    "other scheme and x-api-key": ({"authorization": "Basic alice", **BOB}, 200),
    "none": ({}, 401),
    "unknown key": ({"x-api-key": "alices"}, 401),
    "control token": ({"authorization": "Bearer admin"}, 401),
}


@pytest.mark.parametrize("credentials", CREDENTIALS)
def test_gateway_accepts_only_valid_api_keys(shared: System, credentials: str) -> None:
    headers, status = CREDENTIALS[credentials]
    answer = shared.get(MODELS, headers=headers)
    assert answer.status_code == status
    if status == 401:
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_operator_routes_do_not_exist_on_the_client_port(shared: System) -> None:
    with httpx.Client(limits=httpx.Limits(max_keepalive_connections=0)) as client:
        client_routes = {("POST", "/abort_request"), ("GET", "/get_load"), ("GET", "/get_server_info"), ("GET", "/server_info")}
        for method, path in ROUTES.keys() - client_routes:  # clients have routes with these names too
            for key, status in (("alice", 404), ("admin", 401)):
                answer = client.request(method, shared.url(path), headers={"x-api-key": key}, content=b"{}")
                assert answer.status_code == status, (method, path)


def test_gateway_applies_changed_keys_and_completes_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "POLL_S", 0.05)
    with System(keys=["alice"]) as system:
        system.allow(1)
        running = RawClient(system, CHAT, chat_body(stream=True), "alice")
        running.read_until(b"data: ")
        system.write_keys("bob")
        wait_until(lambda: system.get(MODELS, headers=BOB).status_code == 200, "the new key")
        assert system.get(MODELS, headers=ALICE).status_code == 401
        system.allow(None)
        assert b"[DONE]" in running.read_to_end_of_stream()
        assert system.metric("rootstock_gateway_key_file_valid") == 1
        system.key_file.write_bytes(b"{")
        wait_until(lambda: system.metric("rootstock_gateway_key_file_valid") == 0, "the metric of the invalid file")
        assert system.get(MODELS, headers=BOB).status_code == 200


def test_gateway_does_not_start_when_the_key_file_is_invalid(tmp_path: Path) -> None:
    wrong = tmp_path / "keys.json"
    wrong.write_text('{"keys": [{"name": "a"}]}')
    for path, why in ((wrong, r"keys\[0\]: has neither"), (tmp_path / "none", "No such file")):
        system = System(api_keys_file=str(path))
        with pytest.raises(CannotListen, match=why):
            system.__enter__()


ROUTES_WITH_A_MODEL: dict[str, dict[str, Any]] = {
    CHAT: chat_body(),
    "/v1/completions": {"prompt": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
    "/generate": {"text": "Hi"},
    "/encode": {"text": "Hi"},
    "/v1/messages": {"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module")
def two_models() -> Iterator[System]:
    keys = [{"name": "alice", "key": "alice", "models": ["b"]}, {"name": "bob", "key": "bob", "models": ["c"]}, "carol"]
    with System(workers=2, configure=serving("a", "b"), keys=keys) as system:
        yield system


class TestModels:
    @pytest.mark.parametrize("path", ROUTES_WITH_A_MODEL)
    def test_gateway_refuses_models_that_the_api_key_may_not_use(self, two_models: System, path: str) -> None:
        body = ROUTES_WITH_A_MODEL[path]
        assert two_models.post(path, {**body, "model": "a"}, headers=ALICE).status_code == 403
        assert two_models.post(path, {**body, "model": "b"}, headers=ALICE).status_code == 200
        assert two_models.post(path, {**body, "model": "a"}, headers={"x-api-key": "carol"}).status_code == 200

    @pytest.mark.parametrize("path", [path for path in ROUTES_WITH_A_MODEL if path != "/v1/messages"])  # requires a name
    def test_request_needs_no_model_name_when_the_api_key_has_one_model(self, two_models: System, path: str) -> None:
        body = ROUTES_WITH_A_MODEL[path]
        assert two_models.post(path, body, headers=ALICE).status_code == 200
        assert two_models.post(path, {**body, "model": "c"}, headers=ALICE).status_code == 403

    def test_default_model_is_the_same_for_all_api_keys_when_a_model_has_no_worker(self) -> None:
        keys = [{"name": "alice", "key": "alice", "models": ["c", "a", "b"]}, "carol"]
        with System(workers=2, configure=serving("b", "a"), keys=keys, models="c,b", queue_timeout_s=0.3) as system:
            for key in ("carol", "alice"):
                answer = system.post("/generate", {"text": "Hi"}, headers={"x-api-key": key})
                assert (answer.status_code, answer.json().get("text")) == (200, "I am b")

    def test_models_route_lists_only_models_that_the_api_key_may_use(self, two_models: System) -> None:
        def names(key: str) -> list[str]:
            return [card["id"] for card in two_models.get(MODELS, headers={"x-api-key": key}).json()["data"]]

        assert (names("alice"), names("bob"), sorted(names("carol"))) == (["b"], [], ["a", "b"])
        error = two_models.get(f"{MODELS}/a", headers=ALICE)
        assert (error.status_code, error.json()["error"]["code"]) == (403, "model_not_allowed")
        assert two_models.get("/server_info", headers=ALICE).json()["served_model_name"] == "b"
        assert two_models.get("/model_info", headers=ALICE).json()["model_path"] == "b"

    def test_worker_lists_have_only_models_that_the_api_key_may_use(self) -> None:
        keys = [{"name": "alice", "key": "alice", "models": ["b"]}, {"name": "bob", "key": "bob", "models": ["c"]}, "carol"]
        with System(workers=2, configure=serving("a", "b"), models="a,b,d", keys=keys) as system:

            def body(path: str, key: str) -> Any:
                return system.get(path, headers={"x-api-key": key}).json()

            system.do(lambda: [host.servicer.report_load(num_open=1) for host in system.workers])
            wait_until(lambda: len(body("/get_load", "carol")) == 2, "the load reports of both workers")
            client = RawClient(system, CHAT, chat_body(model="d"), "carol")
            wait_until(lambda: body("/server_info", "carol")["gateway"]["waiting"] == 1, "the request in the gateway's queue")
            assert body("/server_info", "alice")["gateway"]["waiting"] == 0
            client.vanish()
            for key, models in {"alice": ["b"], "bob": [], "carol": ["a", "b"]}.items():
                info = body("/server_info", key)
                assert sorted(worker["model"] for worker in info["workers"]) == models
                assert info["gateway"]["workers"] == len(models)
                ids = sorted(worker["worker_id"] for worker in info["workers"])
                for loads in (info["loads"], body("/get_load", key)):
                    assert sorted(load["worker_id"] for load in loads) == ids


def test_gateway_refuses_an_expired_key() -> None:
    soon = datetime.fromtimestamp(time.time() + 2, UTC).isoformat()
    with System(keys=[{"name": "alice", "key": "alice", "expires": soon}]) as system:
        assert system.get(MODELS, headers=ALICE).status_code == 200
        system.allow(1)
        running = RawClient(system, CHAT, chat_body(stream=True), "alice")
        running.read_until(b"data: ")
        wait_until(lambda: system.get(MODELS, headers=ALICE).status_code == 401, "the end of the key's validity")
        error = system.post(CHAT, chat_body(model=MODEL), headers=ALICE).json()["error"]
        assert (error["code"], error["type"]) == ("api_key_expired", "authentication_error")
        system.allow(None)
        assert b"[DONE]" in running.read_to_end_of_stream(), "a running request is completed"


class TestLimits:
    def test_gateway_limits_requests_per_minute(self, shared: System) -> None:
        """Checks the headers and the error with OpenAI's client."""
        client = shared.openai(api_key="two")
        for left in (1, 0):
            answer = client.chat.completions.with_raw_response.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert answer.headers["x-ratelimit-reset-requests"].startswith("1m")
            assert "x-ratelimit-limit-tokens" not in answer.headers
        before, submits = shared.metric("rootstock_gateway_rate_limited_total", limit="requests"), len(shared.worker.submits)
        with pytest.raises(openai.RateLimitError, match="requests per minute: limit 2, used 2") as error:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
        assert error.value.code == "rate_limit_exceeded"
        headers = error.value.response.headers
        assert 54 <= int(headers["retry-after"]) <= 66 and headers["x-ratelimit-remaining-requests"] == "0"
        assert shared.metric("rootstock_gateway_rate_limited_total", limit="requests") == before + 1
        assert len(shared.worker.submits) == submits
        assert "x-ratelimit-limit-requests" not in shared.get(MODELS, headers=ALICE).headers

    def test_gateway_refunds_unused_tokens(self, shared: System) -> None:
        few = {"x-api-key": "few"}

        def ask(**body: Any) -> httpx.Response:
            return shared.post("/v1/completions", {"model": MODEL, "prompt": "x" * 10, **body}, headers=few)

        large = ask(max_tokens=91)
        error = large.json()["error"]
        assert (large.status_code, error["code"]) == (429, "rate_limit_exceeded")
        assert error["message"].startswith("Request too large") and "retry-after" not in large.headers
        first = ask(max_tokens=60)
        used = first.json()["usage"]["total_tokens"]
        assert first.headers["x-ratelimit-remaining-tokens"] == "30" and used < 70
        wait_until(lambda: shared.get(MODELS, headers=few).headers["x-ratelimit-remaining-tokens"] == str(100 - used))
        assert ask(max_tokens=30, n=3).status_code == 429

    def test_gateway_limits_concurrent_requests(self, shared: System) -> None:
        shared.allow(0)
        first = RawClient(shared, CHAT, chat_body(), "one")
        wait_until(lambda: shared.running() == [1], "the first request at the worker")
        answer = shared.post(CHAT, chat_body(model=MODEL), headers={"x-api-key": "one"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert "concurrent requests: limit 1, used 1" in answer.json()["error"]["message"]
        shared.allow(None)
        first.read_until(b"}]")
        wait_until(
            lambda: shared.post(CHAT, chat_body(model=MODEL), headers={"x-api-key": "one"}).status_code == 200,
            "a free slot of the key",
        )

    def test_gateways_share_the_request_limit_of_an_api_key_in_redis(self) -> None:
        with redis_server() as server:
            keys = [limited("team", requests_per_minute=12)]
            with System(gateways=3, keys=keys, redis_url=server.url) as system:
                wait_until(lambda: system.metric("rootstock_gateway_key_shares_up") == 1, "the exchange of key shares")
                statuses: list[int] = []

                def ask(gateway: int) -> int:
                    answer = system.post(CHAT, chat_body(model=MODEL), gateway, headers={"x-api-key": "team"})
                    statuses.append(answer.status_code)
                    return answer.status_code

                def all_used() -> bool:
                    return {ask(at) for at in range(3)} == {429} and statuses.count(200) == 12

                wait_until(all_used, "the use of the whole limit")
                for at in range(30):
                    ask(at % 3)
                assert statuses.count(200) == 12 and set(statuses) == {200, 429}


class TestOwnership:
    def test_session_can_be_used_only_with_the_api_key_that_opened_the_session(self) -> None:
        with System(keys=["alice", "bob"], down=("worker",)) as system:
            system.workers[0].servicer = SessionWorker("worker-0")
            system.call(system.workers[0].start())
            wait_until(lambda: system.get("/readiness").status_code == 200, "readiness")

            def turn(headers: dict[str, str], session: str) -> httpx.Response:
                body = {"text": "Hi", "session_params": {"id": session}}
                return system.post("/generate", body, headers=headers)

            for chosen in ("mine" * 64, None):
                opened = system.post("/open_session", {"capacity_of_str_len": 99, "session_id": chosen}, headers=ALICE).json()
                assert chosen in (None, opened)
                assert turn(ALICE, opened).status_code == 200
                strangers = turn(BOB, opened)
                assert (strangers.status_code, strangers.json()["error"]["code"]) == (404, "session_not_found")
                assert system.post("/close_session", {"session_id": opened}, headers=BOB).status_code == 404
                assert system.post("/open_session", {"capacity_of_str_len": 9, "session_id": opened}, headers=BOB).is_success
                assert system.post("/close_session", {"session_id": opened}, headers=ALICE).status_code == 200
                assert turn(BOB, opened).status_code == 200

    def test_abort_ends_only_requests_of_the_same_api_key(self) -> None:
        rotated = {"name": "alice", "sha256": [], "key": "alice"}
        with System(keys=[rotated, "bob"]) as system, ThreadPoolExecutor(1) as pool:
            system.allow(0)
            body = {"text": "Hi", "rid": "r"}
            running = pool.submit(system.post, "/generate", body, headers=ALICE)
            wait_until(lambda: system.running() == [1], "the request at the worker")
            strangers = system.post("/abort_request", {"rid": "r"}, headers=BOB)
            assert (strangers.status_code, strangers.json()["aborted"]) == (200, 0)
            assert system.post("/abort_request", {"rid": "r"}, headers=ALICE).json()["aborted"] == 1
            assert running.result(60).json()["meta_info"]["finish_reason"]["type"] == "abort"

    @pytest.mark.parametrize("salted", [False, True])
    def test_setting_salt_cache_by_key_separates_the_cached_prefixes_of_api_keys(self, salted: bool) -> None:
        with System(keys=["alice", "bob"], salt_cache_by_key=salted, workers=2) as system:
            prompt = "x" * 64
            for headers in (ALICE, ALICE, BOB):
                for salt in ({}, {"cache_salt": "s"}):
                    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **salt}
                    assert system.post("/v1/completions", body, headers=headers).status_code == 200
            salts = [submit.cache_salt for host in system.workers for submit in host.servicer.submits]
            assert sorted(Counter(salts).values()) == ([1, 1, 2, 2] if salted else [3, 3])
            assert salted or set(salts) == {"", "s"}
            pool = system.gateway.dispatcher.fleet.pools[MODEL]
            roots = [pool.model.hash_root(salt) for salt in salts]
            sent_roots = [call.hash_root for call in system.tokenizer.calls]
            assert sorted(sent_roots) == sorted(roots) and len({block_hashes(root, ids_of(prompt)) for root in roots}) == len(
                set(salts)
            )

    def test_priority_of_an_api_key_is_the_default_and_the_upper_limit_for_requests(self) -> None:
        keys = [{"name": "batch", "key": "batch", "priority": -5}, "alice"]
        asked = (None, -9, 7)
        with System(keys=keys, enable_priority_scheduling=True) as system:
            for key in ("batch", "alice"):
                for priority in asked:
                    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1, "priority": priority}
                    assert system.post("/v1/completions", body, headers={"x-api-key": key}).status_code == 200
            assert [submit.priority for submit in system.worker.submits] == [-5, -9, -5, 0, -9, 7]


def test_number_of_api_key_labels_in_usage_metrics_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootstock_llm.services.gateway.observe.metrics.MAX_KEYS", 2)
    monkeypatch.setattr("rootstock_llm.services.gateway.observe.metrics.MAX_LATENCY_KEYS", 1)
    with System(keys="abcd") as system:
        for key in "aabcd":
            answer = system.post(CHAT, chat_body(model=MODEL), headers={"x-api-key": key})
            assert answer.status_code == 200
        usage = answer.json()["usage"]
        name = "rootstock_gateway_"
        for label, times in {"a": 2, "b": 1, "other": 2, "c": 0}.items():
            of = {"model": MODEL, "key": label}
            assert system.metric(f"{name}key_requests_total", key=label) == times
            assert system.metric(f"{name}prompt_tokens_total", **of) == times * usage["prompt_tokens"]
            assert system.metric(f"{name}output_tokens_total", **of) == times * usage["completion_tokens"]
        for metric in ("time_to_first_token", "e2e_request_latency"):
            count = f"{name}{metric}_seconds_count"
            assert {label: system.metric(count, model=MODEL, key=label) for label in "ab"} == {"a": 2, "b": 0}
            assert system.metric(count, model=MODEL, key="other") == 3
