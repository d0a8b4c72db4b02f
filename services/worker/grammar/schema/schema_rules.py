"""Translates a JSON schema into grammar rules. Every text that the grammar matches satisfies the schema, unless `partial` is set.

The grammar does not match all texts that satisfy the schema:

- Properties have the schema's order.
- Constants have one spelling.
- An object with declared properties has other properties only if the schema allows them explicitly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from rootstock_llm.services.worker.grammar.schema import json_rules
from rootstock_llm.services.worker.grammar.schema.automaton import TooLarge
from rootstock_llm.services.worker.grammar.schema.ebnf import Grammar, Node, Ref, Seq, Text, choice
from rootstock_llm.services.worker.grammar.schema.formats import ANY_TEXT, LENIENT_PATTERNS, PATTERNS
from rootstock_llm.services.worker.grammar.schema.json_rules import BOOLEAN, INTEGER, NULL, NUMBER, QUOTE, STRING, VALUE
from rootstock_llm.services.worker.grammar.schema.number_ranges import import_rules, multiples, numeric_keywords, whole_multiple
from rootstock_llm.services.worker.grammar.schema.refusal import GrammarRefused, one_line
from rootstock_llm.services.worker.grammar.schema.regex_rules import StringLimits, string_of
from rootstock_llm.services.worker.grammar.schema.schema_containers import array_node, object_node
from rootstock_llm.services.worker.grammar.schema.schema_disjoint import disjoint
from rootstock_llm.services.worker.grammar.schema.schema_support import (
    COMBINERS,
    TYPED,
    TYPES,
    Schema,
    bounds,
    check_keywords,
    child,
    follow,
    is_of,
    keyword_below,
    listing,
    refuse,
    resolve,
    text,
    types_of,
)

MAX_LISTED = 16  # up to this number, each constant is an alternative of its own; more constants share common prefixes
MAX_DEPTH = 64  # largest nesting depth of common prefixes
MAX_RULES = 20_000  # largest number of rules of one schema


def schema_grammar(document: Any, partial: bool = False) -> Grammar:
    """Returns the grammar of a parsed schema.

    Args:
        partial: whether unsupported keywords are ignored instead of refused.

    Raises:
        GrammarRefused: a keyword is not supported, or no finite value satisfies the schema. The error has the JSON pointer.
    """
    grammar = _grammar(PartialRuleBuilder(document) if partial else RuleBuilder(document))
    if grammar.can_end():
        return grammar
    if partial:  # no finite value satisfies all supported keywords, so only the type is enforced
        kind = document.get("type") if isinstance(document, dict) else None
        return _grammar(PartialRuleBuilder({"type": kind} if isinstance(kind, str) else True))
    raise refuse("#", "no finite value satisfies the schema")


def _grammar(builder: RuleBuilder) -> Grammar:
    root = builder.node(builder.document, "#")
    builder.build_referenced()
    return json_rules.finished(builder.rules, builder.imported, root)


class RuleBuilder:
    """Builds the nodes and rules of one schema document.

    node() recurses into nested schemas, whose depth is limited. build_referenced() builds the schemas to which `$ref` refers.
    """

    def __init__(self, document: Any) -> None:
        self.rules: dict[str, Node] = {}
        self.imported: dict[str, str] = {}  # see Grammar.imported
        self.document = document
        self._referenced: dict[str, str] = {}  # name of the rule by JSON pointer of the referenced schema
        self._waiting: list[tuple[str, str, Any]] = []  # referenced schemas without a rule, as (rule name, pointer, schema)
        self._strings: dict[StringLimits, Node] = {}  # cached nodes of limited strings

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
        """Adds a rule for a node and returns a reference to it. Raises GrammarRefused if there are more than MAX_RULES."""
        if len(self.rules) >= MAX_RULES:
            raise GrammarRefused(f"json_schema: too large: needs more than {MAX_RULES} rules")
        name = f"r{len(self.rules)}"
        self.rules[name] = node
        return Ref(name)

    def matching(self, pattern: str, path: str) -> Node:
        """Returns the node of JSON strings in which the pattern matches somewhere. Raises GrammarRefused."""
        return self._limited(StringLimits((pattern,)), path)

    def text(self, schema: Any, path: str) -> Node:
        """Returns the node of JSON strings that satisfy the schema. Raises GrammarRefused if the schema allows other types."""
        schema = self.followed(schema, path)
        found = check_keywords(schema, path)
        if any(key in COMBINERS for key in found) or types_of({"type": "string", **found}, path) != ("string",):
            raise refuse(path, "must be a schema that allows only strings: enum, const, or keywords of the type string")
        return self._string(found, path)

    def followed(self, schema: Any, path: str) -> Any:
        """Returns the schema after following its references. Raises GrammarRefused."""
        return follow(self.document, schema, path)

    def _limited(self, limits: StringLimits, path: str) -> Node:
        """Returns the node of JSON strings within the limits. Equal limits share their rules."""
        known = self._strings.get(limits)
        if known is None:
            try:
                known = self._strings[limits] = self.define(self._limited_string(limits))
            except GrammarRefused as error:
                raise refuse(path, str(error)) from None
            except TooLarge as error:
                raise refuse(path, f"the limits of the string need too many states: {error}") from None
        return known

    def _limited_string(self, limits: StringLimits) -> Node:
        """Returns the node of JSON strings within the limits.

        A pattern with unlimited repetitions becomes an automaton, whose loops become recursive rules, because masks of unlimited
        repetitions take a hundred times as long. If the automaton is too large, the pattern is translated directly if possible.
        """
        direct = limits.direct_node(self.define)
        if direct is not None and limits.is_bounded:
            return direct
        prefix = f"a{len(self._strings)}"
        try:
            rules = string_of(limits.automaton(), prefix)
        except TooLarge:
            if direct is None:
                raise
            return direct
        self.rules.update(rules)
        if len(self.rules) > MAX_RULES:
            raise TooLarge(f"more than {MAX_RULES} rules")
        return Seq((QUOTE, Ref(prefix)))

    def build_referenced(self) -> None:
        while self._waiting:
            name, path, schema = self._waiting.pop()
            self.rules[name] = self.node(schema, path)

    def _ref(self, schema: Schema, path: str) -> Node:
        pointer, target = resolve(self.document, schema["$ref"], path)
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
                if not disjoint(self.document, options[other], option, where):
                    raise refuse(
                        where,
                        f"a value might satisfy both option {other} and option {index}; use anyOf, or give the options "
                        "different types, different constants, or different constants of the same required property",
                    )
        return self._options(schema, "oneOf", path)

    def _all_of(self, schema: Schema, path: str) -> Node:
        options = listing(schema, "allOf", path)
        if len(options) != 1:
            raise refuse(child(path, "allOf"), "more than one schema is not supported")
        return self.node(options[0], child(child(path, "allOf"), 0))

    def _options(self, schema: Schema, key: str, path: str) -> Node:
        options = listing(schema, key, path)
        where = child(path, key)
        found = [self.node(option, child(where, index)) for index, option in enumerate(options) if option is not False]
        if not found:
            raise refuse(where, "must have at least one option other than false")
        return self.define(choice(found))

    def _values(self, values: list[Any], schema: Schema, path: str) -> Node:
        types = types_of(schema, path) if "type" in schema else ()
        found = [value for value in values if is_of(value, types)]
        if not found:
            raise refuse(path, "has no value of the schema's type")
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
        divisor = whole_multiple(schema, kind, path)
        if "multipleOf" in schema and divisor is None:
            prefix = f"m{len(self.rules)}"
            self.rules.update(multiples(schema, kind, prefix, path))
            return Ref(prefix)
        keywords: dict[str, float | int] = {"multipleOf": divisor} if divisor else numeric_keywords(schema, kind, path)
        if not keywords:
            return INTEGER if kind == "integer" else NUMBER
        prefix = f"n{len(self.imported)}"
        self.imported.update(import_rules(keywords, kind, prefix, path))
        return Ref(prefix)

    def _string(self, schema: Schema, path: str) -> Node:
        low, high = bounds(schema, "minLength", "maxLength", path)
        pattern, format_name = text(schema, "pattern", path), text(schema, "format", path)
        encoding = text(schema, "contentEncoding", path)
        if encoding is not None and pattern is None and format_name is None:
            if encoding not in ("base64", "base64url"):
                raise refuse(child(path, "contentEncoding"), "must be base64 or base64url, unless the schema has a pattern")
            format_name = encoding
        if pattern is None and format_name is not None and format_name not in (*PATTERNS, *ANY_TEXT):
            known = ", ".join(LENIENT_PATTERNS)
            why = f"'{one_line(format_name)}' is not supported; supported are {known}, and some formats of zod and pydantic"
            raise refuse(child(path, "format"), why)
        if pattern is not None:
            lenient = LENIENT_PATTERNS.get(format_name or "")
            patterns = (pattern,) if lenient is None else (pattern, lenient)
            return self._limited(StringLimits(patterns, low, high), child(path, "pattern"))
        if format_name is not None and format_name in PATTERNS:
            return self._limited(StringLimits((PATTERNS[format_name],), low, high), child(path, "format"))
        return STRING if low == 0 and high is None else self.define(json_rules.string_of(low, high, self.define))


class PartialRuleBuilder(RuleBuilder):
    """A builder that ignores keywords that it cannot enforce: it removes a refused keyword and builds the schema again.

    Nodes are cached by path, so that nested schemas are not built again.
    """

    def __init__(self, document: Any) -> None:
        super().__init__(document)
        self._made: dict[str, Node] = {}  # nodes by JSON pointer

    def node(self, schema: Any, path: str) -> Node:
        made = self._made.get(path)
        while made is None:
            try:
                made = super().node(_enforceable(schema), path)
            except GrammarRefused as refused:
                if schema is True:
                    raise
                schema = _without(schema, keyword_below(path, refused.path))
        self._made[path] = made
        return made


def _enforceable(schema: Any) -> Any:
    """Returns the schema without keywords that cannot be combined with its other keywords.

    - If the schema has `const` or `enum`, only this keyword and `type` remain.
    - Otherwise, if it has keywords of a type, such as minLength, these keywords and `type` remain, and combiners are removed.
    - Otherwise, only the first combiner remains.
    """
    if not isinstance(schema, dict):
        return True
    combiners = [key for key in COMBINERS if key in schema]
    limits = [key for key in schema if key in TYPED]
    if not combiners or (not limits and len(combiners) == 1 and "type" not in schema):
        return schema
    kept = next((key for key in ("const", "enum") if key in combiners), combiners[0] if not limits else "")
    dropped = {*combiners} - {kept} | ({*limits} if kept in ("const", "enum") else set())
    if kept and kept not in ("const", "enum"):
        dropped.add("type")
    return {key: value for key, value in schema.items() if key not in dropped}


def _without(schema: Any, keyword: str) -> Any:
    """Returns the schema without a keyword. If it lacks the keyword, returns only its type, or True if it has no single type.

    `oneOf` becomes `anyOf`, because `oneOf` is refused if its options do not exclude each other.
    """
    if not isinstance(schema, dict):
        return True
    if keyword == "oneOf" and isinstance(schema.get("oneOf"), list) and "anyOf" not in schema:
        return {**{key: value for key, value in schema.items() if key != "oneOf"}, "anyOf": schema["oneOf"]}
    if keyword in schema:
        return {key: value for key, value in schema.items() if key != keyword}
    kind = schema.get("type")
    return {"type": kind} if isinstance(kind, str) and kind in TYPES and len(schema) > 1 else True


def any_of(texts: Sequence[str], define: Callable[[Node], Ref], depth: int = 0) -> Node:
    """Returns a node that matches exactly these texts.

    Args:
        define: turns a node into a rule and returns a reference to it.
        depth: number of common prefixes that were already removed from these texts.
    """
    distinct = sorted(set(texts))
    if len(distinct) <= MAX_LISTED or depth == MAX_DEPTH:
        return choice(Text(text) for text in dict.fromkeys(texts))
    length = _shared(distinct[0], distinct[-1])
    rests = itertools.groupby((text[length:] for text in distinct), key=lambda rest: rest[:1])
    node = define(choice([any_of(list(group), define, depth + 1) for _, group in rests]))
    return Seq((Text(distinct[0][:length]), node)) if length else node


def _shared(first: str, last: str) -> int:
    """Returns the length of the common prefix of sorted texts: all texts share the prefix of the first and the last text."""
    return next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
