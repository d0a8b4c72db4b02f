"""What a client asks for, whatever endpoint it came to. Plain data, valid by construction: translation.py makes it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import worker_pb2
from services.gateway.parsers.output_parser import Parsing
from services.gateway.request.bodies import TEXT_ALONE, AnswerBody
from services.gateway.request.caller import Caller
from services.gateway.request.field_names import FieldNames
from services.shared.index.block_hash import root_hash
from services.shared.index.cache_namespace import cache_namespace
from services.shared.sampling_defaults import API_DEFAULTS, NAMES, SamplingDefaults

_UINT64_MASK = (1 << 64) - 1

UNLIMITED_ANSWER_TOKENS = 16384  # what an answer without max_tokens counts as in budgets


class ModelVersion(NamedTuple):
    """A version of a model. Workers of equal versions can continue each other's output and read each other's KV."""

    model: str  # this and the next two as in WorkerInfo
    revision: str
    tokenizer: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the gateway knows of a model that workers serve. Lengths in tokens. embedding_size: numbers in its vectors,
    0 if it gives none. source: the name that workers, tokenizers and detokenizers give it. revision, tokenizer: what block
    hashes begin with. auto_truncates: a prompt that exceeds the context is cut. defaults: of what a request leaves out.
    deterministic: whoever computes a request, its result is the same."""

    name: str
    context_len: int
    vocab_size: int
    generates: bool = True
    embedding_size: int = 0
    source: str = ""
    revision: str = ""
    tokenizer: str = ""
    auto_truncates: bool = False
    defaults: SamplingDefaults = API_DEFAULTS
    deterministic: bool = False

    def hash_root(self, cache_salt: str) -> bytes:
        """What the first block of a prompt is chained to in the prefix index."""
        return root_hash(self.source, self.revision, self.tokenizer, cache_namespace("", cache_salt))


class Models(Protocol):
    """Those that can be asked for."""

    def hash_root(self, model: ModelInfo, cache_salt: str) -> bytes:
        """What block hashes of a prompt begin with; empty where nobody needs them."""

    def names(self) -> Sequence[str]:
        """Of all that can be asked for."""

    def reads_predictions(self, model: ModelInfo) -> bool:
        """Whether a worker of it guesses by what clients predict."""

    async def wait_for(self, name: str | None, caller: Caller) -> ModelInfo:
        """Returns the model of this name, for None the default one. Waits for its first worker.

        Raises:
            ApiError: There is no such model, the caller may not use it, or no worker of it came in time.
        """


@dataclass(frozen=True, slots=True)
class Prompt:
    """`ids` stays the packed array that came off the wire. `text` is what `echo` repeats, when it is known without decoding.
    block_hashes: of its full blocks, one after the other; empty where nobody has computed them yet. num_cut: tokens behind them
    that the context had no room for. at_least: ids are the first of a text, or none, and it has at least so many; else 0.
    rendered_end: of a chat, the last characters of what its template has made.
    """

    ids: Sequence[int]
    text: str | None
    block_hashes: bytes = b""
    num_cut: int = 0
    at_least: int = 0
    rendered_end: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceSampling:
    """One choice's parameters. asked: the message that was made of the client's body, the same object for all choices. own: what
    differs by prompt and choice, and what the model has defaults for; no field of it is set in `asked`."""

    asked: pb.SamplingParams
    own: pb.SamplingParams

    def write(self, into: pb.SamplingParams) -> None:
        """Into a message that goes out: the one copy that is made of what was asked."""
        into.CopyFrom(self.asked)
        into.MergeFrom(self.own)


@dataclass(frozen=True, slots=True)
class Generation:
    """What is asked of one prompt. `sampling` lacks max_new_tokens and seed, which differ by prompt and choice, and of what the
    model has defaults for, what the client has not said.

    fields: the client's names of what a worker may refuse. grammar_field: the one that `sampling.grammar` came from. In a
    session the prompt is what the turn adds to a context that only the worker knows. vector_as_base64: an embedding is
    answered as its little-endian float32. hidden: no token is wanted. Workers of an earlier version make one, which is not
    shown. stream_repeats: each event of its stream has all that came before. answer: what is shown beside its text.
    parsing: how calls and reasoning are found in its text; None: it is all text. best: of the n answers so many are shown, those
    with the likeliest tokens; 0: all. shows_logprobs: or they are known to rank by alone.
    """

    stream: bool
    include_usage: bool
    n: int
    seed: int | None
    max_tokens: int | None  # None: up to the context
    sampling: pb.SamplingParams
    stop_token_ids: frozenset[int]
    skip_special_tokens: bool
    include_stop: bool
    cache_salt: str
    priority: int | None
    routing_key: str = ""
    session: worker_pb2.SessionTurn | None = None
    fields: FieldNames = field(default_factory=FieldNames)
    grammar_field: str | None = None
    grammar_fields: Sequence[str] = ()  # the client's, of the grammar's parts in their order
    vector_as_base64: bool = False
    hidden: bool = False
    answer: AnswerBody = TEXT_ALONE
    stream_repeats: bool = False
    parsing: Parsing | None = None
    best: int = 0
    shows_logprobs: bool = True

    @property
    def wants_logprobs(self) -> bool:
        """Of output tokens; Choice.logprobs then has one entry per output id."""
        return bool(self.sampling.HasField("logprobs"))

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.wants_logprobs and bool(self.sampling.logprobs.HasField("prompt_from"))

    @property
    def ends_with_prompt(self) -> bool:
        """Whether a vector or a score is wanted in place of text."""
        return bool(self.sampling.HasField("embedding") or self.sampling.HasField("score"))

    def most_tokens(self, prompt_tokens: int, context_len: int) -> int:
        """Of one answer. Of a session's turn only the worker knows what the context leaves."""
        room = context_len if self.session is not None else context_len - prompt_tokens
        return room if self.max_tokens is None else min(self.max_tokens, room)

    def likely_tokens(self, prompt_tokens: int, context_len: int) -> int:
        """Of one answer, for budgets: one without a limit of its own is not taken to fill a large context."""
        most = self.most_tokens(prompt_tokens, context_len)
        return most if self.max_tokens is not None else min(most, UNLIMITED_ANSWER_TOKENS)

    def sampling_of(self, choice: int, prompt_tokens: int, model: ModelInfo) -> ChoiceSampling:
        """The parameters of one choice: `choice` counts from 0 within its prompt. Whichever worker goes on with it goes by the
        same ones. Raises ValueError for what does not fit the message."""
        own = pb.SamplingParams()
        if self.ends_with_prompt:
            own.max_new_tokens = 1 if self.sampling.HasField("embedding") else 0  # 0: an older worker refuses a score
            return ChoiceSampling(self.sampling, own)
        if self.max_tokens is not None or self.session is None:
            own.max_new_tokens = self.most_tokens(prompt_tokens, model.context_len)
        for name in NAMES:
            if not self.sampling.HasField(name):
                setattr(own, name, getattr(model.defaults, name))
        if self.seed is not None:
            own.seed = (self.seed + choice) & _UINT64_MASK
        elif (own if own.HasField("temperature") else self.sampling).temperature > 0:
            own.seed = secrets.randbits(64)  # made here, so that another worker can go on with it
        return ChoiceSampling(self.sampling, own)


def one_step(
    sampling: pb.SamplingParams,
    priority: int | None,
    cache_salt: str = "",
    routing_key: str = "",
    fields: FieldNames | None = None,
) -> Generation:
    """One token, or the vector or the score that is made in its place."""
    return Generation(
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
class Part:
    """One prompt of a request and what is asked of it. prefix: what its text begins with (echo). prediction: ids of what its
    client takes for its text; none where nobody would read them, None where its client has said nothing.

    request_id: what workers know it by, "" for one made from the HTTP request's; with n > 1 each choice adds its number.
    """

    prompt: Prompt
    generation: Generation
    prefix: str = ""
    request_id: str = ""
    prediction: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A valid request with its prompts as token ids."""

    model: ModelInfo
    parts: list[Part]

    def routed(self, key: str) -> Plan:
        """With this routing key wherever the body gave none."""
        keyed = [
            replace(part, generation=replace(part.generation, routing_key=part.generation.routing_key or key))
            for part in self.parts
        ]
        return Plan(self.model, keyed)
