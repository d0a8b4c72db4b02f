"""How a worker words what is wrong with a field: its message stands alone, and who goes by the field cuts the name off. Pure."""

from __future__ import annotations


def worded(field: str, element: int | None, why: str) -> str:
    """element: which value of a repeated field. Without a field: `why` alone."""
    return _name(field, element) + why


def why_of(message: str, field: str, element: int | None) -> str:
    """What `worded` was given. Of a worker that has not named the field in its message, all of it."""
    return message.removeprefix(_name(field, element))


def _name(field: str, element: int | None) -> str:
    if not field:
        return ""
    return f"{field}: " if element is None else f"{field}[{element}]: "
