"""A client's request and its choices: one owner per request, exactly one terminal event per choice.

    ACCEPTED ──► TOKENIZED ──► SUBMITTED ──► STREAMING ──► ENDED
    reading,     prompts are   a choice is   a token has   every choice has its ending, or
    validating,  known; waits  on a worker   come back     the request has its error, or the
    tokenizing   for a worker                              client is gone

All methods run on the event loop. ChoiceOutput receives the outputs of the worker, and ChoiceText the text of the detokenizer.
The dispatcher's Placement has the worker of a choice, and Wait its time in the queue. New output waits in the choice, merged,
until the request's task takes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import worker_pb2
from services.gateway.request.body_budget import HeldBytes
from services.gateway.request.choice_output import ChoiceOutput, Ending, Progress
from services.gateway.request.context import CallContext
from services.gateway.request.decoding import Decoding
from services.gateway.request.errors import ApiError
from services.gateway.request.generation import ChoiceSampling, Generation, ModelInfo, Part, Prompt
from services.gateway.request.logprobs import LogprobSpan
from services.gateway.request.origin import Origin
from services.gateway.request.trace import RequestTrace
from services.gateway.routing import session_home


class Phase(Enum):
    ACCEPTED = "accepted"
    TOKENIZED = "tokenized"
    SUBMITTED = "submitted"
    STREAMING = "streaming"
    ENDED = "ended"


class Series(Protocol):
    """Counts requests of one model and API key. Times are in seconds."""

    def first_token(self, since_arrival: float) -> None: ...

    def further_tokens(self, between_two: float, count: int) -> None: ...

    def answered(self, prompt: int, cached: int, output: int, since_arrival: float) -> None:
        """Counts a complete response: tokens of the prompts, cached tokens among them, output tokens, and seconds."""


class Measures(Protocol):
    def series(self, model: str, key: str) -> Series:
        """Returns the series of a model and the name of an API key, "" without keys."""


class Releaser(Protocol):
    """Frees the slot of a choice on its worker, its position in a queue, and its stream to a detokenizer. Idempotent."""

    def release(self, choice: Choice) -> None: ...


class KeyAdmission(Protocol):
    """A request's slot within the limits of its API key. end() is called once, by its owner."""

    def reserve(self, tokens: int) -> None:
        """Reserves the largest number of prompt and output tokens that the request may use. Called once; raises ApiError 429."""

    def end(self, used_tokens: int) -> None:
        """Frees the slot and settles the reservation with the tokens that the request has used."""


class Course(Protocol):
    """Notes the workers of a request for a client that has asked for a report."""

    def placed(self, worker_id: str) -> None:
        """Notes that a choice was submitted to this worker."""

    def told(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Returns the report on choices that have ended, as JSON."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice, for its client."""

    choice: Choice
    first: bool  # the choice has had no delta before
    text: str
    # If the client wants them: ids whose text this is, and their log probabilities. An id without text so far (held back for a
    # stop string, part of a character) waits for the next delta.
    token_ids: Sequence[int]
    logprobs: LogprobSpan
    ending: Ending | None  # None while the choice goes on


class ChoiceText:
    """The text of one choice, and the part of it that its client has not taken."""

    __slots__ = (
        "_choice",
        "_delivered",
        "_generation",
        "_last_at",
        "_output",
        "_pieces",
        "_shown_ids",
        "_taken_ids",
        "decoding",
        "ending",
    )

    def __init__(self, choice: Choice, part: Part, output: ChoiceOutput) -> None:
        request, generation = choice.request, part.generation
        self._choice = choice
        self._generation: Generation = generation
        self._output = output
        self._pieces = [part.prefix] if part.prefix else []
        self._shown_ids = 0  # ids with text; the last ones count when their text has come
        self._taken_ids = 0  # ids whose text has been taken
        self._delivered = False  # a delta has been taken
        self._last_at = 0.0  # loop time of the last token; 0.0 before the first
        self.ending: Ending | None = None  # set with the last text
        self.decoding = Decoding(
            self,
            request.request_id,
            output.ids,
            part.prompt.ids,
            generation.sampling.stop,
            generation.skip_special_tokens,
            generation.include_stop,
            model=request.model_source,
            traceparent=request.origin.traceparent,
            patient=not generation.stream,
            kept_tokens=generation.parsing.kept_tokens if generation.parsing is not None else (),
        )

    def resume(self, decoded: int, chars: int, shown: int) -> None:
        """Continues behind text that the client has already.

        Args:
            decoded: Ids that have been decoded.
            chars: Characters of their text.
            shown: Ids whose text the client has.
        """
        self.decoding.resume(decoded, chars)
        self._shown_ids = self._taken_ids = shown
        self._delivered = chars > 0
        if decoded:
            self._last_at = self._choice.request.clock()  # the next token is not its first

    @property
    def place(self) -> tuple[int, int, int]:
        """Arguments of a resume() that continues behind the last take()."""
        return self.decoding.decoded, self.decoding.emitted_chars, self._taken_ids

    def finish(self, finish: worker_pb2.Finish) -> None:
        """Ends the output. The last text follows, unless the output is a vector or a score."""
        # The text that a stop pattern has matched stays; a stop string is cut off.
        self.decoding.finish(finish.matched_stop if finish.reason == pb.FINISH_REASON_MATCHED_STRING else "")
        if finish.reason in (pb.FINISH_REASON_EMBEDDED, pb.FINISH_REASON_SCORED):
            self._end()

    def ids_came(self, count: int) -> None:
        """Notes that `count` ids were added to the output. Unless the response is a stream, they are timed now."""
        if self.decoding.patient:
            self._time(count)
            self._choice.request.streaming()

    def on_text(self, text: str, count: int) -> None:
        if text and not self._generation.hidden:
            self._pieces.append(text)
        if count and not self.decoding.patient:
            self._time(count)
        if text or self.decoding.done:
            self._shown_ids = self.decoding.decoded
        if self.decoding.done:
            self._end()
        else:
            self._choice.request.has_news(self._choice)

    def on_decode_failed(self, error: ApiError) -> None:
        self._choice.request.fail(error)

    def take(self) -> Delta | None:
        """Returns the output since the last take, or None if there is none. After the ending it is never None."""
        if not self._pieces and self.ending is None:
            return None
        text = "".join(self._pieces)
        self._pieces.clear()
        generation, output = self._generation, self._output
        begin, end = self._taken_ids, 0 if generation.hidden else self._shown_ids
        self._taken_ids = self._shown_ids
        ids = output.ids[begin:end] if generation.answer.return_token_ids or generation.wants_logprobs else ()
        logprobs = output.logprobs.span(begin, end if generation.wants_logprobs else 0)
        first, self._delivered = not self._delivered, True
        return Delta(self._choice, first, text, ids, logprobs, self.ending)

    def _end(self) -> None:
        verdict = self._output.verdict
        assert self.ending is None and verdict is not None, "one terminal event per choice"
        self.ending = verdict
        self._choice.request.choice_ended(self._choice)
        self._choice.request.has_news(self._choice)

    def _time(self, count: int) -> None:
        request = self._choice.request
        now = request.clock()
        if self._last_at == 0.0:
            request.series.first_token(now - request.arrived)
        else:
            request.series.further_tokens((now - self._last_at) / count, count)
        self._last_at = now


class Choice:
    """One output for one prompt. It may move from worker to worker with the same parameters."""

    __slots__ = ("generation", "index", "number", "output", "part", "prompt", "request", "resumed", "sampling", "text", "trace")

    def __init__(self, request: RunningRequest, index: int, number: int, part: Part, sampling: ChoiceSampling) -> None:
        self.request = request
        self.index = index  # among all choices of the request
        self.number = number  # among the choices of its prompt
        self.part = part
        self.prompt: Prompt = part.prompt
        self.generation: Generation = part.generation
        self.sampling = sampling
        self.output = ChoiceOutput(part.generation)
        self.text = ChoiceText(self, part, self.output)
        self.trace = None if request.trace is None else request.trace.choice(self.request_id)
        self.resumed: Progress | None = None  # output of another gateway or an earlier try, without log probabilities

    def resume(self, progress: Progress) -> None:
        """Continues earlier output. Called before the choice is dispatched. Raises ValueError if log probabilities do not fit."""
        self.resumed = replace(progress, logprobs=())  # ChoiceOutput has them
        self.output.resume(progress.ids, progress.logprobs)
        self.text.resume(progress.decoded, progress.chars, progress.shown)

    @property
    def request_id(self) -> str:
        """Request id on the worker."""
        own = self.part.request_id
        if not own:
            return f"{self.request.request_id}-{self.index}"
        return f"{own}-{self.number}" if self.generation.n > 1 else own

    @property
    def cache_salt(self) -> str:
        """Cache salt on the worker, which may have the API key's own part."""
        return self.request.caller.cache_salt_of(self.generation.cache_salt)

    @property
    def session_id(self) -> str:
        """Session id on the worker; "" outside of sessions."""
        session = self.generation.session
        return "" if session is None else session_home.owned_id(session.session_id, self.request.key)

    @property
    def priority(self) -> int:
        """Priority within the limit of its API key."""
        return self.request.caller.priority_of(self.generation.priority)

    @property
    def ending(self) -> Ending | None:
        """Ending of the choice; None until its last text has come."""
        return self.text.ending

    @property
    def can_move(self) -> bool:
        """Whether another worker can continue it from its prompt and output. A session's turn needs the KV of its own worker."""
        return self.output.verdict is None and self.generation.session is None and self.request.error is None

    @property
    def generates(self) -> bool:
        """Whether the output is tokens, not a vector or a score."""
        return not self.generation.ends_with_prompt

    def finish(self, finish: worker_pb2.Finish) -> None:
        """Receives the worker's terminal output of a complete choice. Its last text follows."""
        self.output.finish(finish)
        self.text.finish(finish)

    def take(self) -> Delta | None:
        """Returns the output since the last take, or None if there is none. After the ending it is never None."""
        return self.text.take()


class RunningRequest:
    """A generation request from its arrival to release(). Owns its choices, body bytes, admission and trace."""

    generation: Generation  # of its first part, for what all parts have in common
    model: ModelInfo  # from begin() on
    series: Series  # from begin() on

    def __init__(
        self,
        context: CallContext,
        releaser: Releaser,
        measures: Measures,
        held: HeldBytes,
        closed: Callable[[RunningRequest], None],
        trace: RequestTrace | None = None,
        course: Course | None = None,
    ) -> None:
        """Starts the request's clock.

        Args:
            held: Bytes of the body budget. The request frees them.
            closed: Takes the request out of the open ones. Idempotent.
            trace: None if the request is not traced.
            course: Notes the workers of the request; None if its client does not want a report.
        """
        self.context = context
        self.request_id = context.request_id
        self.caller = context.caller
        self.trace = trace
        self.course = course
        self.held = held
        self.admission: KeyAdmission | None = None
        self.usage: dict[str, Any] | None = None  # set when the response is complete
        self.task: asyncio.Task[Any] | None = None  # serves the request
        self.wants_stream = False
        self.origin = Origin(self.request_id, trace, context.caller, wants_stream=self._asks_for_stream)
        self.model_source = ""  # what workers and detokenizers call its model
        self._measures = measures
        self.clock = asyncio.get_running_loop().time
        self.arrived = self.clock()
        self.phase = Phase.ACCEPTED
        self.parts: Sequence[Part] = ()
        self.choices: list[Choice] = []
        self.error: ApiError | None = None
        self.reached_worker = False
        self.first_output_s: float | None = None  # seconds from arrival to the first output of a choice
        self._waits: dict[int, float] = {}  # seconds that each choice waited for a worker, by its index
        self._releaser = releaser
        self._closed = closed
        self._open = 0  # choices without their terminal event
        self._news: dict[int, Choice] = {}  # by index
        self._waker: asyncio.Future[None] | None = None
        self._nudged = False

    @property
    def key(self) -> str:
        """Name of the API key of the caller; "" without keys."""
        return self.caller.key

    def begin(self, parts: Sequence[Part], model: ModelInfo) -> None:
        """Makes the choices of each prompt in order. All parts have the same `stream` and `include_usage`."""
        self.generation = parts[0].generation
        self.model, self.model_source = model, model.source
        self.series = self._measures.series(model.name, self.key)
        self.parts = parts
        for part in parts:
            for number in range(part.generation.n):
                sampling = part.generation.sampling_of(number, len(part.prompt.ids), model)
                self.choices.append(Choice(self, len(self.choices), number, part, sampling))
        self._open = len(self.choices)
        self.phase = Phase.TOKENIZED

    @property
    def begun(self) -> bool:
        """Whether a choice has output."""
        return any(choice.output.ids for choice in self.choices)

    @property
    def complete(self) -> bool:
        return self._open == 0 and self.error is None

    @property
    def tokens_used(self) -> int:
        """Tokens of all prompts, if a worker has received one of them, and of the output that came to this gateway."""
        prompts = sum(len(part.prompt.ids) for part in self.parts) if self.reached_worker else 0
        earlier = sum(len(choice.resumed.ids) for choice in self.choices if choice.resumed is not None)
        return prompts + sum(len(choice.output.ids) for choice in self.choices) - earlier

    def submitted(self) -> None:
        self.reached_worker = True
        if self.phase is Phase.TOKENIZED:
            self.phase = Phase.SUBMITTED

    def choice_ended(self, choice: Choice) -> None:
        self._open -= 1
        self._releaser.release(choice)

    def streaming(self) -> None:
        if self.first_output_s is None:
            self.first_output_s = self.clock() - self.arrived
        if self.phase is not Phase.ENDED:
            self.phase = Phase.STREAMING

    def choice_waited(self, choice: Choice, seconds: float) -> None:
        """Adds a wait of this choice for a worker; a choice waits again after its worker was lost."""
        self._waits[choice.index] = self._waits.get(choice.index, 0.0) + seconds

    @property
    def longest_wait_s(self) -> float:
        """Seconds that the choice which waited longest spent waiting for a worker."""
        return max(self._waits.values(), default=0.0)

    def has_news(self, choice: Choice) -> None:
        self.streaming()
        self._news[choice.index] = choice
        if self.generation.stream or self._open == 0:
            self._wake()

    def nudge(self) -> None:
        """Ends the current news(), which may then return no choice."""
        self._nudged = True
        self._wake()

    def fail(self, error: ApiError) -> None:
        """Ends every choice with an error. No effect after another error, or if the request is complete."""
        if self.error is not None or (self.choices and self._open == 0):
            return
        self.error = error
        self._release_choices()
        self._wake()

    def interrupt(self, error: ApiError) -> None:
        """Ends the request with an error, also while it is prepared. No effect after another error."""
        if self.error is not None:
            return
        self.fail(error)
        if self.task is not None and self.phase is Phase.ACCEPTED:
            self.task.cancel()

    def release(self) -> None:
        """Frees everything that the request holds: its choices on workers, in queues and on detokenizers, its body bytes, its
        admission and its trace. Ends every path of a request; a second call has no effect."""
        if self.phase is Phase.ENDED:
            return
        self.phase = Phase.ENDED
        self._release_choices()
        self.held.close()
        if (admission := self.hand_over()) is not None:
            admission.end(self.tokens_used)
        if self.trace is not None:
            self.trace.end()

    def hand_over(self) -> KeyAdmission | None:
        """Gives up the request's place among the open requests, and its admission, which the caller of this method now owns."""
        self._closed(self)
        admission, self.admission = self.admission, None
        return admission

    def _release_choices(self) -> None:
        for choice in self.choices:
            self._releaser.release(choice)

    async def news(self) -> list[Choice]:
        """Waits for output, and returns the choices that have some in the order of its arrival; none after nudge(). Raises the
        request's ApiError."""
        while self.error is None and not self._ready() and not self._nudged:
            self._waker = asyncio.get_running_loop().create_future()
            await self._waker
        if self.error is not None:
            raise self.error
        self._nudged = False
        choices = list(self._news.values())
        self._news.clear()
        return choices

    def _ready(self) -> bool:
        return bool(self._news) if self.generation.stream else self._open == 0

    def _asks_for_stream(self) -> None:
        self.wants_stream = True

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)
