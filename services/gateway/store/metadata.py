"""Checks the metadata that clients attach to stored objects."""

from __future__ import annotations

from typing import Any

from rootstock_llm.services.gateway.generation.errors import bad_request
from rootstock_llm.services.shared import limits


def check_metadata(given: Any) -> dict[str, str]:
    """Returns the metadata of a request, {} for None, checked against OpenAI's limits. Raises ApiError."""
    found = {} if given is None else given
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise bad_request("metadata", "'metadata' must be an object of strings.")
    too_long = any(
        len(name) > limits.MAX_METADATA_NAME_CHARS or len(value) > limits.MAX_METADATA_CHARS for name, value in found.items()
    )
    if len(found) > limits.MAX_METADATA or too_long:
        most = f"{limits.MAX_METADATA} names of up to {limits.MAX_METADATA_NAME_CHARS} characters"
        raise bad_request("metadata", f"'metadata' may have {most}, with values of up to {limits.MAX_METADATA_CHARS}.")
    return found
