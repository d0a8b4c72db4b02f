"""Builds the parts of a structural tag, in the form that services/worker/grammar/schema/structural_tag.py reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Layout = Mapping[str, Any]
# Name of the member that has the LayoutOrigin of a part. The gateway removes this member before it sends the tag.
ORIGIN = "origin"

LINES = r"\n{0,2}"  # pattern of the line ends that models write between reasoning and text


def const(text: str) -> Layout:
    return {"type": "const_string", "value": text}


def any_text(*excludes: str) -> Layout:
    return {"type": "any_text", "excludes": list(excludes)}


@dataclass(frozen=True, slots=True)
class LayoutOrigin:
    """The request field from which a part of a layout was built. If a worker refuses the part, the error names this field."""

    field: str  # field of the request, such as tools[0].function.parameters
    within: str = ""  # JSON pointer into the schema in `field`, without the #
    partial: bool = False  # whether the worker ignores keywords of the schema that it does not support, instead of refusing them


def schema(document: Mapping[str, Any] | bool, origin: LayoutOrigin | None = None) -> Layout:
    return {"type": "json_schema", "json_schema": document, **({} if origin is None else {ORIGIN: origin})}


def regex(pattern: str) -> Layout:
    return {"type": "regex", "pattern": pattern}


def sequence(*parts: Layout) -> Layout:
    return {"type": "sequence", "elements": list(parts)} if len(parts) != 1 else parts[0]


def either(*parts: Layout) -> Layout:
    return {"type": "or", "elements": list(parts)} if len(parts) != 1 else parts[0]


def optional(part: Layout) -> Layout:
    return {"type": "optional", "content": part}


def star(part: Layout) -> Layout:
    return {"type": "star", "content": part}


def tag(begin: str, content: Layout, end: str) -> Layout:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def calls(tags: Sequence[Layout], separator: str, parallel: bool) -> Layout:
    """Returns the layout of one or more tags with the separator between them; of exactly one tag if `parallel` is False."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def within_text(triggers: Sequence[str], tags: Sequence[Layout], excludes: Sequence[str], parallel: bool) -> Layout:
    """Returns the layout of free text with tags. If the text has a trigger, the trigger must be the beginning of one of the tags.

    Args:
        excludes: Texts that must not occur in the free text.
        parallel: Whether more text and tags may follow the first tag.
    """
    return {
        "type": "triggered_tags",
        "triggers": list(triggers),
        "tags": list(tags),
        "excludes": list(excludes),
        "stop_after_first": not parallel,
    }
