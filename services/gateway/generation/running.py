"""A client's request and its choices. Each request has one owner, and each choice has exactly one terminal event.

    ACCEPTED ──► TOKENIZED ──► SUBMITTED ──► STREAMING ──► ENDED
    reading,     prompts are   a choice is   a token has   every choice has its ending, or
    validating,  known; waits  on a worker   come back     the request has its error, or the
    tokenizing   for a worker                              client is gone

All methods run on the event loop. A Choice (choice.py) receives the outputs of the worker and the text of the detokenizer. The
dispatcher's Placement has the worker of a choice and its time in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

from rootstock_llm.services.gateway.generation.bodies import RequestBody
from rootstock_llm.services.gateway.generation.choice import Choice, Series
from rootstock_llm.services.gateway.generation.errors import ApiError
from rootstock_llm.services.gateway.generation.origin import Origin
from rootstock_llm.services.gateway.generation.request import GenerationParams, GenerationRequest, ModelInfo, PromptInput


class Phase(Enum):
    ACCEPTED = "accepted"
    TOKENIZED = "tokenized"
    SUBMITTED = "submitted"
    STREAMING = "streaming"
    ENDED = "ended"


class Measures(Protocol):
    def series(self, model: str, key: str) -> Series:
        """Returns the metrics of a model and an API key. `key` is the API key's name; "" if the gateway has no API keys."""


class Releaser(Protocol):
    """Frees the slot of a choice on its worker, its position in a queue, and its stream to a detokenizer. Idempotent."""

    def release(self, choice: Choice) -> None: ...


class KeyAdmission(Protocol):
    """A request's share of the limits of its API key. The owner calls end() once."""

    def reserve(self, tokens: int) -> None:
        """Reserves the prompt and output tokens that the request is expected to use at most. Called once. Raises ApiError."""

    def end(self, used_tokens: int) -> None:
        """Ends the request's share, and replaces the reserved number of tokens by the used number."""


class RunningRequest:
    """A generation request from its arrival to release(). Owns its choices, body bytes, admission and trace."""

    params: GenerationParams  # parameters of the first prompt; `stream` and `include_usage` are the same for all prompts
    model: ModelInfo  # from begin() on
    series: Series  # from begin() on

    def __init__(
        self,
        origin: Origin,
        releaser: Releaser,
        measures: Measures,
        body: RequestBody,
        closed: Callable[[RunningRequest], None],
        wants_report: bool = False,
    ) -> None:
        """Starts the request's clock.

        Args:
            body: The request closes it.
            closed: Removes the request from the open requests of the service. Idempotent.
            wants_report: Whether the client requests report_of().
        """
        self.origin = origin
        self.request_id = origin.request_id
        self.caller = origin.caller
        self.trace = origin.trace
        self.wants_report = wants_report
        self.workers: list[str] = []  # ids of the workers to which a choice was submitted, each once
        self.body = body
        self.admission: KeyAdmission | None = None
        self.usage: dict[str, Any] | None = None  # set when the response is complete
        self.task: asyncio.Task[Any] | None = None  # task that serves the request
        self.model_source = ""  # model id at workers and detokenizers
        self._measures = measures
        self.clock = asyncio.get_running_loop().time
        self.arrived = self.clock()
        self.phase = Phase.ACCEPTED
        self.prompts: Sequence[PromptInput] = ()
        self.choices: list[Choice] = []
        self.error: ApiError | None = None
        self.reached_worker = False  # whether a choice has been sent to a worker
        self.first_output_s: float | None = None  # seconds from arrival to the first output of a choice
        self._waits: dict[int, float] = {}  # seconds that each choice waited for a worker, by its index
        self._releaser = releaser
        self._closed = closed
        self._open = 0  # number of choices without their terminal event
        self._choices_with_output: dict[int, Choice] = {}  # choices that next_output() will return, by index
        self._waker: asyncio.Future[None] | None = None  # wakes next_output()
        self._nudged = False  # whether the running or next call of next_output() returns even without output

    @property
    def key(self) -> str:
        """Name of the caller's API key; "" if the gateway has no API keys."""
        return self.caller.key

    def begin(self, prepared: GenerationRequest) -> None:
        """Makes the choices of all prompts, in the order of the prompts."""
        model = prepared.model
        self.params, self.prompts = prepared.params[0], prepared.prompts
        self.model, self.model_source = model, model.source
        self.series = self._measures.series(model.name, self.key)
        for prompt, params in zip(prepared.prompts, prepared.params, strict=True):
            for number in range(params.n):
                self.choices.append(Choice(self, len(self.choices), number, prompt, params, params.seed_of(number, model)))
        self._open = len(self.choices)
        self.phase = Phase.TOKENIZED

    @property
    def begun(self) -> bool:
        """Whether a choice has output."""
        return any(choice.output_ids for choice in self.choices)

    @property
    def complete(self) -> bool:
        return self._open == 0 and self.error is None

    @property
    def tokens_used(self) -> int:
        """Output tokens that this gateway has received, plus the tokens of all prompts if any choice was sent to a worker."""
        prompts = sum(len(prompt.ids) for prompt in self.prompts) if self.reached_worker else 0
        earlier = sum(len(choice.resumed.ids) for choice in self.choices if choice.resumed is not None)
        return prompts + sum(len(choice.output_ids) for choice in self.choices) - earlier

    def placed(self, worker_id: str) -> None:
        """Records that a choice has been submitted to this worker."""
        if worker_id not in self.workers:
            self.workers.append(worker_id)

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
        """Adds the seconds of one wait of this choice for a worker. A choice waits again after its worker was lost."""
        self._waits[choice.index] = self._waits.get(choice.index, 0.0) + seconds

    @property
    def longest_wait_s(self) -> float:
        """Longest time in seconds that a choice waited for a worker."""
        return max(self._waits.values(), default=0.0)

    def has_output(self, choice: Choice) -> None:
        self.streaming()
        self._choices_with_output[choice.index] = choice
        if self.params.stream or self._open == 0:
            self._wake()

    def nudge(self) -> None:
        """Makes the running call of next_output() return, or else the next call, possibly without a choice."""
        self._nudged = True
        self._wake()

    def fail(self, error: ApiError) -> None:
        """Ends every choice with an error. Has no effect after another error, or if the request is complete."""
        if self.error is not None or (self.choices and self._open == 0):
            return
        self.error = error
        self._release_choices()
        self._wake()

    def interrupt(self, error: ApiError) -> None:
        """Ends the request with an error, even while it is prepared. Has no effect after another error."""
        if self.error is not None:
            return
        self.fail(error)
        if self.task is not None and self.phase is Phase.ACCEPTED:
            self.task.cancel()

    def release(self) -> None:
        """Frees all resources of the request. Called at the end of every request. Idempotent.

        The resources are its choices on workers, in queues and on detokenizers, its body bytes, its admission and its trace.
        """
        if self.phase is Phase.ENDED:
            return
        self.phase = Phase.ENDED
        self._release_choices()
        self.body.close()
        if (admission := self.hand_over()) is not None:
            admission.end(self.tokens_used)
        if self.trace is not None:
            self.trace.end()

    def hand_over(self) -> KeyAdmission | None:
        """Removes the request from the open requests and returns its admission, which the caller now owns."""
        self._closed(self)
        admission, self.admission = self.admission, None
        return admission

    def _release_choices(self) -> None:
        for choice in self.choices:
            self._releaser.release(choice)

    async def next_output(self) -> list[Choice]:
        """Waits for new output, and returns the choices that have it, in the order in which their output arrived.

        If the request does not stream, waits until all its choices have ended. The list may be empty after nudge(). Raises the
        request's ApiError.
        """
        while self.error is None and not self._has_result() and not self._nudged:
            self._waker = asyncio.get_running_loop().create_future()
            await self._waker
        if self.error is not None:
            raise self.error
        self._nudged = False
        choices = list(self._choices_with_output.values())
        self._choices_with_output.clear()
        return choices

    def _has_result(self) -> bool:
        return bool(self._choices_with_output) if self.params.stream else self._open == 0

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)
