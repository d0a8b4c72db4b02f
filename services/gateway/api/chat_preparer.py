"""Who makes a chat of any API ready to be generated: api/openai does, for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from services.gateway.request.generation import ModelInfo, Plan, Prompt
from services.gateway.request.origin import Origin
from services.shared.output_formats import OutputFormats
from services.shared.sampling_defaults import SamplingDefaults


@dataclass(frozen=True, slots=True)
class Settled:
    """What a chat was prepared as, for whoever goes on with it, whatever the model's workers and tokenizers say there. formats,
    reasoning_marks: by which its output is read, see Parsing. context_len: in tokens. formats is None where the prompt alone is
    known."""

    prompt: Prompt
    formats: OutputFormats | None
    reasoning_marks: Sequence[int]
    context_len: int
    defaults: SamplingDefaults

    def of(self, model: ModelInfo) -> ModelInfo:
        """As it was; where there is less room by now, with that."""
        if self.formats is None:
            return model
        return replace(model, context_len=min(self.context_len, model.context_len), defaults=self.defaults)


class ChatPreparer(Protocol):
    """chat: a body of the chat completions API. Every method raises ApiError in the words of that API."""

    omits_hosted_tools: bool  # a chat is served without its hosted tools, instead of refused

    async def of_chat(self, chat: dict[str, Any], origin: Origin, settled: Settled | None = None) -> Plan:
        """settled: of one that was prepared before, whose messages are of no account."""

    async def count_of(self, chat: dict[str, Any], origin: Origin) -> int:
        """Tokens of its prompt."""
