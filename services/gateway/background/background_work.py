"""Makes the store, the runner and the streams of background responses. services/gateway/api/responses has the HTTP routes."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from rootstock_llm.services.gateway.background.background_run import BackgroundRun, FirstAttempt, RunPorts
from rootstock_llm.services.gateway.background.background_runner import BackgroundRunner
from rootstock_llm.services.gateway.background.follow import Follow, Streams
from rootstock_llm.services.gateway.background.journal import Journal
from rootstock_llm.services.gateway.background.ports import Answers
from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.generation.choice import Choice
from rootstock_llm.services.gateway.generation.errors import ApiError, unavailable
from rootstock_llm.services.gateway.generation.origin import Caller
from rootstock_llm.services.gateway.generation.request import GenerationRequest, ModelVersion
from rootstock_llm.services.gateway.generation.running import KeyAdmission
from rootstock_llm.services.gateway.observe.access_log import AccessLog
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.service.sink import RunGeneration
from rootstock_llm.services.gateway.store.background_record import OPEN, BackgroundOrder, BackgroundStatus, Stored
from rootstock_llm.services.gateway.store.background_store import BackgroundLimits, BackgroundStore, Begun, new_lease
from rootstock_llm.services.gateway.store.lease import Lease, LeaseLost
from rootstock_llm.services.gateway.store.owner import owner_of
from rootstock_llm.services.gateway.store.state_redis import StateRedis
from rootstock_llm.services.gateway.store.state_store import StoreAway
from rootstock_llm.services.shared.limits import MAX_BACKGROUND_STREAMS, MAX_OWN_BACKGROUND_STREAMS

CANCEL_S = 5.0  # seconds that cancel() waits while another caller cancels the same response
LOOK_S = 0.05  # seconds between two reads of the status during this wait


class BackgroundWork:
    """The background responses of this gateway: their store, streams and runner. Every method for a client may raise ApiError."""

    def __init__(
        self,
        settings: GatewaySettings,
        answers: Answers,
        run: RunGeneration,
        callers: Callable[[str, float], Caller],
        computed_by: Callable[[Choice], tuple[ModelVersion | None, str]],
        is_ready: Callable[[], bool],
        metrics: GatewayMetrics,
        access: AccessLog,
    ) -> None:
        """Makes the store, the runner and the streams. Nothing runs before run().

        Args:
            answers: The API whose responses run in the background.
            run: GenerationService.run.
            callers: See RunPorts.
            computed_by: See RunPorts.
            is_ready: Returns whether this gateway has all connections that a response needs.

        Raises:
            ValueError: The store's URL is not valid.
        """
        self._retry_after_s = settings.retry_after_s
        self._redis = StateRedis(settings.state_redis_url, settings.state_patience_s)
        limits = BackgroundLimits(
            settings.state_ttl_s,
            settings.background_replay_s,
            settings.state_records_per_key,
            settings.state_bytes_per_key,
            settings.background_per_key,
        )
        self._store = BackgroundStore(self._redis, settings.background_lease_s, limits)
        self._answers = answers
        self._streams = Streams(self._store, settings.sse_comment_s)
        self._most_streams, self._most_own_streams = MAX_BACKGROUND_STREAMS, MAX_OWN_BACKGROUND_STREAMS
        self._anonymous_owner = owner_of("")  # owner of all responses if there are no API keys; has no limit of streams
        self._ports = RunPorts(self._store, answers, run, callers, computed_by, self._streams.wrote, metrics, access)
        most = settings.background_responses
        self._metrics = metrics
        self._runner = BackgroundRunner(
            self._store, partial(BackgroundRun, self._ports), answers.given_up, most, is_ready, self._retry_after_s, metrics
        )
        self.takes_any = bool(most)
        self.timeout_s = settings.background_timeout_s

    async def run(self) -> None:
        """Runs this gateway's responses, and takes over stored responses whose lease is free, until cancelled."""
        await self._runner.run()

    async def drain(self) -> None:
        """Releases all responses to other gateways, and ends the streams."""
        try:
            await self._runner.drain()
        finally:
            self._streams.close()

    async def close(self) -> None:
        await self._redis.close()

    # For clients

    async def begin(
        self,
        order: BackgroundOrder,
        record: bytes,
        request: GenerationRequest,
        caller: Caller,
        admission: KeyAdmission | None,
        events: Sequence[bytes],
    ) -> None:
        """Starts a response and returns when it is stored.

        Args:
            record: Content of the response's record until the response is complete.
            admission: The request's share of its API key's limits. This method takes ownership, even if it raises.
            events: The first events of the response.
        """
        try:
            self._runner.check_capacity()
        except ApiError:
            if admission is not None:
                admission.end(0)
            raise
        stored = self._store.initial_state(order, array("I", request.prompts[0].ids).tobytes(), len(events))
        lease = new_lease(order.owner, order.id)
        store = partial(self._store_response, lease, stored, record, events)
        first = FirstAttempt(stored, _without_truncation_counts(request), caller, admission, store)
        await self._runner.begin(BackgroundRun(self._ports, lease, order, first))

    async def _store_response(self, lease: Lease, stored: Stored, record: bytes, events: Sequence[bytes]) -> None:
        try:
            begun = await self._store.begin(lease, stored.order, record, stored.prompt, events)
        except StoreAway:
            raise self._store_unavailable() from None
        if begun is Begun.TOO_MANY:
            message = "This API key has its largest number of background responses. Wait until one has ended."
            raise ApiError(429, message, code="background_full", retry_after_s=self._retry_after_s)
        if begun is Begun.STORE_FULL:
            raise ApiError(429, "The store limit of this API key is reached. Delete stored data.", code="store_full")

    async def status(self, owner: str, response_id: str) -> BackgroundStatus | None:
        """Returns the status of a background response. None if its state is not stored, even if its record still is."""
        try:
            return await self._store.status(owner, response_id)
        except StoreAway:
            raise self._store_unavailable() from None

    async def stream(self, owner: str, response_id: str, after: int) -> Follow:
        """Returns a function that streams the events after sequence number `after`; -1 streams all events.

        Raises:
            ApiError: The events have expired, `after` is above the last event's number, too many streams are open at this gateway
                or for the API key, or the store cannot be reached.
        """
        try:
            page = await self._store.follow(owner, response_id, after + 1)
        except StoreAway:
            raise self._store_unavailable() from None
        if page is None:
            message = "The events of this response were not stored or have expired. Ask for the response without 'stream'."
            raise ApiError(400, message, param="stream", code="stream_expired")
        if after >= page.total:
            message = f"'starting_after' is {after}; the last event so far has the number {page.total - 1}."
            raise ApiError(400, message, param="starting_after", code="invalid_value")
        if owner != self._anonymous_owner and self._streams.num_of(owner) >= self._most_own_streams:
            message = "This API key has its largest number of open streams. Wait until a stream has ended."
            raise ApiError(429, message, code="streams_full", retry_after_s=self._retry_after_s)
        if self._streams.num_open >= self._most_streams:
            raise unavailable(
                "This gateway streams its largest number of stored responses. Retry later.", self._retry_after_s, "queue_full"
            )
        return self._streams.stream(owner, response_id, after + 1)

    @property
    def store_is_up(self) -> bool:
        """Whether the last call of the store succeeded."""
        return not self._redis.is_away

    def own_stream(self, owner: str, response_id: str) -> Follow:
        """Returns a function that streams all events to the client that has just created the response."""
        return self._streams.stream(owner, response_id, 0)

    async def cancel(self, owner: str, response_id: str) -> None:
        """Cancels a response, and returns when the response has ended. Has no effect on an ended response.

        The stored output remains.
        """
        try:
            await self._cancel(owner, response_id)
        except StoreAway:
            raise self._store_unavailable() from None

    async def _cancel(self, owner: str, response_id: str) -> None:
        lease = await self._store.seize(owner, response_id)
        if lease is None:
            return
        stored = await self._store.read(owner, response_id)
        if stored is None:
            return
        try:
            response, events = await self._answers.concluded(stored, BackgroundStatus.CANCELLED, None)
            journal = Journal(self._store, lease, stored, partial(self._streams.wrote, response_id), self._metrics)
            await journal.finish(BackgroundStatus.CANCELLED, lambda: self._answers.record(stored.order, response), events)
        except LeaseLost:
            await self._until_over(owner, response_id)  # another caller cancels the response at the same time

    async def _until_over(self, owner: str, response_id: str) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + CANCEL_S
        while True:
            status = await self._store.status(owner, response_id)
            if status not in OPEN:
                return
            if loop.time() > until:
                raise unavailable("The response is being cancelled.", self._retry_after_s, "being_cancelled")
            await asyncio.sleep(LOOK_S)

    async def delete(self, owner: str, response_id: str) -> bool:
        """Deletes a stored response, whether it ran in the background or not. A running response is cancelled.

        Returns:
            False if the response does not exist.
        """
        try:
            return await self._store.delete(owner, response_id)
        except StoreAway:
            raise self._store_unavailable() from None

    def _store_unavailable(self) -> ApiError:
        return unavailable("The store cannot be reached. Retry later.", self._retry_after_s, "store_unavailable")


def _without_truncation_counts(request: GenerationRequest) -> GenerationRequest:
    """Returns the request without counts of truncated tokens, because the metrics have already counted them."""
    return replace(request, prompts=tuple(replace(prompt, num_cut=0) for prompt in request.prompts))
