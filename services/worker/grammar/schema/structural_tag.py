"""Translates structural tags. A structural tag describes the whole output, with a schema, pattern or grammar for some parts.

A tag has xgrammar's format. This module replaces its schemas and patterns by grammars of this package, so that they have the same
meaning as outside of a tag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rootstock_llm.services.worker.core.contracts.grammar import GrammarPart
from rootstock_llm.services.worker.grammar.schema.json_document import parse_json
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused
from rootstock_llm.services.worker.grammar.schema.regex_rules import regex_ebnf
from rootstock_llm.services.worker.grammar.schema.schema_rules import schema_grammar
from rootstock_llm.services.worker.grammar.schema.schema_support import child

KIND = "structural_tag"
_FIELDS: Mapping[str, frozenset[str]] = {
    "const_string": frozenset({"value"}),
    "any_text": frozenset({"excludes"}),
    "json_schema": frozenset({"json_schema"}),
    "regex": frozenset({"pattern"}),
    "grammar": frozenset({"grammar"}),
    "sequence": frozenset({"elements"}),
    "or": frozenset({"elements"}),
    "tag": frozenset({"begin", "content", "end"}),
    "triggered_tags": frozenset({"triggers", "tags", "at_least_one", "stop_after_first", "excludes"}),
    "tags_with_separator": frozenset({"tags", "separator", "at_least_one", "stop_after_first"}),
    "optional": frozenset({"content"}),
    "plus": frozenset({"content"}),
    "star": frozenset({"content"}),
    "repeat": frozenset({"content", "min", "max"}),
}
_LISTS = ("elements", "tags")
DEFINITIONS = ("#/$defs/", "#/definitions/")  # JSON pointers that are the same in a part's and in the client's schema begin so
Parts = Mapping[str, tuple[int, GrammarPart]]  # (index, part) by the part's JSON pointer


def structural_tag(source: str, parts: Sequence[GrammarPart] = ()) -> str:
    """Returns the tag for xgrammar's compiler. Raises GrammarRefused, with the index of a part if its schema is refused."""
    document = parse_json(source, KIND)
    if not isinstance(document, dict):
        raise _refuse("#", "must be an object")
    layout = document.get("format") if "format" in document else _legacy(document)
    known = {"type", "format"} if "format" in document else {"type", "structures", "triggers"}
    _check_fields(document, known, "#")
    known_parts = {part.pointer: (index, part) for index, part in enumerate(parts)}
    return json.dumps({"type": KIND, "format": _format(layout, "#/format", known_parts)})


def _legacy(document: dict[str, Any]) -> Any:
    """Returns the format of a tag in SGLang's older form, which has `structures` (begin, schema, end) and `triggers`."""
    structures, triggers = document.get("structures"), document.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise _refuse("#", "needs 'format', or 'structures' and 'triggers'")
    tags = []
    for index, structure in enumerate(structures):
        where = child("#/structures", index)
        if not isinstance(structure, dict) or not {"begin", "end"} <= structure.keys():
            raise _refuse(where, "needs 'begin' and 'end'")
        _check_fields(structure, {"begin", "schema", "end"}, where)
        schema = structure.get("schema", True)
        content = {"type": "json_schema", "json_schema": schema if schema != {} else True}
        tags.append({"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _format(layout: Any, path: str, parts: Parts) -> dict[str, Any]:
    """Returns the format with grammars instead of schemas and patterns. parse_json() limits the depth of the recursion."""
    kind = layout.get("type") if isinstance(layout, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise _refuse(path, f"must be an object whose 'type' is one of {', '.join(_FIELDS)}")
    _check_fields(layout, _FIELDS[kind] | {"type"}, path)
    if kind == "json_schema":
        return {"type": "grammar", "grammar": _schema(layout, path, parts)}
    if kind == "regex":
        return {"type": "grammar", "grammar": _build_part(lambda: regex_ebnf(_text(layout, "pattern", path)), path, parts)}
    if kind == "tag":
        _tag_ends(layout, path)
    changed = dict(layout)
    for key in _LISTS:
        if key in layout:
            items = layout[key] if isinstance(layout[key], list) else []
            where = child(path, key)
            changed[key] = [_format(item, child(where, index), parts) for index, item in enumerate(items)]
    if "content" in layout:
        changed["content"] = _format(layout["content"], child(path, "content"), parts)
    return changed


def _schema(layout: dict[str, Any], path: str, parts: Parts) -> str:
    schema = layout.get("json_schema")
    is_partial = path in parts and parts[path][1].partial
    return _build_part(lambda: schema_grammar(schema, is_partial).render(), path, parts)


def _build_part(build: Callable[[], str], path: str, parts: Parts) -> str:
    try:
        return build()
    except GrammarRefused as error:
        if path not in parts:
            raise _refuse(path, str(error)) from None
        index, part = parts[path]
        pointer = error.path if error.path.startswith(DEFINITIONS) else f"#{part.within}{error.path[1:]}"
        raise GrammarRefused(f"{pointer}: {error.why}" if error.path else str(error), part=index) from None


def _tag_ends(layout: dict[str, Any], path: str) -> None:
    """Checks that `begin` and `end` are texts. xgrammar also allows token ids, which are not supported."""
    _text(layout, "begin", path)
    ends = layout.get("end")
    if not isinstance(ends, str) and not (isinstance(ends, list) and all(isinstance(end, str) for end in ends)):
        raise _refuse(child(path, "end"), "must be a string or an array of strings")


def _text(layout: dict[str, Any], key: str, path: str) -> str:
    value = layout.get(key)
    if not isinstance(value, str):
        raise _refuse(child(path, key), "must be a string")
    return value


def _check_fields(found: dict[str, Any], known: frozenset[str] | set[str], path: str) -> None:
    for key in found:
        if key not in known:
            raise _refuse(child(path, key), "is not supported")


def _refuse(path: str, why: str) -> GrammarRefused:
    return GrammarRefused(f"{KIND}: {path}: {why}")
