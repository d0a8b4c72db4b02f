"""python -m charts.rootstock.empty_keys writes charts/rootstock/files/empty-keys.yaml, the meaning of empty keys of values.yaml.

Helm removes the default of a key if a values file leaves the key empty. The templates then read one of two trees:

- empty: the value of a key that may be empty, such as {} for `settings` and "" for a Secret's name;
- required: the default of a key that needs a value. The templates refuse the empty key and name this default.

A key in neither tree is left out of the objects, so that Kubernetes' default applies.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from charts.rootstock import values_schema
from charts.rootstock.schema_words import Schema

CHART = Path(__file__).parent
# Objects are valid without these fields. A null removes security contexts (docs/reference/kubernetes/values.md).
LEFT_OUT = {"maxSurge", "maxUnavailable", "pullPolicy", "nodeLostSeconds", "interval"}
CONTEXTS = {"securityContext", "containerSecurityContext"}
HEAD = """\
# Written by `make docs` from values.yaml and its schema; templates/_values.tpl reads it.
# empty: keys that a values file may leave empty, with their empty values.
# required: keys that a values file must not leave empty, with their defaults.
"""


def render() -> str:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    document = values_schema.document()
    empty, required = _trees(values, document, document["$defs"])
    return HEAD + yaml.safe_dump({"empty": empty, "required": required}, sort_keys=True, width=120)


def _trees(values: dict[str, Any], schema: Schema, definitions: dict[str, Schema]) -> tuple[dict[str, Any], dict[str, Any]]:
    empty: dict[str, Any] = {}
    required: dict[str, Any] = {}
    properties = _resolved(schema, definitions)["properties"]
    for key, value in values.items():
        part = _resolved(properties[key], definitions)
        if key in CONTEXTS or (key in LEFT_OUT and not _is_budget(values)):
            continue
        if isinstance(value, dict):
            inner = _trees(value, part, definitions) if "properties" in part else ({}, {})
            empty[key] = inner[0]
            if inner[1]:
                required[key] = inner[1]
        elif _may_be_empty(key, value, part):
            empty[key] = type(value)()
        else:
            required[key] = value
    return empty, required


def _is_budget(values: dict[str, Any]) -> bool:
    """Returns whether the block is a PodDisruptionBudget's, which needs maxUnavailable."""
    return values.keys() == {"enabled", "maxUnavailable"}


def _may_be_empty(key: str, default: Any, schema: Schema) -> bool:
    if isinstance(default, list):
        return not schema.get("minItems")
    if not isinstance(default, str) or key == "tag":  # without a tag, a Redis image would get the tag of the chart's images
        return not default
    return not default or _allows_empty_text(schema)


def _allows_empty_text(schema: Schema) -> bool:
    if "enum" in schema:
        return "" in schema["enum"]
    return schema.get("type") == "string" and bool(re.search(schema.get("pattern", ""), ""))


def _resolved(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    return definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


if __name__ == "__main__":
    print(render(), end="")
