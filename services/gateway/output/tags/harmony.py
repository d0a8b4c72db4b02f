"""Builds the layout of outputs in the harmony format. A call ends the output, because the mark after a call is a stop token."""

from __future__ import annotations

from rootstock_llm.services.gateway.output.tags.demand import CallDemand
from rootstock_llm.services.gateway.output.tags.layouts import Layout, any_text, const, either, sequence, star, tag

_ANALYSIS, _FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
_PREAMBLE = "<|channel|>commentary<|message|>"
_END, _NEXT = "<|end|>", "<|start|>assistant"
_OTHERS = ("<|start|>", "<|channel|>", "<|return|>", "<|call|>")  # marks besides _END that end a message


def harmony(demand: CallDemand, answer: Layout | None = None) -> Layout:
    """Returns the layout of an output with calls.

    The output is reasoning and then one call. If no call is forced, messages for the user may precede or replace the call.

    Args:
        answer: Layout of the final message, which may replace the call. If it is not None, other messages for the user are not
            allowed.
    """
    tools = [sequence(_header(tool.name), demand.arguments(tool)) for tool in demand.tools]
    if demand.forced:
        return sequence(_before(_ANALYSIS), either(*tools))
    if answer is not None:
        return sequence(_before(_ANALYSIS), either(*tools, sequence(const(_FINAL), answer)))
    return sequence(_before(_ANALYSIS, _PREAMBLE), either(*tools, sequence(const(_FINAL), any_text(_END, *_OTHERS))))


def harmony_answer(content: Layout) -> Layout:
    """Returns the layout of reasoning, followed by a final message with this content."""
    return sequence(_before(_ANALYSIS), const(_FINAL), content)


def _before(*headers: str) -> Layout:
    return star(sequence(either(*(tag(header, any_text(*_OTHERS), _END) for header in headers)), const(_NEXT)))


def _header(name: str) -> Layout:
    """Returns the layout of a call's header, in any of the four spellings that the models use."""
    return either(
        const(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"),
        const(f"<|channel|>commentary to=functions.{name}<|constrain|>json<|message|>"),
        const(f" to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>"),
        const(f" to=functions.{name}<|channel|>commentary json<|message|>"),
    )
