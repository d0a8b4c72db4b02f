"""Requests a streamed answer of a chat completion or a completion, and prints it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from rootstock_llm.services.cli.shared.exits import CommandFailed
from rootstock_llm.services.cli.shared.server import Server, cut_off
from rootstock_llm.services.cli.shared.terminal import Terminal

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Clock = Callable[[], float]


@dataclass(slots=True)
class Answer:
    """The received part of an answer. Only ask() writes it."""

    model: str = ""
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    tool_calls: bool = False  # whether the answer has tool calls
    ttft_s: float | None = None  # seconds to the first text or reasoning; None before it is received
    total_s: float = 0.0  # seconds to the last event

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self.model,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "usage": self.usage,
        }
        return fields | ({"reasoning": self.reasoning} if self.reasoning else {})

    def figures(self) -> str:
        """Returns token counts and times as text. The rate excludes the first token."""
        count, cached = self.usage.get("completion_tokens"), (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        parts = [f"{self.usage['prompt_tokens']} tokens in"] if "prompt_tokens" in self.usage else []
        parts += [f"{cached} of them cached"] if cached else []
        parts += [f"{count} out"] if count is not None else []
        if self.ttft_s is not None:
            parts.append(f"first after {self.ttft_s * 1e3:.0f} ms")
            decoding_s = self.total_s - self.ttft_s
            parts += [f"{(count - 1) / decoding_s:.0f} tokens/s"] if count and count > 1 and decoding_s > 0 else []
        return ", ".join(parts)


def ask(
    server: Server,
    path: str,
    body: dict[str, Any],
    answer: Answer,
    show: Callable[[str, bool], None],
    clock: Clock = time.monotonic,
) -> None:
    """Sends a streaming request and fills `answer` as events arrive.

    Args:
        answer: receives the events; after an exception, it has the part that was received before.
        show: called with each piece of text and whether the piece is reasoning.

    Raises:
        CommandFailed: The request failed, or the stream ended before a finish reason.
    """
    begun = clock()
    with closing(server.events(path, {**body, "stream_options": {"include_usage": True}})) as events:
        for event in events:
            answer.model = event.get("model") or answer.model
            answer.usage = event.get("usage") or answer.usage
            for choice in event.get("choices") or ():
                _add_choice(choice, answer, show, clock() - begun)
            answer.total_s = clock() - begun
    if answer.finish_reason is None:
        raise cut_off("the stream ended early")


def _add_choice(choice: dict[str, Any], answer: Answer, show: Callable[[str, bool], None], passed_s: float) -> None:
    delta = choice.get("delta") or {}
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.tool_calls = answer.tool_calls or bool(delta.get("tool_calls"))
    reasoning, text = delta.get("reasoning_content") or "", choice.get("text") or delta.get("content") or ""
    if (reasoning or text) and answer.ttft_s is None:
        answer.ttft_s = passed_s
    answer.reasoning += reasoning
    answer.text += text
    for piece, is_reasoning in ((reasoning, True), (text, False)):
        if piece:
            show(piece, is_reasoning)


def print_answer(server: Server, path: str, body: dict[str, object], args: argparse.Namespace) -> None:
    """Prints an answer on stdout as it arrives, or with --json as one line at the end. Raises CommandFailed."""
    answer, out, err = Answer(), Terminal.of(sys.stdout), Terminal.of(sys.stderr)

    def show(piece: str, is_reasoning: bool) -> None:
        if args.json or (is_reasoning and not out.is_tty):
            return
        out.write(piece, "dim" if is_reasoning else "")

    try:
        ask(server, path, body, answer, show)
    except (CommandFailed, KeyboardInterrupt):
        if answer.text and not args.json:
            out.line()
        raise
    out.line(json.dumps(answer.as_json(), ensure_ascii=False) if args.json else "")
    if args.stats:
        err.line(err.painted(answer.figures(), "dim"))
