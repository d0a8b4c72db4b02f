"""One table defines the sampling parameters. Request bodies, filters, protobuf messages, core and docs agree with the table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import annotated_types
import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.api import known_fields
from rootstock_llm.services.gateway.api.known_fields import KnownFields
from rootstock_llm.services.gateway.api.openai.types import ChatCompletionRequest, CompletionRequest
from rootstock_llm.services.gateway.api.request_body import SamplingBody
from rootstock_llm.services.gateway.api.sglang.types import NativeSampling
from rootstock_llm.services.local.parameter_tables import PAGES, TABLES, rendered
from rootstock_llm.services.shared.sampling_parameters import (
    API_DEFAULTS,
    DEFAULT_NAMES,
    PARAMETERS,
    SCALAR,
    SCALARS,
    UNSERVED,
    Api,
    Kind,
    SamplingParameter,
    of_api,
)
from rootstock_llm.services.worker.core.contracts.plan import DryParams, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
BODIES: dict[Api, type[BaseModel]] = {
    Api.CHAT: ChatCompletionRequest,
    Api.COMPLETION: CompletionRequest,
    Api.GENERATE: NativeSampling,
}
FILTERS: dict[Api, KnownFields] = {
    Api.CHAT: known_fields.CHAT,
    Api.COMPLETION: known_fields.COMPLETION,
    Api.GENERATE: known_fields.NATIVE_SAMPLING,
}
TYPES: dict[Kind, Any] = {
    Kind.NUMBER: float,
    Kind.INTEGER: int,
    Kind.FLAG: bool,
    Kind.STRINGS: list[str],
    Kind.TOKEN_IDS: list[int],
    Kind.BIASES: dict[str, float],
}
WIRE_TYPES: dict[Kind, tuple[int, ...]] = {
    Kind.NUMBER: (FieldDescriptor.TYPE_FLOAT,),
    Kind.INTEGER: (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64),
    Kind.FLAG: (FieldDescriptor.TYPE_BOOL,),
    Kind.TEXTS: (FieldDescriptor.TYPE_STRING,),
    Kind.STRINGS: (FieldDescriptor.TYPE_STRING,),
    Kind.TOKEN_IDS: (FieldDescriptor.TYPE_UINT32,),
}
# Fields with a range that are not sampling parameters.
OTHERS = frozenset(
    ("cache_salt", "extra_key", "guided_choice", "logprob_token_ids", "logprobs", "priority", "request_id", "rid", "routing_key")
) | {"top_logprobs"}
NOT_SAMPLED = frozenset(("logprobs", "grammar", "embedding", "score"))  # fields of the message that are no sampling parameters


def limits_of(field: FieldInfo) -> dict[str, Any]:
    """Returns the limits of a field that pydantic enforces."""
    found: dict[str, Any] = {}
    for limit in field.metadata:
        for kind, name in (("Ge", "ge"), ("Gt", "gt"), ("Le", "le"), ("MinLen", "min_length"), ("MaxLen", "max_length")):
            if isinstance(limit, getattr(annotated_types, kind)):
                found[kind] = getattr(limit, name)
        assert not isinstance(limit, annotated_types.Lt), "upper limits of ranges must be inclusive"
    return found


def limits_in(row: SamplingParameter) -> dict[str, Any]:
    if row.kind in (Kind.STRINGS, Kind.TOKEN_IDS, Kind.BIASES):
        return {"MaxLen": row.most} | ({"MinLen": row.least} if row.least else {})
    if row.kind in (Kind.NUMBER, Kind.INTEGER):
        low = "Gt" if row.excludes_low else "Ge"
        return {name: limit for name, limit in ((low, row.low), ("Le", row.high)) if limit is not None}
    return {}


@pytest.mark.parametrize("api", Api)
def test_request_bodies_have_the_fields_and_ranges_of_the_table(api: Api) -> None:
    fields = BODIES[api].model_fields
    for name, row in of_api(api).items():
        assert limits_of(fields[name]) == limits_in(row), name
        assert fields[name].description == row.doc, name
        if row.kind in TYPES:
            assert set(get_args(fields[name].annotation)) == {TYPES[row.kind], type(None)}, name
    assert SamplingBody.model_fields.keys() <= of_api(api).keys()
    ranged = {name for name, field in fields.items() if limits_of(field)}
    assert ranged <= of_api(api).keys() | OTHERS


@pytest.mark.parametrize("api", Api)
def test_only_max_new_tokens_has_a_default_other_than_null(api: Api) -> None:
    absent = {name: BODIES[api].model_fields[name].default for name in of_api(api)}
    assert {name: value for name, value in absent.items() if value is not None} == (
        {"max_new_tokens": of_api(api)["max_new_tokens"].default} if api is Api.GENERATE else {}
    )


@pytest.mark.parametrize("api", Api)
def test_filters_accept_the_neutral_values_of_the_table(api: Api) -> None:
    known = FILTERS[api]
    unserved = {row.name: row.neutral for row in UNSERVED if api in row.apis}
    assert {name: known.neutral[name] for name in unserved if name in known.neutral} == unserved
    assert not (known.unused | known.neutral.keys()) & of_api(api).keys()
    assert not unserved.keys() & BODIES[api].model_fields.keys()


def test_parameter_names_are_unique_and_in_use() -> None:
    assert all(len(of_api(api)) == sum(api in row.names for row in PARAMETERS) for api in Api)
    assert all(row.names for row in PARAMETERS)
    assert len(SCALAR) == len(SCALARS)


def test_neutral_and_default_values_are_within_the_range() -> None:
    for row in PARAMETERS:
        values = [value for value in (row.default, *row.neutral) if value is not None]
        assert not [row.fault(value) for value in values if row.fault(value)], row.wire
        if row in SCALARS and row.neutral:
            assert row.default == row.neutral[0], f"{row.wire}: the default must be the first neutral value"


def descriptor_of(row: SamplingParameter) -> FieldDescriptor:
    message = pb.SamplingParams.DESCRIPTOR
    *parents, field = row.wire.split(".")
    for parent in parents:
        message = message.fields_by_name[parent].message_type
    return message.fields_by_name[field]


def test_protobuf_message_has_the_fields_of_the_table() -> None:
    crossing = [row for row in PARAMETERS if row.wire and row.kind is not Kind.BIASES]
    for row in crossing:
        field = descriptor_of(row)
        assert field.type in WIRE_TYPES[row.kind], row.wire
        assert field.is_repeated == (row.kind in (Kind.TEXTS, Kind.STRINGS, Kind.TOKEN_IDS)), row.wire
    biases = {f"{row.wire}_{part}" for row in PARAMETERS if row.kind is Kind.BIASES for part in ("ids", "values")}
    fields = {row.wire.partition(".")[0] for row in crossing} | biases
    assert fields | NOT_SAMPLED == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    dry = {row.wire for row in crossing if row.wire.startswith("dry.")}
    assert dry == {f"dry.{field.name}" for field in pb.Dry.DESCRIPTOR.fields}


def test_range_limits_are_exact_in_float32() -> None:
    """If rounding to float32 changed a limit of a range, the gateway would accept values that the worker refuses."""
    for row in PARAMETERS:
        if row.kind is Kind.NUMBER:
            assert [float(np.float32(end)) for end in (row.low, row.high)] == [row.low, row.high], row.wire


def test_scheduler_core_has_the_defaults_of_the_table() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    for row in SCALARS:
        assert defaults[row.wire] == (1 if row.default is None else row.default), row.wire
    dry = {field.name: field.default for field in dataclasses.fields(DryParams)}
    for row in PARAMETERS:
        if row.wire in ("dry.base", "dry.allowed_length"):
            assert dry[row.wire.removeprefix("dry.")] == row.default


def test_sampling_defaults_have_exactly_the_fields_that_a_model_can_set() -> None:
    of_model = {row.wire: row.default for row in SCALARS if row.of_model}
    assert API_DEFAULTS.as_dict() == of_model
    assert set(DEFAULT_NAMES) == {field.name for field in worker_pb2.SamplingDefaults.DESCRIPTOR.fields}


@pytest.mark.parametrize("page", PAGES)
def test_tables_on_the_pages_are_up_to_date(page: str) -> None:
    text = (ROOT / page).read_text()
    assert rendered(text) == text, "run `make docs`"


def test_every_table_is_on_one_page() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    assert [name for name in TABLES if text.count(f"<!-- make docs: {name} -->\n") != 1] == []
