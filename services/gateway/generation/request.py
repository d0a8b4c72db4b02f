"""Prepared generation requests: the model, the prompts as token ids, and the parameters. The data is immutable.

The functions at the end of the file check the memory that all choices of a request may need. They raise an ApiError that names
the field of the client's request.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.generation.body_fields import TEXT_ALONE, AnswerBody, FieldNames
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request
from rootstock_llm.services.gateway.generation.logprobs import values_per_token
from rootstock_llm.services.gateway.generation.origin import Caller
from rootstock_llm.services.gateway.generation.routed_experts import RoutedExpertsParams
from rootstock_llm.services.gateway.output.output_parser import Parsing
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.index.prefix_index import cache_namespace, root_hash
from rootstock_llm.services.shared.sampling_parameters import API_DEFAULTS, SamplingDefaults

_UINT64_MASK = (1 << 64) - 1

UNLIMITED_ANSWER_TOKENS = 16384  # maximum output tokens per choice that budgets assume if max_tokens is not set


class ModelVersion(NamedTuple):
    """A version of a model. Workers of equal versions can continue each other's output and read each other's KV."""

    model: str  # WorkerInfo.model
    revision: str  # WorkerInfo.revision
    tokenizer: str  # WorkerInfo.tokenizer


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as its workers report it."""

    name: str  # name that clients use
    context_len: int  # context length in tokens; 0 if no worker has connected
    vocab_size: int
    generates: bool = True  # False if the model only makes embeddings
    embedding_size: int = 0  # elements of an embedding; 0 if the model makes no embeddings
    source: str = ""  # model id at workers, tokenizers and detokenizers
    revision: str = ""  # revision of the weights; part of the block hashes
    tokenizer: str = ""  # tokenizer of the model; part of the block hashes
    auto_truncates: bool = False  # whether a prompt that exceeds the context is truncated
    defaults: SamplingDefaults = API_DEFAULTS  # values of parameters that a request does not set
    deterministic: bool = False  # whether a request has the same result on every worker
    routed_experts_per_token: int = 0  # expert ids of a token that workers return; 0 if no worker returns any
    quantization: str = ""  # quantization of the weights, see WorkerInfo; "" if they are not quantized

    def hash_root(self, cache_salt: str) -> bytes:
        """Returns the hash from which the hash of a prompt's first block is computed, for the prefix index."""
        return root_hash(self.source, self.revision, self.tokenizer, cache_namespace("", cache_salt))


class Models(Protocol):
    """The models of the gateway."""

    def hash_root(self, model: ModelInfo, cache_salt: str) -> bytes:
        """Returns ModelInfo.hash_root(), from which block hashes are computed; b"" if routing uses no block hashes."""

    def names(self) -> Sequence[str]:
        """Returns the names of all models, with or without a worker."""

    def reads_predictions(self, model: ModelInfo) -> bool:
        """Returns whether a worker of the model drafts tokens from predicted outputs."""

    async def wait_for(self, name: str | None, caller: Caller) -> ModelInfo:
        """Returns the model of this name, or the default model for None. Waits until a worker of the model has connected.

        Raises:
            ApiError: No model has this name, the caller may not use it, or none of its workers connected in time.
        """


@dataclass(frozen=True, slots=True)
class PromptInput:
    """A prompt of a request as token ids."""

    ids: Sequence[int]  # token ids, as the packed array of the tokenizer's message
    text: str | None  # text of the prompt for `echo`, or None if the ids must be decoded for `echo`
    block_hashes: bytes = b""  # joined hashes of the full blocks; b"" until they are computed
    # Number of tokens by which the prompt was truncated, to the context or to `truncate_prompt_tokens`. It is a lower bound if
    # the tokenizer stopped early.
    num_cut: int = 0
    # The tokenizer stops early if a prompt is too long. `ids` then has only the first tokens, and at_least is a lower bound of
    # the number of all tokens. 0 if `ids` has all tokens.
    at_least: int = 0
    rendered_end: str = ""  # last characters of a rendered chat
    prefix: str = ""  # text with which the output begins, for `echo`; "" for none
    request_id: str = ""  # the client's name of this prompt, which workers receive; "" if the client has set no name
    prediction: Sequence[int] | None = None  # token ids of the predicted output, or None if the client has sent none


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """The parameters of one prompt. All prompts of a request may share one object.

    `sampling` and `grammar` are protobuf messages that no code changes after construction. A test checks this.
    """

    stream: bool  # whether output is sent to the client while it is generated
    include_usage: bool  # the last event of a stream has the usage
    n: int  # number of choices
    seed: int | None  # seed of the first choice, or None for a random seed
    max_tokens: int | None  # limit of output tokens, or None for the rest of the context
    # Parameters of all choices. The dispatcher adds the grammar, the seed, the output limit and the model's defaults to a copy.
    sampling: pb.SamplingParams
    stop_token_ids: frozenset[int]
    skip_special_tokens: bool
    include_stop: bool  # the text ends with the stop string
    cache_salt: str
    priority: int | None
    routing_key: str = ""
    # The session and the turn that this request continues. The worker puts the session's context before the prompt ids. None:
    # no session.
    session: worker_pb2.SessionTurn | None = None
    fields: FieldNames = field(default_factory=FieldNames)  # the client's names of fields that a worker may refuse
    grammar: pb.Grammar | None = None  # grammar of the output, or None for any text
    grammar_field: str | None = None  # the client's field that `grammar` was made from
    grammar_fields: Sequence[str] = ()  # the client's fields that the parts of the grammar were made from, by index of the part
    vector_as_base64: bool = False  # an embedding is returned as base64 of little-endian float32
    hidden: bool = False  # the client gets no output (max_tokens 0), although a worker of an older version generates one token
    answer: AnswerBody = TEXT_ALONE  # optional fields of the response
    stream_repeats: bool = False  # each event of a stream has all output so far
    parsing: Parsing | None = None  # formats of tool calls and reasoning in the output, or None if all output is text
    best: int = 0  # number of the `n` choices to return: those with the highest mean log probability; 0: all choices
    routed_experts: RoutedExpertsParams | None = None  # requested routed experts, or None
    shows_logprobs: bool = True  # False if log probabilities are only used to rank the choices

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client wants log probabilities of output tokens. Choice.logprobs then has one row per output id."""
        return bool(self.sampling.HasField("logprobs"))

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.wants_logprobs and bool(self.sampling.logprobs.HasField("prompt_from"))

    @property
    def ends_with_prompt(self) -> bool:
        """Whether the client wants a vector or a score in place of text."""
        return bool(self.sampling.HasField("embedding") or self.sampling.HasField("score"))

    def most_tokens(self, prompt_tokens: int, context_len: int) -> int:
        """Returns the limit of output tokens of a choice.

        In a session, earlier turns may use a part of the context. Only the worker has the size of the free part, so this method
        assumes that the whole context is free.
        """
        free = context_len if self.session is not None else context_len - prompt_tokens
        return free if self.max_tokens is None else min(self.max_tokens, free)

    def likely_tokens(self, prompt_tokens: int, context_len: int) -> int:
        """Returns the number of output tokens that budgets assume for one choice.

        This is most_tokens(), but at most UNLIMITED_ANSWER_TOKENS if the client sets no limit.
        """
        most = self.most_tokens(prompt_tokens, context_len)
        return most if self.max_tokens is not None else min(most, UNLIMITED_ANSWER_TOKENS)

    def seed_of(self, number: int, model: ModelInfo) -> int | None:
        """Returns the seed of one choice, which all its workers use. None if the choice draws no random tokens.

        Args:
            number: Index of the choice among those of its prompt.
        """
        if self.ends_with_prompt:
            return None
        if self.seed is not None:
            return (self.seed + number) & _UINT64_MASK
        asks = self.sampling.HasField("temperature")
        temperature = self.sampling.temperature if asks else model.defaults.temperature
        return secrets.randbits(64) if temperature > 0 else None


def one_step(
    sampling: pb.SamplingParams,
    priority: int | None,
    cache_salt: str = "",
    routing_key: str = "",
    fields: FieldNames | None = None,
) -> GenerationParams:
    """Returns the parameters of a request for one token, one vector or one score."""
    return GenerationParams(
        stream=False,
        include_usage=False,
        n=1,
        seed=None,
        max_tokens=1,
        sampling=sampling,
        stop_token_ids=frozenset(),
        skip_special_tokens=True,
        include_stop=False,
        cache_salt=cache_salt,
        priority=priority,
        routing_key=routing_key,
        fields=fields or FieldNames(),
    )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A valid request whose prompts are token ids."""

    model: ModelInfo
    prompts: tuple[PromptInput, ...]
    params: tuple[GenerationParams, ...]  # one per prompt; may be the same object

    @classmethod
    def of(cls, model: ModelInfo, prompts: Sequence[PromptInput], params: GenerationParams) -> GenerationRequest:
        """Returns a request whose prompts have the same parameters."""
        return cls(model, tuple(prompts), (params,) * len(prompts))

    def with_params(self, change: Callable[[GenerationParams], GenerationParams]) -> GenerationRequest:
        """Returns the request with changed parameters."""
        return replace(self, params=tuple(map(change, self.params)))

    def routed(self, key: str) -> GenerationRequest:
        """Returns the request with the routing key `key` in all prompts that have no routing key of their own."""
        return self.with_params(lambda params: replace(params, routing_key=params.routing_key or key))


def check_logprobs(request: GenerationRequest) -> None:
    """Checks the number of log probability values of all choices. Counts likely_tokens() output tokens per choice.

    Raises:
        ApiError: The number exceeds MAX_LOGPROB_VALUES, or MAX_REPEATED_LOGPROB_VALUES if `stream_repeats` is set.
    """
    total = 0
    for prompt, params in zip(request.prompts, request.params, strict=True):
        if not params.wants_logprobs:
            continue
        total += params.n * logprob_values(params, len(prompt.ids), request.model.context_len)
        limit = limits.MAX_REPEATED_LOGPROB_VALUES if params.stream_repeats else limits.MAX_LOGPROB_VALUES
        if total > limit:
            name = params.fields.of("logprobs")
            message = (
                f"'{name}' asks for more than {limit} log probabilities in all. Each token of each choice has"
                " 1, 1 more for each top token and 1 more for each chosen id. Ask for fewer of them, or for fewer tokens."
            )
            raise bad_request(name, message)


def check_routed_experts(request: GenerationRequest) -> None:
    """Checks the number of expert ids of all choices. Counts most_tokens() output tokens per choice, as workers do.

    Raises:
        ApiError: The number exceeds MAX_ROUTED_EXPERT_IDS.
    """
    total = 0
    for prompt, params in zip(request.prompts, request.params, strict=True):
        if (wanted := params.routed_experts) is None:
            continue
        tokens = len(prompt.ids) + params.most_tokens(len(prompt.ids), request.model.context_len) - wanted.start
        total += params.n * tokens * wanted.per_token
        if total > limits.MAX_ROUTED_EXPERT_IDS:
            name = params.fields.of("routed_experts_from")
            message = (
                f"The outputs of this request may have {total} expert ids; the limit is {limits.MAX_ROUTED_EXPERT_IDS} for all"
                f" outputs together, which have 32 MiB. Raise '{name}', or ask for fewer tokens."
            )
            raise bad_request(name, message)


def logprob_values(params: GenerationParams, prompt_tokens: int, context_len: int) -> int:
    """Returns the number of log probability values of one choice."""
    wanted = params.sampling.logprobs
    tokens = params.likely_tokens(prompt_tokens, context_len)
    if params.wants_prompt_logprobs:
        tokens += max(0, prompt_tokens - max(1, wanted.prompt_from))
    return tokens * values_per_token(wanted.top, len(wanted.token_ids))


def most_tokens(request: GenerationRequest) -> int:
    """Returns the number of tokens of all prompts, plus likely_tokens() of all choices that generate output."""
    total = 0
    for prompt, params in zip(request.prompts, request.params, strict=True):
        prompt_tokens = len(prompt.ids)
        output = 0 if params.ends_with_prompt else params.n * params.likely_tokens(prompt_tokens, request.model.context_len)
        total += prompt_tokens + output
    return total


def check_chars(chars: int, param: str) -> None:
    """Raises ApiError if the texts of a request have more characters than tokenizers accept."""
    if chars > limits.MAX_RENDERED_CHARS:
        message = f"The texts of '{param}' may have at most {limits.MAX_RENDERED_CHARS} characters."
        raise ApiError(413, message, param=param, code="request_too_large")


def check_sets(allowed: Sequence[int] | None, banned: Sequence[int] | None, choices: int, where: str = "") -> None:
    """Raises ApiError if the allowed and banned ids, times `choices`, exceed MAX_REQUEST_SET_IDS. Each choice copies both sets.

    Args:
        choices: Number of choices of the request.
        where: Path of the object with the fields, with a dot at the end; "" for the body itself.
    """
    ids = len(allowed or ()) + len(banned or ())
    if ids * choices > limits.MAX_REQUEST_SET_IDS:
        name = where + ("banned_token_ids" if len(banned or ()) > len(allowed or ()) else "allowed_token_ids")
        raise bad_request(name, f"'{name}' times prompts times 'n' may have at most {limits.MAX_REQUEST_SET_IDS} ids.")
