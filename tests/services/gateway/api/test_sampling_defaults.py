"""Tests of sampling defaults: the gateway puts the worker's defaults into a request that lacks a value."""

from __future__ import annotations

from typing import Any

import pytest

from rootstock_llm.protos import worker_pb2
from tests.services.gateway.fakes import MODEL, FakeWorker
from tests.services.gateway.system import RawClient, System, chat_body, wait_until

DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, **chat_body()},
    "/v1/completions": {"model": MODEL, "prompt": "Hi"},
    "/generate": {"text": "Hi"},
}


def prefer(**values: Any) -> Any:
    def configure(workers: list[FakeWorker]) -> None:
        for worker in workers:
            worker.info.sampling_defaults.CopyFrom(worker_pb2.SamplingDefaults(**values))

    return configure


def sampled(system: System, path: str, **params: Any) -> dict[str, float]:
    body = {**BODIES[path], **({"sampling_params": params} if path == "/generate" else params)}
    assert system.post(path, body).status_code == 200
    sampling = system.worker.submits[-1].sampling
    return {name: getattr(sampling, name) for name in DEFAULTS}


@pytest.mark.by_day(one_in=3)
@pytest.mark.parametrize("path", BODIES)
def test_value_of_the_request_overrides_the_default(path: str) -> None:
    with System(configure=prefer(**DEFAULTS)) as system:
        assert sampled(system, path) == pytest.approx(DEFAULTS)
        own = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
        assert sampled(system, path, **own) == own
        assert not system.worker.submits[-1].sampling.HasField("seed"), "the request is greedy, so no seed is drawn"
        assert sampled(system, path, top_k=5) == pytest.approx(DEFAULTS | {"top_k": 5})
        assert sampled(system, path, temperature=None) == pytest.approx(DEFAULTS)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", {"model": MODEL, **chat_body(max_tokens=4)}), ("/v1/responses", {"model": MODEL, "input": "Hi"})],
    ids=["messages", "responses"],
)
def test_sampling_defaults_apply_to_the_messages_and_responses_apis(path: str, body: dict[str, Any]) -> None:
    with System(configure=prefer(**DEFAULTS | {"temperature": 0.0})) as system:
        for fields, temperature in (({}, 0.0), ({"temperature": 0.75}, 0.75)):
            assert system.post(path, {**body, **fields}).status_code == 200
            sampling = system.worker.submits[-1].sampling
            assert (sampling.temperature, sampling.top_k) == (temperature, 20)


def test_other_parameters_keep_the_api_defaults_when_a_worker_has_one_default() -> None:
    with System(configure=prefer(temperature=0.0)) as system:
        plain = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
        assert sampled(system, "/v1/completions") == plain
        assert not system.worker.submits[-1].sampling.HasField("seed"), "the request is greedy, so no seed is drawn"
        assert sampled(system, "/v1/completions", temperature=0.5)["temperature"] == 0.5
        assert system.worker.submits[-1].sampling.HasField("seed")
        assert system.post("/v1/embeddings", {"model": MODEL, "input": "Hi"}).status_code == 200
        assert not system.worker.submits[-1].sampling.HasField("temperature")


def test_invalid_default_of_a_worker_is_ignored() -> None:
    with System(configure=prefer(temperature=float("nan"), top_p=7.0, top_k=-5, min_p=0.25)) as system:
        plain = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0.25, "repetition_penalty": 1}
        assert sampled(system, "/v1/completions") == plain


def test_clients_can_read_the_sampling_defaults() -> None:
    with System(configure=prefer(**DEFAULTS)) as system:
        assert system.get("/v1/models").json()["data"][0]["sampling_defaults"] == DEFAULTS
        assert system.get("/get_model_info").json()["preferred_sampling_params"] == DEFAULTS
        assert system.openai().models.retrieve(MODEL).sampling_defaults == DEFAULTS  # type: ignore[attr-defined]


def test_both_copies_of_a_hedged_request_have_the_same_sampling_defaults() -> None:
    def differ(workers: list[FakeWorker]) -> None:
        for worker, temperature in zip(workers, (0.25, 0.75), strict=True):
            prefer(temperature=temperature)([worker])

    with System(workers=2, configure=differ, hedge_after_s=0.05) as system:
        system.allow(0)
        client = RawClient(system, "/v1/completions", {"prompt": "Hi", "stream": True})
        wait_until(lambda: system.submits() == [1, 1], "the hedge copy")
        first, second = (host.servicer.submits[0].sampling for host in system.workers)
        assert first == second and first.temperature in (0.25, 0.75)
        system.allow(None)
        client.read_to_end_of_stream()
