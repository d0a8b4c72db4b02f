"""Runs generation requests without HTTP: admits, prepares, dispatches, and passes output to a sink (service/sink.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.generation.abort import AbortScope
from rootstock_llm.services.gateway.generation.bodies import BodyBudget, ClientGone
from rootstock_llm.services.gateway.generation.choice import Choice, Series
from rootstock_llm.services.gateway.generation.errors import ApiError, bad_request, internal, timed_out, unavailable
from rootstock_llm.services.gateway.generation.request import GenerationRequest, check_logprobs, most_tokens
from rootstock_llm.services.gateway.generation.running import Phase, Releaser, RunningRequest
from rootstock_llm.services.gateway.generation.usage import usage_of
from rootstock_llm.services.gateway.keys.key_ring import KeyRing
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.remote.token_texts import TokenTexts
from rootstock_llm.services.gateway.service.sink import GenerationCall, Sink
from rootstock_llm.services.shared.observe.log_fields import fields

if TYPE_CHECKING:
    from collections.abc import Collection

    from rootstock_llm.services.shared.observe.spans import Tracing

logger = logging.getLogger(__name__)


class Dispatch(Releaser, Protocol):
    """Places choices on workers."""

    def start(self, request: RunningRequest, refused_by: Collection[str] = ()) -> None:
        """Places or queues every choice.

        Args:
            refused_by: Addresses of workers that do not get the request.

        Raises:
            ApiError: The queue is full.
        """

    def abort(self, choice: Choice) -> bool:
        """Ends the choice with the output so far. Returns False if it has ended already."""

    def worker_ids(self, choice: Choice) -> list[str]:
        """Returns the ids of the workers that compute the choice."""


class Attendance:
    """Counts the open requests of waiting clients. Batch lines and background responses do not count. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open = 0
        self._last = float("-inf")
        self._arrived: list[Callable[[bool], None]] = []

    def listen(self, arrived: Callable[[bool], None]) -> None:
        """Registers a function for new requests. Its argument is True if no other client waits."""
        self._arrived.append(arrived)

    def begin(self, attended: bool) -> None:
        self._open += attended
        if attended:
            self._last = self._clock()
            for arrived in self._arrived:
                arrived(self._open == 1)

    def end(self, attended: bool) -> None:
        """Counts the end of a request that begin() has counted."""
        self._open -= attended
        if attended:
            self._last = self._clock()

    @property
    def quiet_s(self) -> float:
        """Seconds since the last client waited; 0.0 while one waits."""
        return 0.0 if self._open else self._clock() - self._last


class GenerationService:
    """Owns all open generation requests of the process. Runs on the event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        dispatcher: Dispatch,
        token_texts: TokenTexts,
        metrics: GatewayMetrics,
        bodies: BodyBudget,
        keys: KeyRing,
        tracing: Tracing | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.keys = keys
        self.attendance = Attendance(asyncio.get_running_loop().time)
        self._dispatcher = dispatcher
        self.token_texts = token_texts
        self._bodies = bodies
        self._tracing = tracing
        self._open: dict[RunningRequest, None] = {}
        metrics.in_flight.set_function(lambda: float(len(self._open)))

    async def run(self, call: GenerationCall, sink: Sink) -> None:
        """Serves one request from its admission to its last output. Before it returns or raises, the request is released.

        Cancelling it means that the client has left.

        Raises:
            ClientGone: The client left while its body was read.
        """
        running = self._opened(call)
        try:
            sink.open(running)
            try:
                self._admit(running, call)
                await call.read_body(running.body)
            except ApiError as error:
                running.fail(error)
                await self._send_failure(running, sink, error)
            else:
                await self._serve(running, call, sink)
        except (ClientGone, asyncio.CancelledError):
            self._client_gone(running)
            raise
        finally:
            running.release()
            sink.released(running)

    def abort(self, scope: AbortScope, error: ApiError) -> int:
        """Ends the selected choices, which keep their output so far. Requests that have no output to return end with `error`.

        Returns:
            The number of ended choices and requests.
        """
        return sum(self._abort(running, scope, error) for running in list(self._open))

    def end_all(self, error: ApiError) -> None:
        """Ends every open request with this error."""
        for running in list(self._open):
            running.interrupt(error)

    @property
    def idle(self) -> bool:
        return not self._open

    def _opened(self, call: GenerationCall) -> RunningRequest:
        origin, body = call.origin, self._bodies.open(call.gone)
        if not origin.is_counted:
            return RunningRequest(origin, self._dispatcher, _UNCOUNTED, body, self._forget)
        if self._tracing is not None:
            origin.begin_trace(self._tracing)
        return RunningRequest(origin, self._dispatcher, self.metrics, body, self._forget, call.wants_report)

    def _admit(self, running: RunningRequest, call: GenerationCall) -> None:
        """Admits the request. Raises ApiError if too many requests are open, or the key's limits are reached."""
        running.admission = call.admission
        if not call.origin.is_counted:
            return
        if len(self._open) >= self.settings.max_concurrent_requests:
            raise unavailable("Too many requests are in flight.", self.settings.retry_after_s, "queue_full")
        self._open[running] = None
        self.attendance.begin(_is_attended(running))
        if call.admission is None:
            running.admission = self.keys.begin(running.key)

    def _forget(self, running: RunningRequest) -> None:
        if running in self._open:
            del self._open[running]
            self.attendance.end(_is_attended(running))

    async def _serve(self, running: RunningRequest, call: GenerationCall, sink: Sink) -> None:
        running.task = asyncio.current_task()
        try:
            async with asyncio.timeout(self.settings.request_timeout_s):
                await self._generate(running, call, sink)
            return
        except ApiError as failure:
            error = _alone(failure)
        except TimeoutError:
            error = timed_out()
        except asyncio.CancelledError:
            if running.error is None and (running.task is None or running.task.cancelling()):
                raise
            if running.error is None:
                logger.error("a request was cancelled without a reason", extra=fields(**running.origin.log_fields))
            error = running.error or internal()  # interrupted, and the client is still there
        except Exception:
            logger.exception("request failed", extra=fields(**running.origin.log_fields))
            error = internal()
        running.fail(error)
        await self._send_failure(running, sink, error)

    async def _generate(self, running: RunningRequest, call: GenerationCall, sink: Sink) -> None:
        prepared = await self._prepared(running, call, sink)
        if not await sink.begin(prepared, self.token_texts):
            return
        self._dispatcher.start(running, call.avoid)
        running.body.close()
        await sink.queued()
        more = True
        while more:
            choices = await running.next_output()
            if not running.params.stream and running.complete:
                choices = running.choices  # a response that is not a stream lists its choices by index
            deltas = [delta for choice in choices if (delta := choice.take()) is not None]
            more = (
                not running.complete
            )  # read before the sink is awaited, because output that arrives meanwhile is not in `deltas`
            await sink.take(deltas, more)
        self._count(running)
        await sink.end()

    async def _prepared(self, running: RunningRequest, call: GenerationCall, sink: Sink) -> GenerationRequest:
        """Returns a prepared request whose choices have been made. Raises ApiError."""
        try:
            prepared = await sink.while_preparing(call.prepare(running.body, running.origin))
            if call.origin.routing_key:
                prepared = prepared.routed(call.origin.routing_key)
            if running.error is not None:
                raise running.error
            self._count_cuts(running, prepared)
            check_logprobs(prepared)
            if running.admission is not None and call.admission is None:
                running.admission.reserve(most_tokens(prepared))
            running.begin(prepared)
            if running.trace is not None:
                running.trace.begin(prepared.model.name, len(running.choices))
        except (ValueError, OverflowError):
            # A fallback for a value that passed its field's check but does not fit its protobuf message.
            logger.warning("a value does not fit its message", extra=fields(**running.origin.log_fields), exc_info=True)
            raise bad_request(None, "A value of the request is out of its range.") from None
        return prepared

    async def _send_failure(self, running: RunningRequest, sink: Sink, error: ApiError) -> None:
        if running.trace is not None:
            running.trace.failed(error)
        await sink.fail(error)

    def _client_gone(self, running: RunningRequest) -> None:
        if not _is_attended(running):
            return  # a batch line or a background response moved to another gateway; no client was waiting
        self.metrics.aborts.labels(running.phase.value).inc()
        if running.trace is not None:
            running.trace.client_gone()
        logger.info("client gone", extra=fields(**running.origin.log_fields, phase=running.phase.value))

    def _count_cuts(self, running: RunningRequest, prepared: GenerationRequest) -> None:
        cuts = [prompt.num_cut for prompt in prepared.prompts if prompt.num_cut]
        if cuts:
            self.metrics.truncated_prompts.inc(len(cuts))
            logger.info("prompts were cut", extra=fields(**running.origin.log_fields, prompts=len(cuts), tokens=sum(cuts)))

    def _count(self, running: RunningRequest) -> None:
        running.usage = usage = usage_of(running)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        since_arrival = running.clock() - running.arrived
        running.series.answered(usage["prompt_tokens"], cached, usage["completion_tokens"], since_arrival)
        if running.trace is not None:
            running.trace.answered(usage, [choice.ending.finish_reason for choice in running.choices if choice.ending])

    def _abort(self, running: RunningRequest, scope: AbortScope, error: ApiError) -> int:
        if running.error is not None or not scope.owns(running.key):
            return 0
        whole = (running.request_id, *running.origin.names)
        if running.phase is Phase.ACCEPTED:
            if not scope.on(()) or not scope.names(*whole, *running.origin.part_names):
                return 0
            running.interrupt(error)
            return 1
        named = (each for each in running.choices if scope.names(*whole, each.prompt.request_id, each.request_id))
        selected = [each for each in named if scope.on(self._dispatcher.worker_ids(each))]
        if selected and running.params.ends_with_prompt:
            running.fail(error)
            return int(running.error is not None)
        return sum(self._dispatcher.abort(choice) for choice in selected)


class _Uncounted:
    """Metrics of requests that no client has sent. Nothing is counted."""

    def series(self, model: str, key: str) -> Series:
        return self

    def first_token(self, since_arrival: float) -> None:
        """Counts nothing."""

    def further_tokens(self, between_two: float, count: int) -> None:
        """Counts nothing."""

    def answered(self, prompt: int, cached: int, output: int, since_arrival: float) -> None:
        """Counts nothing."""


_UNCOUNTED = _Uncounted()


def _is_attended(running: RunningRequest) -> bool:
    """Whether a client waits for the response."""
    return not running.caller.background and running.origin.is_counted


def _alone(error: ApiError) -> ApiError:
    """Returns the error without its traceback, whose frames would keep the parsed body in memory."""
    error.__traceback__ = error.__context__ = None
    return error
