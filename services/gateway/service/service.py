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
from rootstock_llm.services.gateway.generation.request import (
    GenerationRequest,
    check_logprobs,
    check_routed_experts,
    most_tokens,
)
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
            refused_by: Addresses of workers that get the request only if no other worker takes requests.

        Raises:
            ApiError: No worker can take or queue the request.
        """

    def abort(self, choice: Choice) -> bool:
        """Ends the choice with the output so far. Returns False if the choice had ended before."""

    def worker_ids(self, choice: Choice) -> list[str]:
        """Returns the ids of the workers that compute the choice."""


class Attendance:
    """Counts the open requests that clients wait for. Batch lines, background responses and health probes do not count."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open = 0
        self._last = float("-inf")
        self._listeners: list[Callable[[bool], None]] = []

    def listen(self, arrived: Callable[[bool], None]) -> None:
        """Registers a function to call for each new request of a client, with True if no other such request is open."""
        self._listeners.append(arrived)

    def begin(self, has_client: bool) -> None:
        self._open += has_client
        if has_client:
            self._last = self._clock()
            for arrived in self._listeners:
                arrived(self._open == 1)

    def end(self, has_client: bool) -> None:
        """Counts the end of a request. `has_client` must be the value that begin() received for the request."""
        self._open -= has_client
        if has_client:
            self._last = self._clock()

    @property
    def quiet_s(self) -> float:
        """Seconds since the last request of a client ended; 0.0 while such a request is open."""
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
        """Serves one request from its admission to its last output. Releases the request before it returns or raises.

        If the client closes its connection, the caller cancels this method.

        Raises:
            ClientGone: The client has closed its connection while its body was read.
        """
        running = self._open_request(call)
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
        """Ends the selected choices with the output so far.

        A request that is still being prepared, or that has a vector or a score in place of text, ends with `error`.

        Returns:
            The number of ended choices. A request that ended with `error` counts as 1.
        """
        return sum(self._abort(running, scope, error) for running in list(self._open))

    def end_all(self, error: ApiError) -> None:
        """Ends every open request with this error."""
        for running in list(self._open):
            running.interrupt(error)

    @property
    def idle(self) -> bool:
        return not self._open

    def _open_request(self, call: GenerationCall) -> RunningRequest:
        origin, body = call.origin, self._bodies.open(call.gone)
        if not origin.is_counted:
            return RunningRequest(origin, self._dispatcher, _UNCOUNTED, body, self._close)
        if self._tracing is not None:
            origin.begin_trace(self._tracing)
        return RunningRequest(origin, self._dispatcher, self.metrics, body, self._close, call.wants_report)

    def _admit(self, running: RunningRequest, call: GenerationCall) -> None:
        """Admits the request. Raises ApiError if too many requests are open, or a limit of the API key is reached."""
        running.admission = call.admission
        if not call.origin.is_counted:
            return
        if len(self._open) >= self.settings.max_concurrent_requests:
            raise unavailable("Too many requests are in flight.", self.settings.retry_after_s, "queue_full")
        self._open[running] = None
        self.attendance.begin(_has_client(running))
        if call.admission is None:
            running.admission = self.keys.begin(running.key)

    def _close(self, running: RunningRequest) -> None:
        if running in self._open:
            del self._open[running]
            self.attendance.end(_has_client(running))

    async def _serve(self, running: RunningRequest, call: GenerationCall, sink: Sink) -> None:
        running.task = asyncio.current_task()
        try:
            async with asyncio.timeout(self.settings.request_timeout_s):
                await self._generate(running, call, sink)
            return
        except ApiError as failure:
            error = _without_traceback(failure)
        except TimeoutError:
            error = timed_out()
        except asyncio.CancelledError:
            if running.error is None and (running.task is None or running.task.cancelling()):
                raise
            if running.error is None:
                logger.error("a request was cancelled without a reason", extra=fields(**running.origin.log_fields))
            error = running.error or internal()  # interrupt() has cancelled the task; the client is still connected
        except Exception:
            logger.exception("request failed", extra=fields(**running.origin.log_fields))
            error = internal()
        running.fail(error)
        await self._send_failure(running, sink, error)

    async def _generate(self, running: RunningRequest, call: GenerationCall, sink: Sink) -> None:
        prepared = await self._prepare(running, call, sink)
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
            # Read before the sink is awaited. Output that arrives during sink.take() is not in `deltas`.
            more = not running.complete
            await sink.take(deltas, more)
        self._record_usage(running)
        await sink.end()

    async def _prepare(self, running: RunningRequest, call: GenerationCall, sink: Sink) -> GenerationRequest:
        """Returns a prepared request whose choices have been made. Raises ApiError."""
        try:
            prepared = await sink.while_preparing(call.prepare(running.body, running.origin))
            if call.origin.routing_key:
                prepared = prepared.routed(call.origin.routing_key)
            if running.error is not None:
                raise running.error
            self._count_truncated(running, prepared)
            check_logprobs(prepared)
            check_routed_experts(prepared)
            if running.admission is not None and call.admission is None:
                running.admission.reserve(most_tokens(prepared))
            running.begin(prepared)
            if running.trace is not None:
                running.trace.begin(prepared.model.name, len(running.choices))
        except (ValueError, OverflowError):
            # A value has passed the check of its field, but protobuf does not accept it.
            logger.warning(
                "a value of a request does not fit its protobuf field", extra=fields(**running.origin.log_fields), exc_info=True
            )
            raise bad_request(None, "A value of the request is out of its range.") from None
        return prepared

    async def _send_failure(self, running: RunningRequest, sink: Sink, error: ApiError) -> None:
        if running.trace is not None:
            running.trace.failed(error)
        await sink.fail(error)

    def _client_gone(self, running: RunningRequest) -> None:
        if not _has_client(running):
            return  # a batch line or a background response moved to another gateway; no client was waiting
        self.metrics.aborts.labels(running.phase.value).inc()
        if running.trace is not None:
            running.trace.client_gone()
        logger.info("client gone", extra=fields(**running.origin.log_fields, phase=running.phase.value))

    def _count_truncated(self, running: RunningRequest, prepared: GenerationRequest) -> None:
        cuts = [prompt.num_cut for prompt in prepared.prompts if prompt.num_cut]
        if cuts:
            self.metrics.truncated_prompts.inc(len(cuts))
            logger.info("prompts were truncated", extra=fields(**running.origin.log_fields, prompts=len(cuts), tokens=sum(cuts)))

    def _record_usage(self, running: RunningRequest) -> None:
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
    """Metrics of health probes, which count nothing."""

    def series(self, model: str, key: str) -> Series:
        return self

    def first_token(self, since_arrival: float) -> None:
        """Counts nothing."""

    def further_tokens(self, between_two: float, count: int) -> None:
        """Counts nothing."""

    def answered(self, prompt: int, cached: int, output: int, since_arrival: float) -> None:
        """Counts nothing."""


_UNCOUNTED = _Uncounted()


def _has_client(running: RunningRequest) -> bool:
    """Returns whether a client waits for the response. False for batch lines, background responses and health probes."""
    return not running.caller.background and running.origin.is_counted


def _without_traceback(error: ApiError) -> ApiError:
    """Returns the error without its traceback, whose frames would keep the parsed body in memory."""
    error.__traceback__ = error.__context__ = None
    return error
