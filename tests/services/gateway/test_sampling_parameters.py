"""Tests of the scalar sampling parameters at each API.

A value outside the range is refused with the parameter's name, a value inside reaches the worker, and null leaves the default.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.services.gateway.api.openai.types import GenerationBody
from rootstock_llm.services.gateway.api.request_body import SamplingBody
from rootstock_llm.services.gateway.api.sglang.types import NativeSampling
from rootstock_llm.services.shared.sampling_parameters import PARAMETERS, SCALAR, SCALARS, Api, Kind, SamplingParameter
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.system import System
from tests.services.parameter_values import WRONG_TYPES, name_of, outside, typical

SECRET = "s3cr3t-input"
MINIMAL_BODIES: dict[Api, dict[str, Any]] = {
    Api.CHAT: {"model": MODEL, "messages": [{"role": "user", "content": SECRET}]},
    Api.COMPLETION: {"model": MODEL, "prompt": SECRET},
    Api.GENERATE: {"text": SECRET},
}
# tests/contracts/test_sampling_parameters.py checks type and range of every field of every body. For chat, one row per kind of
# range is therefore enough here. For the other routes, the rows are tested whose field is not inherited (see below).
ONE_OF_EACH_RANGE = {(row.kind, row.low is not None and row.low < 0, row.high is None): row for row in reversed(PARAMETERS)}
CHECKED = [
    pytest.param(api, row, id=f"{row.names[api]} of {api}")
    for row in PARAMETERS
    if row.kind in WRONG_TYPES
    for api in row.names
    # Chats and completions inherit the fields from one class, so completions are not tested again. Of the fields that SGLang's
    # route inherits, only temperature is tested.
    if not (api is Api.COMPLETION and Api.CHAT in row.names)
    if not (api is Api.GENERATE and row.names[api] in SamplingBody.model_fields and row.names[api] != "temperature")
    if api is not Api.CHAT or row in ONE_OF_EACH_RANGE.values()
]
# One comprehension copies all scalars. tests/services/gateway/api/test_known_fields.py checks the effect of each.
ONE_OF_EACH_COPY = {(row.kind, row.of_model, len(set(row.names.values()))): row for row in SCALARS}


def test_shared_fields_are_defined_once() -> None:
    """A check of one route is valid for all routes, because they share the definition."""
    assert SamplingBody.model_fields.keys() & NativeSampling.__annotations__.keys() == set()
    assert SamplingBody.model_fields.keys() & GenerationBody.__annotations__.keys() == set()


def body_of(api: Api, name: str, value: Any) -> dict[str, Any]:
    return {**MINIMAL_BODIES[api], **({"sampling_params": {name: value}} if api is Api.GENERATE else {name: value})}


def sampled(system: System, api: Api, name: str, value: Any) -> pb.SamplingParams:
    answer = system.post(api, body_of(api, name, value))
    assert answer.status_code == 200, answer.text
    return system.worker.submits[-1].sampling


@pytest.mark.by_day(one_in=2, seed=22)
@pytest.mark.parametrize(("api", "row"), CHECKED)
def test_error_about_an_invalid_value_names_the_sampling_parameter(shared: System, api: Api, row: SamplingParameter) -> None:
    before = len(shared.worker.submits)
    for value in (*WRONG_TYPES[row.kind], *(outside(row) if row.kind is not Kind.FLAG else ())):
        answer = shared.post(api, json.dumps(body_of(api, row.names[api], value)).encode())
        error = answer.json()["error"]
        path = "sampling_params." if api is Api.GENERATE else ""
        assert (answer.status_code, error["param"]) == (400, path + row.names[api]), f"{value}: {answer.text}"
        assert error["type"] == "invalid_request_error" and error["message"] and error["code"]
        assert SECRET not in answer.text
    assert len(shared.worker.submits) == before


SHARED_NAMES: dict[str, dict[str, Any]] = {
    **{str(api): body for api, body in MINIMAL_BODIES.items()},
    "/v1/messages": {**MINIMAL_BODIES[Api.CHAT], "max_tokens": 4},
    "/v1/responses": {"model": MODEL, "input": SECRET},
}


def shared_body(path: str, fields: dict[str, Any], stream: bool = False) -> dict[str, Any]:
    where = {"sampling_params": fields} if path == Api.GENERATE else fields
    return {**SHARED_NAMES[path], **where, "stream": stream}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", SHARED_NAMES)
def test_top_p_of_0_is_accepted_by_every_api(shared: System, path: str, stream: bool) -> None:
    answer = shared.post(path, shared_body(path, {"top_p": 0}, stream))
    assert answer.status_code == 200, answer.text
    sent = shared.worker.submits[-1].sampling
    assert sent.HasField("top_p") and sent.top_p == 0


@pytest.mark.parametrize(
    ("name", "value", "range_text"),
    [
        ("repetition_penalty", 0, "greater than 0."),
        ("repetition_penalty", 2.5, "less than or equal to 2."),
        ("top_p", 1.5, "less than or equal to 1."),
        ("top_p", -1e-3, "greater than or equal to 0."),
        ("temperature", 101, "less than or equal to 100."),
        ("temperature", -0.1, "greater than or equal to 0."),
        ("top_k", -2, "greater than or equal to -1."),
        ("top_k", 1 << 31, "less than or equal to 1073741824."),
    ],
)
@pytest.mark.parametrize("path", SHARED_NAMES)
def test_error_messages_have_short_numbers(shared: System, path: str, name: str, value: float, range_text: str) -> None:
    if path == "/v1/messages" and name == "repetition_penalty":
        return  # the API has no such field
    answer = shared.post(path, shared_body(path, {name: value}))
    assert answer.status_code == 400 and answer.json()["error"]["message"].endswith(range_text)


def test_tiny_repetition_penalty_stays_above_0(shared: System) -> None:
    for api in Api:
        assert 0 < sampled(shared, api, "repetition_penalty", 1e-60).repetition_penalty < 1e-30


@pytest.mark.by_day(one_in=3, seed=6)
@pytest.mark.parametrize("row", ONE_OF_EACH_COPY.values(), ids=name_of)
def test_value_reaches_the_worker_unless_null(shared: System, row: SamplingParameter) -> None:
    for api, name in row.names.items():
        assert getattr(sampled(shared, api, name, typical(row)), row.wire) == typical(row)
        given = sampled(shared, api, name, None)
        assert not given.HasField(row.wire) or (row.of_model and getattr(given, row.wire) == row.default)


@pytest.mark.parametrize("row", [SCALAR["top_k"], SCALAR["frequency_penalty"]], ids=name_of)
def test_ends_of_a_range_are_valid(shared: System, row: SamplingParameter) -> None:
    for end in (row.low, row.high):
        params = {row.names[Api.GENERATE]: end, "max_new_tokens": None}
        assert shared.post(Api.GENERATE, {"text": SECRET, "sampling_params": params}).status_code == 200, end
        assert getattr(shared.worker.submits[-1].sampling, row.wire) == end
