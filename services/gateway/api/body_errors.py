"""What a request type has to say against a body → the client's error. It repeats nothing of what the client sent but names."""

from __future__ import annotations

from pydantic import ValidationError

from services.gateway.api.known_fields import unserved
from services.gateway.request.errors import ApiError, bad_request

MAX_NAME_CHARS = 64  # of a client's own field name in an error


def of_validation(error: ValidationError, where: str = "") -> ApiError:
    """Pydantic's first complaint. where: the field that holds the value, "" for the body itself."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    location = [str(part)[:MAX_NAME_CHARS] for part in first["loc"]]
    if location[0] == "logit_bias":  # further parts are the client's keys
        location = location[:1]
    param = ".".join([where, *location] if where else location)
    if first["type"] == "extra_forbidden":
        return unserved(param)
    if first["type"] == "missing":
        return bad_request(param, f"'{param}' is required.", "missing_required_parameter")
    return bad_request(param, f"'{param}': {first['msg']}.")
