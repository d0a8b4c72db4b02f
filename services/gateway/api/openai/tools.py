"""The tools of a chat request and what it says of calls → what a model may call, and must. Pure; raises ApiError that names the
exact element."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rootstock.v1 import common_pb2 as pb
from services.gateway.api.constraints import structural_tag
from services.gateway.api.known_fields import hosted_type, own_name
from services.gateway.parsers.output_parser import MakeParsing, ParserSetup, Parsing
from services.gateway.parsers.tags.demand import CallDemand, TagRefused, ToolSpec
from services.gateway.parsers.tags.layouts import Layout
from services.gateway.parsers.tags.structural_tags import Tag, call_tag, calls_or_answer
from services.gateway.request.errors import ApiError, bad_request
from services.shared import limits
from services.shared.json_schema import too_large
from services.shared.output_formats import NONE, OutputFormats

FALLBACK = "hermes"  # for calls that are forced out of a model that no format is known of
_NAME = re.compile(f"[a-zA-Z0-9_.:-]{{1,{limits.MAX_TOOL_NAME_CHARS}}}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Held:
    """A grammar that holds an output to calls, or to calls and answers."""

    grammar: pb.Grammar
    fields: Sequence[str]  # of the request, that the grammar's parts were made of


def held(tag: Tag, field: str) -> Held:
    """Returns the grammar of a tag that was made of a field. Raises ApiError if it is too large."""
    grammar = structural_tag(str(tag), field)
    if sum(len(pointer) + len(origin.within) + 1 for pointer, origin in tag.origins.items()) > limits.MAX_GRAMMAR_BYTES:
        raise bad_request(field, f"'{field}' may come to at most {limits.MAX_GRAMMAR_BYTES} bytes. Give fewer tools.")
    for pointer, origin in tag.origins.items():
        grammar.parts.add(pointer=pointer, within=origin.within, partial=origin.partial)
    return Held(grammar, [origin.field for origin in tag.origins.values()])


@dataclass(frozen=True, slots=True)
class ToolUse:
    """callable: those that may be called. forced: one must be. parallel: more than one call may come."""

    callable: tuple[ToolSpec, ...] = ()
    forced: bool = False
    parallel: bool = True

    def formats(self, known: OutputFormats) -> OutputFormats:
        """known: what the model's tokenizer says. Without tools, calls are text."""
        if not self.callable:
            return known if known.tools == "harmony" else OutputFormats(NONE, known.reasoning)
        return OutputFormats(FALLBACK, known.reasoning) if self.forced and known.tools == NONE else known

    def parsing(self, formats: OutputFormats, make: MakeParsing) -> Parsing | None:
        """None: the output is its text."""
        if not formats.tools and not formats.reasoning:
            return None
        schemas = {tool.name: tool.parameters for tool in self.callable}
        most = limits.MAX_CALLS if self.parallel else 1
        return make(formats, ParserSetup(schemas, most))

    def or_answer(self, formats: OutputFormats, answer: Layout, field: str) -> Held | None:
        """What holds the output to calls, or to an answer that follows the layout; None where no call may come, or one has to.
        field: the client's, of the answer. Raises ApiError."""
        if not self.callable or self.forced or formats.tools == NONE:
            return None
        try:
            return held(calls_or_answer(formats, CallDemand(self.callable, False, self.parallel), answer), field)
        except TagRefused as error:
            raise bad_request(error.field, f"'{error.field}': {error}.") from None

    def grammar(self, formats: OutputFormats) -> Held | None:
        """What holds the output to calls that are forced or strict; None where nothing has to. Raises ApiError."""
        if not self.callable or formats.tools == NONE:
            return None
        try:
            tag = call_tag(formats, CallDemand(self.callable, self.forced, self.parallel))
        except TagRefused as error:
            raise bad_request(error.field, f"'{error.field}': {error}.") from None
        return None if tag is None else held(tag, "tools")


def parameters_of(tools: Sequence[Any]) -> Mapping[str, Mapping[str, Any] | None]:
    """Schemas by the tools' names."""
    return {spec.name: spec.parameters for spec in _specs(tools)}


def tool_use(tools: Sequence[Any] | None, choice: Any, parallel: bool | None, omits_hosted: bool = False) -> ToolUse:
    """Returns the functions that may be called. omits_hosted: hosted tools are left out instead of refused. Raises ApiError."""
    hosted = [tool for tool in tools or () if omits_hosted and hosted_type(tool)]
    specs = _specs(tools or (), omits_hosted)
    allowed, forced = _chosen(choice, {spec.name for spec in specs}, hosted)
    return ToolUse(
        callable=tuple(spec for spec in specs if spec.name in allowed),
        forced=forced,
        parallel=parallel is not False,
    )


def _specs(tools: Sequence[Any], omits_hosted: bool = False) -> tuple[ToolSpec, ...]:
    if len(tools) > limits.MAX_TOOLS:
        raise bad_request("tools", f"'tools' may have at most {limits.MAX_TOOLS} tools.")
    found: dict[str, ToolSpec] = {}
    for index, tool in enumerate(tools):
        if omits_hosted and hosted_type(tool):
            continue
        where = f"tools[{index}]"
        spec = _spec(tool, where)
        if spec.name in found:
            raise bad_request(f"{where}.function.name", f"'{where}.function.name' is the name of an earlier tool.")
        found[spec.name] = spec
    return tuple(found.values())


def _spec(tool: Any, where: str) -> ToolSpec:
    if not isinstance(tool, dict):
        raise bad_request(where, f"'{where}' must be an object.")
    if tool.get("type", "function") != "function":
        message = f"'{where}.type': only tools of type 'function' are supported by this server."
        raise bad_request(f"{where}.type", message, "unsupported_parameter")
    function = tool.get("function")
    where = f"{where}.function"
    if not isinstance(function, dict):
        raise bad_request(where, f"'{where}' must be an object.")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        allowed = f"1 to {limits.MAX_TOOL_NAME_CHARS} letters, digits, '_', '-', '.' or ':'"
        raise bad_request(f"{where}.name", f"'{where}.name' must be {allowed}.")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise bad_request(f"{where}.strict", f"'{where}.strict' must be true or false.")
    field = f"{where}.parameters"
    return ToolSpec(name, _parameters(function.get("parameters"), field), bool(strict), field)


def _parameters(schema: Any, where: str) -> Mapping[str, Any] | None:
    if schema is None:
        return None
    if not isinstance(schema, dict):
        raise bad_request(where, f"'{where}' must be a JSON Schema, as an object.")
    why = too_large(schema)
    if why:
        raise bad_request(where, f"'{where}' has {why}.")
    return schema


def _chosen(choice: Any, names: set[str], hosted: Sequence[Any]) -> tuple[set[str], bool]:
    """Returns the functions that may be called, and whether one must be. hosted: the tools that are left out."""
    if choice is None or choice == "auto":
        return names, False
    if choice == "none":
        return set(), False
    if choice == "required":
        if not names and hosted:
            message = "'tool_choice' requires a call, but this server runs none of the 'tools'. Add a function, or use 'auto'."
            raise bad_request("tool_choice", message, "unsupported_parameter")
        if not names:
            raise bad_request("tool_choice", "'tool_choice' is 'required', but there are no 'tools'.")
        return names, True
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return {_named(choice, "tool_choice", names, hosted)}, True
    if kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), names, hosted)
    if any(kind == hosted_type(tool) for tool in hosted):
        raise _hosted_choice("tool_choice", hosted_type(choice))
    raise _bad_choice()


def _allowed(allowed: Any, names: set[str], hosted: Sequence[Any]) -> tuple[set[str], bool]:
    where = "tool_choice.allowed_tools"
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(tools, list) or not tools:
        raise bad_request(where, f"'{where}' must be an object with 'mode' and 'tools'.")
    if allowed.get("mode") not in ("auto", "required"):
        raise bad_request(f"{where}.mode", f"'{where}.mode' must be auto or required.")
    forced, omitted = allowed["mode"] == "required", {hosted_type(tool) for tool in hosted}
    listed = {f"{where}.tools[{index}]": tool for index, tool in enumerate(tools)}
    found = {_named(tool, at, names, hosted) for at, tool in listed.items() if hosted_type(tool) not in omitted}
    if forced and not found:
        raise _hosted_choice(f"{where}.tools", hosted_type(tools[0]))
    return found, forced


def _named(choice: Any, where: str, names: set[str], hosted: Sequence[Any]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        if isinstance(name, str) and name in {own_name(tool) for tool in hosted} - {""}:
            raise _hosted_choice(f"{where}.function.name", name)
        raise bad_request(f"{where}.function.name", f"'{where}.function.name' must be the name of one of the 'tools'.")
    return name


def _hosted_choice(where: str, name: str) -> ApiError:
    message = f"'{where}' asks for the tool '{name}', which this server cannot run. Name a function, or use 'auto'."
    return bad_request(where, message, "unsupported_parameter")


def _bad_choice() -> ApiError:
    return bad_request("tool_choice", f"'tool_choice' must be one of {', '.join(_CHOICES)}, or name a function.")
