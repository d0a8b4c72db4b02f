"""Builds the JSON Schema parts that describe the chart's values."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def closed(properties: dict[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    """Returns the schema of an object that has no keys besides `properties`."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        **({"required": list(required)} if required else {}),
    }


def string(pattern: str = "") -> Schema:
    return {"type": "string", **({"pattern": pattern} if pattern else {})}


def choice(*values: str) -> Schema:
    return {"enum": list(values)}


def number(low: float, high: float | None = None) -> Schema:
    return {"type": "number", "minimum": low, **({} if high is None else {"maximum": high})}


def integer(low: int, high: int | None = None) -> Schema:
    return {"type": "integer", "minimum": low, **({} if high is None else {"maximum": high})}


def array(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, **({"minItems": least} if least else {})}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


BOOLEAN: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}  # a Kubernetes object, which the API server validates
STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
SHARE: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
SECRET_NAME = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"
SECRET = string(SECRET_NAME)
