"""Translates every form of an output constraint that an API accepts into a Grammar for workers. Pure; raises ApiError.

These functions check only the form and the size of a constraint. The worker compiles the schema, pattern or grammar before the
first token and reports an invalid one. Error messages never repeat a value that the client sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.services.gateway.api.request_body import ConstraintBody, load_json
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.json_schema import too_large

Named = tuple[str, pb.Grammar]  # the client's field that asks for the constraint, and the grammar
# The fields of chats, Responses and Messages with the format of the text. Clients also send them with a required call.
TEXT_FORMATS = frozenset(("response_format", "text.format", "output_config.format"))


def constraint_of(body: ConstraintBody) -> Named | None:
    """Returns the constraint of a body, or None. Raises ApiError if it is invalid, or if two fields constrain the output."""
    found = [named for field in ConstraintBody.model_fields if (named := _of_field(field, getattr(body, field))) is not None]
    return only_one(found)


def only_one(found: Sequence[Named]) -> Named | None:
    """Returns the only constraint of the list, or None if the list is empty.

    Raises:
        ApiError: The list has several constraints. The message names the fields of the first two.
    """
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise bad_request(second, f"'{first}' and '{second}' both constrain the output. Send only one.")
    return found[0] if found else None


def _of_field(field: str, value: Any) -> Named | None:
    if value is None:
        return None
    if field == "response_format":
        return response_format(value, field)
    if field == "structured_outputs":
        return _structured_outputs(value)
    return field, _MAKERS[field](value, field)


def response_format(value: Any, where: str) -> Named | None:
    """Returns the constraint of a response format, or None for the format `text`. Raises ApiError.

    Args:
        where: Path of `value` in the client's body.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return where, pb.Grammar(json_object=True) if schema is None else json_schema(schema, f"{where}.schema")
    if kind == "json_schema":
        return where, named_schema(value.get("json_schema"), f"{where}.json_schema")
    if kind == "structural_tag":
        return where, structural_tag(value, where)
    raise bad_request(f"{where}.type", f"'{where}.type' must be one of text, json_object, json_schema, structural_tag.")


def named_schema(value: Any, where: str) -> pb.Grammar:
    """Returns the grammar of the `json_schema` member of a response format, which has a name and a schema. Raises ApiError."""
    if not isinstance(value, dict):
        raise bad_request(where, f"'{where}' must be an object with 'name' and 'schema'.")
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise bad_request(f"{where}.name", f"'{where}.name' is required.")
    if value.get("schema") is None:
        raise bad_request(f"{where}.schema", f"'{where}.schema' is required.")
    return json_schema(value["schema"], f"{where}.schema")


def _structured_outputs(value: Any) -> Named | None:
    if not isinstance(value, dict):
        raise bad_request("structured_outputs", "'structured_outputs' must be an object.")
    if value.get("whitespace_pattern") is not None:
        where = "structured_outputs.whitespace_pattern"
        raise bad_request(where, f"'{where}' is not supported by this server.", "unsupported_parameter")
    found: list[Named] = []
    for name, maker in _STRUCTURED.items():
        where = f"structured_outputs.{name}"
        if value.get(name) is not None and not (name == "json_object" and value[name] is False):
            found.append((where, maker(value[name], where)))
    return only_one(found)


def json_object(value: Any, where: str) -> pb.Grammar:
    if value is not True:
        raise bad_request(where, f"'{where}' must be true or false.")
    return pb.Grammar(json_object=True)


def json_schema(value: Any, where: str) -> pb.Grammar:
    """Returns the grammar of a JSON schema: an object, a boolean, or the JSON text of either. Raises ApiError."""
    schema = _loaded(value, where) if isinstance(value, str) else value
    if not isinstance(schema, dict | bool):
        raise bad_request(where, f"'{where}' must be a JSON Schema: an object, a boolean, or the JSON text of either.")
    _check_parts(schema, where)
    return pb.Grammar(json_schema=_dumped(schema, where))


def structural_tag(value: Any, where: str) -> pb.Grammar:
    """Returns the grammar of a structural tag: an object, or the JSON text of one. Raises ApiError.

    A text is parsed without the depth limit of load_json(), because tags that the gateway makes for tool calls are nested more
    deeply.
    """
    tag = _loaded(value, where, orjson.loads) if isinstance(value, str) else value
    if not isinstance(tag, dict):
        raise bad_request(where, f"'{where}' must be an object, or the JSON text of one.")
    _check_parts(tag, where)
    return pb.Grammar(structural_tag=_dumped(tag, where))


def regex(value: Any, where: str) -> pb.Grammar:
    return pb.Grammar(regex=_text(value, where))


def ebnf(value: Any, where: str) -> pb.Grammar:
    return pb.Grammar(ebnf=_text(value, where))


def choice(value: Any, where: str) -> pb.Grammar:
    """Returns the grammar of an output that equals one of the listed texts. Raises ApiError."""
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise bad_request(where, f"'{where}' must be a list of at least one text, and no text may be empty.")
    if len(value) > limits.MAX_GUIDED_CHOICES:
        raise bad_request(where, f"'{where}' may have at most {limits.MAX_GUIDED_CHOICES} texts.")
    if sum(map(len, value)) > limits.MAX_GRAMMAR_BYTES:
        raise _too_large(where)
    return ebnf("root ::= " + " | ".join(map(_literal, dict.fromkeys(value))), where)


def _literal(text: str) -> str:
    """Returns an EBNF string literal for the text."""
    return f'"{text.translate(_ESCAPES)}"'


_ESCAPES = str.maketrans({'"': '\\"', "\\": "\\\\", **{chr(code): f"\\u{code:04x}" for code in (*range(0x20), 0x7F)}})


def _loaded(text: str, where: str, load: Callable[[str], Any] = load_json) -> Any:
    _check_size(text, where)
    try:
        return load(text)
    except orjson.JSONDecodeError:
        raise bad_request(where, f"'{where}' is not valid JSON.") from None


def _dumped(value: Any, where: str) -> str:
    """Returns the JSON text of a value, which workers use as the key of their cache of compiled grammars.

    Members keep the client's order, because the output has its members in the same order.
    """
    try:
        text = orjson.dumps(value).decode()
    except (orjson.JSONEncodeError, RecursionError):
        raise bad_request(where, f"'{where}' is nested too deeply.") from None
    return _check_size(text, where)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad_request(where, f"'{where}' must be a text that is not empty.")
    return _check_size(value, where)


def _check_size(text: str, where: str) -> str:
    if len(text) > limits.MAX_GRAMMAR_BYTES or len(text.encode()) > limits.MAX_GRAMMAR_BYTES:
        raise _too_large(where)
    return text


def _check_parts(schema: Any, where: str) -> None:
    excess = too_large(schema)
    if excess:
        raise bad_request(where, f"'{where}' has {excess}.")


def _too_large(where: str) -> ApiError:
    return bad_request(where, f"'{where}' may have at most {limits.MAX_GRAMMAR_BYTES} bytes.")


# Makes the grammar of a field's value. The second argument is the field's path in the client's body, for errors.
Maker = Callable[[Any, str], pb.Grammar]
_MAKERS: Mapping[str, Maker] = {
    "guided_json": json_schema,
    "guided_regex": regex,
    "guided_choice": choice,
    "guided_grammar": ebnf,
    "json_schema": json_schema,
    "regex": regex,
    "ebnf": ebnf,
    "structural_tag": structural_tag,
}
_STRUCTURED: Mapping[str, Maker] = {
    "json": json_schema,
    "regex": regex,
    "choice": choice,
    "grammar": ebnf,
    "json_object": json_object,
    "structural_tag": structural_tag,
}
