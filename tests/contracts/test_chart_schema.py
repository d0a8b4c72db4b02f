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
# Blocks whose keys values.yaml does not list: services document their settings, and Helm documents `global`.
OPEN = {"global", "settings"}
OVER = {"pod", "strategy"}  # blocks of a component that override a common block; only the common block lists all keys


def test_schema_file_is_up_to_date() -> None:
    wanted = values_schema.render()
    assert (CHART / "values.schema.json").read_text() == wanted, (
        "run `python -m charts.rootstock.values_schema > charts/rootstock/values.schema.json`"
    )


def test_empty_keys_file_is_up_to_date() -> None:
    assert (CHART / "files/empty-keys.yaml").read_text() == empty_keys.render(), "run `make docs`"


@pytest.mark.parametrize("service", values_schema.DERIVED)
def test_every_setting_that_the_chart_sets_exists(service: str) -> None:
    assert values_schema.DERIVED[service] <= set(SERVICES[service].model_fields)


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return found


def _unequal(schema: dict[str, Any], value: Any, at: str) -> Iterator[str]:
    """Yields the paths of keys that only the schema or only the values have."""
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
    old = "/monitoring/serviceMonitor/"  # deprecated keys; they have no defaults, because defaults would override the new keys
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
