"""A request and its phases. The scheduler is the only writer; only `move` changes a phase."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.grammar import Matcher
from services.worker.core.contracts.messages import NOTHING_VERIFIED, SessionTurn, Verified
from services.worker.core.contracts.plan import RowLogprobs, no_tokens
from services.worker.core.contracts.reservations import KvReservation, KvSource
from services.worker.core.contracts.sampling import SamplingParams
from services.worker.core.contracts.transfers import Tier
from services.worker.core.kv.memory import Lease
from services.worker.core.requests.shares import Flow, Payer


class Phase(enum.IntEnum):
    WAITING = 0
    EXTEND = 1
    DECODE = 2
    FINISHED = 3
    GATED = 4  # a gate makes it wait outside of the queue


_LEGAL: dict[Phase, tuple[Phase, ...]] = {
    Phase.GATED: (Phase.WAITING, Phase.FINISHED),
    Phase.WAITING: (Phase.EXTEND, Phase.FINISHED, Phase.GATED),
    Phase.EXTEND: (Phase.DECODE, Phase.WAITING, Phase.FINISHED),
    Phase.DECODE: (Phase.EXTEND, Phase.WAITING, Phase.FINISHED),
    Phase.FINISHED: (),
}


@dataclass(slots=True, eq=False)
class RequestProgress:
    """Output tokens of one request, their logprobs, and the request's counts."""

    output_ids: list[int] = field(default_factory=list)
    num_given: int = 0  # first output tokens, which another worker sampled
    num_followed: int = 0  # given tokens that the matcher has accepted
    num_sent: int = 0  # output tokens sent to the gateway; SlotColumns.sent counts them while the request runs
    # Logprobs of the output tokens after the given ones, if the client wants them.
    logprobs: list[RowLogprobs] = field(default_factory=list)
    logprob_planned: int = 0  # prompt positions below this one have their logprobs planned
    logprob_done: int = 0  # prompt positions below this one have their logprobs committed
    queue_s: float = -1.0  # seconds from arrival to the first admission; -1 before it
    num_cached_tokens: int = 0  # prompt tokens that a prefix hit covered at the first admission
    num_retractions: int = 0
    verified: Verified = NOTHING_VERIFIED
    flight_step: int = -1  # uncommitted step at the retraction whose sampled token still counts; -1 for none
    parked_step: int = -1  # plan that retracted the request; the same plan does not admit it again


@dataclass(slots=True, eq=False)
class RequestKv:
    """KV that one request uses, finds in tiers, or reserves for another worker."""

    token_key: bytes = b""  # tokens as bytes, which the radix tree compares; set by Request.rekey()
    lease: Lease | None = None  # set exactly in the phases EXTEND and DECODE
    page_keys: list[bytes] = field(default_factory=list)  # page keys of the first pages
    num_tier_lookups: int = 0  # searches of other tiers since the request last began to wait
    imported: Counter[str] = field(default_factory=Counter)  # pages that arrived from each tier
    cached_from: dict[Tier, int] = field(default_factory=dict)  # num_cached_tokens by the tier that had them
    prefix_seen: int = -1  # largest number of bytes of token_key that were cached while it waited for more; -1: it never waited
    prefix_passes: int = 0  # admission passes that it has waited since then
    source: KvSource | None = None  # pages in another worker that the request may still need, or None
    reservation: KvReservation | None = None  # reserves the pages for the worker that continues after the next token
    num_announced: int = 0  # pages that were added to the reservation


@dataclass(slots=True, eq=False)
class Request:
    """A request in the scheduler, with its identity, its parameters and its phase.

    RequestQueues changes the phase. RequestLifecycle, the planners and the committer write `progress` and `kv`.
    """

    seq: int  # order of arrival, unique
    peer: int  # the worker's number for the gateway stream
    handle: int  # the gateway's number for the request
    request_id: str
    prompt_ids: NDArray[np.int32]
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    namespace: str  # name of the radix tree
    rank: int  # order of urgency; lower ranks are served first
    interval: int  # output tokens per message to the gateway
    arrival: float
    deadline: float  # absolute; inf for none
    tail_tokens: int  # last output tokens that probably contain any of the stop strings
    reuse_limit: int  # tokens that a prefix hit may cover
    routing_key: str = ""
    session: SessionTurn | None = None
    session_number: int = 0  # number of the session; another session may reuse the name
    prediction: NDArray[np.int32] = field(default_factory=no_tokens)
    payer: Payer = (b"", 0, 0)  # the flow that its prompt tokens are charged to
    weight: float = 1.0  # weight of the payer's share
    phase: Phase = Phase.WAITING
    matcher: Matcher | None = None
    flow: Flow | None = None  # set while prompt tokens are left to plan and no gate outside of the queue holds the request
    queued_tokens: int = 0  # prompt and output tokens when the request last began to wait
    held: int = 0  # tokens of KV set aside while a gate holds the request in the queue; 0 if no gate holds it
    progress: RequestProgress = field(default_factory=RequestProgress)
    kv: RequestKv = field(default_factory=RequestKv)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def most_outputs(self) -> int:
        """Largest number of output tokens on this worker, given ones included."""
        most = self.params.max_new_tokens if self.params.samples else 0
        return most if self.kv.reservation is None else min(most, self.progress.num_given + 1)

    @property
    def wants_logprobs(self) -> bool:
        return self.params.top_logprobs >= 0

    @property
    def jump(self) -> bool:
        """Whether tokens that the grammar forces are appended without sampling.

        Such tokens have no logprobs, and penalties and sets of allowed tokens do not apply to them. A request with any of these
        samples each token. A request that another worker continues gets its forced tokens there.
        """
        params = self.params
        steered = params.banned_token_ids or params.allowed_token_ids or params.logit_bias
        penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0 or params.dry
        free = not (self.wants_logprobs or penalised or steered)
        return self.matcher is not None and free and self.kv.reservation is None

    def move(self, phase: Phase) -> None:
        if phase not in _LEGAL[self.phase]:
            raise ValueError(f"request {self.request_id}: {self.phase.name} to {phase.name} is not a legal transition")
        self.phase = phase

    def tokens(self) -> NDArray[np.int32]:
        """Returns prompt and committed output as int32[n]. Admission treats them as the prompt."""
        if not self.progress.output_ids:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, np.asarray(self.progress.output_ids, dtype=np.int32)])

    def rekey(self) -> None:
        """Sets the token key to the present prompt and output."""
        self.kv.token_key = self.tokens().tobytes()

    def prefix_limit(self) -> int:
        """Returns the tokens that a prefix hit may cover at this admission. The hidden states of later ones must be computed."""
        if self.params.prompt_logprobs_from >= 0 and self.progress.logprob_done < self.num_prompt_tokens:
            return min(self.reuse_limit, self.progress.logprob_done - 1)
        return self.reuse_limit
