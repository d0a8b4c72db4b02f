"""The state of a request: its phase, its parameters, its columns while it has a slot, and its outputs.

Only the scheduler's thread writes this state. RequestQueues sets the phase of a new request, and later changes the phase through
Request.move(), which refuses an illegal transition. RequestLifecycle, the planners and the committer write `progress` and `kv`.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.shared.index.prefix_index import cache_namespace
from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.grammar import Matcher
from rootstock_llm.services.worker.core.contracts.messages import (
    NOTHING_VERIFIED,
    Finish,
    PagesReady,
    PeerOutput,
    SessionTurn,
    Submit,
    Verified,
)
from rootstock_llm.services.worker.core.contracts.plan import (
    FORCE_STREAM_INTERVAL,
    PromptLogprobs,
    RowLogprobs,
    SamplingParams,
    no_tokens,
)
from rootstock_llm.services.worker.core.contracts.reservations import KvReservation, KvSource
from rootstock_llm.services.worker.core.contracts.transfers import Tier
from rootstock_llm.services.worker.core.kv.memory import Lease
from rootstock_llm.services.worker.core.kv.radix_cache import tree_name
from rootstock_llm.services.worker.core.requests.shares import Flow, Payer

STOP_IDS = 8  # stop token ids per slot in SlotColumns; requests with more ids are marked as special
# Assumed number of characters per token when the length of a stop string in tokens is estimated. Most texts have more.
CHARS_PER_TOKEN = 2
_UNLIMITED = 1 << 62


class Phase(enum.IntEnum):
    WAITING = 0
    EXTEND = 1
    DECODE = 2
    FINISHED = 3
    # The request waits, outside of the waiting queue, for its grammar to compile or for KV pages from another tier or worker.
    GATED = 4


_LEGAL: dict[Phase, tuple[Phase, ...]] = {
    Phase.GATED: (Phase.WAITING, Phase.FINISHED),
    Phase.WAITING: (Phase.EXTEND, Phase.FINISHED, Phase.GATED),
    Phase.EXTEND: (Phase.DECODE, Phase.WAITING, Phase.FINISHED),
    Phase.DECODE: (Phase.EXTEND, Phase.WAITING, Phase.FINISHED),
    Phase.FINISHED: (),
}


@dataclass(slots=True, eq=False)
class RequestProgress:
    """The output tokens of one request with their logprobs, and the counters of the request."""

    output_ids: list[int] = field(default_factory=list)
    num_given: int = 0  # number of first output tokens that another worker has sampled (given output)
    num_replayed: int = 0  # number of given tokens that the matcher has accepted
    num_sent: int = 0  # output tokens sent to the gateway; SlotColumns.sent counts them while the request runs
    # Logprobs of the output tokens that were sampled here, if the client asks for logprobs.
    logprobs: list[RowLogprobs] = field(default_factory=list)
    logprob_planned: int = 0  # first prompt position whose logprob no planned step computes
    logprob_done: int = 0  # first prompt position whose logprob is not committed
    routed_planned: int = 0  # first position whose routed experts no planned extend row returns
    routed_done: int = 0  # first position whose routed experts are not committed
    routed: list[NDArray[np.uint16]] = field(default_factory=list)  # committed routed experts that are not sent
    queue_s: float = -1.0  # seconds from arrival to the first admission; -1 before the first admission
    num_cached_tokens: int = 0  # prompt tokens that a prefix hit covered at the first admission
    num_retractions: int = 0
    verified: Verified = NOTHING_VERIFIED
    # Number of the step that was in flight when the request was retracted, and that samples a token for the request. The token
    # counts at the commit. -1: none.
    flight_step: int = -1
    retraction_step: int = -1  # step whose plan last retracted this request and must not admit it again; -1: none


@dataclass(slots=True, eq=False)
class RequestKv:
    """The state of one request's KV: token key, lease, imports and reservation."""

    token_key: bytes = b""  # prompt and output as bytes, by which the radix tree is searched; set by Request.rekey()
    lease: Lease | None = None  # set exactly in the phases EXTEND and DECODE
    page_keys: list[bytes] = field(default_factory=list)  # known page keys of the token key's first pages
    num_tier_lookups: int = 0  # searches of other tiers since the request last began to wait
    imported: Counter[str] = field(default_factory=Counter)  # number of pages that were read for the request, by tier
    cached_from: dict[Tier, int] = field(default_factory=dict)  # num_cached_tokens, by the tier from which they were read
    # For PrefixGate: largest number of first bytes of token_key that were cached or committed while the request waited; -1: it
    # has not waited since its last admission.
    prefix_seen: int = -1
    prefix_passes: int = 0  # admission passes that the request has waited since prefix_seen last rose
    source: KvSource | None = None  # reservation in another worker from which pages may still be read
    reservation: KvReservation | None = None  # reservation for a decode worker; None: the request decodes here
    num_announced: int = 0  # number of pages that were added to the reservation; 0: it was never opened


@dataclass(slots=True, eq=False)
class Request:
    """A request in the scheduler, with its identity, its parameters and its phase. RequestQueues has it until it ends."""

    seq: int  # unique; rises in the order of arrival
    peer: int  # the worker's number for the gateway stream
    handle: int  # the gateway's number for the request
    request_id: str
    prompt_ids: NDArray[np.int32]
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    namespace: str  # name of the radix tree
    rank: int  # see SchedulerConfig.rank(); lower ranks are served first
    interval: int  # output tokens per message to the gateway
    arrival: float
    deadline: float  # time limit, absolute; inf: none; running_timeout_s may lower it at the first admission
    tail_tokens: int  # number of last output tokens in which stop strings are searched first, see finish.py
    reuse_limit: int  # largest number of tokens that a prefix hit may cover; 0: the request cannot use cached KV
    routing_key: str = ""
    session: SessionTurn | None = None
    routed_from: int = -1  # see Submit.routed_from
    session_number: int = 0  # unique number of the session, whose name another session may reuse
    prediction: NDArray[np.int32] = field(default_factory=no_tokens)  # see Submit.prediction
    payer: Payer = (b"", 0, 0)  # name of the flow against whose share the prompt tokens count, see shares.py
    weight: float = 1.0  # weight of the tenant's share
    phase: Phase = Phase.WAITING
    matcher: Matcher | None = None
    flow: Flow | None = None  # set in the phases WAITING and EXTEND, in which the request has tokens to plan
    queued_tokens: int = 0  # prompt and output tokens when the request last began to wait
    # Tokens of KV that less urgent requests leave free for this request while a gate blocks it in the waiting queue. 0: no gate
    # blocks it. (Requests in the phase GATED wait outside of the waiting queue.)
    blocked_tokens: int = 0
    progress: RequestProgress = field(default_factory=RequestProgress)
    kv: RequestKv = field(default_factory=RequestKv)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def most_outputs(self) -> int:
        """Largest number of output tokens, including given output, that the request may have on this worker."""
        most = self.params.max_new_tokens if self.params.samples else 0
        return most if self.kv.reservation is None else min(most, self.progress.num_given + 1)

    @property
    def wants_logprobs(self) -> bool:
        return self.params.top_logprobs >= 0

    @property
    def returns_experts(self) -> bool:
        """Whether the client wants the routed experts of the tokens."""
        return self.routed_from >= 0

    @property
    def num_routable(self) -> int:
        """Number of tokens whose routed experts the client may get: all but the last output token, which is not computed."""
        return self.num_prompt_tokens + max(len(self.progress.output_ids) - 1, 0)

    @property
    def jump(self) -> bool:
        """Whether tokens that the grammar forces are appended without sampling.

        Forced tokens have no logprobs, and penalties, biases and sets of allowed tokens do not apply to them. A request that uses
        one of these features therefore samples each token. A request that returns routed experts also samples each token, because
        forced tokens at the end of the output are never computed. A request that will be handed over samples each token here,
        because the other worker appends its forced tokens.
        """
        params = self.params
        steered = params.banned_token_ids or params.allowed_token_ids or params.logit_bias
        penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0 or params.dry
        free = not (self.wants_logprobs or self.returns_experts or penalised or steered)
        return self.matcher is not None and free and self.kv.reservation is None

    def move(self, phase: Phase) -> None:
        if phase not in _LEGAL[self.phase]:
            raise ValueError(f"request {self.request_id}: {self.phase.name} to {phase.name} is not a legal transition")
        self.phase = phase

    def tokens(self) -> NDArray[np.int32]:
        """Returns prompt and committed output as int32[n]. A new admission computes both like a prompt."""
        if not self.progress.output_ids:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, np.asarray(self.progress.output_ids, dtype=np.int32)])

    def rekey(self) -> None:
        """Sets the token key to the present prompt and output."""
        self.kv.token_key = self.tokens().tobytes()

    def prefix_limit(self) -> int:
        """Returns the largest number of tokens that a prefix hit may cover at the next admission."""
        limit = self.reuse_limit
        if self.params.prompt_logprobs_from >= 0 and self.progress.logprob_done < self.num_prompt_tokens:
            limit = min(limit, self.progress.logprob_done - 1)
        return min(limit, self.progress.routed_done) if self.returns_experts else limit


def make_request(message: Submit, seq: int, config: SchedulerConfig, now: float, revision: str = "") -> Request:
    """Creates a request from a message that refusal() accepts.

    If the message has given output, this output and the logprobs of the prompt count as sent to the gateway. Routed experts of
    positions before routed_from also count as sent.

    Args:
        message: the message.
        seq: number of the request.
        config: the configuration.
        now: time of arrival.
        revision: revision of the weights that compute the request.
    """
    params, given = message.params, len(message.output_ids)
    if given and params.prompt_logprobs_from >= 0:
        params = replace(params, prompt_logprobs_from=-1)
    eos = () if params.ignore_eos else config.eos_token_ids
    reusable = params.embedding is None or config.pooling_reuses_prefix
    first_logprob = max(params.prompt_logprobs_from, 1)
    progress = RequestProgress(
        output_ids=list(message.output_ids),
        num_given=given,
        num_sent=given,
        logprob_planned=first_logprob,
        logprob_done=first_logprob,
        routed_planned=max(message.routed_from, 0),
        routed_done=max(message.routed_from, 0),
    )
    source = message.source if config.reads_peers else None
    request = Request(
        seq=seq,
        peer=message.peer,
        handle=message.handle,
        request_id=message.request_id,
        prompt_ids=message.prompt_ids,
        params=params,
        stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
        namespace=tree_name(revision, cache_namespace(message.lora, message.salt)),
        rank=config.rank(message.priority),
        interval=params.stream_interval if message.stream else FORCE_STREAM_INTERVAL,
        arrival=now,
        deadline=now + message.timeout_s if message.timeout_s else float("inf"),
        tail_tokens=_tail_tokens(params.stop),
        reuse_limit=_UNLIMITED if reusable else 0,
        routing_key=message.routing_key,
        session=message.session,
        routed_from=message.routed_from,
        payer=(message.tenant, message.peer, message.batch) if message.batch else (message.tenant, 0, 0),
        weight=message.weight,
        prediction=message.prediction if params.speculative else no_tokens(),
        progress=progress,
        kv=RequestKv(source=source, reservation=message.hand_over),
    )
    if message.page_keys is not None and message.page_keys.tree == request.namespace and message.session is None:
        request.kv.page_keys = list(message.page_keys.keys)
    request.rekey()
    return request


def _tail_tokens(stops: Sequence[str]) -> int:
    """Returns the estimated number of tokens of the longest stop string, plus 4."""
    return max((len(stop) for stop in stops), default=0) // CHARS_PER_TOKEN + 4


class SlotColumns:
    """The state of running requests in columns by slot, so that a step with many rows takes a few array operations.

    An entry is valid while its slot is leased.
    """

    def __init__(self, num_slots: int) -> None:
        def column() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return np.zeros(num_slots, dtype=np.int64)

        self.epoch = column()  # rises when the slot is freed, so that a commit finds rows whose lease has ended since the plan
        self.computed = column()  # tokens whose KV the planned steps have written or will write
        self.committed = column()  # tokens whose KV the committed steps have written
        self.target = column()  # tokens of prompt and output at the admission or the last grammar jump; the extend ends there
        self.planned_out = column()  # output tokens, including those in flight
        self.num_out = column()  # committed output tokens
        self.sent = column()  # output tokens that were sent to the gateway
        self.max_new = column()
        self.min_new = column()
        self.interval = column()
        self.peer = column()
        self.handle = np.zeros(num_slots, dtype=np.uint64)
        self.draftable = np.zeros(num_slots, dtype=np.bool_)  # the request may get draft tokens
        # Whether the end of the request depends on more than stop_ids and the numbers of tokens, for example on stop strings.
        self.special = np.zeros(num_slots, dtype=np.bool_)
        self.masked = np.zeros(num_slots, dtype=np.bool_)  # sampling needs the mask of the request's grammar
        self.wants_logprobs = np.zeros(num_slots, dtype=np.bool_)  # the client wants logprobs of output tokens
        self.predicted = np.zeros(num_slots, dtype=np.bool_)  # the client has sent a prediction
        self.returns_experts = np.zeros(num_slots, dtype=np.bool_)  # the client wants the routed experts of the tokens
        self.ignore_eos = np.zeros(num_slots, dtype=np.bool_)
        # Whether the token that the step in flight samples is already known and counted, because the grammar forced it.
        self.redundant = np.zeros(num_slots, dtype=np.bool_)
        self.stop_ids = np.full((num_slots, STOP_IDS), -1, dtype=np.int64)

    def begin(self, slot: int, request: Request, num_cached: int) -> None:
        """Fills the columns for a request that is admitted with `num_cached` tokens of KV."""
        outputs = len(request.progress.output_ids)
        target = request.num_prompt_tokens + outputs
        assert 0 <= num_cached < target, "an admitted request has a token to compute"
        assert request.progress.num_sent <= outputs, "the gateway has no more tokens than the output"
        self.computed[slot] = self.committed[slot] = num_cached
        self.target[slot] = target
        self.planned_out[slot] = self.num_out[slot] = outputs
        self.sent[slot] = request.progress.num_sent
        self.max_new[slot] = request.most_outputs
        self.min_new[slot] = request.params.min_new_tokens
        self.interval[slot] = request.interval
        self.peer[slot] = request.peer
        self.handle[slot] = request.handle
        ids = request.stop_token_ids
        params = request.params
        self.draftable[slot] = params.speculative and params.samples
        self.masked[slot] = params.grammar is not None and params.samples
        self.wants_logprobs[slot] = request.wants_logprobs
        self.predicted[slot] = len(request.prediction) > 0
        self.returns_experts[slot] = request.returns_experts
        self.redundant[slot] = False
        self.ignore_eos[slot] = params.ignore_eos
        strings = bool(params.stop or params.stop_regex)
        # The request ends with its prompt, or another worker continues it after its first token here.
        leaves = not params.samples or request.kv.reservation is not None
        self.special[slot] = strings or len(ids) > STOP_IDS or params.grammar is not None or leaves
        self.stop_ids[slot] = -1
        if ids:
            self.stop_ids[slot, : min(len(ids), STOP_IDS)] = ids[:STOP_IDS]

    def drop_flight(self, slot: int) -> None:
        """Makes the commit of the step in flight ignore the slot's row, and undoes the row's effect on the columns."""
        self.epoch[slot] += 1
        self.computed[slot] = self.committed[slot]
        self.planned_out[slot] = self.num_out[slot]

    def end(self, slot: int) -> None:
        assert self.committed[slot] <= self.computed[slot], "only planned tokens are committed"
        assert self.sent[slot] <= self.num_out[slot] <= self.planned_out[slot], "sent <= committed <= planned outputs"
        self.epoch[slot] += 1


class Outputs:
    """The outputs that the loop has not taken yet, one PeerOutput per gateway stream."""

    def __init__(self) -> None:
        self._peers: dict[int, PeerOutput] = {}

    def _peer(self, peer: int) -> PeerOutput:
        output = self._peers.get(peer)
        if output is None:
            output = self._peers[peer] = PeerOutput(peer)
        return output

    def add_rows(self, peer: int, handles: list[int], counts: list[int], tokens: list[int]) -> None:
        assert len(handles) == len(counts) <= len(tokens), "each handle has a count of at least one token"
        output = self._peer(peer)
        output.handles += handles
        output.counts += counts
        output.tokens += tokens

    def add_news(self, request: Request) -> None:
        """Adds the unsent tokens of one request, with their logprobs and routed experts and the counts of add_predicted()."""
        self._add_tokens(request)
        self.add_routed_experts(request)
        self.add_predicted(request)

    def _add_tokens(self, request: Request) -> None:
        assert request.progress.num_sent <= len(request.progress.output_ids), "the gateway has no more tokens than the output"
        tokens = request.progress.output_ids[request.progress.num_sent :]
        if not tokens:
            return
        self.add_rows(request.peer, [request.handle], [len(tokens)], tokens)
        self.add_logprobs(request, request.progress.num_sent, len(request.progress.output_ids))
        request.progress.num_sent = len(request.progress.output_ids)

    def add_logprobs(self, request: Request, first: int, end: int) -> None:
        """Adds the logprobs of the output tokens [first, end) to the message with these tokens, if the client wants them."""
        if request.wants_logprobs:
            assert request.progress.num_given <= first < end, "only tokens that were sampled here have logprobs"
            rows = request.progress.logprobs[first - request.progress.num_given : end - request.progress.num_given]
            self._peer(request.peer).logprobs.append((request.handle, rows))

    def add_predicted(self, request: Request) -> None:
        """Adds how many draft tokens were verified and accepted, if the client has sent a prediction of the output."""
        if len(request.prediction):
            self._peer(request.peer).predicted.append((request.handle, request.progress.verified))

    def add_prompt_logprobs(self, request: Request, values: PromptLogprobs) -> None:
        self._peer(request.peer).prompt_logprobs.append((request.handle, values))

    def add_routed_experts(self, request: Request) -> None:
        """Adds the unsent routed experts of a request, up to those of the last output token but one.

        The routed experts of later computed tokens are dropped. Such tokens are draft tokens after the end of the output, and the
        last output token if the token after it is invalid.
        """
        progress = request.progress
        if not progress.routed:
            return
        parts, progress.routed = progress.routed, []
        values = parts[0] if len(parts) == 1 else np.concatenate(parts)
        surplus = max(progress.routed_done - request.num_routable, 0)
        assert surplus <= len(values), "the experts that were sent belong to tokens before the last one"
        if surplus < len(values):
            self._peer(request.peer).routed_experts.append((request.handle, values[: len(values) - surplus]))

    def add_ready(self, peer: int, ready: PagesReady) -> None:
        self._peer(peer).ready.append(ready)

    def add_finish(self, request: Request, finish: Finish) -> None:
        """Adds the unsent tokens of a request, and then its terminal output."""
        self.add_news(request)
        self._peer(request.peer).finishes.append(finish)

    def add_refusal(self, peer: int, finish: Finish) -> None:
        self._peer(peer).finishes.append(finish)

    def take(self) -> tuple[PeerOutput, ...]:
        peers = tuple(self._peers.values())
        self._peers.clear()
        return peers
