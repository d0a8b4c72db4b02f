"""Checks the size of JSON schemas, and lists the annotation keywords (draft 2020-12, and `definitions` of older drafts)."""

from __future__ import annotations

from typing import Any

from rootstock_llm.services.shared import limits

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator"),
        *("$comment", "$schema", "$id", "$anchor", "$defs", "definitions"),
    }
)


def is_annotation(keyword: str) -> bool:
    """Whether the keyword does not constrain values. This includes extensions, which begin with x-."""
    return keyword in ANNOTATIONS or keyword.startswith("x-")


def too_large(document: Any) -> str:
    """Returns the fault if a parsed schema, or a document with schemas, exceeds a size limit of limits.py; otherwise "".

    The fault contains no value of the schema. The check stops at the first exceeded limit, which bounds its time.
    """
    nodes = properties = values = 0
    waiting = [document]
    while waiting:
        found = waiting.pop()
        nodes += 1
        if isinstance(found, list):
            waiting.extend(found[: limits.MAX_SCHEMA_NODES + 1])
        elif isinstance(found, dict):
            members, enum = found.get("properties"), found.get("enum")
            if isinstance(members, dict):
                properties += len(members)
                if _num_optional(members, found.get("required")) > limits.MAX_OPTIONAL_PROPERTIES:
                    return f"more than {limits.MAX_OPTIONAL_PROPERTIES} properties that are not required in one object"
            if isinstance(enum, list):
                values += len(enum)
            waiting.extend(found.values())
        if properties > limits.MAX_SCHEMA_PROPERTIES:
            return f"more than {limits.MAX_SCHEMA_PROPERTIES} properties"
        if values > limits.MAX_SCHEMA_VALUES:
            return f"more than {limits.MAX_SCHEMA_VALUES} values in enums"
        if nodes + len(waiting) > limits.MAX_SCHEMA_NODES:
            return f"more than {limits.MAX_SCHEMA_NODES} values, arrays and objects"
    return ""


def _num_optional(members: dict[str, Any], required: Any) -> int:
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return len(members.keys() - names)
