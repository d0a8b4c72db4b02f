"""A request and its phases. The scheduler is the only writer; `move` is the only code that changes a phase."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.grammar import Matcher
from services.worker.core.contracts.messages import NOTHING_VERIFIED, SessionTurn, Verified
from services.worker.core.contracts.plan import RowLogprobs, no_tokens
from services.worker.core.contracts.rooms import Room, Source
from services.worker.core.contracts.sampling import SamplingParams
from services.worker.core.contracts.transfers import Tier
from services.worker.core.kv.memory import Lease
from services.worker.core.queue.shares import Flow, Payer


class Phase(enum.IntEnum):
    WAITING = 0
    EXTEND = 1
    DECODE = 2
    FINISHED = 3
    GATED = 4  # a gate makes it wait, beside the queue


_LEGAL: dict[Phase, tuple[Phase, ...]] = {
    Phase.GATED: (Phase.WAITING, Phase.FINISHED),
    Phase.WAITING: (Phase.EXTEND, Phase.FINISHED, Phase.GATED),
    Phase.EXTEND: (Phase.DECODE, Phase.WAITING, Phase.FINISHED),
    Phase.DECODE: (Phase.EXTEND, Phase.WAITING, Phase.FINISHED),
    Phase.FINISHED: (),
}


@dataclass(slots=True, eq=False)
class Request:
    """seq: order of arrival, unique. rank: order of urgency, lower first. num_sent: output tokens already told to the front
    end. deadline: absolute, or inf. reuse_limit: tokens that a prefix hit may cover.

    lease is set exactly in EXTEND and DECODE. flight_step: the step that was uncommitted when the request lost its lease
    to retraction, whose sampled token still counts (-1: none). parked_step: the plan that took its lease; it may not come
    back in that one. logprob_planned, logprob_done: prompt positions below these have their logprobs planned, committed.
    num_given: output tokens that it came with, sampled elsewhere. num_followed: those that its matcher has accepted since.
    logprobs: of each later output token, in order, if they are wanted. queued_tokens: prompt and output when it last began to
    wait. held: tokens of KV kept for it while an admission gate makes it wait in the queue, 0 if none does. prefix_seen: most
    bytes of its key that were cached while it waited for more (-1: it has not). prefix_passes: how many it has waited since
    they were. jump: the grammar may add tokens by itself. payer: whose share its prompt tokens are of, weight: of that share.
    flow: the same while there are any to be planned, but for those that wait at a gate. page_keys: of the first pages of its key,
    where there are tiers. num_looks: how often other tiers were asked for its prefix since it last began to wait. imported: pages
    that came from each. cached_from: num_cached_tokens, by where they were. hand_over, source,
    prediction: see Submit; source is None once nothing more is wanted of it. num_announced: pages that are, or were, in its room.
    """

    seq: int
    peer: int
    handle: int
    request_id: str
    prompt_ids: NDArray[np.int32]
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    namespace: str
    priority: int
    rank: int
    interval: int
    arrival: float
    deadline: float
    tail_tokens: int
    reuse_limit: int
    routing_key: str = ""
    session: SessionTurn | None = None
    session_number: int = 0  # of the session itself: another one may get its name
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    lease: Lease | None = None
    matcher: Matcher | None = None
    num_given: int = 0
    num_followed: int = 0
    num_sent: int = 0
    queued_tokens: int = 0
    num_cached_tokens: int = 0
    num_retractions: int = 0
    verified: Verified = NOTHING_VERIFIED
    queue_s: float = -1.0
    flight_step: int = -1
    parked_step: int = -1
    held: int = 0
    prefix_seen: int = -1
    prefix_passes: int = 0
    logprob_planned: int = 0
    logprob_done: int = 0
    key: bytes = b""
    payer: Payer = (b"", 0, 0)
    weight: float = 1.0
    flow: Flow | None = None
    page_keys: list[bytes] = field(default_factory=list)
    num_looks: int = 0
    imported: Counter[str] = field(default_factory=Counter)
    cached_from: dict[Tier, int] = field(default_factory=dict)
    hand_over: Room | None = None
    source: Source | None = None
    prediction: NDArray[np.int32] = field(default_factory=no_tokens)
    num_announced: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def most_outputs(self) -> int:
        """Tokens of output that there may come to be here, given ones included."""
        most = self.params.max_new_tokens if self.params.samples else 0
        return most if self.hand_over is None else min(most, self.num_given + 1)

    @property
    def wants_logprobs(self) -> bool:
        return self.params.top_logprobs >= 0

    @property
    def jump(self) -> bool:
        """Tokens that nothing sampled have no logprobs and escape penalties and sets of tokens, so requests with any of them
        sample each one. Who goes on elsewhere gets them there."""
        params = self.params
        steered = params.banned_token_ids or params.allowed_token_ids or params.logit_bias
        penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0 or params.dry
        free = not (self.wants_logprobs or penalised or steered)
        return self.matcher is not None and free and self.hand_over is None

    def move(self, phase: Phase) -> None:
        if phase not in _LEGAL[self.phase]:
            raise ValueError(f"request {self.request_id}: {self.phase.name} to {phase.name} is not a legal transition")
        self.phase = phase

    def tokens(self) -> NDArray[np.int32]:
        """int32[n]: prompt and committed output. What admission treats as the prompt."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, np.asarray(self.output_ids, dtype=np.int32)])

    def rekey(self) -> None:
        """Sets `key`, the bytes that the radix tree compares, to the tokens as they are now."""
        self.key = self.tokens().tobytes()

    def prefix_limit(self) -> int:
        """Tokens that a prefix hit may cover at this admission: hidden states of later ones are wanted."""
        if self.logprob_done < self.num_prompt_tokens and self.params.prompt_logprobs_from >= 0:
            return min(self.reuse_limit, self.logprob_done - 1)
        return self.reuse_limit
