"""The tools of a chat: the functions that the model may or must call, and the grammar that restricts the output to valid calls.

Each API translates its form of tools and tool choice with these functions. Pure. An ApiError names the invalid element.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.services.gateway.api.constraints import TEXT_FORMATS, structural_tag
from rootstock_llm.services.gateway.api.known_fields import hosted_type, own_name
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request
from rootstock_llm.services.gateway.generation.request import GenerationParams
from rootstock_llm.services.gateway.output.output_parser import MakeParsing, ParserSetup, Parsing
from rootstock_llm.services.gateway.output.tags.demand import CallDemand, TagRefused, ToolSpec
from rootstock_llm.services.gateway.output.tags.layouts import ORIGIN, Layout, LayoutOrigin, regex, schema
from rootstock_llm.services.gateway.output.tags.structural_tags import Tag, after_reasoning, call_tag, calls_or_answer
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.json_schema import too_large
from rootstock_llm.services.shared.output_formats import NONE, OutputFormats

FALLBACK = "hermes"  # format of required calls if the model's own format of calls is unknown
_NAME = re.compile(f"[a-zA-Z0-9_.:-]{{1,{limits.MAX_TOOL_NAME_CHARS}}}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """A grammar that restricts an output to calls, to a constrained text, or to either."""

    grammar: pb.Grammar
    fields: Sequence[str]  # for each part of the grammar, the client's field that it was made of


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tool calls that the outputs of a chat may or must have."""

    callable: tuple[ToolSpec, ...] = ()  # functions that the model may call
    forced: bool = False  # whether the output must be at least one call
    parallel: bool = True  # whether the output may have more than one call

    def formats(self, known: OutputFormats) -> OutputFormats:
        """Returns the formats in which outputs are parsed.

        Without tools, calls are not parsed and stay in the text, except in harmony. If a call is required and the model's format
        of calls is unknown, the format is FALLBACK.

        Args:
            known: The model's formats, which its tokenizer reports.
        """
        if not self.callable:
            return known if known.tools in (NONE, "harmony") else OutputFormats(NONE, known.reasoning)
        return OutputFormats(FALLBACK, known.reasoning) if self.forced and known.tools == NONE else known

    def parsing(self, formats: OutputFormats, make: MakeParsing) -> Parsing | None:
        """Returns the parser settings for the outputs, or None if the whole output is text."""
        if not formats.tools and not formats.reasoning:
            return None
        schemas = {tool.name: tool.parameters for tool in self.callable}
        most = limits.MAX_CALLS if self.parallel else 1
        return make(formats, ParserSetup(schemas, most))

    def calls_or_text(self, formats: OutputFormats, text: Layout, field: str) -> OutputGrammar | None:
        """Returns the grammar of an output that is either calls or a constrained text. Raises ApiError.

        Args:
            text: The layout of the constrained text.
            field: The client's field that constrains the text.

        Returns:
            None if calls are not allowed, are required, or have no known format.
        """
        if not self.callable or self.forced or formats.tools == NONE:
            return None
        try:
            return _grammar_of(calls_or_answer(formats, CallDemand(self.callable, False, self.parallel), text), field)
        except TagRefused as error:
            raise bad_request(error.field, f"'{error.field}': {error}.") from None

    def grammar(self, formats: OutputFormats) -> OutputGrammar | None:
        """Returns the grammar of required calls, or of calls to strict functions. Raises ApiError.

        None if no call is required and no function is strict, or if the format of calls is unknown.
        """
        if not self.callable or formats.tools == NONE:
            return None
        try:
            tag = call_tag(formats, CallDemand(self.callable, self.forced, self.parallel))
        except TagRefused as error:
            raise bad_request(error.field, f"'{error.field}': {error}.") from None
        return None if tag is None else _grammar_of(tag, "tools")


NO_TOOLS = ToolUse()


def constrained(generation: GenerationParams, use: ToolUse, formats: OutputFormats, make: MakeParsing) -> GenerationParams:
    """Returns `generation` with its parser settings, and with one grammar for reasoning, calls and constrained text together.

    Args:
        formats: Formats in which the outputs of this prompt are parsed.

    Raises:
        ApiError: A constraint other than a text format is combined with required calls, a structural tag is combined with strict
            functions, or a grammar is too large.
    """
    parsing, field = use.parsing(formats, make), generation.grammar_field or ""
    answer = None if generation.grammar is None else _layout_of(generation.grammar, LayoutOrigin(field))
    if answer is not None and not use.forced:
        found = use.calls_or_text(formats, answer, field)
        if found is None and formats.reasoning != NONE:
            found = _grammar_of(after_reasoning(formats, answer), field)
        if found is None:
            return replace(generation, parsing=parsing)
        return replace(generation, parsing=parsing, grammar=found.grammar, grammar_fields=found.fields)
    calls = use.grammar(formats)
    if calls is not None:
        # A text format has no effect on an output that has only calls. A structural tag describes the whole output.
        if generation.grammar is not None and (answer is None or field not in TEXT_FORMATS):
            kind = "a required call" if use.forced else "strict functions"
            raise bad_request(field, f"'{field}' cannot be combined with {kind}.")
        return replace(generation, parsing=parsing, grammar=calls.grammar, grammar_field="tools", grammar_fields=calls.fields)
    return generation if parsing is generation.parsing else replace(generation, parsing=parsing)


def _layout_of(grammar: pb.Grammar, origin: LayoutOrigin) -> Layout | None:
    """Returns the layout of a text that follows a grammar.

    None for a structural tag, because it already defines the whole output, and nothing can be put before it.
    """
    kind = grammar.WhichOneof("kind")
    if kind == "json_schema":
        return schema(orjson.loads(grammar.json_schema), origin)
    if kind == "json_object":
        return schema({"type": "object"}, origin)
    if kind == "regex":
        return {**regex(grammar.regex), ORIGIN: origin}
    return {"type": "grammar", "grammar": grammar.ebnf, ORIGIN: origin} if kind == "ebnf" else None


def _grammar_of(tag: Tag, field: str) -> OutputGrammar:
    """Returns the grammar of a structural tag. Raises ApiError, which names the client's field `field`, if it is too large."""
    grammar = structural_tag(str(tag), field)
    if sum(len(pointer) + len(origin.within) + 1 for pointer, origin in tag.origins.items()) > limits.MAX_GRAMMAR_BYTES:
        raise bad_request(field, f"'{field}' needs a grammar of more than {limits.MAX_GRAMMAR_BYTES} bytes. Give fewer tools.")
    for pointer, origin in tag.origins.items():
        grammar.parts.add(pointer=pointer, within=origin.within, partial=origin.partial)
    return OutputGrammar(grammar, [origin.field for origin in tag.origins.values()])


Functions = Iterable[tuple[str, Mapping[str, Any]]]  # each function's path in the client's body, and its description


def check_num_tools(tools: Sequence[Any]) -> None:
    if len(tools) > limits.MAX_TOOLS:
        raise bad_request("tools", f"'tools' may have at most {limits.MAX_TOOLS} tools.")


def tool_specs(functions: Functions, schema_name: str = "parameters") -> tuple[ToolSpec, ...]:
    """Returns the checked functions of a request. Raises ApiError.

    Args:
        functions: Iterated once. An iterator may check each tool before it yields the tool's function.
        schema_name: Name of the member of a function's description that has the JSON schema of the arguments.
    """
    found: dict[str, ToolSpec] = {}
    for where, function in functions:
        spec = _spec(function, where, schema_name)
        if spec.name in found:
            raise bad_request(f"{where}.name", f"'{where}.name' is the name of an earlier tool.")
        found[spec.name] = spec
    return tuple(found.values())


def _spec(function: Mapping[str, Any], where: str, schema_name: str) -> ToolSpec:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        allowed = f"1 to {limits.MAX_TOOL_NAME_CHARS} letters, digits, '_', '-', '.' or ':'"
        raise bad_request(f"{where}.name", f"'{where}.name' must be {allowed}.")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise bad_request(f"{where}.strict", f"'{where}.strict' must be true or false.")
    field = f"{where}.{schema_name}"
    return ToolSpec(name, _parameters(function.get(schema_name), field), bool(strict), field)


def _parameters(schema: Any, where: str) -> Mapping[str, Any] | None:
    if schema is None:
        return None
    if not isinstance(schema, dict):
        raise bad_request(where, f"'{where}' must be a JSON Schema, as an object.")
    excess = too_large(schema)
    if excess:
        raise bad_request(where, f"'{where}' has {excess}.")
    return schema


class ToolChoice:
    """Translates the tool choice of one request, in the form of any API, into a ToolUse. Every method may raise ApiError."""

    def __init__(self, specs: Sequence[ToolSpec], hosted: Sequence[Any], parallel: bool, function_member: str = "") -> None:
        """Makes the translator for one request.

        Args:
            specs: The functions of the request.
            hosted: Hosted tools that the gateway omits.
            parallel: Whether an output may have more than one call.
            function_member: Name of a tool's member that is an object with the function's `name`; "" if `name` is in the tool
                itself.
        """
        self._specs = specs
        self._names = {spec.name for spec in specs}
        self._hosted = hosted
        self._parallel = parallel
        self._member = function_member

    def mode(self, choice: str | None) -> ToolUse:
        """Returns the ToolUse for the choice `none`, `auto`, `required` or None."""
        if choice is None or choice == "auto":
            return self._use(self._names, False)
        if choice == "none":
            return self._use(set(), False)
        if choice != "required":
            raise self.unknown()
        if not self._names and self._hosted:
            message = (
                "'tool_choice' requires a call, but this server cannot run any of the 'tools'. Add a function, or use 'auto'."
            )
            raise bad_request("tool_choice", message, "unsupported_parameter")
        if not self._names:
            raise bad_request("tool_choice", "'tool_choice' is 'required', but there are no 'tools'.")
        return self._use(self._names, True)

    def function(self, choice: Any) -> ToolUse:
        """Returns the ToolUse that requires a call of the function that the choice names."""
        return self._use({self._named(choice, "tool_choice")}, True)

    def allowed(self, allowed: Any, where: str) -> ToolUse:
        """Returns the ToolUse of a tool choice that lists the allowed tools.

        Args:
            allowed: An object with `mode` and `tools`.
            where: Path of `allowed` in the client's body.
        """
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        if not isinstance(tools, list) or not tools:
            raise bad_request(where, f"'{where}' must be an object with 'mode' and 'tools'.")
        if allowed.get("mode") not in ("auto", "required"):
            raise bad_request(f"{where}.mode", f"'{where}.mode' must be auto or required.")
        forced, omitted = allowed["mode"] == "required", {hosted_type(tool) for tool in self._hosted}
        listed = {f"{where}.tools[{index}]": tool for index, tool in enumerate(tools)}
        found = {self._named(tool, at) for at, tool in listed.items() if hosted_type(tool) not in omitted}
        if forced and not found:
            raise _hosted_choice(f"{where}.tools", hosted_type(tools[0]))
        return self._use(found, forced)

    def unknown(self, choice: Any = None) -> ApiError:
        """Returns the error for a tool choice that has no known form.

        If the choice names an omitted hosted tool, the error names this tool.
        """
        kind = hosted_type(choice)
        if kind and any(kind == hosted_type(tool) for tool in self._hosted):
            return _hosted_choice("tool_choice", kind)
        return bad_request("tool_choice", f"'tool_choice' must be one of {', '.join(_CHOICES)}, or name a function.")

    def _use(self, names: set[str], forced: bool) -> ToolUse:
        return ToolUse(tuple(spec for spec in self._specs if spec.name in names), forced, self._parallel)

    def _named(self, tool: Any, where: str) -> str:
        where = ".".join(part for part in (where, self._member, "name") if part)
        function = tool.get(self._member) if self._member and isinstance(tool, dict) else tool
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in self._names:
            if isinstance(name, str) and name in {own_name(tool) for tool in self._hosted} - {""}:
                raise _hosted_choice(where, name)
            raise bad_request(where, f"'{where}' must be the name of one of the 'tools'.")
        return name


def _hosted_choice(where: str, name: str) -> ApiError:
    message = f"'{where}' asks for the tool '{name}', which this server cannot run. Name a function, or use 'auto'."
    return bad_request(where, message, "unsupported_parameter")
