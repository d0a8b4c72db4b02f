"""A JSON schema turned into grammar rules. Everything that the grammar matches satisfies the schema.

The reverse does not hold, on purpose: properties come in the schema's order, an object that declares properties has no
others unless it says so, constants have one spelling.
"""

from __future__ import annotations

from typing import Any

from services.worker.grammar.schema import json_rules
from services.worker.grammar.schema.ebnf import Grammar, Node, Ref, choice
from services.worker.grammar.schema.formats import PATTERNS
from services.worker.grammar.schema.json_rules import BOOLEAN, INTEGER, NULL, NUMBER, STRING, VALUE
from services.worker.grammar.schema.number_ranges import import_rules, numeric_keywords
from services.worker.grammar.schema.refusal import GrammarRefused
from services.worker.grammar.schema.regex_rules import string_matching
from services.worker.grammar.schema.schema_containers import array_node, object_node
from services.worker.grammar.schema.schema_disjoint import disjoint
from services.worker.grammar.schema.schema_support import (
    KEYWORDS_OF_TYPE,
    Schema,
    bounds,
    check_keywords,
    child,
    is_of,
    listing,
    refuse,
    resolve,
    types_of,
)
from services.worker.grammar.schema.shared_beginnings import any_of

MAX_RULES = 20_000


def schema_grammar(document: Any) -> Grammar:
    """The grammar of a parsed schema. Raises GrammarRefused with the place of what is not supported."""
    builder = RuleBuilder(document)
    root = builder.node(document, "#")
    builder.build_referenced()
    grammar = json_rules.finished(builder.rules, builder.imported, root)
    if not grammar.can_end():
        raise refuse("#", "no finite value satisfies it")
    return grammar


class RuleBuilder:
    """Makes nodes of schemas. Recursion follows the document's nesting, which is bounded; references wait for their turn."""

    def __init__(self, document: Any) -> None:
        self.rules: dict[str, Node] = {}
        self.imported: dict[str, str] = {}
        self._document = document
        self._referenced: dict[str, str] = {}  # pointer -> rule
        self._waiting: list[tuple[str, str, Any]] = []

    def node(self, schema: Any, path: str) -> Node:
        if schema is True:
            return VALUE
        found = check_keywords(schema, path)
        for key, build in (("$ref", self._ref), ("anyOf", self._any_of), ("oneOf", self._one_of), ("allOf", self._all_of)):
            if key in found:
                return build(found, path)
        if "const" in found:
            return self._values([found["const"]], found, child(path, "const"))
        if "enum" in found:
            return self._values(listing(found, "enum", path), found, child(path, "enum"))
        types = types_of(found, path)
        return choice(self._typed(name, found, path) for name in types) if types else VALUE

    def define(self, node: Node) -> Ref:
        """A rule of its own."""
        if len(self.rules) >= MAX_RULES:
            raise GrammarRefused(f"json_schema: more than {MAX_RULES} rules")
        name = f"r{len(self.rules)}"
        self.rules[name] = node
        return Ref(name)

    def matching(self, pattern: str, path: str) -> Node:
        """A string in which the pattern is found. Raises GrammarRefused."""
        try:
            return string_matching(pattern)
        except GrammarRefused as error:
            raise refuse(path, str(error)) from None

    def build_referenced(self) -> None:
        while self._waiting:
            name, path, schema = self._waiting.pop()
            self.rules[name] = self.node(schema, path)

    def _ref(self, schema: Schema, path: str) -> Node:
        pointer, target = resolve(self._document, schema["$ref"], path)
        name = self._referenced.get(pointer)
        if name is None:
            name = self._referenced[pointer] = f"ref{len(self._referenced)}"
            self._waiting.append((name, pointer, target))
        return Ref(name)

    def _any_of(self, schema: Schema, path: str) -> Node:
        return self._options(schema, "anyOf", path)

    def _one_of(self, schema: Schema, path: str) -> Node:
        options = listing(schema, "oneOf", path)
        where = child(path, "oneOf")
        for index, option in enumerate(options):
            for other in range(index):
                if not disjoint(self._document, options[other], option, where):
                    raise refuse(
                        where,
                        f"options {other} and {index} may both hold; supported are options that types, constants or a "
                        "required constant property tell apart (or use anyOf)",
                    )
        return self._options(schema, "oneOf", path)

    def _all_of(self, schema: Schema, path: str) -> Node:
        options = listing(schema, "allOf", path)
        if len(options) != 1:
            raise refuse(child(path, "allOf"), "supported with a single schema only")
        return self.node(options[0], child(child(path, "allOf"), 0))

    def _options(self, schema: Schema, key: str, path: str) -> Node:
        options = listing(schema, key, path)
        where = child(path, key)
        found = [self.node(option, child(where, index)) for index, option in enumerate(options) if option is not False]
        if not found:
            raise refuse(where, "must have an option that allows something")
        return self.define(choice(found))

    def _values(self, values: list[Any], schema: Schema, path: str) -> Node:
        types = types_of(schema, path) if "type" in schema else ()
        found = [value for value in values if is_of(value, types)]
        if not found:
            raise refuse(path, "no value of the schema's type")
        return self.define(any_of([json_rules.literal(value, f"json_schema: {path}").text for value in found], self.define))

    def _typed(self, name: str, schema: Schema, path: str) -> Node:
        match name:
            case "object":
                return object_node(self, schema, path)
            case "array":
                return array_node(self, schema, path)
            case "string":
                return self._string(schema, path)
            case "null":
                return NULL
            case "boolean":
                return BOOLEAN
        return self._number(name, schema, path)

    def _number(self, kind: str, schema: Schema, path: str) -> Node:
        keywords = numeric_keywords(schema, kind, path)
        if not keywords:
            return INTEGER if kind == "integer" else NUMBER
        prefix = f"n{len(self.imported)}"
        self.imported.update(import_rules(keywords, kind, prefix, path))
        return Ref(prefix)

    def _string(self, schema: Schema, path: str) -> Node:
        low, high = bounds(schema, "minLength", "maxLength", path)
        kinds = [key for key in ("pattern", "format") if key in schema]
        if not KEYWORDS_OF_TYPE["string"] & schema.keys() or (not kinds and low == 0 and high is None):
            return STRING
        if not kinds:
            return self.define(json_rules.string_of(low, high))
        if len(kinds) > 1 or high is not None or low > (1 if kinds == ["format"] else 0):
            raise refuse(child(path, kinds[0]), "not supported together with other limits on the string")
        return self.define(self._pattern_or_format(schema, kinds[0], path))

    def _pattern_or_format(self, schema: Schema, key: str, path: str) -> Node:
        value = schema[key]
        if not isinstance(value, str):
            raise refuse(child(path, key), "must be a string")
        if key == "format" and value not in PATTERNS:
            raise refuse(child(path, key), f"'{value}' is not supported; supported are {', '.join(PATTERNS)}")
        return self.matching(PATTERNS[value] if key == "format" else value, child(path, key))
