"""Members of SGLang's bodies that ask for nothing: clients send its whole form, mostly at its defaults.

Taken out before a body is checked, so that what is left and unknown is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from services.gateway.api.known_fields import NATIVE, is_one_of
from services.shared import limits


def without_neutral(body: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The body without members that ask for nothing, except those with a name in `known`."""
    return {name: value for name, value in body.items() if name in known or not _asks_for_nothing(name, value)}


def _asks_for_nothing(name: str, value: Any) -> bool:
    if value is None or name in NATIVE.unused:
        return True
    neutral = NATIVE.neutral.get(name)
    if neutral is None:
        return False
    is_one_per_prompt = isinstance(value, list) and len(value) <= limits.MAX_BATCH_PROMPTS
    return is_one_of(value, neutral) or (is_one_per_prompt and all(one is None or is_one_of(one, neutral) for one in value))
