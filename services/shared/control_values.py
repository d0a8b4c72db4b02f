"""Converts between protobuf messages of the control service and plain Python values.

JSON bodies, command lines and the scheduler's tunables contain these plain values.

The functions read messages by their descriptors, because protobuf's generated classes have no types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Scalar = bool | int | float | str

# Pseudo-tier that a client adds to a FlushCache call that is limited to one cache salt or one age. An older worker ignores the
# salt and the age and would flush all KV. Because it does not know this tier, it refuses the call instead.
SELECTED = "selected"

_VALUE = "rootstock.v1.Value"
_KINDS: Mapping[type, str] = {bool: "flag", int: "whole", float: "real", str: "text"}


def put_values(target: Any, values: Mapping[str, Scalar]) -> None:
    """Writes the values into a map<string, Value> of a message. Raises ValueError for an integer of more than 64 bits."""
    for name, value in values.items():
        setattr(target[name], _KINDS[type(value)], value)


def value_from_pb(value: Any) -> Scalar:
    """Returns the scalar in a Value message. Raises ValueError if no field is set."""
    kind = value.WhichOneof("kind")
    if kind is None:
        raise ValueError("a message Value has no field set")
    found: Scalar = getattr(value, kind)
    return found


def as_json(message: Any) -> dict[str, Any]:
    """Returns the fields of a message by name. An enum value becomes its name in lower case without the prefix of its type."""
    return {field.name: _field(field, getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _field(field: Any, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        item = field.message_type.fields_by_name["value"]
        return {key: _item(item, value[key]) for key in sorted(value)}
    return [_item(field, item) for item in value] if field.is_repeated else _item(field, value)


def _item(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return value_from_pb(value) if field.message_type.full_name == _VALUE else as_json(value)
    if field.enum_type is not None:
        return enum_word(field.enum_type.values[0].name, field.enum_type.values_by_number[value].name)
    return value


def enum_word(unspecified: str, name: str) -> str:
    """Returns an enum name in lower case without its prefix: ("PAUSE_MODE_UNSPECIFIED", "PAUSE_MODE_IN_PLACE") → "in_place"."""
    return name.removeprefix(unspecified.removesuffix("UNSPECIFIED")).lower()
