"""Keywords of JSON Schema that limit nothing. Draft 2020-12, with `definitions` of the older drafts."""

from __future__ import annotations

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator"),
        *("$comment", "$schema", "$id", "$anchor", "$defs", "definitions"),
    }
)


def is_annotation(keyword: str) -> bool:
    """Anybody's own, which begin with x-, are too."""
    return keyword in ANNOTATIONS or keyword.startswith("x-")
