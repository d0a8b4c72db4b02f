"""An answer as it streams in, of chat completions and of completions."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from services.cli.shared.server import Server, cut_off

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Clock = Callable[[], float]


@dataclass(slots=True)
class Answer:
    """What has come so far. Written by ask() alone."""

    model: str = ""
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    tool_calls: bool = False
    ttft_s: float | None = None
    total_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {"model": self.model, "text": self.text, "finish_reason": self.finish_reason, "usage": self.usage}
        return told | ({"reasoning": self.reasoning} if self.reasoning else {})

    def figures(self) -> str:
        """In words; an answer's rate is that of the tokens after its first."""
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
    """Fills `answer` while it streams in; what has come is there also after an exception. show: called with each piece, and
    whether it is reasoning. Raises CommandFailed."""
    begun = clock()
    with closing(server.events(path, {**body, "stream_options": {"include_usage": True}})) as events:
        for event in events:
            answer.model = event.get("model") or answer.model
            answer.usage = event.get("usage") or answer.usage
            for choice in event.get("choices") or ():
                _take(choice, answer, show, clock() - begun)
            answer.total_s = clock() - begun
    if answer.finish_reason is None:
        raise cut_off("the stream ended early")


def _take(choice: dict[str, Any], answer: Answer, show: Callable[[str, bool], None], passed_s: float) -> None:
    delta = choice.get("delta") or {}
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.tool_calls = answer.tool_calls or bool(delta.get("tool_calls"))
    thought, said = delta.get("reasoning_content") or "", choice.get("text") or delta.get("content") or ""
    if (thought or said) and answer.ttft_s is None:
        answer.ttft_s = passed_s
    answer.reasoning += thought
    answer.text += said
    for piece, is_reasoning in ((thought, True), (said, False)):
        if piece:
            show(piece, is_reasoning)
