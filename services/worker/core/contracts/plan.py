"""The messages between the scheduler core and an executor: BatchPlan and StepResult, and the sampling parameters of slots.

The messages have one array per attribute of rows, and no row objects. They are immutable. Arrays are numpy int32 unless a comment
says otherwise, and belong to the plan. The executor may read them from its own thread until the step's result is committed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.kernels.contracts.row_fault import RowFault as RowFault
from rootstock_llm.services.worker.core.contracts.grammar import GrammarSpec
from rootstock_llm.services.worker.core.contracts.transfers import PageOperation

I32 = NDArray[np.int32]
# Largest number of tokens of a decode step that has draft tokens; the draft tokens count. Up to this number, reading the weights
# dominates the time of a step, so that draft tokens add little time.
VERIFIED_TOKENS = 16
# Output tokens per message to the gateway.
DEFAULT_STREAM_INTERVAL = 1  # for requests that stream and name no interval
FORCE_STREAM_INTERVAL = 50  # for requests that do not stream, to save messages; named as in SGLang
NO_STEP = 0  # steps are numbered from 1
_NO_TOKENS: I32 = np.empty(0, dtype=np.int32)


def no_tokens() -> I32:
    """Returns a shared empty array, which must not be written to."""
    return _NO_TOKENS


@dataclass(frozen=True, slots=True)
class EmbeddingParams:
    """A request for a vector instead of tokens."""

    dimensions: int = 0  # number of first dimensions to return; 0 for all
    # Whether the vector of the returned dimensions is scaled to length 1, or None to follow the model's files.
    normalize: bool | None = None


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """A request for the log probabilities of some tokens after its prompt, instead of output."""

    label_token_ids: tuple[int, ...]  # one or more ids within the vocabulary, in the order of the result


@dataclass(frozen=True, slots=True)
class DryParams:
    """A penalty on continuing a repetition ("Don't Repeat Yourself").

    If a token would extend a repetition of n tokens, n >= allowed_length, its logit is lowered by
    multiplier * base ** (n - allowed_length).
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    window: int = 0  # number of last tokens that are searched; 0 for all
    breakers: tuple[int, ...] = ()  # token ids that end every repetition


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The rules for sampling and stopping of one request. Every default is resolved."""

    max_new_tokens: int  # at most the part of the context after the prompt; 0: the request ends with its prompt
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    min_p: float = 0.0
    top_n_sigma: float = 0.0  # 0: the whole vocabulary
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value that is added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all tokens are allowed
    banned_token_ids: tuple[int, ...] = ()
    dry: DryParams | None = None
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    # 64 bits. Seed and absolute token position determine each draw, so that a request samples the same tokens in any batch.
    seed: int = 0
    top_logprobs: int = -1  # -1: no logprobs of outputs; 0: only the sampled token's
    logprob_token_ids: tuple[int, ...] = ()  # token ids whose logprobs are returned at each position with logprobs
    # Position of the first prompt token whose logprob is returned; at least 1, because no token predicts the token at 0. -1: no
    # logprobs of the prompt. top_logprobs and logprob_token_ids apply to prompt positions as well.
    prompt_logprobs_from: int = -1
    grammar: GrammarSpec | None = None
    embedding: EmbeddingParams | None = None
    score: ScoreParams | None = None
    stream_interval: int = DEFAULT_STREAM_INTERVAL
    skip_special_tokens: bool = True
    speculative: bool = True  # whether the request may get draft tokens, if the worker has a drafter

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled. If not, the request ends with its prompt and reserves no KV for output."""
        return self.max_new_tokens > 0 and self.embedding is None and self.score is None


class ForwardMode(enum.IntEnum):
    IDLE = 0
    EXTEND = 1
    DECODE = 2
    MIXED = 3


@dataclass(frozen=True, slots=True)
class SlotParams:
    """The data of a request that the executor stores for its slot, until another request is admitted to the slot."""

    slot: int
    num_prompt_tokens: int  # tokens of the client's prompt, without output that was sampled before a retraction
    params: SamplingParams
    # Stop tokens, including EOS unless ignore_eos is set. The sampler masks them in the first min_new_tokens output tokens.
    stop_token_ids: tuple[int, ...]
    history: I32  # int32[n], prompt and output so far; empty unless penalties or the drafter need it
    prediction: I32 = field(default_factory=no_tokens)  # int32[n], the client's prediction of the output, for the drafter
    drafted_for: bool = False  # whether the decode rows of the slot may have draft tokens


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The rows of one step: num_extend extend rows, then the decode rows.

    Row r computes the positions starts[r] to starts[r] + num_tokens[r] - 1 of its sequence. Update u of the page tables sets the
    logical pages table_firsts[u] to table_firsts[u] + table_counts[u] - 1 of the slot table_slots[u] to the next table_counts[u]
    ids of table_pages. The updates are applied before the forward pass, in any order, because no two write the same entry. A
    slot's table is stale beyond the pages that its rows cover.
    """

    step_id: int
    mode: ForwardMode
    num_extend: int
    slots: I32  # [rows], slot of each row
    # [rows], first position of each row. If the uncommitted previous step has draft tokens, the position assumes that all of them
    # are accepted.
    starts: I32
    num_tokens: I32  # [rows]
    # Tokens of the extend rows, flat, in row order. A decode row takes its one input token from FutureMap[slot].
    input_ids: I32
    # bool[rows], whether the row has the request's last known token, so that the next token is sampled; False for all chunks of a
    # prompt but the last. For requests that do not sample (SamplingParams.samples), no token is sampled even if `sample` is True.
    sample: NDArray[np.bool_]
    mask_rows: I32  # rows with `sample` set that need a grammar mask for sampling
    prompt_logprob_rows: I32  # extend rows with logprobs of prompt tokens
    # Parallel to prompt_logprob_rows: index in the row of the first token whose successor's logprob is returned.
    prompt_logprob_offsets: I32
    prompt_logprob_nexts: I32  # parallel to prompt_logprob_rows: the prompt token after the row; -1 if the prompt ends there
    admitted: tuple[SlotParams, ...]  # parameters of the requests that are admitted with this step, valid for later steps too
    table_slots: I32  # [updates]
    table_firsts: I32  # [updates]
    table_counts: I32  # [updates]
    table_pages: I32  # flat, the page ids of all updates, in their order
    # [rows], largest number of draft tokens of a row; empty if the executor has no drafter. A decode row computes 1 + drafts
    # positions. Only the executor knows the first position, because it depends on the tokens that the previous step accepts.
    drafts: I32 = field(default_factory=no_tokens)
    # Updates of the window tables, in the form of the updates of the page tables. A slot's window table has the units of the
    # windowed layers, and is stale before the window of its rows. Empty if the model has no windowed layers.
    window_slots: I32 = field(default_factory=no_tokens)  # [updates]
    window_firsts: I32 = field(default_factory=no_tokens)  # [updates]
    window_counts: I32 = field(default_factory=no_tokens)  # [updates]
    window_units: I32 = field(default_factory=no_tokens)  # flat, the units of all updates, in their order
    # State units of the recurrent layers, [rows] each; empty without such layers. No unit that a row reads is also written.
    state_before: I32 = field(default_factory=no_tokens)  # state at the position state_starts; -1: the row begins the sequence
    # Gets the state after the row's last token. If the row has draft tokens (`drafts`), it gets the state before the row's first
    # token, because draft tokens may be rejected.
    state_after: I32 = field(default_factory=no_tokens)
    # Number of tokens after which the state is also stored in state_at_cut; 0: it is not. An extend row counts its own first
    # tokens. A decode row counts accepted tokens of earlier rows, from the position state_starts on; if the accepted tokens are
    # fewer than this number, the state is not stored.
    state_cuts: I32 = field(default_factory=no_tokens)
    state_at_cut: I32 = field(default_factory=no_tokens)
    # Position of state_before: the number of the sequence's first tokens that it covers. It is exact, unlike `starts`. The
    # executor replays the accepted tokens between this position and the row's first token.
    state_starts: I32 = field(default_factory=no_tokens)
    # Whether the executor counts the rows of each expert (StepResult.expert_rows). Only for models with experts.
    counts_experts: bool = False
    routed_rows: I32 = field(default_factory=no_tokens)  # rows whose routed experts are returned, rising
    # Parallel to routed_rows: index in the row of the first token whose routed experts are returned; 0 for decode rows.
    routed_offsets: I32 = field(default_factory=no_tokens)
    # Operations that begin when all previously launched steps have ended. A plan with operations and no rows is IDLE: it is not
    # launched and has no result.
    operations: tuple[PageOperation, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.slots)


def idle_plan(operations: tuple[PageOperation, ...]) -> BatchPlan:
    """Returns a plan with operations and without rows."""
    none, no_rows = no_tokens(), np.empty(0, dtype=np.bool_)
    columns = (none, none, none, none, no_rows, none, none, none, none, (), none, none, none, none)
    return BatchPlan(NO_STEP, ForwardMode.IDLE, 0, *columns, operations=operations)


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Natural log probabilities at one output position in fp32, from the logits before penalties, biases and temperature."""

    sampled: float  # log probability of the sampled token
    top_ids: tuple[int, ...]  # most likely tokens, in descending order
    top: tuple[float, ...]  # log probabilities of top_ids
    chosen: tuple[float, ...] = ()  # log probabilities of params.logprob_token_ids, in their order


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Natural log probabilities of n consecutive prompt tokens of a row.

    The position p of a row gives the logprobs of the token at p + 1. If the prompt ends with the row, the row's last position
    gives no logprobs.
    """

    values: NDArray[np.float32]  # [n], log probability of each prompt token
    top_ids: I32  # [n, k], most likely tokens instead of each prompt token
    top: NDArray[np.float32]  # [n, k], log probabilities of top_ids, in descending order
    chosen: NDArray[np.float32]  # [n, m], log probabilities of params.logprob_token_ids


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one step. Dictionaries map rows to values unless a comment says otherwise.

    A dictionary has entries only for rows whose request needs the value.
    """

    step_id: int
    # [rows], sampled tokens; valid for rows with plan.sample whose request samples. If `counts` is set, the array is flat: row r
    # has counts[r] tokens, which are its accepted draft tokens and the token that was sampled after them.
    tokens: I32
    faults: dict[int, RowFault] = field(default_factory=dict)  # fault of the row's last token
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)  # by index of the token in `tokens`
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    embeddings: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # float32[dimensions]
    label_logprobs: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # float32[labels], see ScoreParams
    counts: I32 | None = None  # [rows], number of tokens of each row, 1 or more; None: each row has one token
    drafted: I32 | None = None  # [rows], number of draft tokens of each row, at most plan.drafts; None: no row has draft tokens
    # bool[rows], whether the row's draft tokens came from the client's prediction, or None if no row has such tokens.
    predicted: NDArray[np.bool_] | None = None
    # int32[layers, experts], rows of each sparse layer that each expert computed, if plan.counts_experts is set. Rejected draft
    # tokens do not count.
    expert_rows: I32 | None = None
    # uint16[tokens, layers, chosen] by row of plan.routed_rows: the experts that computed the row's tokens from the index
    # in routed_offsets to the row's end, without rejected draft tokens. A row with a fault may be missing.
    routed_experts: dict[int, NDArray[np.uint16]] = field(default_factory=dict)
    seconds: float = 0.0  # computing time of the step, without the time in which it waited for earlier work; 0: not measured
