"""A request through all four services is one trace, and the logs of all services have the trace's id."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from tests.e2e.system import System
from tests.services.collector import CALLER, SAMPLED, TRACE, Collector, Received

CLOCK_NS = 5_000_000  # tolerated difference between clock readings of two processes, in nanoseconds
PARENTS = {
    "tokenize": "POST /v1/chat/completions",
    "EncodeChat": "tokenize",
    "render": "EncodeChat",
    "encode": "EncodeChat",
    "attempt": "POST /v1/chat/completions",
    "generate": "attempt",
    "queue": "generate",
    "prefill": "generate",
    "decode": "generate",
    "detokenize": "POST /v1/chat/completions",
}
SERVICES = {
    "rootstock-gateway": {"POST /v1/chat/completions", "tokenize", "attempt"},
    "rootstock-tokenizer": {"EncodeChat", "render", "encode"},
    "rootstock-worker": {"generate", "queue", "prefill", "decode"},
    "rootstock-detokenizer": {"detokenize"},
}


def test_one_request_is_one_trace_over_all_services(tmp_path: Path) -> None:
    with Collector() as collector:
        env = {"ROOTSTOCK_OTLP_ENDPOINT": collector.address, "ROOTSTOCK_TRACE_SAMPLE_RATIO": "0"}
        with System(tmp_path, env) as system:
            body = {"model": "demo", "messages": [{"role": "user", "content": "Count to 9."}], "max_tokens": 8}
            headers = {"traceparent": SAMPLED, "x-request-id": "traced-1"}
            answer = httpx.post(f"{system.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, "traced-1")
            for name in ("POST /v1/chat/completions", *PARENTS):
                collector.wait_for(name)
            check_logs(system)
        check_spans(collector, answer.json()["usage"])


def check_spans(collector: Collector, usage: dict[str, int]) -> None:
    spans: dict[str, Received] = {one.name: one for one in collector.spans}
    assert {one.trace for one in collector.spans} == {TRACE}
    assert spans["POST /v1/chat/completions"].parent == CALLER
    for name, parent in PARENTS.items():
        assert spans[name].parent == spans[parent].id, name
        assert spans[name].within(spans[parent], CLOCK_NS), name
    found = {service: {one.name for one in collector.spans if one.service == service} for service in SERVICES}
    assert found == SERVICES
    assert spans["prefill"].attributes["rootstock.chunk.tokens"] == usage["prompt_tokens"]
    assert spans["decode"].attributes["rootstock.output_tokens"] == usage["completion_tokens"]
    assert not [one.name for one in collector.spans if one.failed]


def check_logs(system: System) -> None:
    for name, message in (
        ("access", "request"),
        ("tokenizer", "request"),
        ("worker-0", "submitted"),
        ("detokenizer", "request opened"),
    ):
        lines = [json.loads(line) for line in system.log(name).splitlines() if line.startswith("{")]
        (line,) = [one for one in lines if one["msg"] == message and one.get("request_id", "").startswith("traced-1")]
        assert line["trace_id"] == TRACE, name
