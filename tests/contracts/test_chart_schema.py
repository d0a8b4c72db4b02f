"""charts/rootstock/values.schema.json equals the schema of the settings classes, and has exactly the keys of values.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts.rootstock import empty_keys, values_schema
from rootstock_llm.services.local.reference import SERVICES

CHART = Path(__file__).parents[2] / "charts" / "rootstock"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
# Keys that values.yaml leaves open: settings have their own pages, and the rest belongs to Helm or Kubernetes.
OPEN = {"global", "settings"}
OVER = {"pod", "strategy"}  # a component's block has only overrides of another block, which has all keys


def test_schema_file_is_up_to_date() -> None:
    wanted = values_schema.render()
    assert (CHART / "values.schema.json").read_text() == wanted, (
        "python -m charts.rootstock.values_schema > charts/rootstock/values.schema.json"
    )


def test_empty_keys_file_is_up_to_date() -> None:
    assert (CHART / "files/empty-keys.yaml").read_text() == empty_keys.render(), "make docs"


@pytest.mark.parametrize("service", values_schema.DERIVED)
def test_values_that_the_chart_sets_are_settings(service: str) -> None:
    assert values_schema.DERIVED[service] <= set(SERVICES[service].model_fields)


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return found


def _unequal(schema: dict[str, Any], value: Any, at: str) -> Iterator[str]:
    """Yields the keys that only one of the two has."""
    known = _resolved(schema)
    parent, _, key = at.rpartition("/")
    if not isinstance(value, dict) or "properties" not in known or key in OPEN or (parent and key in OVER):
        return
    properties = {key: part for key, part in known["properties"].items() if values_schema.FOREIGN not in part}
    yield from (f"{at}/{key}" for key in (properties.keys() ^ value.keys()) - OPEN)
    for key in properties.keys() & value.keys():
        yield from _unequal(properties[key], value[key], f"{at}/{key}")


def test_values_and_schema_have_the_same_keys() -> None:
    kubernetes_own = {"/networkPolicy/dns"}
    old = "/monitoring/serviceMonitor/"  # deprecated keys have no defaults, which would override those of the new keys
    found = [path for path in _unequal(SCHEMA, {**VALUES, "gatway": {}}, "") if not path.startswith(old)]
    assert [path for path in found if path not in kubernetes_own] == ["/gatway"]


def _open_objects(schema: Any, at: str) -> Iterator[str]:
    if isinstance(schema, dict):
        if (
            "properties" in schema
            and schema.get("type") in ("object", ["object", "null"])
            and schema.get("additionalProperties") is not False
        ):
            yield at
        for key, part in schema.items():
            yield from _open_objects(part, f"{at}/{key}")


def test_schema_refuses_unknown_keys() -> None:
    assert list(_open_objects(SCHEMA, "")) == []
