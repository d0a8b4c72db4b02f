"""The layout of harmony's messages. A call ends the output: the mark after it is a stop token."""

from __future__ import annotations

from services.gateway.parsers.tags.demand import CallDemand
from services.gateway.parsers.tags.layouts import Layout, any_text, const, either, sequence, star, tag

_ANALYSIS, _FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
_PREAMBLE = "<|channel|>commentary<|message|>"
_END, _NEXT = "<|end|>", "<|start|>assistant"
_OTHERS = ("<|start|>", "<|channel|>", "<|return|>", "<|call|>")  # that would end a message too


def harmony(demand: CallDemand, answer: Layout | None = None) -> Layout:
    """Reasoning, then one call; where none is forced, also messages for the user before it or instead of it. answer: what stands
    instead of a call, and there are no other messages then."""
    tools = [sequence(_header(tool.name), demand.arguments(tool)) for tool in demand.tools]
    if demand.forced:
        return sequence(_before(_ANALYSIS), either(*tools))
    if answer is not None:
        return sequence(_before(_ANALYSIS), either(*tools, sequence(const(_FINAL), answer)))
    return sequence(_before(_ANALYSIS, _PREAMBLE), either(*tools, sequence(const(_FINAL), any_text(_END, *_OTHERS))))


def harmony_answer(content: Layout) -> Layout:
    """Reasoning, then an answer that follows the layout."""
    return sequence(_before(_ANALYSIS), const(_FINAL), content)


def _before(*headers: str) -> Layout:
    return star(sequence(either(*(tag(header, any_text(*_OTHERS), _END) for header in headers)), const(_NEXT)))


def _header(name: str) -> Layout:
    """In each of the three orders in which the models write it."""
    return either(
        const(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"),
        const(f"<|channel|>commentary to=functions.{name}<|constrain|>json<|message|>"),
        const(f" to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>"),
        const(f" to=functions.{name}<|channel|>commentary json<|message|>"),
    )
