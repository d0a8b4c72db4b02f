"""How large a JSON schema is, told before anything is made of it. Pure; its time is bounded by the limits themselves."""

from __future__ import annotations

from typing import Any

from services.shared import limits


def too_large(document: Any) -> str:
    """Why a parsed schema, or anything that holds schemas, is refused; empty if it is not. Names no value of the schema's."""
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
                if _optional(members, found.get("required")) > limits.MAX_OPTIONAL_PROPERTIES:
                    return f"more than {limits.MAX_OPTIONAL_PROPERTIES} properties of an object are not required"
            if isinstance(enum, list):
                values += len(enum)
            waiting.extend(found.values())
        if properties > limits.MAX_SCHEMA_PROPERTIES:
            return f"more than {limits.MAX_SCHEMA_PROPERTIES} properties"
        if values > limits.MAX_SCHEMA_VALUES:
            return f"more than {limits.MAX_SCHEMA_VALUES} values in enums"
        if nodes + len(waiting) > limits.MAX_SCHEMA_NODES:
            return f"more than {limits.MAX_SCHEMA_NODES} parts"
    return ""


def _optional(members: dict[str, Any], required: Any) -> int:
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return len(members.keys() - names)
