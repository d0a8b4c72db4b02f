"""The format of workers' error messages about a field of a request.

A worker sends the field, the index of the element and a complete message that begins with the field's name. If the API has
another name for the field, the gateway removes the name with which the message begins.
"""

from __future__ import annotations


def worded(field: str, element: int | None, why: str) -> str:
    """Returns the complete message: the field, the index of the element if it is not None, and the fault.

    If `field` is empty, the message is only the fault.
    """
    return _name(field, element) + why


def why_of(message: str, field: str, element: int | None) -> str:
    """Returns the fault in a message made by worded(), or the whole message if it does not begin with the field."""
    return message.removeprefix(_name(field, element))


def _name(field: str, element: int | None) -> str:
    if not field:
        return ""
    return f"{field}: " if element is None else f"{field}[{element}]: "
