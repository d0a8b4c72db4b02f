"""Tests that the responses of real gateways match the OpenAPI document, and that every documented response occurs."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest
from jsonschema import Draft202012Validator

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.services.gateway import gateway as gateway_module
from rootstock_llm.services.gateway.http.front_door import FrontDoor
from rootstock_llm.services.gateway.http.http_server import HttpOptions
from rootstock_llm.services.shared.limits import MAX_HEAD_BYTES, SMALL_BODY_BYTES
from tests.services.gateway.api.test_sessions import SessionWorker
from tests.services.gateway.documented import Answered, Documented
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.system import RawClient, System, wait_until
from tests.services.redis_server import RedisServer

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
FILES, BATCHES = "/v1/files", "/v1/batches"
FILE, BATCH = f"{FILES}/file-a", f"{BATCHES}/batch_a"
INPUT_TOKENS, STORED_RESPONSE, CONVERSATION = f"{RESPONSES}/input_tokens", f"{RESPONSES}/resp_a", f"{CONVERSATIONS}/conv_a"
USER = [{"role": "user", "content": "Hi"}]
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": USER},
    COMPLETIONS: {"model": MODEL, "prompt": "Hi"},
    EMBEDDINGS: {"model": MODEL, "input": "Hi"},
    "/generate": {"text": "Hi"},
    "/encode": {"text": "Hi"},
    **{path: {"query": "Hi", "items": ["a", "b"], "label_token_ids": [5, 6]} for path in ("/v1/score", "/score")},
    RESPONSES: {"model": MODEL, "input": "Hi"},
    MESSAGES: {"model": MODEL, "messages": USER, "max_tokens": 20},
}
SESSION_BODIES = {"/open_session": {"capacity_of_str_len": 100}, "/close_session": {"session_id": "unknown"}}
STORE_BODIES: dict[str, dict[str, Any]] = {
    INPUT_TOKENS: PLAIN[RESPONSES],
    f"{STORED_RESPONSE}/cancel": {},
    CONVERSATIONS: {"items": []},
    CONVERSATION: {"metadata": {"a": "b"}},
    f"{CONVERSATION}/items": {"items": [{"role": "user", "content": "Hi"}]},
    FILES: {},
    BATCHES: {"input_file_id": "file-a", "endpoint": COMPLETIONS, "completion_window": "24h"},
    f"{BATCH}/cancel": {},
}
DELETES = (STORED_RESPONSE, CONVERSATION, f"{CONVERSATION}/items/item_a", FILE)
LISTS = (FILES, BATCHES)
STORED_GETS = (*DELETES, f"{STORED_RESPONSE}/input_items", f"{CONVERSATION}/items", f"{FILE}/content", BATCH)
FORM_TYPE = "multipart/form-data; boundary=x"
LINE = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "Hi", "max_tokens": 2}}
TEXT_BODIES: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": ["Hi", "you"]},
    "/detokenize": {"tokens": [72, 105]},
    "/parse_function_call": {"text": "Hi", "tools": [], "tool_call_parser": "qwen25"},
    "/separate_reasoning": {"text": "<think>a</think>b", "reasoning_parser": "qwen3"},
    **{path: {} for path in ("/classify", "/v1/rerank", "/rerank")},
}
POSTS = {**PLAIN, **SESSION_BODIES, **TEXT_BODIES, **STORE_BODIES, COUNT_TOKENS: PLAIN[MESSAGES], "/abort_request": {"rid": "a"}}
STATE_GETS = ("/ping", "/version", "/get_load", "/get_server_info", "/server_info")
GETS = (
    "/health",
    "/readiness",
    "/ready",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/health_generate",
    "/get_model_info",
    "/model_info",
    *STATE_GETS,
)
MODEL_PATHS = ("/v1/models", f"/v1/models/{MODEL}")
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
CHAT_LOGPROBS = {"logprobs": True, "top_logprobs": 2, "logprob_token_ids": [7, 8], "return_token_ids": True}
LOGPROBS = {"logprobs": 2, "logprob_token_ids": [7, 8], "return_token_ids": True}
NATIVE_LOGPROBS = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "token_ids_logprob": [7],
    "return_text_in_logprobs": True,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
VALID_REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((path, {}) for path in PLAIN),
    (CHAT, {"n": 2, "stop": ["wor"], **CHAT_LOGPROBS}),
    (CHAT, {"max_tokens": 3, "response_format": SCHEMA}),
    (CHAT, {"n": 2, **STREAM, **CHAT_LOGPROBS}),
    (CHAT, {"stream": True, "stop_token_ids": [ord("w")]}),
    (COMPLETIONS, {"prompt": ["Hi", "you"], "n": 2, "echo": True, **LOGPROBS}),
    (COMPLETIONS, {"prompt": [72, 105], "max_tokens": 0, "echo": True, **LOGPROBS}),
    (COMPLETIONS, {"prompt": ["Hi", "you"], "echo": True, **STREAM, **LOGPROBS}),
    (COMPLETIONS, {"stream": True, "stop_regex": "w.r"}),
    (RESPONSES, {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 2}),
    (RESPONSES, {"stream": True, "max_output_tokens": 3}),
    (MESSAGES, {"thinking": {"type": "enabled"}, "stop_sequences": ["wor"]}),
    (MESSAGES, {"stream": True}),
    (EMBEDDINGS, {"input": ["Hi", "you"], "encoding_format": "base64"}),
    (EMBEDDINGS, {"input": [72, 105], "dimensions": 2}),
    ("/generate", {"text": ["Hi", "you"], "sampling_params": {"n": 2, "stop": "wor"}, **NATIVE_LOGPROBS}),
    ("/generate", {"sampling_params": {"max_new_tokens": 0}, **NATIVE_LOGPROBS}),
    ("/generate", {"stream": True, **NATIVE_LOGPROBS}),
    ("/generate", {"text": ["Hi", "you"], "stream": True, "sampling_params": {"max_new_tokens": 2}}),
    ("/encode", {"text": ["Hi", "you"], "dimensions": 3}),
    ("/v1/score", {"query": [72], "items": [[105], [106]], "apply_softmax": True, "item_first": True}),
)


@contextmanager
def system_with_sessions(**settings: Any) -> Iterator[System]:
    with System(down=("worker",), **settings) as system:
        system.workers[0].servicer = SessionWorker("worker-0")
        system.call(system.workers[0].start())
        wait_until(lambda: system.get("/readiness").status_code == 200, "readiness")
        yield system


class Collected:
    """Collects responses of gateways, and their differences from the OpenAPI document."""

    def __init__(self) -> None:
        self.statuses: set[tuple[str, str, int]] = set()
        self.documented: set[tuple[str, str, int]] = set()
        self.document: Mapping[str, Any] = {}
        self.faults: list[str] = []
        self.answers: list[Answered] = []

    def add(self, system: System, answers: Iterable[Answered]) -> None:
        self.add_for(Documented(system.get("/openapi.json").json()), answers)

    def add_for(self, document: Documented, answers: Iterable[Answered]) -> None:
        self.document = document.document
        self.documented.update(document.statuses())
        for answer in answers:
            self.faults += document.faults(answer)
            self.statuses.add((answer.method, document.place(answer.path) or answer.path, answer.status))
            self.answers.append(answer)


def ask(system: System, method: str, path: str, body: Any = None, **headers: str) -> Answered:
    content = {} if body is None else {"content": body} if isinstance(body, bytes) else {"json": body}
    return Answered.of(system.request(method, path, headers=headers, **content))


def ask_all(system: System, bodies: dict[str, Any], **headers: str) -> list[Answered]:
    """Sends a request to every path in `bodies`, with the body of the path."""
    methods = [("POST", path) for path in bodies] + ([("PUT", "/generate")] if "/generate" in bodies else [])
    return [ask(system, method, path, bodies[path], **headers) for method, path in methods]


def send_raw(system: System, method: str, path: str, rest: bytes) -> Answered:
    """Sends a request that no HTTP client would send. Returns the response."""
    with socket.create_connection(("127.0.0.1", system.port), timeout=60) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\n".encode() + rest)
        received = b""
        while more := connection.recv(65536):
            received += more
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Answered(method, path, int(first.split()[1]), headers, b"" if method == "HEAD" else body)


def operations() -> list[tuple[str, str]]:
    """Returns a method and path for every documented operation."""
    gets = (*GETS, *MODEL_PATHS, *LISTS, *STORED_GETS)
    found = [(method, path) for path in gets for method in ("GET", "HEAD")]
    found += [("POST", path) for path in POSTS] + [("PUT", "/generate")]
    return found + [("DELETE", path) for path in DELETES] + [("OPTIONS", path) for path in {*gets, *POSTS}]


def store_calls(system: System) -> list[Answered]:
    """Creates, reads, changes and deletes a stored response and a conversation."""
    response = json.loads(ask(system, "POST", RESPONSES, PLAIN[RESPONSES]).body)["id"]
    conversation = json.loads(ask(system, "POST", CONVERSATIONS, {}).body)["id"]
    background = json.loads(ask(system, "POST", RESPONSES, {**PLAIN[RESPONSES], "background": True}).body)["id"]
    own = [ask(system, "POST", f"{CONVERSATIONS}/{conversation}/items", STORE_BODIES[f"{CONVERSATION}/items"])]
    item = json.loads(own[0].body)["first_id"]

    def path_of(path: str) -> str:
        return path.replace("resp_a", response).replace("conv_a", conversation).replace("item_a", item)

    own += [ask(system, "POST", f"{RESPONSES}/{background}/cancel"), ask(system, "GET", f"{RESPONSES}/{background}?stream=true")]
    own += [ask(system, "POST", path_of(CONVERSATION), STORE_BODIES[CONVERSATION])]
    own += [ask(system, "POST", CONVERSATIONS, {"items": [{"type": "item_reference", "id": "msg_a"}]})]
    own += [ask(system, method, path_of(path)) for path in STORED_GETS for method in ("GET", "HEAD")]
    own += [ask(system, "GET", path_of(f"{CONVERSATION}/items") + "?limit=0")]
    return own + [ask(system, "DELETE", path_of(path)) for path in reversed(DELETES)]


def form_of(lines: bytes) -> bytes:
    parts = (b'name="purpose"\r\n\r\nbatch', b'name="file"; filename="a.jsonl"\r\n\r\n' + lines)
    return b"".join(b"--x\r\ncontent-disposition: form-data; %s\r\n" % part for part in parts) + b"--x--\r\n"


def upload(system: System, lines: bytes) -> Answered:
    return ask(system, "POST", FILES, form_of(lines), **{"content-type": FORM_TYPE})


def batch_calls(system: System) -> list[Answered]:
    """Runs a valid and an invalid batch, and reads, cancels and deletes their files."""
    found = []
    for lines in (json.dumps(LINE).encode(), b"nonsense"):
        found.append(upload(system, lines))
        file_id = json.loads(found[-1].body)["id"]
        found.append(ask(system, "POST", BATCHES, {**STORE_BODIES[BATCHES], "input_file_id": file_id}))
        batch = f"{BATCHES}/{json.loads(found[-1].body)['id']}"
        found.append(ask(system, "DELETE", f"{FILES}/{file_id}"))
        assert found[-1].status == 409
        wait_until(lambda: system.get(batch).json()["status"] in ("completed", "failed"), "the end of the batch")  # noqa: B023
        found += [ask(system, method, path) for path in (*LISTS, batch, f"{FILES}/{file_id}") for method in ("GET", "HEAD")]
        found += [ask(system, method, f"{FILES}/{file_id}/content") for method in ("GET", "HEAD")]
        found += [ask(system, "POST", f"{batch}/cancel"), ask(system, "DELETE", f"{FILES}/{file_id}")]
    found += [ask(system, "GET", f"{path}?limit=0") for path in LISTS]
    last = ask(system, "POST", FILES, form_of(json.dumps(LINE).encode()), **{"content-type": FORM_TYPE})
    begun = ask(system, "POST", BATCHES, {**STORE_BODIES[BATCHES], "input_file_id": json.loads(last.body)["id"]})
    return [*found, last, begun, ask(system, "POST", f"{BATCHES}/{json.loads(begun.body)['id']}/cancel")]


def collect_normal_responses(collected: Collected, store: RedisServer) -> None:
    """Checks responses of a complete system to valid and invalid requests."""
    limits = {"max_body_bytes": 2 * SMALL_BODY_BYTES, "max_file_bytes": SMALL_BODY_BYTES}
    with system_with_sessions(**limits, state_redis_url=store.url) as system:
        collected.add(system, store_calls(system))
        collected.add(system, batch_calls(system))
        good = [ask(system, "POST", path, {**PLAIN[path], **fields}) for path, fields in VALID_REQUESTS]
        assert {answer.status for answer in good} == {200}, good
        collected.add(system, good)
        collected.add(system, [ask(system, method, path, POSTS.get(path)) for method, path in operations()])
        others = [path for path in (*GETS, *MODEL_PATHS, *POSTS) if path not in DELETES]
        collected.add(system, [ask(system, "DELETE", path) for path in others])
        collected.add(system, [ask(system, method, "/v1/models/nobody's") for method in ("GET", "HEAD")])
        collected.add(system, [ask(system, method, "/nowhere/") for method in ("GET", "OPTIONS", "BREW")])
        session = {"capacity_of_str_len": 9, "session_id": "mine"}
        collected.add(
            system, [ask(system, "POST", "/open_session", session), ask(system, "POST", "/close_session", {"session_id": "mine"})]
        )
        collected.add(
            system, ask_all(system, {path: body | {"model": "unknown"} for path, body in POSTS.items() if "rid" not in body})
        )
        collected.add(system, ask_all(system, {path: {} for path in POSTS}))
        collected.add(system, ask_all(system, dict.fromkeys(POSTS, b"x" * 3 * SMALL_BODY_BYTES)))
        collected.add(system, [ask(system, "POST", "/abort_request", {"abort_all": True})])
        for status in (grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
            system.do(partial(setattr, system.worker, "failure", status))
            collected.add(system, ask_all(system, SESSION_BODIES))


def collect_faults(collected: Collected, patch: pytest.MonkeyPatch) -> None:
    """Checks responses to faults before and during a response. The last event of a started stream reports the fault."""
    with System() as system:
        system.do(lambda: system.worker.allow(1))
        with ThreadPoolExecutor(4) as pool:
            paths = (CHAT, "/generate", RESPONSES, MESSAGES)
            streams = [pool.submit(ask, system, "POST", path, PLAIN[path] | {"stream": True}) for path in paths]
            wait_until(lambda: system.running() == [4])
            system.do(lambda: system.worker.allow(1))
            wait_until(lambda: all(running.made for running in system.worker.running.values()))
            system.do(lambda: system.worker.end_running(pb.ERROR_CODE_INTERNAL))
            ended = [stream.result() for stream in streams]
        assert all(re.search(b'"(server|api)_error"', answer.body) for answer in ended)
        collected.add(system, ended)
        with patch.context() as broken:
            broken.setattr(FrontDoor, "_caller", lambda *_: 1 / 0)
            failed = [ask(system, method, path, POSTS.get(path)) for method, path in operations()]
        assert {answer.status for answer in failed} == {500}
        collected.add(system, failed)


def collect_store_refusals(collected: Collected, patch: pytest.MonkeyPatch, store: RedisServer) -> None:
    """Checks responses of a store that is full, then contended, then unreachable."""
    store.client.flushall()
    full: dict[str, Any] = {"state_bytes_per_key": 2000, "file_bytes_per_key": 2000, "state_records_per_key": 2}
    with System(state_redis_url=store.url, state_patience_s=0.1, batch_lines=0, **full) as system:
        file_id = json.loads(upload(system, b"x").body)["id"]
        begin = partial(ask, system, "POST", BATCHES, {**STORE_BODIES[BATCHES], "input_file_id": file_id})
        answers = [upload(system, b"x" * 2000), *(begin() for _ in range(3))]
        assert [answer.status for answer in answers] == [429, 200, 200, 429]
        collected.add(system, answers)
        conversation = json.loads(ask(system, "POST", CONVERSATIONS, {}).body)["id"]
        path_of = {path: path.replace("conv_a", conversation) for path in STORE_BODIES}
        item = json.loads(ask(system, "POST", path_of[f"{CONVERSATION}/items"], STORE_BODIES[f"{CONVERSATION}/items"]).body)[
            "first_id"
        ]
        many = [{"role": "user", "content": "x" * 2000}]
        full = [ask(system, "POST", path, {"items": many}) for path in (CONVERSATIONS, path_of[f"{CONVERSATION}/items"])]
        long = {"metadata": {str(number): "x" * 500 for number in range(5)}}
        collected.add(system, [*full, ask(system, "POST", path_of[CONVERSATION], long)])
        with patch.context() as contended:
            contended.setattr("rootstock_llm.services.gateway.api.responses.records.MAX_ATTEMPTS", 0)
            changes = [ask(system, "POST", path_of[path], STORE_BODIES[path]) for path in (CONVERSATION, f"{CONVERSATION}/items")]
            collected.add(system, [*changes, ask(system, "DELETE", f"{path_of[CONVERSATION]}/items/{item}")])
        store.kill()
        gone = [ask(system, method, path) for method, path in operations() if path in (*STORED_GETS, *LISTS)]
        gone.append(upload(system, b"x"))
        collected.add(system, [*gone, *ask_all(system, STORE_BODIES)])
        store.start()


def collect_key_refusals(collected: Collected) -> None:
    limited_key = {"name": "a", "key": "a", "requests_per_minute": 1, "tokens_per_minute": 1 << 30}
    keys = [limited_key, "b", {"name": "c", "key": "c", "models": ["other"]}]
    with system_with_sessions(keys=keys) as system:
        collected.add(system, [ask(system, method, path, POSTS.get(path)) for method, path in operations()])
        collected.add(system, [ask(system, "GET", "/nowhere"), *(ask(system, "PATCH", path) for path in POSTS)])
        limited = [answer for _ in range(2) for answer in ask_all(system, PLAIN, authorization="Bearer a")]
        assert {answer.status for answer in limited} == {200, 429} and "x-ratelimit-reset-tokens" in limited[0].headers
        collected.add(system, limited)
        collected.add(system, ask_all(system, POSTS, authorization="Bearer b"))
        other = [ask(system, method, path, POSTS.get(path), authorization="Bearer c") for method, path in operations()]
        assert 403 in {answer.status for answer in other}
        collected.add(system, other)


def collect_without_workers(collected: Collected) -> None:
    with System(down=("worker",), queue_timeout_s=0.05, models=MODEL) as system:
        wait_until(lambda: system.get("/health").status_code == 200)
        collected.add(system, [ask(system, method, path, POSTS.get(path)) for method, path in operations()])
    with System(down=("worker",)) as system:  # no model is known
        collected.add(system, [ask(system, method, "/ready") for method in ("GET", "HEAD")])


def collect_timeouts(collected: Collected, patch: pytest.MonkeyPatch) -> None:
    """Checks responses to late or malformed heads and bodies, and to requests that time out."""
    with patch.context() as short:
        short.setattr(gateway_module, "_http_options", lambda *_: HttpOptions(head_s=0.5))
        system = System(request_timeout_s=0.3, body_timeout_s=0.3)
        with system, ThreadPoolExecutor(len(operations())) as pool:
            late = list(pool.map(lambda each: send_raw(system, *each, b"host: a\r\n"), operations()))
            assert {answer.status for answer in late} == {408}
            collected.add(system, late)
            bodies = [("POST", path) for path in POSTS]
            collected.add(
                system, pool.map(lambda each: send_raw(system, *each, b"host: a\r\ncontent-length: 9\r\n\r\n{"), bodies)
            )
            collected.add(system, [send_raw(system, *each, b"no header\r\n\r\n") for each in operations()])
            collected.add(system, [send_raw(system, *each, b"a: " + b"x" * MAX_HEAD_BYTES) for each in operations()])
            system.do(lambda: system.worker.allow(0))
            timed_out = ask_all(system, PLAIN)
            assert {answer.status for answer in timed_out} == {504}
            collected.add(system, timed_out)
        with System(tokenize_timeout_s=0.2) as system:
            system.do(lambda: system.tokenizer.gate.clear())
            late = {INPUT_TOKENS: PLAIN[RESPONSES], COUNT_TOKENS: PLAIN[MESSAGES], "/tokenize": TEXT_BODIES["/tokenize"]}
            collected.add(system, ask_all(system, late))


def collect_overload(collected: Collected, patch: pytest.MonkeyPatch) -> None:
    """Checks responses of a gateway whose only connection is in use."""
    with patch.context() as small:
        small.setattr(gateway_module, "_http_options", lambda *_: HttpOptions(connections=1))
        with System() as system:
            document = system.get("/openapi.json")
            system.do(lambda: system.worker.allow(0))
            RawClient(system, COMPLETIONS, {"prompt": "Hi"})
            wait_until(lambda: system.running() == [1])
            answers = [ask(system, method, path, POSTS.get(path)) for method, path in operations()]
            system.allow(None)
            collected.add_for(Documented(document.json()), answers)


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collected]:
    found, store = Collected(), RedisServer(folder=tmp_path_factory.mktemp("state"))
    store.start()
    with pytest.MonkeyPatch.context() as patch:
        collect_normal_responses(found, store)
        collect_store_refusals(found, patch, store)
        store.kill()
        for each in (collect_key_refusals, collect_without_workers):
            each(found)
        for broken in (collect_faults, collect_timeouts, collect_overload):
            broken(found, patch)
    yield found


def test_responses_match_the_openapi_document(collected: Collected) -> None:
    assert not collected.faults, "\n".join(collected.faults[:20])
    assert len(collected.answers) > 400


def test_every_documented_response_occurs(collected: Collected) -> None:
    assert not sorted(collected.documented - collected.statuses)


def test_comparison_with_the_openapi_document_finds_each_difference_of_a_response(collected: Collected) -> None:
    document = Documented(collected.document)
    answer = next(each for each in collected.answers if each.path == CHAT and each.status == 200 and b'"usage"' in each.body)
    refused = next(each for each in collected.answers if each.path == "/open_session" and each.status == 503)
    stream = next(each for each in collected.answers if each.path == CHAT and each.body.endswith(b"[DONE]\n\n"))
    others = {
        "a status": replace(answer, status=418),
        "a member": replace(answer, body=answer.body.replace(b'"usage"', b'"used"')),
        "a null": replace(answer, body=answer.body.replace(b'"assistant"', b"null")),
        "a header": replace(answer, headers={**answer.headers, "x-more": "1"}),
        "no header": replace(refused, headers={name: value for name, value in refused.headers.items() if name != "retry-after"}),
        "a header's value": replace(refused, headers={**refused.headers, "retry-after": "soon"}),
        "a type": replace(refused, headers={**refused.headers, "content-type": "text/html"}),
        "an event": replace(stream, body=stream.body.replace(b'"finish_reason":null', b'"finish_reason":""')),
        "an end": replace(stream, body=stream.body.removesuffix(b"data: [DONE]\n\n")),
        "a body": replace(answer, method="HEAD", path="/health"),
    }
    assert [name for name, other in others.items() if not document.faults(other)] == []


def test_every_route_is_documented_and_every_reference_resolves(shared: System) -> None:
    document = shared.get("/openapi.json").json()
    door: Any = shared.gateway.app
    routes = [(route.path.replace(":path", ""), method) for route in door._app.routes for method in route.methods]
    paths = document["paths"]
    documented = {(path, method.upper()) for path in paths for method in paths[path] if not method.startswith("x-")}
    heads = {(path, "HEAD") for path, method in routes if method == "GET"}
    assert {*routes, *heads, *((path, "OPTIONS") for path, _ in routes)} == documented
    names = [operation["operationId"] for item in paths.values() for method, operation in item.items() if method[0] != "x"]
    assert len(names) == len(set(names)) == len(documented)
    references = set(re.findall(r'"\$ref": "#/components/(\w+)/(\w+)"', json.dumps(document)))
    assert references and all(name in document["components"][kind] for kind, name in references)
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_openapi_document_follows_the_settings() -> None:
    with System(cors_allow_origins="https://page.test", metrics_on_http=False) as system:
        document = Documented(system.get("/openapi.json").json())
        assert "/metrics" not in document.document["paths"] and "securitySchemes" not in document.document["components"]
        for origin, status in (("https://page.test", 200), ("https://other.test", 400)):
            asked = {"origin": origin, "access-control-request-method": "POST"}
            answer = ask(system, "OPTIONS", CHAT, **asked)
            assert answer.status == status and not document.faults(answer)


def test_openapi_document_has_decimal_numbers_without_rounding_errors(shared: System) -> None:
    text = re.sub(r'"(?:[^"\\]|\\.)*"', '""', shared.get("/openapi.json").text)
    numbers = re.findall(r"[-+.0-9eE]*\d[-+.0-9eE]*", text)
    assert numbers and [each for each in numbers if "e" in each.lower() or len(each.partition(".")[2]) > 3] == []


def test_every_request_body_has_a_valid_example(shared: System) -> None:
    document = shared.get("/openapi.json").json()
    found = []
    for path, item in document["paths"].items():
        for method in ("post", "put"):
            for content in item.get(method, {}).get("requestBody", {}).get("content", {}).values():
                schema = {**content["schema"], "components": document["components"]}
                assert not list(Draft202012Validator(schema).iter_errors(content["example"])), path
                found.append(path)
    assert len(found) > 15


def test_path_parameters_have_examples(shared: System) -> None:
    document = shared.get("/openapi.json").json()
    parameters = [each for item in document["paths"].values() for each in item.get("get", {}).get("parameters", ())]
    assert all(each["example"] for each in parameters if each["in"] == "path")


@pytest.mark.parametrize(
    ("schema", "first"),
    [
        ("ChatCompletionRequest", ["messages", "model", "max_completion_tokens", "max_tokens", "stream"]),
        ("CompletionRequest", ["prompt", "model", "max_completion_tokens", "max_tokens", "stream"]),
        ("ResponsesRequest", ["model", "input", "text", "instructions", "max_output_tokens", "stream"]),
        ("MessagesRequest", ["messages", "max_tokens", "model", "system", "stream"]),
        ("NativeGenerateRequest", ["model", "text", "input_ids", "sampling_params", "stream"]),
        ("NativeSampling", ["max_new_tokens", "temperature", "top_p"]),
    ],
)
def test_schemas_of_request_bodies_list_the_common_fields_first(shared: System, schema: str, first: list[str]) -> None:
    document = shared.get("/openapi.json").json()
    assert list(document["components"]["schemas"][schema]["properties"])[: len(first)] == first
