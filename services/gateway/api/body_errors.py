"""Translates pydantic's errors to the client's error. Of the body, an error repeats only names of fields."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from services.gateway.api.known_fields import unserved
from services.gateway.request.errors import ApiError, bad_request

MAX_NAME_CHARS = 64  # characters of a client's own field name that an error shows
_TYPES = ("bool", "int", "float", "str")


def of_validation(error: ValidationError, where: str = "") -> ApiError:
    """Returns the most precise of pydantic's errors about the first wrong field.

    Args:
        where: Field that holds the value. Empty for the body itself.
    """
    errors = error.errors(include_input=False, include_url=False, include_context=False)
    first = max((each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]), key=lambda each: len(_location(each)))
    location = [str(part)[:MAX_NAME_CHARS] for part in _location(first)]
    if location[0] == "logit_bias":  # further parts are the client's keys
        location = location[:1]
    param = ".".join([where, *location] if where else location)
    if first["type"] == "extra_forbidden":
        return unserved(param)
    if first["type"] == "missing":
        return bad_request(param, f"'{param}' is required.", "missing_required_parameter")
    return bad_request(param, f"'{param}': {first['msg']}.")


def _location(error: ErrorDetails) -> list[str | int]:
    """Returns the names and indices that the client sent. Pydantic adds the type that it tried if a field allows several."""
    *above, last = error["loc"]
    kept = [part for part in above if not _is_type(part)]
    return kept if _is_type(last) and error["type"] != "extra_forbidden" else [*kept, last]


def _is_type(part: str | int) -> bool:
    """Returns whether a part of a location is a type. Fields of the API are in lower case."""
    return isinstance(part, str) and (part in _TYPES or "[" in part or part[:1].isupper())
