"""The messages between gateways and the core, and the trace events. plan.py has the messages between core and executor.

The pair (peer, handle) identifies a request: `peer` is the worker's number for a gateway stream, `handle` is the gateway's number
for the request.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.plan import PromptLogprobs, RowLogprobs, SamplingParams, no_tokens
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, KvSource
from rootstock_llm.services.worker.core.contracts.transfers import Tier


class FinishReason(enum.IntEnum):
    LENGTH = 1
    MATCHED_TOKEN = 2
    MATCHED_STRING = 3
    ABORT = 4
    MATCHED_REGEX = 5
    EMBEDDED = 6  # the requested vector is computed
    HANDED_OVER = 7  # another worker continues the request
    SCORED = 8  # the requested log probabilities after the prompt are computed


class ErrorCode(enum.IntEnum):
    NONE = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 2
    QUEUE_FULL = 3
    TIMEOUT = 4
    OUT_OF_MEMORY = 5
    INTERNAL = 6
    UNAVAILABLE = 7
    OTHER_WEIGHTS = 8  # the worker's model version differs from the request's


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """The position of a request in a session."""

    session_id: str
    parent: str = ""  # request id of an earlier turn; empty for the latest turn, or for the start of a new session
    offset: int = -1  # number of the parent's tokens that the turn continues; the parent's later tokens are dropped; -1: all
    replace: bool = False  # whether the end of this turn deletes the parent's other descendants; an aborted turn deletes none
    drop_previous_output: bool = False  # whether the turn continues the parent's prompt without the parent's output


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """Page keys of a prompt's whole pages. The core ignores them if the request's radix tree is not `tree`."""

    tree: str  # name of the radix tree for which the keys were computed
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request."""

    peer: int
    handle: int
    request_id: str
    prompt_ids: NDArray[np.int32]  # int32[n], n >= 1; in a session, the tokens that this turn adds
    params: SamplingParams
    stream: bool = True
    salt: str = ""  # cache salt, a part of the cache namespace
    priority: int = 0
    timeout_s: float = 0.0  # seconds from arrival to the last token; 0 for no limit
    lora: str = ""  # adapter, a part of the cache namespace
    routing_key: str = ""  # the policy routing-key prefers requests whose routing key has many running requests
    session: SessionTurn | None = None  # not with output_ids, hand_over or source
    output_ids: tuple[int, ...] = ()  # output that another worker sampled; the request continues after it
    revision: str = ""  # model version that must compute the request; empty for any
    tenant: bytes = b""  # tenant against whose fair share the prompt tokens count, see shares.py; empty for none
    batch: int = 0  # number of a batch of prompts from this gateway stream; 0 for a single prompt
    weight: float = 1.0  # weight of the tenant's share, above 0
    # Page keys, computed by the thread that reads gateway messages. None: the core computes them.
    page_keys: PromptKeys | None = None
    # Reservation for the decode worker that continues the request after its first token here. None: no handover.
    hand_over: KvReservation | None = None
    source: KvSource | None = None  # reservation in another worker with the first pages of the prompt
    # Position of the first token whose routed experts are returned, at most the number of prompt and given tokens. -1: no routed
    # experts are returned. It must be -1 in a session, with hand_over, and for an embedding or a score.
    routed_from: int = -1
    # int32[n], the client's prediction of the output, from which draft tokens are taken.
    prediction: NDArray[np.int32] = field(default_factory=no_tokens)


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A prompt that a prefill worker is computing. Its pages are read before the request with this handle arrives."""

    peer: int
    handle: int
    prompt_ids: NDArray[np.int32]  # int32[n], n >= 1
    source: KvSource  # reservation in the prefill worker, with the number of pages that can be read now
    # Submit explains the following fields.
    salt: str = ""
    lora: str = ""
    revision: str = ""
    page_keys: PromptKeys | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PagesReady:
    """Reports that the first `num_pages` pages of a prompt can be read from the reservation.

    A prefill worker sends it to the gateway, which sends it to the decode worker that prefetches the pages.
    """

    handle: int
    reservation: KvReservation
    num_pages: int


@dataclass(frozen=True, slots=True)
class Verified:
    """Results of verifying one request's draft tokens."""

    rows: int = 0  # decode rows with draft tokens
    drafted: int = 0  # draft tokens in these rows
    accepted: int = 0  # draft tokens that were accepted
    predicted: int = 0  # draft tokens that came from the request's prediction
    right_predicted: int = 0  # accepted draft tokens that came from the prediction

    def and_row(self, drafted: int, accepted: int, predicted: bool = False) -> Verified:
        """Returns the results with one more row.

        Args:
            drafted: draft tokens of the row.
            accepted: draft tokens that were accepted.
            predicted: whether the draft tokens came from the request's prediction.
        """
        assert 0 <= accepted <= drafted, "an accepted token was drafted"
        of_prediction = (drafted, accepted) if predicted else (0, 0)
        return Verified(
            self.rows + 1,
            self.drafted + drafted,
            self.accepted + accepted,
            self.predicted + of_prediction[0],
            self.right_predicted + of_prediction[1],
        )


NOTHING_VERIFIED = Verified()


@dataclass(frozen=True, slots=True)
class Finish:
    """The terminal output of a request.

    The code that ends the request sets the reason and its details. RequestLifecycle sets the other fields.
    """

    reason: FinishReason
    # Set by RequestLifecycle
    handle: int = 0
    request_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    # cached_tokens by tier. Empty if the device is the only tier, or if the request was never admitted.
    cached_from: dict[Tier, int] = field(default_factory=dict)
    completion_tokens: int = 0
    queue_s: float = 0.0  # seconds from arrival to the first admission, or to the end if the request was never admitted
    retractions: int = 0
    verified: Verified = NOTHING_VERIFIED
    reservation: KvReservation | None = None  # reservation of the computed pages; set with HANDED_OVER if a page is reserved
    reserved_pages: int = 0  # number of pages in the reservation
    # Details of the reason
    matched_stop: str = ""  # the stop string or stop pattern that the output matches
    matched_token: int = -1  # the stop token that was sampled; -1 for none
    error: ErrorCode = ErrorCode.NONE
    message: str = ""  # reason of an error; the gRPC server puts the name of `field` before the reason
    embedding: NDArray[np.float32] | None = None  # float32[dimensions]; set with EMBEDDED
    label_logprobs: NDArray[np.float32] | None = None  # float32[labels], see ScoreParams; set with SCORED
    field: str = ""  # with INVALID_ARGUMENT: the invalid field of the request; empty if the error concerns several fields
    element: int | None = None  # index of the invalid element if `field` is a list


@dataclass(slots=True)
class PeerOutput:
    """The outputs of one step for one gateway stream, in parallel columns: the request handles[i] has counts[i] new tokens."""

    peer: int
    handles: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # the new tokens of all requests, flat, in the order of handles
    finishes: list[Finish] = field(default_factory=list)
    logprobs: list[tuple[int, list[RowLogprobs]]] = field(default_factory=list)  # (handle, logprobs of its new tokens)
    # (handle, logprobs of the next prompt positions). The first position follows the last one of the request's previous message.
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = field(default_factory=list)
    # (handle, uint16[tokens, layers, chosen]): routed experts of the next positions. The first position follows the last one of
    # the request's previous message. A message with output tokens has all positions before the last of these tokens.
    routed_experts: list[tuple[int, NDArray[np.uint16]]] = field(default_factory=list)
    # (handle, results of all verifications of the request so far), for requests with a prediction.
    predicted: list[tuple[int, Verified]] = field(default_factory=list)
    ready: list[PagesReady] = field(default_factory=list)  # readable pages of prompts that the worker is still computing


class PauseMode(enum.StrEnum):
    """The effect of a pause on the requests that the worker has. Requests that arrive during the pause wait for its end."""

    ABORT = "abort"  # requests end with an error
    RETRACT = "retract"  # running requests free their memory and wait; their cached prefixes may be flushed
    IN_PLACE = "in_place"  # running requests keep their memory and continue after the pause


class TraceKind(enum.StrEnum):
    """Kinds of trace events. Each comment explains the field `detail` of such an event."""

    QUEUED = "queued"  # prompt tokens
    GATED = "gated"  # prompt tokens; the request waits until its grammar is compiled
    UNGATED = "ungated"  # always 0
    IMPORTING = "importing"  # largest number of tokens that a prefix hit can cover; another tier or worker may have some of them
    IMPORTED = "imported"  # prompt tokens whose KV was read from another tier
    ADMITTED = "admitted"  # tokens that a prefix hit covered
    PREFILLED = "prefilled"  # tokens with KV after the request's last chunk, which has just been planned
    JUMPED = "jumped"  # output tokens, including the tokens that the grammar has added
    RETRACTED = "retracted"  # output tokens so far
    PREEMPTED = "preempted"  # output tokens so far
    ENDED = "ended"  # output tokens


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A transition of one request in the scheduler."""

    at: float  # seconds on the scheduler loop's clock
    request_id: str
    kind: TraceKind
    detail: int  # see TraceKind
