"""Rules for the objects and arrays of a schema.

An object has one rule per position in its list of declared properties. If the number of properties is limited, it has one rule
per position and number of properties so far.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rootstock_llm.services.shared.json_schema import is_annotation
from rootstock_llm.services.shared.limits import MAX_OPTIONAL_PROPERTIES
from rootstock_llm.services.worker.grammar.schema import json_rules
from rootstock_llm.services.worker.grammar.schema.ebnf import Chars, Node, Ref, Repeat, Seq, Text, choice, without
from rootstock_llm.services.worker.grammar.schema.json_rules import COMMA, OBJECT, QUOTE, SAFE, STRING, VALUE, WS
from rootstock_llm.services.worker.grammar.schema.schema_support import (
    Schema,
    bounds,
    check_keywords,
    child,
    is_of,
    listing,
    mapping,
    names,
    refuse,
    types_of,
)

MAX_COUNTED_STATES = 2000  # largest number of an object's rules; there is one for each position and number of pairs so far
MANY_PROPERTIES = 64  # if an object has more properties, each optional pair becomes a rule
RUN_ITEMS = 32  # largest number of consecutive required pairs in one rule
_COLON = Seq((WS, Text(":"), WS))


class Builder(Protocol):
    """Builds the nodes of an object's keys and values and of an array's items, and turns nodes into rules."""

    def node(self, schema: Any, path: str) -> Node: ...

    def define(self, node: Node) -> Ref: ...

    def matching(self, pattern: str, path: str) -> Node:
        """Returns the node of JSON strings in which the pattern matches somewhere. Raises GrammarRefused."""

    def text(self, schema: Any, path: str) -> Node:
        """Returns the node of JSON strings that satisfy the schema. Raises GrammarRefused if the schema allows other types."""

    def followed(self, schema: Any, path: str) -> Any:
        """Returns the schema after following its references. Raises GrammarRefused."""


@dataclass(frozen=True, slots=True)
class _Members:
    """The key-value pairs that an object may have."""

    pairs: tuple[tuple[Node, bool], ...]  # declared properties in order, as (pair, whether it is required)
    extra: Node | None  # a pair of an undeclared property, or None if such properties are not allowed
    low: int  # smallest number of pairs
    high: int | None  # largest number of pairs; None: unlimited

    @property
    def counted_to(self) -> int:
        """The number up to which the rules must count pairs; 0 if the number of pairs is not limited."""
        return self.low if self.high is None else self.high


def object_node(builder: Builder, schema: Schema, path: str) -> Node:
    members = _members(builder, schema, path)
    if members is None:
        return OBJECT
    if members.counted_to and (len(members.pairs) + 1) * (members.counted_to + 1) > MAX_COUNTED_STATES:
        raise refuse(path, "has too many properties for minProperties or maxProperties")
    return builder.define(Seq((Text("{"), WS, _PairStates(builder, members).first())))


def array_node(builder: Builder, schema: Schema, path: str) -> Node:
    if schema.get("uniqueItems", False) is not False:
        raise refuse(child(path, "uniqueItems"), "this keyword is not supported")
    low, high = bounds(schema, "minItems", "maxItems", path)
    prefix_schemas = listing(schema, "prefixItems", path)[:high]
    where = child(path, "prefixItems")
    prefix = [builder.node(item, child(where, index)) for index, item in enumerate(prefix_schemas)]
    rest = _rest_items(builder, schema, path, len(prefix), low)
    if rest is None and low > len(prefix):
        raise refuse(child(path, "minItems"), "exceeds the number of items that the array may have")
    end = Seq((WS, Text("]")))
    state = _rest_of_array(rest, end, max(low - len(prefix), 0), None if high is None else high - len(prefix), not prefix)
    for index in reversed(range(len(prefix))):
        item = prefix[index] if index == 0 else Seq((COMMA, prefix[index]))
        follows: Node = Seq((item, state))
        if index >= low:
            follows = choice([follows, Text("]") if index == 0 else end])
        state = builder.define(follows)
    return builder.define(Seq((Text("["), WS, state)))


def _rest_items(builder: Builder, schema: Schema, path: str, num_prefix: int, low: int) -> Node | None:
    """Returns the node of the items after the prefix, or None if no items may follow."""
    if schema.get("items", True) is False:
        return None
    if "items" not in schema:  # without `items`, a tuple ends after its prefix unless minItems needs more
        return None if num_prefix and low <= num_prefix else VALUE
    if isinstance(schema["items"], list):
        raise refuse(child(path, "items"), "an array of schemas is not supported; use prefixItems")
    return builder.node(schema["items"], child(path, "items"))


def _rest_of_array(rest: Node | None, end: Node, low: int, high: int | None, first: bool) -> Node:
    if rest is None or high == 0:
        return Text("]") if first else end
    more = Seq((COMMA, rest))
    if not first:
        return Seq((Repeat(more, low, high), end))
    some = Seq((rest, Repeat(more, max(low - 1, 0), None if high is None else high - 1), end))
    return some if low else choice([some, Text("]")])


def _members(builder: Builder, schema: Schema, path: str) -> _Members | None:
    """Returns the pairs that objects of the schema may have, or None if any object satisfies the schema."""
    low, high = bounds(schema, "minProperties", "maxProperties", path)
    _check_additional(schema, path)
    written = mapping(schema, "properties", path)
    schema = _with_named(builder, schema, path)
    properties = mapping(schema, "properties", path)
    required = set(names(schema, "required", path))
    extra = _extra_pair(builder, schema, path, properties)
    if extra is not None and low > 1:
        raise refuse(child(path, "minProperties"), "a value above 1 needs additionalProperties: false")
    where = child(path, "properties")
    pairs = []
    for name, member in properties.items():
        if member is not False:
            at = child(where, name) if name in written else child(path, "additionalProperties")
            pair = _pair(_key(name, where), builder.node(member, at))
            # An optional pair occurs in several rules. With hundreds of pairs, one shared rule per pair reduces the cost to a
            # tenth.
            shared = len(properties) > MANY_PROPERTIES and name not in required
            pairs.append((builder.define(pair) if shared else pair, name in required))
        elif name in required:
            raise refuse(child(where, name), "is required, but its schema false allows no value")
    for name in dict.fromkeys(names(schema, "required", path)):
        if name not in properties:
            pairs.append((_pair(_key(name, where), _undeclared(builder, schema, path, name)), True))
    if not (pairs or low or high is not None or _is_narrow(schema)):
        return None
    if low > len(pairs) and extra is None:
        raise refuse(child(path, "minProperties"), "exceeds the number of properties that the object may have")
    if high is not None and high < sum(needed for _, needed in pairs):
        raise refuse(child(path, "maxProperties"), "is less than the number of required properties")
    return _Members(tuple(pairs), extra, low, high)


def _is_narrow(schema: Schema) -> bool:
    open_ended = ("additionalProperties", "unevaluatedProperties")
    return any(schema.get(key, True) is not True for key in open_ended) or "properties" in schema or _key_limits(schema) != []


def _key_limits(schema: Schema) -> list[str]:
    return [key for key in ("patternProperties", "propertyNames") if schema.get(key, {}) != {}]


def _check_additional(schema: Schema, path: str) -> None:
    for key in ("additionalProperties", "unevaluatedProperties"):
        if key in schema and schema[key] is None:
            raise refuse(child(path, key), "must be an object, or a boolean")


def _additional(schema: Schema) -> Any:
    """Returns the schema of undeclared properties, or None if the schema has none. See _check_additional()."""
    return schema.get("additionalProperties", schema.get("unevaluatedProperties"))


def _undeclared(builder: Builder, schema: Schema, path: str, name: str) -> Node:
    """Returns the node of the value of a required property that is not declared. Raises GrammarRefused."""
    additional = _additional(schema)
    if additional is False or _key_limits(schema):
        raise refuse(child(path, "required"), f"'{name}' is not in properties")
    return VALUE if additional is None else builder.node(additional, child(path, "additionalProperties"))


def _extra_pair(builder: Builder, schema: Schema, path: str, properties: Mapping[str, Any]) -> Node | None:
    """Returns the node of an undeclared property's key and value, or None if the object must not have such properties.

    The key is written without escapes and is never a declared key.
    """
    additional = _additional(schema)
    limits = _key_limits(schema)
    if len(limits) > 1:
        raise refuse(child(path, limits[1]), f"not supported together with {limits[0]}")
    if "patternProperties" in limits:
        return _pattern_pair(builder, schema, path, properties, additional)
    declared = [*properties, *names(schema, "required", path)]
    if "propertyNames" in limits and declared:
        raise refuse(child(path, "propertyNames"), "not supported together with properties")
    is_declared = bool(declared) or ("properties" in schema and not schema.get("minProperties"))
    if additional is False or (is_declared and additional is None and not limits):
        return None
    value = VALUE if additional is None else builder.node(additional, child(path, "additionalProperties"))
    if "propertyNames" in limits:
        return _pair(builder.text(schema["propertyNames"], child(path, "propertyNames")), value)
    return _pair(_key_except(builder, set(declared)) if declared else STRING, value)


def _pattern_pair(builder: Builder, schema: Schema, path: str, properties: Mapping[str, Any], additional: Any) -> Node:
    patterns = mapping(schema, "patternProperties", path)
    where = child(path, "patternProperties")
    if additional not in (None, False):
        raise refuse(child(path, "additionalProperties"), "must be false or absent if patternProperties is set")
    if len(patterns) > 1:
        raise refuse(where, "more than one pattern is not supported")
    for pattern, member in patterns.items():
        at = child(where, pattern)
        key = builder.matching(pattern, at)
        for name in (*properties, *names(schema, "required", path)):
            if _found(pattern, name, at):
                raise refuse(at, f"matches the declared property '{name}'")
        return _pair(builder.define(key), builder.node(member, at))
    raise AssertionError("patternProperties is not empty here")


def _found(pattern: str, name: str, path: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error as error:
        raise refuse(path, f"pattern: {error}") from None


def _with_named(builder: Builder, schema: Schema, path: str) -> Schema:
    """Returns the schema without `propertyNames`, if possible.

    - If `propertyNames` allows every name, it is removed.
    - If it lists names (enum or const) and there is no `patternProperties`, the names become declared properties. A declared
      property occurs at most once in an object.
    - Otherwise, the schema does not change.
    """
    where = child(path, "propertyNames")
    found = builder.followed(schema.get("propertyNames", True), where)
    if found is True or (isinstance(found, dict) and _keywords_of(found) <= {"type"} and "string" in types_of(found, where)):
        return {key: value for key, value in schema.items() if key != "propertyNames"}
    if not isinstance(found, dict) or not ("enum" in found or "const" in found) or schema.get("patternProperties"):
        return schema
    check_keywords(found, where)
    listed = listing(found, "enum", where) if "enum" in found else [found["const"]]
    types = types_of(found, where) if "type" in found else ()
    allowed = dict.fromkeys(value for value in listed if isinstance(value, str) and is_of(value, types))
    if not 0 < len(allowed) <= MAX_OPTIONAL_PROPERTIES:
        raise refuse(where, f"must list 1 to {MAX_OPTIONAL_PROPERTIES} different strings; it lists {len(allowed)}")
    for name in names(schema, "required", path):
        if name not in allowed:
            raise refuse(child(path, "required"), f"'{name}' is not in propertyNames")
    additional = _additional(schema)
    member = True if additional is None else additional
    properties = mapping(schema, "properties", path)
    declared = {name: properties.get(name, member) for name in allowed if name in properties or additional is not False}
    rest = {key: value for key, value in schema.items() if key not in ("propertyNames", "unevaluatedProperties")}
    return {**rest, "properties": declared, "additionalProperties": False}


def _keywords_of(schema: Schema) -> set[str]:
    return {key for key in schema if not is_annotation(key)}


def _key(name: str, path: str) -> Node:
    return json_rules.literal(name, f"json_schema: {path}")


def _pair(key: Node, value: Node) -> Node:
    return Seq((key, _COLON, value))


def _key_except(builder: Builder, declared: set[str]) -> Ref:
    """Returns the node of a key without escapes that differs from all declared keys.

    If an undeclared pair could have a declared key, the key could occur twice, and most parsers would use the last value. There
    is one rule per prefix of a declared key, with the characters that may follow the prefix.
    """
    following: dict[str, set[str]] = {"": set()}
    for name in sorted(declared):
        for index, char in enumerate(name):
            following.setdefault(name[:index], set()).add(char)
            following.setdefault(name[: index + 1], set())
    rules: dict[str, Ref] = {}
    for beginning in sorted(following, key=lambda text: (-len(text), text)):
        next_chars = sorted(following[beginning])
        others = without(SAFE.ranges, tuple((ord(char), ord(char)) for char in next_chars))
        options: list[Node] = [Seq((Chars(others), Repeat(SAFE, 0, None), QUOTE))]
        options += [Seq((Text(char), rules[beginning + char])) for char in next_chars if _is_safe(char)]
        options += [QUOTE] if beginning not in declared else []
        rules[beginning] = builder.define(choice(options))
    return builder.define(Seq((QUOTE, rules[""])))


def _is_safe(char: str) -> bool:
    return any(low <= ord(char) <= high for low, high in SAFE.ranges)


class _PairStates:
    """Builds the rules of an object.

    A rule matches the rest of the object. It depends on the next declared pair and the number of pairs so far.
    """

    def __init__(self, builder: Builder, members: _Members) -> None:
        self._builder = builder
        self._members = members
        # Rules by (index of the next declared pair, number of pairs so far, whether the next pair is the first of the object).
        # None: no text can complete the object.
        self._rules: dict[tuple[int, int, bool], Node | None] = {}

    def first(self) -> Node:
        """Returns the node of the whole object. Builds the rules from the last declared pair backwards, without recursion."""
        members = self._members
        for index in range(len(members.pairs), -1, -1):
            for pairs in range(members.counted_to, -1, -1):
                for is_first in (False, True) if pairs == 0 else (False,):
                    options = self._options(index, pairs, is_first)
                    self._rules[index, pairs, is_first] = self._state(index, options) if options else None
        start = self._rules[0, 0, True]
        assert start is not None, "the counts were checked against the properties"
        return start

    def _state(self, index: int, options: list[Node]) -> Node:
        """Returns a node that matches one of the options. It refers to a new rule, except within a run of required pairs.

        A run becomes a single rule, which compiles four times as fast as one rule per pair.
        """
        node = choice(options)
        follows_required = index > 0 and self._members.pairs[index - 1][1] and not self._members.counted_to
        if follows_required and isinstance(node, Seq) and len(node.items) < RUN_ITEMS:
            return node
        return self._builder.define(node)

    def _options(self, index: int, pairs: int, is_first: bool) -> list[Node]:
        members = self._members
        room = members.high is None or pairs < members.high
        after = min(pairs + 1, members.counted_to)
        if index == len(members.pairs):
            return self._last(pairs, is_first, room)
        pair, required = members.pairs[index]
        options: list[Node] = []
        taken, left_out = self._rules[index + 1, after, False], self._rules[index + 1, pairs, is_first]
        if room and taken is not None:
            follows = taken.items if isinstance(taken, Seq) else (taken,)
            options.append(Seq((_joined(pair, is_first), *follows)))
        if not required and left_out is not None:
            options.append(left_out)
        return options

    def _last(self, pairs: int, is_first: bool, room: bool) -> list[Node]:
        """Returns the options after all declared pairs: undeclared pairs, or the end of the object.

        Args:
            pairs: number of pairs so far.
            is_first: whether the next pair is the first of the object.
            room: whether the object may have another pair.
        """
        members = self._members
        end: Node = Text("}") if is_first else Seq((WS, Text("}")))
        left = None if members.high is None else members.high - pairs
        needed = max(members.low - pairs, 0)
        if members.extra is None or not room:
            return [] if needed else [end]
        if not is_first:
            return [Seq((Repeat(_joined(members.extra, False), needed, left), end))]
        rest = Repeat(_joined(members.extra, False), max(needed - 1, 0), None if left is None else left - 1)
        some = Seq((members.extra, rest, Seq((WS, Text("}")))))
        return [some] if needed else [some, end]


def _joined(pair: Node, is_first: bool) -> Node:
    return pair if is_first else Seq((COMMA, pair))
