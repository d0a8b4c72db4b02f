"""Checks the metadata that clients attach to stored objects."""

from __future__ import annotations

from typing import Any

from rootstock_llm.services.gateway.generation.errors import bad_request
from rootstock_llm.services.shared import limits


def check_metadata(value: Any) -> dict[str, str]:
    """Returns the metadata of a request after a check against OpenAI's limits; {} for None. Raises ApiError."""
    metadata = {} if value is None else value
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise bad_request("metadata", "'metadata' must be an object whose values are strings.")
    name_chars = max(map(len, metadata), default=0)
    value_chars = max(map(len, metadata.values()), default=0)
    _check_size("names", len(metadata), limits.MAX_METADATA)
    _check_size("characters in its longest name", name_chars, limits.MAX_METADATA_NAME_CHARS)
    _check_size("characters in its longest value", value_chars, limits.MAX_METADATA_CHARS)
    return metadata


def _check_size(unit: str, size: int, limit: int) -> None:
    if size > limit:
        raise bad_request("metadata", f"'metadata' has {size} {unit}; at most {limit} are allowed.")
