"""Tests of JSON schemas at and above the size limits, in the gateway and in the worker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rootstock_llm.services.gateway.api.constraints import json_schema, structural_tag
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.json_schema import too_large
from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec
from rootstock_llm.services.worker.grammar.compile.forking_compiler import prepare
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused


def properties(count: int, required: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"p{at}": True for at in range(count)},
        "required": [f"p{at}" for at in range(required)],
    }


def values(count: int) -> dict[str, Any]:
    return {"anyOf": [{"enum": list(range(count // 2))}, {"enum": [f"v{at}" for at in range(count - count // 2)]}]}


def parts(count: int) -> dict[str, Any]:
    """Returns a document of `count` nodes: the document itself, an array, and the items of the array."""
    return {"examples": [0] * (count - 2)}


LIMITS = [
    pytest.param(properties, (limits.MAX_SCHEMA_PROPERTIES,) * 2, (limits.MAX_SCHEMA_PROPERTIES + 1,) * 2, id="properties"),
    pytest.param(properties, (1500, 1500 - limits.MAX_OPTIONAL_PROPERTIES), (1500, 475), id="optional properties"),
    pytest.param(values, (limits.MAX_SCHEMA_VALUES,), (limits.MAX_SCHEMA_VALUES + 1,), id="values"),
    pytest.param(parts, (limits.MAX_SCHEMA_NODES,), (limits.MAX_SCHEMA_NODES + 1,), id="parts"),
]


@pytest.mark.parametrize(("make", "at_limit", "above_limit"), LIMITS)
def test_gateway_and_worker_refuse_schemas_above_the_limits(
    make: Any, at_limit: tuple[int, ...], above_limit: tuple[int, ...]
) -> None:
    assert too_large(make(*at_limit)) == ""
    json_schema(make(*at_limit), "schema")
    schema = make(*above_limit)
    why = too_large(schema)
    with pytest.raises(ApiError, match=why) as refused:
        json_schema(json.dumps(schema), "schema")
    assert (refused.value.status, refused.value.param) == (400, "schema")
    with pytest.raises(GrammarRefused, match=f"json_schema: {why}"):
        prepare(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(ApiError):
        structural_tag(tag, "tag")
    with pytest.raises(GrammarRefused, match="structural_tag: more than"):
        prepare(GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)))
