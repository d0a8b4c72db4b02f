"""The neutral form of a chat: every API translates its body into a ChatRequest, which chat_preparer.py prepares.

Messages, tools and variables have the form that chat templates read. Pure; raises ApiError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rootstock.v1 import worker_pb2
from services.gateway.api.constraints import Named
from services.gateway.api.request_body import SamplingBody, ThinkingBody, ThinkingSwitch
from services.gateway.api.tools import NO_TOOLS, ToolUse
from services.gateway.request.bodies import TEXT_ALONE, AnswerBody
from services.gateway.request.errors import bad_request
from services.gateway.request.field_names import FieldNames
from services.gateway.request.generation import ModelInfo, PromptInput, check_chars
from services.shared import limits
from services.shared.output_formats import OutputFormats
from services.shared.sampling_defaults import SamplingDefaults

Message = Mapping[str, Any]  # role, content, and where it has them reasoning_content, tool_calls and tool_call_id
Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters", …}}

NO_SAMPLING = SamplingBody()  # every parameter at its default
_THINKING_OFF = {"enable_thinking": False, "thinking": False}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A client's chat in the neutral form.

    The checks that need neither the model nor its tokenizer have been made.
    """

    fields: FieldNames  # client's names of these fields and of the workers' fields, for errors
    model: str | None  # None: the only model that the caller may use

    # The prompt.
    messages: Sequence[Message]
    tools: Sequence[Tool] = ()  # tools that the template shows
    variables: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    read_variables: Sequence[str] = ()  # names in `variables` that the template must read
    generation_prompt: bool = True  # the prompt ends with the beginning of an assistant's message
    continues: bool = False  # the output continues the last message

    # The output.
    tool_use: ToolUse = NO_TOOLS
    separates_reasoning: bool = True  # reasoning is apart from the text
    constraint: Named | None = None  # client's field, and the grammar of the text
    prediction: str | None = None  # text that the client expects as the output, or None

    # Parameters.
    sampling: SamplingBody = NO_SAMPLING
    min_tokens: int | None = None
    max_tokens: int | None = None  # None: all that the context allows
    seed: int | None = None
    logprobs: int | None = None  # most likely tokens per output token, or None for no log probabilities
    logprob_token_ids: Sequence[int] = ()  # further tokens whose log probabilities are wanted

    # The response.
    stream: bool = False  # text is wanted as it is generated
    include_usage: bool = False  # the last event of a stream has the usage
    include_stop: bool | None = None  # whether the text keeps its stop string, or None for the value of `sampling.no_stop_trim`
    answer: AnswerBody = TEXT_ALONE

    # Placement.
    name: str = ""  # client's name of the request, for aborts and sessions; "" for none
    cache_salt: str = ""
    priority: int | None = None
    routing_key: str = ""
    session: worker_pb2.SessionTurn | None = None


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """The stored part of a chat that was prepared earlier, so that another gateway can continue it.

    It is used even if the model's workers and tokenizers report other values by then.
    """

    prompt: PromptInput
    formats: OutputFormats | None  # formats of the output, or None if only the prompt was stored
    reasoning_marks: Sequence[int]  # see Parsing
    context_len: int  # tokens
    defaults: SamplingDefaults

    def of(self, model: ModelInfo) -> ModelInfo:
        """Returns the model with the stored facts. Its context is the shorter one of then and now."""
        if self.formats is None:
            return model
        return replace(model, context_len=min(self.context_len, model.context_len), defaults=self.defaults)


def switches_of(body: ThinkingBody) -> dict[str, Any]:
    """Returns the fields that switch reasoning, as variables of the template: an object {"type"} becomes true or false."""
    return {
        name: value.type != "disabled" if isinstance(value, ThinkingSwitch) else value
        for name in ("enable_thinking", "thinking", "think")
        if (value := getattr(body, name)) is not None
    }


def template_variables(
    fields: FieldNames,
    given: Mapping[str, Any] | None,
    effort: str | None,
    switches: Mapping[str, Any],
    documents: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Returns the variables of the template. The client's own ones go before those that other fields set.

    Effort `none` turns the switches of reasoning off, as in SGLang.

    Args:
        given: The client's own variables.

    Raises:
        ApiError: Two fields set a variable to different values.
    """
    given = given or {}
    if effort is None:
        own: dict[str, Any] = {}
    elif given.get("reasoning_effort", effort) != effort:
        name = fields.of("reasoning_effort")
        raise bad_request(name, f"'{name}' and 'chat_template_kwargs' say different things.")
    else:
        own = {"reasoning_effort": effort, **(_THINKING_OFF if effort == "none" else {})}
    for name, value in switches.items():
        if given.get(name, value) != value:
            raise bad_request(name, f"'{name}' and 'chat_template_kwargs' set '{name}' to different values. Send one value.")
    if documents:
        own["documents"] = documents
    return {**own, **switches, **given}


def check_size(messages: Sequence[Message], fields: FieldNames) -> None:
    """Checks the number of messages and the length of their texts. Raises ApiError."""
    name = fields.of("messages")
    if len(messages) > limits.MAX_CHAT_MESSAGES:
        raise bad_request(name, f"'{name}' may have at most {limits.MAX_CHAT_MESSAGES} messages.")
    check_chars(sum(_num_chars(message.get("content")) for message in messages), name)


def _num_chars(content: Any) -> int:
    return sum(len(part["text"]) for part in content) if isinstance(content, list) else len(content or "")
