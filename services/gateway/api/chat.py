"""ChatRequest, the form of a chat that is the same for every API, and its preparation for generation.

Every API translates its body into a ChatRequest, and the ChatPreparer turns it into a GenerationRequest. Messages, tools and
variables have the form that chat templates read. The preparation checks the request against the model, has the tokenizer encode
the prompt, and checks the prompt's length. It calls no worker, and cancelling it needs no cleanup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import tokenizer_pb2, worker_pb2
from rootstock_llm.services.gateway.api import prompts
from rootstock_llm.services.gateway.api.constraints import Named
from rootstock_llm.services.gateway.api.generation_params import check_token_ids, generation_of
from rootstock_llm.services.gateway.api.prompts import UNBOUNDED, budget_with_output
from rootstock_llm.services.gateway.api.request_body import SamplingBody, ThinkingBody, ThinkingSwitch, check_turn, dump_json
from rootstock_llm.services.gateway.api.tools import NO_TOOLS, ToolUse, constrained
from rootstock_llm.services.gateway.generation.body_fields import TEXT_ALONE, AnswerBody, FieldNames
from rootstock_llm.services.gateway.generation.errors import bad_request
from rootstock_llm.services.gateway.generation.origin import Caller, Origin
from rootstock_llm.services.gateway.generation.request import (
    GenerationParams,
    GenerationRequest,
    ModelInfo,
    Models,
    PromptInput,
    check_chars,
    check_sets,
)
from rootstock_llm.services.gateway.output.output_parser import MakeParser, MakeParsing, Parsing
from rootstock_llm.services.gateway.remote.tokenizer_client import TokenizerClient
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.output_formats import NONE, OutputFormats
from rootstock_llm.services.shared.sampling_parameters import Api, SamplingDefaults

Message = Mapping[str, Any]  # role, content; optionally reasoning_content, tool_calls, tool_call_id
Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters", …}}

NO_SAMPLING = SamplingBody()  # every parameter at its default
_THINKING_OFF = {"enable_thinking": False, "thinking": False}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A client's chat, in a form that does not depend on the API.

    A chat of this type has passed all checks that need neither the model nor its tokenizer.
    """

    fields: FieldNames  # names of the fields below in the client's API, for errors
    model: str | None  # None: the only model that the caller may use

    # The prompt.
    messages: Sequence[Message]
    tools: Sequence[Tool] = ()  # tools that the chat template writes into the prompt
    variables: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template besides messages and tools
    read_variables: Sequence[str] = ()  # names in `variables` that the chat template must read; otherwise, the request is refused
    generation_prompt: bool = True  # whether the prompt ends with the template's beginning of an assistant's message
    continues: bool = False  # whether the output continues the last message

    # The output.
    tool_use: ToolUse = NO_TOOLS  # calls that the output may or must have
    separates_reasoning: bool = True  # whether the response has reasoning in a field of its own
    constraint: Named | None = None  # grammar of the text, with the client's field that asks for it, or None for any text
    prediction: str | None = None  # text that the client expects as the output, or None

    # Parameters.
    sampling: SamplingBody = NO_SAMPLING
    min_tokens: int | None = None  # output tokens, or None for no minimum
    max_tokens: int | None = None  # output tokens, or None for as many as the context allows
    seed: int | None = None  # seed of sampling, or None for a random seed
    logprobs: int | None = None  # number of most likely tokens per output token, or None for no log probabilities
    logprob_token_ids: Sequence[int] = ()  # tokens whose log probabilities are returned for every output token

    # The response.
    stream: bool = False  # whether text is sent while it is generated
    include_usage: bool = False  # whether the last event of a stream has the token counts
    include_stop: bool | None = None  # whether the text keeps its stop string, or None for the value of `sampling.no_stop_trim`
    answer: AnswerBody = TEXT_ALONE  # optional fields of the response

    # Placement.
    name: str = ""  # request id that the client chose, for aborts and sessions; "" for none
    cache_salt: str = ""  # separates cached prefixes; "" for the namespace that requests without a salt share
    priority: int | None = None  # scheduling priority, or None for the default
    routing_key: str = ""  # the affinity policy sends requests with the same routing key to one worker; "" for none
    session: worker_pb2.SessionTurn | None = None  # session and turn that the chat continues, or None for no session


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """The stored part of a chat that was prepared earlier, so that another gateway can continue it.

    The stored values take precedence over the values that the model's workers and tokenizers report now, except that the shorter
    context length counts.
    """

    prompt: PromptInput
    formats: OutputFormats | None  # formats of the output. None: only the prompt was stored, and the fields below are unused
    reasoning_marks: Sequence[int]  # token ids of the marks around reasoning, see Parsing
    context_len: int  # context length of the model in tokens
    defaults: SamplingDefaults

    def applied_to(self, model: ModelInfo) -> ModelInfo:
        """Returns the model with the stored sampling defaults, and with the shorter of the stored and the current context.

        If only the prompt was stored, returns the model unchanged.
        """
        if self.formats is None:
            return model
        return replace(model, context_len=min(self.context_len, model.context_len), defaults=self.defaults)


class ChatPreparer:
    """Prepares the chats of all APIs. Each process has one. Every public method raises ApiError for an invalid request."""

    def __init__(
        self,
        models: Models,
        tokenizer: TokenizerClient,
        make_parser: MakeParser,
        dropped: Callable[[], None],
        omits_hosted_tools: bool,
    ) -> None:
        """Makes the preparer.

        Args:
            dropped: Called for each generated tool call that the response omits.
            omits_hosted_tools: Whether hosted tools are removed from chats. If not, chats with hosted tools are refused.
        """
        self._models = models
        self._tokenizer = tokenizer
        self._make_parser = make_parser
        self._dropped = dropped
        self.omits_hosted_tools = omits_hosted_tools

    async def prepare(self, chat: ChatRequest, origin: Origin, prepared: PreparedChat | None = None) -> GenerationRequest:
        """Returns the prepared request of a chat.

        Args:
            prepared: The stored part of a chat that was prepared earlier, or None. If it is given, its prompt replaces the
                messages.
        """
        call = _encode_call(chat, origin.request_id)
        chat = replace(chat, messages=())  # messages may have 64 MiB, and `call` has a copy
        model = await self.generating_model(chat.model, origin.caller)
        model = model if prepared is None else prepared.applied_to(model)
        check_sets(chat.sampling.allowed_token_ids, chat.sampling.banned_token_ids, chat.sampling.n or 1)
        generation = _generation_of(chat, model)
        if chat.session is not None:
            check_turn(generation.n == 1, None)
        call.hash_root = self._models.hash_root(model, origin.caller.cache_salt_of(chat.cache_salt))
        if prepared is None:
            budget = budget_with_output(model, chat.session is not None)
            prompt = await prompts.of_chat(call, self._tokenizer, model, origin, budget, chat.fields)
        else:
            prompt = prepared.prompt
        if prepared is not None and prepared.formats is not None:
            formats, marks = prepared.formats, prepared.reasoning_marks
        else:
            if prepared is not None:
                # The formats are known only after a tokenizer has connected, and this gateway has not tokenized the prompt.
                await self._tokenizer.ready(model.source)
            formats = self._formats(chat, model).after(prompt.rendered_end)
            marks = self._tokenizer.reasoning_marks(model.source)
        generation = constrained(generation, chat.tool_use, formats, self._parsing(marks))
        # A turn of a session always gets a request id, because a later turn may name it as its parent.
        name = chat.name or (origin.request_id if chat.session is not None else "")
        prompt = replace(prompt, request_id=name, prediction=await self._prediction(chat, model, origin))
        return GenerationRequest.of(model, [prompt], generation)

    async def count(self, chat: ChatRequest, origin: Origin) -> int:
        """Returns the number of tokens of a chat's prompt, which may be longer than the context."""
        call = _encode_call(chat, origin.request_id)
        model = await self.generating_model(chat.model, origin.caller)
        return len((await prompts.of_chat(call, self._tokenizer, model, origin, UNBOUNDED, chat.fields)).ids)

    async def generating_model(self, name: str | None, caller: Caller) -> ModelInfo:
        """Returns the model of this name, as model_of() does. Raises ApiError if the model does not generate text."""
        model = await self.model_of(name, caller)
        if not model.generates:
            raise bad_request("model", "This model gives embeddings only; see /v1/embeddings.", "unsupported_model")
        return model

    async def model_of(self, name: str | None, caller: Caller) -> ModelInfo:
        """Returns the model of this name. None means the only model that the caller may use."""
        self._check_model_name(name, caller)
        model = await self._models.wait_for(name, caller)
        self._check_model_name(name, caller)
        return model

    def _check_model_name(self, name: str | None, caller: Caller) -> None:
        """Checks that the request names a model if the caller may use several models. Raises ApiError.

        model_of() checks before and after its wait for a worker, because models may appear during the wait.
        """
        if name is None and sum(map(caller.may_use, self._models.names())) > 1:
            raise bad_request(
                "model", "'model' is required, because several models are served. See /v1/models.", "missing_required_parameter"
            )

    def _formats(self, chat: ChatRequest, model: ModelInfo) -> OutputFormats:
        known = self._tokenizer.formats(model.source)
        return chat.tool_use.formats(known if chat.separates_reasoning else replace(known, reasoning=NONE))

    def _parsing(self, marks: Sequence[int]) -> MakeParsing:
        """Returns a function that makes the parser settings of one request. `marks`: see Parsing.reasoning_marks."""
        return lambda formats, setup: Parsing(formats, setup, self._make_parser, self._dropped, marks)

    async def _prediction(self, chat: ChatRequest, model: ModelInfo, origin: Origin) -> Sequence[int] | None:
        """Returns the token ids of the predicted text.

        None if the client predicts no text. Empty if the client turns drafting off, or if no worker drafts from predictions.
        """
        if chat.prediction is None:
            return None
        if chat.sampling.speculative is False or not self._models.reads_predictions(model):
            return ()
        return await prompts.of_prediction(chat.prediction, self._tokenizer, model, origin)


def _encode_call(chat: ChatRequest, request_id: str) -> tokenizer_pb2.EncodeChatRequest:
    """Returns the message with which the tokenizer renders the chat template and encodes the prompt. Raises ApiError."""
    return tokenizer_pb2.EncodeChatRequest(
        request_id=request_id,
        messages_json=dump_json(chat.messages, chat.fields.of("messages")),
        tools_json=dump_json(chat.tools, "tools") if chat.tools else b"",
        template_kwargs_json=dump_json(chat.variables, "chat_template_kwargs") if chat.variables else b"",
        add_generation_prompt=chat.generation_prompt,
        continue_final_message=chat.continues,
        read_variables=chat.read_variables,
    )


def _generation_of(chat: ChatRequest, model: ModelInfo) -> GenerationParams:
    """Returns the generation parameters of a chat. Raises ApiError."""
    check_token_ids(chat.logprob_token_ids, model.vocab_size, "logprob_token_ids")
    logprobs = None if chat.logprobs is None else pb.Logprobs(top=chat.logprobs, token_ids=chat.logprob_token_ids)
    return generation_of(
        chat.sampling,
        Api.CHAT,
        model.vocab_size,
        chat.fields,
        max_tokens=chat.max_tokens,
        min_tokens=chat.min_tokens,
        seed=chat.seed,
        logprobs=logprobs,
        constraint=chat.constraint,
        stream=chat.stream,
        include_usage=chat.include_usage,
        include_stop=chat.include_stop,
        answer=chat.answer,
        cache_salt=chat.cache_salt,
        priority=chat.priority,
        routing_key=chat.routing_key,
        session=chat.session,
    )


def switches_of(body: ThinkingBody) -> dict[str, Any]:
    """Returns the template variables that switch reasoning on or off.

    A switch that is an object means false if its type is `disabled`, and true for any other type.
    """
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
    """Returns the variables of the chat template.

    As in SGLang, the effort `none` also sets the variables `enable_thinking` and `thinking` to false, unless `switches` or
    `given` has them.

    Args:
        given: The client's chat_template_kwargs. Its `documents` take precedence over the argument `documents`.
        effort: The client's reasoning effort, or None.
        switches: The variables that switches_of() returns.

    Raises:
        ApiError: `given` sets the effort or a switch to another value than the client's own field does.
    """
    given = given or {}
    if effort is None:
        own: dict[str, Any] = {}
    elif given.get("reasoning_effort", effort) != effort:
        name = fields.of("reasoning_effort")
        raise bad_request(name, f"'{name}' and 'chat_template_kwargs.reasoning_effort' are different. Send one value.")
    else:
        own = {"reasoning_effort": effort, **(_THINKING_OFF if effort == "none" else {})}
    for name, value in switches.items():
        if given.get(name, value) != value:
            raise bad_request(name, f"'{name}' and 'chat_template_kwargs.{name}' are different. Send one value.")
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
