"""A client's request and its choices: one owner per request, exactly one terminal event per choice.

    ACCEPTED ──► TOKENIZED ──► SUBMITTED ──► STREAMING ──► ENDED
    reading,     prompts are   a choice is   a token has   every choice has its ending, or
    validating,  known; waits  on a worker   come back     the request has its error, or the
    tokenizing   for a worker                              client is gone

Written on the event loop only: by the request's task (begin, take, close), by Dispatcher and WorkerLink events (tokens, finish,
restart, fail) and by the detokenizer's answers (on_text). What reaches the client waits here, merged per choice, until the
request's task takes it: a slow client costs one pending piece per choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import worker_pb2
from services.gateway.decoding import Decoding
from services.gateway.errors import ApiError
from services.gateway.metrics import GatewayMetrics
from services.gateway.prompts import Prompt
from services.gateway.validation import Generation

if TYPE_CHECKING:
    from services.gateway.worker_link import WorkerLink


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
    """A complete answer. `stop_reason` is the matched stop string or stop token id; None for the end of sequence."""

    finish_reason: str  # "stop" or "length"
    stop_reason: str | int | None
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice has for its client since the last take."""

    choice: Choice
    first: bool
    text: str
    token_ids: Sequence[int]
    ending: Ending | None


class Choice:
    """One answer to one prompt. Keeps prompt ids and all output ids, so that it can go on elsewhere."""

    __slots__ = (
        "_ending",
        "_last_text_at",
        "_parts",
        "_taken_ids",
        "attempts",
        "decoding",
        "delivered",
        "ending",
        "handle",
        "index",
        "link",
        "output_ids",
        "prefix",
        "prompt",
        "refused_by",
        "request",
        "sampling",
        "waiting",
    )

    def __init__(self, request: ClientRequest, index: int, prompt: Prompt, sampling: pb.SamplingParams, prefix: str) -> None:
        self.request = request
        self.index = index
        self.prompt = prompt
        self.sampling = sampling
        self.prefix = prefix  # text before the first token: echo
        self.handle = 0  # on the worker's stream; a new one with every submit
        self.link: WorkerLink | None = None
        self.waiting: asyncio.TimerHandle | None = None  # runs while no worker is connected
        self.attempts = 0
        self.refused_by: list[str] = []  # addresses of workers whose queue was full
        self.delivered = False  # the client has something of it
        self.ending: Ending | None = None
        self._begin_output()

    def _begin_output(self) -> None:
        generation = self.request.generation
        self.output_ids: list[int] = []
        self.decoding = Decoding(
            self,
            self.request.request_id,
            self.output_ids,
            self.prompt.ids,
            self.sampling.stop,
            generation.skip_special_tokens,
            generation.include_stop,
        )
        self._parts = [self.prefix] if self.prefix else []
        self._taken_ids = 0
        self._ending: Ending | None = None  # becomes `ending` with its last text
        self._last_text_at = 0.0

    @property
    def can_restart(self) -> bool:
        return not self.delivered and self.ending is None

    def restart(self) -> None:
        """Forgets its output, of which nothing has reached the client. The caller has released it before."""
        assert self.can_restart
        self._begin_output()

    def finish(self, finish: worker_pb2.Finish) -> None:
        """The worker's terminal output, for an answer that is complete; its text is still to come."""
        self._ending = _ending_of(finish, self.request.generation.stop_token_ids)
        self.decoding.finish(finish.matched_stop)

    def on_text(self, text: str, count: int) -> None:
        if text:
            self._parts.append(text)
        if count:
            self._observe(count)
        if self.decoding.done:
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

    def take(self) -> Delta | None:
        """What has gathered for the client, or None if there is nothing to show yet. Never None after the ending."""
        if not self._parts and self.ending is None:
            return None
        text = "".join(self._parts)
        self._parts.clear()
        ids = self.output_ids[self._taken_ids : self.decoding.decoded] if self.request.generation.return_token_ids else ()
        self._taken_ids = self.decoding.decoded
        first, self.delivered = not self.delivered, True
        return Delta(self, first, text, ids, self.ending)


def _ending_of(finish: worker_pb2.Finish, stop_token_ids: frozenset[int]) -> Ending:
    stop_reason: str | int | None = None
    if finish.reason == pb.FINISH_REASON_MATCHED_STRING:
        stop_reason = finish.matched_stop
    elif finish.reason == pb.FINISH_REASON_MATCHED_TOKEN and finish.matched_token in stop_token_ids:
        stop_reason = finish.matched_token
    reason = "length" if finish.reason == pb.FINISH_REASON_LENGTH else "stop"
    return Ending(reason, stop_reason, finish.cached_tokens, finish.completion_tokens)


class ClientRequest:
    """Owns its choices from begin() to close(). After fail() or close() it holds nothing anywhere."""

    generation: Generation

    def __init__(self, request_id: str, releaser: Releaser, metrics: GatewayMetrics) -> None:
        self.request_id = request_id
        self.metrics = metrics
        self.clock = asyncio.get_running_loop().time
        self.arrived = self.clock()
        self.phase = Phase.ACCEPTED
        self.prompts: list[Prompt] = []
        self.choices: list[Choice] = []
        self.error: ApiError | None = None
        self._releaser = releaser
        self._open = 0  # choices without their terminal event
        self._news: dict[int, Choice] = {}  # by index
        self._waker: asyncio.Future[None] | None = None

    def begin(self, generation: Generation, prompts: list[Prompt], context_len: int, prefixes: Sequence[str]) -> None:
        """Makes the choices: that of prompt p and choice i has index p * n + i."""
        self.generation = generation
        self.prompts = prompts
        for prompt, prefix in zip(prompts, prefixes, strict=True):
            for number in range(generation.n):
                sampling = generation.sampling_of(number, len(prompt.ids), context_len)
                self.choices.append(Choice(self, len(self.choices), prompt, sampling, prefix))
        self._open = len(self.choices)
        self.phase = Phase.TOKENIZED

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
