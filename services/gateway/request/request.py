"""A client's request and its choices: one owner per request, exactly one terminal event per choice.

    ACCEPTED ──► TOKENIZED ──► SUBMITTED ──► STREAMING ──► ENDED
    reading,     prompts are   a choice is   a token has   every choice has its ending, or
    validating,  known; waits  on a worker   come back     the request has its error, or the
    tokenizing   for a worker                              client is gone

Written on the event loop only: by the request's task (begin, take, close), by Dispatcher and WorkerLink events (tokens, finish,
move, fail) and by the detokenizer's answers (on_text). What reaches the client waits here, merged per choice, until the
request's task takes it: a slow client costs one pending piece per choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import worker_pb2
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.request.decoding import Decoding
from services.gateway.request.errors import ApiError
from services.gateway.request.generation import Generation, ModelInfo, Part, Prompt
from services.gateway.request.logprobs import LogprobSpan, LogprobTable
from services.gateway.request.origin import Origin

if TYPE_CHECKING:
    from services.gateway.dispatch.model_pool import ModelPool
    from services.gateway.hedging import Hedge
    from services.gateway.peers.weights import Weights
    from services.gateway.peers.worker_link import WorkerLink
    from services.gateway.request.trace import RequestTrace


class Phase(Enum):
    ACCEPTED = "accepted"
    TOKENIZED = "tokenized"
    SUBMITTED = "submitted"
    STREAMING = "streaming"
    ENDED = "ended"


class Releaser(Protocol):
    """Who frees what a choice holds on a worker, in a queue and on a detokenizer. Idempotent."""

    def release(self, choice: Choice) -> None: ...


@dataclass(frozen=True, slots=True)
class Ending:
    """A complete answer. Counts are the worker's own: in a session prompt_tokens are the whole context's.

    stop_reason: the matched stop string, stop pattern or stop token id; None for the end of sequence.
    matched: the same, but with the end of sequence's token id. retractions: how often it lost its memory to others.
    """

    finish_reason: str  # "stop", "length" or "abort"
    stop_reason: str | int | None
    matched: str | int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_ms: int
    retractions: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice has for its client since the last take.

    token_ids: where ids or log probabilities are wanted, those whose text this is. A token that gave no text when it came (held
    back for a stop string, part of a character) waits for the next one that does. logprobs: one entry per token id, where
    they are wanted.
    """

    choice: Choice
    first: bool
    text: str
    token_ids: Sequence[int]
    logprobs: LogprobSpan
    ending: Ending | None


class Choice:
    """One answer to one prompt. Keeps prompt ids and all output ids, so that it can go on elsewhere."""

    __slots__ = (
        "_ending",
        "_last_text_at",
        "_parts",
        "_shown_ids",
        "_taken_ids",
        "arrived_in_queue",
        "blocks",
        "charged",
        "crashes",
        "decoding",
        "delivered",
        "embedding",
        "ending",
        "generation",
        "handle",
        "hedge",
        "hedge_timer",
        "index",
        "link",
        "logprobs",
        "number",
        "output_ids",
        "part",
        "patience_until",
        "placed_at",
        "pool",
        "predicted_tokens",
        "prompt",
        "prompt_logprobs",
        "refused_by",
        "request",
        "retried",
        "sampling",
        "trace",
        "waiting",
        "weights",
    )

    def __init__(self, request: ClientRequest, index: int, number: int, part: Part, sampling: pb.SamplingParams) -> None:
        self.request = request
        self.index = index  # within the request
        self.number = number  # within its prompt
        self.part = part
        self.prompt: Prompt = part.prompt
        self.generation: Generation = part.generation
        self.sampling = sampling
        self.handle = 0  # on the worker's stream; a new one with every submit
        self.link: WorkerLink | None = None
        self.pool: ModelPool | None = None  # from its first placement on
        self.waiting: asyncio.TimerHandle | None = None  # runs while it waits for a worker
        self.arrived_in_queue = 0.0
        self.patience_until = 0.0  # when waiting for a worker ends with an error; 0.0: it has not waited yet
        self.weights: Weights | None = None  # that its output comes from, or will; None: placed nowhere yet
        self.placed_at = 0.0  # when its worker got it
        self.hedge: Hedge | None = None  # its copy on another worker
        self.hedge_timer: asyncio.TimerHandle | None = None  # runs until a copy is made
        self.crashes = 0  # workers lost soon after they got it
        self.refused_by: list[str] = []  # addresses of workers that would not or could not serve it
        self.retried = False  # elsewhere, after a worker's fault
        self.charged = 0  # of its output tokens, to its key's account
        self.blocks: Sequence[bytes] | None = None  # hashes of its prompt's blocks, once routing has asked for them
        self.predicted_tokens = 0  # of its prompt, that its worker was thought to have cached
        self.delivered = False  # the client has something of it
        self.ending: Ending | None = None
        self.trace = None if request.trace is None else request.trace.choice(self.request_id)
        self._begin_output()

    @property
    def request_id(self) -> str:
        """What a worker knows it by."""
        own = self.part.request_id
        if not own:
            return f"{self.request.request_id}-{self.index}"
        return f"{own}-{self.number}" if self.generation.n > 1 else own

    def _begin_output(self) -> None:
        generation = self.generation
        self.output_ids: list[int] = []
        self.logprobs = LogprobTable()  # of output_ids, where wanted
        self.prompt_logprobs = LogprobTable()  # from position max(1, sampling.logprobs.prompt_from) on
        self.embedding: Sequence[float] | None = None
        self.decoding = Decoding(
            self,
            self.request.request_id,
            self.output_ids,
            self.prompt.ids,
            self.sampling.stop,
            generation.skip_special_tokens,
            generation.include_stop,
            model=self.request.model_source,
            traceparent=self.request.origin.traceparent,
        )
        self._parts = [self.part.prefix] if self.part.prefix else []
        self._shown_ids = 0  # ids whose text has come, not counting those at the end that have given no text yet
        self._taken_ids = 0
        self._ending: Ending | None = None  # becomes `ending` with its last text
        self._last_text_at = 0.0

    @property
    def can_move(self) -> bool:
        """Whether another worker can go on with it: from its prompt and the output so far. A turn of a session goes on from what
        only its worker has."""
        return self._ending is None and self.generation.session is None and self.request.error is None

    def move(self) -> None:
        """Before it goes to another worker: what the last one said of a prompt that it did not finish is void."""
        if not self.output_ids:
            self.prompt_logprobs = LogprobTable()

    def add_logprobs(self, rows: worker_pb2.LogprobRows) -> None:
        """Of the next output tokens. Raises StreamBroken."""
        self.logprobs.extend(rows)

    def add_prompt_logprobs(self, rows: worker_pb2.LogprobRows) -> None:
        """Of the next prompt tokens. Raises StreamBroken."""
        self.prompt_logprobs.extend(rows)

    def finish(self, finish: worker_pb2.Finish) -> None:
        """The worker's terminal output, for an answer that is complete; its text is still to come."""
        ending = _ending_of(finish, self.generation.stop_token_ids)
        self._ending = _without_output(ending) if self.generation.hidden else ending
        # What a stop pattern has matched stays in the text; a stop string is cut off.
        self.decoding.finish(finish.matched_stop if finish.reason == pb.FINISH_REASON_MATCHED_STRING else "")
        if finish.reason == pb.FINISH_REASON_EMBEDDED:
            self.embedding = finish.embedding
            self._end()

    def on_text(self, text: str, count: int) -> None:
        if text and not self.generation.hidden:
            self._parts.append(text)
        if count:
            self._observe(count)
        if text or self.decoding.done:
            self._shown_ids = self.decoding.decoded
        if self.decoding.done:
            self._end()
        else:
            self.request.has_news(self)

    def _end(self) -> None:
        assert self.ending is None and self._ending is not None, "one terminal event per choice"
        self.ending = self._ending
        self.request.choice_ended(self)
        self.request.has_news(self)

    def _observe(self, count: int) -> None:
        request = self.request
        now = request.clock()
        if self._last_text_at == 0.0:
            request.metrics.time_to_first_token.observe(now - request.arrived)
        else:
            request.metrics.inter_token_latency.observe((now - self._last_text_at) / count, count)
        self._last_text_at = now

    def on_decode_failed(self, error: ApiError) -> None:
        self.request.fail(error)

    @property
    def worker_id(self) -> str:
        """Of the worker that it is on; "" while it is on none."""
        info = self.link.info if self.link is not None else None
        return info.worker_id if info is not None else ""

    def take(self) -> Delta | None:
        """What has gathered for the client, or None if there is nothing to show yet. Never None after the ending."""
        if not self._parts and self.ending is None:
            return None
        text = "".join(self._parts)
        self._parts.clear()
        generation = self.generation
        begin, end = self._taken_ids, 0 if generation.hidden else self._shown_ids
        self._taken_ids = self._shown_ids
        ids = self.output_ids[begin:end] if generation.return_token_ids or generation.wants_logprobs else ()
        logprobs = self.logprobs.span(begin, end if generation.wants_logprobs else 0)
        first, self.delivered = not self.delivered, True
        return Delta(self, first, text, ids, logprobs, self.ending)


_FINISH_REASONS = {pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_ABORT: "abort"}


def _ending_of(finish: worker_pb2.Finish, stop_token_ids: frozenset[int]) -> Ending:
    matched: str | int | None = None
    if finish.reason in (pb.FINISH_REASON_MATCHED_STRING, pb.FINISH_REASON_MATCHED_REGEX):
        matched = finish.matched_stop
    elif finish.reason == pb.FINISH_REASON_MATCHED_TOKEN:
        matched = finish.matched_token
    is_end_of_sequence = isinstance(matched, int) and matched not in stop_token_ids
    return Ending(
        finish_reason=_FINISH_REASONS.get(finish.reason, "stop"),
        stop_reason=None if is_end_of_sequence else matched,
        matched=matched,
        prompt_tokens=finish.prompt_tokens,
        cached_tokens=finish.cached_tokens,
        completion_tokens=finish.completion_tokens,
        queue_ms=finish.queue_ms,
        retractions=finish.retractions,
    )


def _without_output(ending: Ending) -> Ending:
    """The ending of an answer whose tokens are not shown."""
    reason = "abort" if ending.finish_reason == "abort" else "length"
    return replace(ending, finish_reason=reason, stop_reason=None, matched=None, completion_tokens=0)


class ClientRequest:
    """Owns its choices from begin() to close(). After fail() or close() it holds nothing anywhere."""

    generation: Generation  # of its first part, for what all parts have in common
    model: ModelInfo  # from begin() on

    def __init__(
        self,
        request_id: str,
        releaser: Releaser,
        metrics: GatewayMetrics,
        key: str = "",
        trace: RequestTrace | None = None,
    ) -> None:
        """key: whose request it is, for fairness; "" where nobody has keys. trace: where it is traced."""
        self.request_id = request_id
        self.trace = trace
        self.origin = Origin(request_id, trace)
        self.key = key
        self.model_source = ""  # what workers and detokenizers call its model
        self.metrics = metrics
        self.clock = asyncio.get_running_loop().time
        self.arrived = self.clock()
        self.phase = Phase.ACCEPTED
        self.parts: Sequence[Part] = ()
        self.choices: list[Choice] = []
        self.error: ApiError | None = None
        self._releaser = releaser
        self._open = 0  # choices without their terminal event
        self._news: dict[int, Choice] = {}  # by index
        self._waker: asyncio.Future[None] | None = None

    def begin(self, parts: Sequence[Part], model: ModelInfo) -> None:
        """Makes the choices, prompt by prompt. `stream` and `include_usage` are the same in all parts."""
        self.generation = parts[0].generation
        self.model, self.model_source = model, model.source
        self.parts = parts
        for part in parts:
            for number in range(part.generation.n):
                sampling = part.generation.sampling_of(number, len(part.prompt.ids), model)
                self.choices.append(Choice(self, len(self.choices), number, part, sampling))
        self._open = len(self.choices)
        self.phase = Phase.TOKENIZED

    @property
    def begun(self) -> bool:
        """Output of one of its choices is there."""
        return any(choice.output_ids for choice in self.choices)

    @property
    def complete(self) -> bool:
        return self._open == 0 and self.error is None

    def submitted(self) -> None:
        if self.phase is Phase.TOKENIZED:
            self.phase = Phase.SUBMITTED

    def choice_ended(self, choice: Choice) -> None:
        self._open -= 1
        self._releaser.release(choice)

    def has_news(self, choice: Choice) -> None:
        if self.phase is not Phase.ENDED:
            self.phase = Phase.STREAMING
        self._news[choice.index] = choice
        if self.generation.stream or self._open == 0:
            self._wake()

    def fail(self, error: ApiError) -> None:
        """Ends every choice. The first error counts; after a complete answer there is none."""
        if self.error is not None or (self.choices and self._open == 0):
            return
        self.error = error
        self._release_all()
        self._wake()

    def close(self) -> None:
        """Frees whatever is still held: the client has its answer, or is gone."""
        self.phase = Phase.ENDED
        self._release_all()

    def _release_all(self) -> None:
        for choice in self.choices:
            self._releaser.release(choice)

    async def news(self) -> list[Choice]:
        """Choices with something to take, in the order in which it came. Raises the request's ApiError."""
        while self.error is None and not self._ready():
            self._waker = asyncio.get_running_loop().create_future()
            await self._waker
        if self.error is not None:
            raise self.error
        choices = list(self._news.values())
        self._news.clear()
        return choices

    def _ready(self) -> bool:
        return bool(self._news) if self.generation.stream else self._open == 0

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)
