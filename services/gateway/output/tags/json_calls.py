"""Builds the layouts of the formats that write arguments as JSON: Hermes, Llama 3, Mistral, DeepSeek V3 and V3.1."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from rootstock_llm.services.gateway.output.tags.demand import CallDemand
from rootstock_llm.services.gateway.output.tags.layouts import Layout, calls, const, either, sequence, tag, within_text

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_TOOL_CALLS = "[TOOL_CALLS]"


def hermes(demand: CallDemand, excludes: Sequence[str]) -> Layout:
    tags = _objects(demand, "<tool_call>\n", "arguments", "\n</tool_call>")
    if demand.forced:
        return calls(tags, "\n", demand.parallel)
    return within_text(["<tool_call>"], tags, excludes, demand.parallel)


def llama3_json(demand: CallDemand, excludes: Sequence[str]) -> Layout:
    tags = _objects(demand, "", "parameters", "")
    if demand.forced:
        return calls(tags, "; ", demand.parallel)
    return within_text(['{"name": '], tags, excludes, demand.parallel)


def mistral(demand: CallDemand, excludes: Sequence[str]) -> Layout:
    """Returns a layout that allows both forms of Mistral's calls, because it is unknown on which form a model was trained."""
    objects = calls(_objects(demand, "", "arguments", ""), ", ", demand.parallel)
    listed = tag(f"{_TOOL_CALLS}[", objects, "]")
    named = [tag(f"{_TOOL_CALLS}{tool.name}[ARGS]", demand.arguments(tool), "") for tool in demand.tools]
    if demand.forced:
        return either(listed, calls(named, "", demand.parallel))
    return within_text([_TOOL_CALLS], [listed, *named], excludes, demand.parallel)


def deepseek_v3(demand: CallDemand, excludes: Sequence[str]) -> Layout:
    begin, end = f"{_CALL}function{_SEPARATOR}", f"\n```{_CALL_END}"
    tags = [tag(f"{begin}{tool.name}\n```json\n", demand.arguments(tool), end) for tool in demand.tools]
    return _section(tags, "\n", demand, excludes)


def deepseek_v31(demand: CallDemand, excludes: Sequence[str]) -> Layout:
    tags = [tag(f"{_CALL}{tool.name}{_SEPARATOR}", demand.arguments(tool), _CALL_END) for tool in demand.tools]
    return _section(tags, "", demand, excludes)


def _section(tags: Sequence[Layout], separator: str, demand: CallDemand, excludes: Sequence[str]) -> Layout:
    section = calls(tags, separator, demand.parallel)
    if demand.forced:
        return sequence(const(_SECTION), section, const(_SECTION_END))
    return within_text([_SECTION], [tag(_SECTION, section, _SECTION_END)], excludes, parallel=False)


def _objects(demand: CallDemand, before: str, key: str, after: str) -> list[Layout]:
    """Returns the layout of `{"name": …, KEY: …}` for each tool, between the texts `before` and `after`."""
    return [
        tag(f'{before}{{"name": {orjson.dumps(tool.name).decode()}, "{key}": ', demand.arguments(tool), f"}}{after}")
        for tool in demand.tools
    ]
