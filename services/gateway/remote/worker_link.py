"""The gateway's stream to one worker. The gateway sends submits, aborts and prefetches; the worker sends steps and loads.

The messages of one event-loop tick are sent together. The link owns the choices that are open on the worker, and LinkEvents
interprets the worker's messages. If the stream breaks, the worker aborts the choices of the stream, and the link passes them to
LinkEvents.on_down().

A worker reports its load every second. If a worker sends nothing for Patience.silence, it counts as lost, even if its connection
is up: its process has stopped or hangs, or its machine is unreachable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import grpc

from rootstock_llm.protos import common_pb2, worker_pb2, worker_pb2_grpc
from rootstock_llm.services.gateway.generation.request import ModelVersion
from rootstock_llm.services.gateway.remote.connection import Duplex, Patience, StreamBroken, keep_connected, until_lost
from rootstock_llm.services.gateway.routing.breaker import CircuitBreaker
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.rpc.dialer import PLAINTEXT, Dialer, LongLivedChannel
from rootstock_llm.services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 4 << 20  # size at which a message gets no more prompts, far below gRPC's limit
ID_BYTES = 3  # approximate size of a token id in a message; an exact count would take as long as sending the ids

Call = Duplex[worker_pb2.GenerateRequest, worker_pb2.GenerateResponse]


class OpenChoice(Protocol):
    """A choice that is open on workers, with a handle on each. The link reads the choice's tokens when it sends the submit."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def prediction_ids(self) -> Sequence[int]:
        """Token ids of the client's prediction. Only a worker with reads_predictions receives them."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Token ids of prompt and output."""

    def write_sampling(self, into: common_pb2.SamplingParams, ends_with_prompt: bool) -> None:
        """Writes the sampling parameters into a message.

        Args:
            ends_with_prompt: Whether the worker serves requests that end with their prompt: scores, and max_new_tokens 0.
        """

    def aborted(self, handle: int) -> None:
        """Notes that the gateway has aborted the choice."""

    def lost(self, handle: int, was_sent: bool) -> None:
        """Notes that the worker is lost.

        Args:
            was_sent: Whether the submit had been sent to the worker.
        """


Open = TypeVar("Open", bound=OpenChoice)


class LinkEvents(Protocol[Open]):
    """The receiver of a link's events. Called on the event loop; must not block."""

    def on_hello(self, link: WorkerLink[Open]) -> None:
        """Called after `link.info` was set: the link has connected, or the weights of its worker have changed."""

    def on_step(self, link: WorkerLink[Open], step: worker_pb2.StepOutput) -> None: ...

    def on_load(self, link: WorkerLink[Open]) -> None:
        """Called after `link.load` was set."""

    def on_down(self, link: WorkerLink[Open], orphans: list[Open]) -> None:
        """Called after the stream has ended, with the choices that were open on it."""


class WorkerLink(Generic[Open]):
    """The stream to one worker, and the choices that are open on it. The link reconnects until its task is cancelled."""

    def __init__(
        self,
        address: str,
        events: LinkEvents[Open],
        patience: Patience,
        breaker: CircuitBreaker,
        dialer: Dialer = PLAINTEXT,
    ) -> None:
        self.address = address
        self._dialer = dialer
        self.breaker = breaker
        # Reports of the worker. Times are on the event loop's clock.
        self.info: worker_pb2.WorkerInfo | None = None  # newest hello of the current stream, or None while not connected
        self.model_version: ModelVersion | None = None  # from the newest hello of any stream, or None before the first connection
        # First hello of the newest stream. It stays set after the stream has ended. None before the first connection.
        self.last_info: worker_pb2.WorkerInfo | None = None
        self.load: worker_pb2.WorkerLoad | None = None  # last load of the current stream, or None if no load has arrived
        self.load_at = 0.0  # time at which the last load arrived
        self.draining = False  # the worker takes no new requests, by its last load or a refusal; False again after a reconnect
        self.paused = False  # an operator has paused the worker, by the last load of any stream
        self.was_connected = False  # the link has been connected at least once
        # State of the link
        self.ready = True  # discovery allows new requests
        self.retiring = False  # discovery has dropped the address
        self.full_until = 0.0  # time until which the worker's queue counts as full; the next load resets it
        self.reserved_until = 0.0  # time until which the worker may have KV reservations of this stream
        self.open: dict[int, Open] = {}  # open choices by handle
        self.open_tokens = 0  # prompt and output tokens of the open choices
        self.prefetch_tokens = 0  # sum of _prefetched
        self._patience = patience
        self._num_received = 0  # number of messages after the hello
        self._events = events
        # Messages to be sent, by handle. OpenChoice adds the tokens and sampling parameters when the message is sent.
        self._submits: dict[int, worker_pb2.Submit] = {}
        self._prefetches: dict[int, tuple[Open, worker_pb2.Prefetch]] = {}
        self._pages_ready: dict[int, worker_pb2.PagesReady] = {}
        self._aborts: list[int] = []
        # Prefetches that are queued or sent, and whose submit has not followed: number of tokens by handle.
        self._prefetched: dict[int, int] = {}
        self._sent_prefetches: set[int] = set()  # handles of _submits whose prefetch was sent
        self._wake = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether the stream is needed: choices are open, or the worker has KV reservations, which would end with the stream."""
        return bool(self.open) or self.reserved_until > asyncio.get_running_loop().time()

    @property
    def hangs(self) -> bool:
        """Whether the current step of the worker takes longer than the limit that the worker reports."""
        return self.load is not None and 0 < self.load.step_limit_ms < self.load.step_age_ms

    @property
    def refuses_new(self) -> bool:
        """Whether the worker refuses every request without earlier output, because its max_queued_requests is 0."""
        return self.load is not None and self.load.refuses_new

    @property
    def num_prefetches(self) -> int:
        """Number of choices whose pages the worker prefetches before their submit."""
        return len(self._prefetched)

    def submit(self, choice: Open, submit: worker_pb2.Submit) -> None:
        """Queues a submit.

        Args:
            submit: The message without prompt, prediction and sampling parameters, which are added when the message is sent.
        """
        if submit.handle in self._prefetched and self._forget_prefetch(submit.handle):
            self._sent_prefetches.add(submit.handle)
        self.open[submit.handle] = choice
        self.open_tokens += choice.num_tokens
        self._submits[submit.handle] = submit
        self._wake.set()

    def close(self, handle: int) -> Open | None:
        """Removes a choice that the worker has ended."""
        choice = self.open.pop(handle, None)
        if choice is not None:
            self.open_tokens -= choice.num_tokens
        return choice

    def abort(self, handle: int) -> bool:
        """Removes a choice and queues its abort. Later messages of the worker about it are ignored.

        Returns:
            True if the submit was never sent. If a prefetch for the choice was sent, the abort makes the worker drop the
            prefetched pages.
        """
        choice = self.close(handle)
        if choice is None:
            return False
        choice.aborted(handle)
        unsent = self._submits.pop(handle, None) is not None
        if not unsent or handle in self._sent_prefetches:
            self._sent_prefetches.discard(handle)
            self._aborts.append(handle)
            self._wake.set()
        return unsent

    def prefetch(self, choice: Open, prefetch: worker_pb2.Prefetch) -> None:
        """Queues a prefetch of pages for a choice. submit() or cancel_prefetch() ends the prefetch.

        Args:
            prefetch: The message without the tokens, which are added when the message is sent.
        """
        self._prefetched[prefetch.handle] = choice.num_tokens
        self.prefetch_tokens += choice.num_tokens
        self._prefetches[prefetch.handle] = choice, prefetch
        self._wake.set()

    def is_prefetching(self, handle: int) -> bool:
        """Returns whether a prefetch for this handle is queued or sent on the current stream, and its submit has not followed."""
        return handle in self._prefetched

    def report_ready_pages(self, handle: int, reservation: worker_pb2.KvRoom) -> None:
        """Reports to the worker that the KV reservation of a prefetch has more pages to read."""
        if handle in self._prefetches:
            self._prefetches[handle][1].source.room.CopyFrom(reservation)
        else:
            self._pages_ready[handle] = worker_pb2.PagesReady(handle=handle, room=reservation)
            self._wake.set()

    def cancel_prefetch(self, handle: int) -> None:
        """Ends a prefetch whose submit will not follow."""
        if handle in self._prefetched and self._forget_prefetch(handle):
            self._aborts.append(handle)
            self._wake.set()

    def _forget_prefetch(self, handle: int) -> bool:
        """Removes a prefetch. Returns whether it had been sent to the worker."""
        self.prefetch_tokens -= self._prefetched.pop(handle, 0)
        self._pages_ready.pop(handle, None)
        return self._prefetches.pop(handle, None) is None

    def release_reservation(self, handle: int) -> None:
        """Releases the KV reservation that this worker has for a handed-over choice, because no worker will read it."""
        if self.info is not None:
            self._aborts.append(handle)
            self._wake.set()

    async def run(self) -> None:
        kept = self._dialer.long_lived_channel(self.address, Role.WORKER)
        try:
            await keep_connected("worker", self.address, lambda: self._session(kept))
        finally:
            await kept.close()

    async def _session(self, kept: LongLivedChannel) -> None:
        call: Call = worker_pb2_grpc.WorkerStub(kept.now()).Generate(wait_for_ready=True)
        writer: asyncio.Task[None] | None = None
        listener: asyncio.Task[None] | None = None
        try:
            async with kept.opening():
                first = await self._read(call)
            if not first.HasField("hello"):
                raise StreamBroken("the worker's first message is not a hello")
            self.info = self.last_info = first.hello
            self.model_version = _version_of(self.info)
            self.load, self.was_connected = None, True
            self.draining = False
            logger.info("worker connected", extra=fields(address=self.address, worker=self.info.worker_id, model=self.info.model))
            writer = asyncio.create_task(self._write(call))
            writer.add_done_callback(lambda _: call.cancel())
            listener = asyncio.create_task(self._end_when_silent(call))
            self._events.on_hello(self)
            while True:
                message = await self._read(call)
                self._num_received += 1
                if message.HasField("load"):
                    self.load, self.load_at = message.load, asyncio.get_running_loop().time()
                    self._events.on_load(self)
                elif message.HasField("hello"):
                    self._renew(self.info, message.hello)
                else:
                    self._events.on_step(self, message.step)
        finally:
            for task in (writer, listener):
                if task is not None:
                    task.cancel()
            call.cancel()
            self._reset()

    def _renew(self, before: worker_pb2.WorkerInfo, info: worker_pb2.WorkerInfo) -> None:
        """Applies a second hello, after a change of weights.

        Raises:
            StreamBroken: The worker's id or model has changed. Sessions belong to a worker, and token ids to a model.
        """
        if (info.worker_id, info.model) != (before.worker_id, before.model):
            raise StreamBroken("the worker sent a second hello with another worker id or model")
        self.info, self.model_version = info, _version_of(info)
        logger.info(
            "the weights of the worker have changed",
            extra=fields(address=self.address, worker=info.worker_id, revision=info.revision),
        )
        self._events.on_hello(self)

    def _reset(self) -> None:
        orphans = list(self.open.values())
        for handle, choice in self.open.items():
            choice.lost(handle, was_sent=handle not in self._submits)
        self.info = self.load = None
        self.open.clear()
        self.open_tokens, self.prefetch_tokens, self.reserved_until = 0, 0, 0.0
        for unsent in (self._submits, self._aborts, self._prefetched, self._sent_prefetches, self._prefetches, self._pages_ready):
            unsent.clear()
        self._events.on_down(self, orphans)

    def _count_while_loads_are_due(self) -> int | None:
        """Returns the number of received messages, or None before the first load. Later, a load is due every second."""
        return self._num_received if self.load is not None else None

    def _count_while_steps_are_due(self) -> int | None:
        """Returns the number of received messages; None before the first load, and while no choice is open."""
        return self._count_while_loads_are_due() if self.open else None

    async def _end_when_silent(self, call: Call) -> None:
        why = await until_lost(self.address, self._patience, self._count_while_loads_are_due, self._count_while_steps_are_due)
        logger.warning("worker is lost: %s", why, extra=fields(address=self.address))
        call.cancel()

    @staticmethod
    async def _read(call: Call) -> worker_pb2.GenerateResponse:
        message = await call.read()
        if not isinstance(message, worker_pb2.GenerateResponse):
            raise StreamBroken("ended by the worker")
        return message

    def _next_message(self) -> worker_pb2.GenerateRequest:
        """Returns a message with all queued aborts, and with queued prefetches and submits up to about MESSAGE_BYTES."""
        message = worker_pb2.GenerateRequest(aborts=self._aborts, ready=self._pages_ready.values())
        self._aborts.clear()
        self._pages_ready.clear()
        size, predicts = 0, self.info is not None and self.info.reads_predictions
        while self._prefetches and size < MESSAGE_BYTES:
            choice, prefetch = self._prefetches.pop(next(iter(self._prefetches)))
            added = message.prefetches.add()
            added.CopyFrom(prefetch)
            added.prompt_ids.extend(choice.token_ids)
            size += ID_BYTES * len(added.prompt_ids)
        while self._submits and size < MESSAGE_BYTES:
            handle = next(iter(self._submits))
            submit = message.submits.add()
            submit.CopyFrom(self._submits.pop(handle))
            self._sent_prefetches.discard(handle)
            self.open[handle].write_sampling(submit.sampling, self.info is not None and self.info.ends_with_prompt)
            submit.prompt_ids.extend(self.open[handle].prompt_ids)
            if predicts:
                submit.prediction_ids.extend(self.open[handle].prediction_ids)
            ids = len(submit.prompt_ids) + len(submit.output_ids) + len(submit.prediction_ids)
            size += ID_BYTES * ids + submit.sampling.ByteSize()
        return message

    async def _write(self, call: Call) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._submits or self._aborts or self._prefetches or self._pages_ready:
                    await call.write(self._next_message())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reading task raises the reason


def _version_of(info: worker_pb2.WorkerInfo) -> ModelVersion:
    return ModelVersion(info.model, info.revision, info.tokenizer)
