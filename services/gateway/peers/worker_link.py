"""The gateway's stream to one worker: submits and aborts go out in one message per event-loop tick, steps come in.

Owns what is open on the worker. Knows nothing of what it means: that is the LinkEvents' part. When the stream breaks, the worker
aborts what came over it, and what is open is handed back.

A worker that has told its load does so every second. One that falls silent for `silence_s` is taken for lost, whatever the
connection looks like: stopped, cut off, or hanging.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import grpc

from rootstock.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from services.gateway.peers.reconnect import Duplex, StreamBroken, keep_connected
from services.gateway.peers.silence import Patience, until_lost
from services.gateway.request.generation import ModelVersion
from services.gateway.routing.breaker import CircuitBreaker
from services.shared.observe.log_fields import fields
from services.shared.rpc.dialer import IN_THE_CLEAR, Dialer, KeptChannel
from services.shared.tls.roles import Role

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 4 << 20  # of submits in one message: far below what gRPC accepts, for a burst of long prompts is large

ID_BYTES = 3  # of a token id in a message, about: counting them exactly takes as long as sending them

Call = Duplex[worker_pb2.GenerateRequest, worker_pb2.GenerateResponse]


class Occupant(Protocol):
    """What is open on workers, by a handle on each. Its prompt, its prediction and its output so far are read when it is sent."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def prediction_ids(self) -> Sequence[int]:
        """For a worker that reads them."""

    @property
    def num_tokens(self) -> int:
        """Of prompt and output."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Of prompt and output."""

    def write_sampling(self, into: common_pb2.SamplingParams, ends_with_prompt: bool) -> None:
        """Its parameters, into a message that goes out."""

    def aborted(self, handle: int) -> None:
        """By the gateway."""

    def lost(self, handle: int, heard: bool) -> None:
        """The worker is gone. heard: it had been told of it."""


Open = TypeVar("Open", bound=Occupant)


class LinkEvents(Protocol[Open]):
    """Called on the event loop; must not block."""

    def on_hello(self, link: WorkerLink[Open]) -> None:
        """The link is connected, or was and its worker has got other weights: its `info` is new."""

    def on_step(self, link: WorkerLink[Open], step: worker_pb2.StepOutput) -> None: ...

    def on_load(self, link: WorkerLink[Open]) -> None:
        """The link's `load` is new."""

    def on_down(self, link: WorkerLink[Open], orphans: list[Open]) -> None:
        """The session is over; `orphans` were open on it."""


class WorkerLink(Generic[Open]):
    def __init__(
        self,
        address: str,
        events: LinkEvents[Open],
        patience: Patience,
        breaker: CircuitBreaker,
        dialer: Dialer = IN_THE_CLEAR,
    ) -> None:
        self.address = address
        self._dialer = dialer
        self.breaker = breaker
        self.info: worker_pb2.WorkerInfo | None = None  # None: not connected
        self.model_version: ModelVersion | None = None  # by its last hello, also once it is lost; None: never met
        self.last_info: worker_pb2.WorkerInfo | None = None  # as it said when it was connected last; None: never yet
        self.load: worker_pb2.WorkerLoad | None = None  # None: not told yet
        self.told_at = 0.0  # when it came
        self.draining = False  # it said that it is going away; until its next hello
        self.paused = False  # no step runs there until an operator says so; as its last load says, also of an earlier stream
        self.ready = True  # as discovery sees it
        self.retiring = False  # discovery does not know the address any more
        self.crowded_until = 0.0  # its own queue was full: until its next load, or this time
        self.kept_until = 0.0  # the last of its rooms may stand until then
        self.met = False  # it has been connected once
        self.open: dict[int, Open] = {}  # by handle
        self.open_tokens = 0  # prompt and output of what is open, as far as it is known here
        self.ahead_tokens = 0  # the same of what is to come, as they were when it was told
        self._patience = patience
        self._heard = 0  # messages
        self._events = events
        self._submits: dict[int, worker_pb2.Submit] = {}  # without what Occupant gives
        self._aborts: list[int] = []
        self._ahead: dict[int, int] = {}  # tokens by handle, of submits to come, whose pages are read ahead
        self._heard_ahead: set[int] = set()  # of submits that are to be sent, those whose pages are read ahead
        self._prefetches: dict[int, tuple[Open, worker_pb2.Prefetch]] = {}  # of these; to be sent, without the tokens
        self._ready: dict[int, worker_pb2.PagesReady] = {}
        self._wake = asyncio.Event()

    @property
    def busy(self) -> bool:
        """With its stream end the rooms that were told over it."""
        return bool(self.open) or self.kept_until > asyncio.get_running_loop().time()

    @property
    def hangs(self) -> bool:
        """Its step takes longer than any may."""
        return self.load is not None and 0 < self.load.step_limit_ms < self.load.step_age_ms

    @property
    def refuses_new(self) -> bool:
        """Whether the worker refuses every request that has no output yet."""
        return self.load is not None and self.load.refuses_new

    @property
    def num_ahead(self) -> int:
        """Submits to come, whose pages it reads ahead."""
        return len(self._ahead)

    def submit(self, occupant: Open, submit: worker_pb2.Submit) -> None:
        """submit: all but prompt, prediction and sampling parameters, which are copied once, into the message that goes out."""
        if submit.handle in self._ahead and self._forget_ahead(submit.handle):
            self._heard_ahead.add(submit.handle)
        self.open[submit.handle] = occupant
        self.open_tokens += occupant.num_tokens
        self._submits[submit.handle] = submit
        self._wake.set()

    def close(self, handle: int) -> Open | None:
        """Forgets what the worker has ended."""
        occupant = self.open.pop(handle, None)
        if occupant is not None:
            self.open_tokens -= occupant.num_tokens
        return occupant

    def abort(self, handle: int) -> bool:
        """Forgets it: whatever the worker still says of it is dropped. Whether the worker has never heard of it; what
        it has read ahead for it, it is told not to keep."""
        occupant = self.close(handle)
        if occupant is None:
            return False
        occupant.aborted(handle)
        unsent = self._submits.pop(handle, None) is not None
        if not unsent or handle in self._heard_ahead:
            self._heard_ahead.discard(handle)
            self._aborts.append(handle)
            self._wake.set()
        return unsent

    def prefetch(self, occupant: Open, prefetch: worker_pb2.Prefetch) -> None:
        """prefetch: all but the tokens. Until its submit, or until it is left."""
        self._ahead[prefetch.handle] = occupant.num_tokens
        self.ahead_tokens += occupant.num_tokens
        self._prefetches[prefetch.handle] = occupant, prefetch
        self._wake.set()

    def reads_ahead(self, handle: int) -> bool:
        """It has been told to, and is connected still."""
        return handle in self._ahead

    def more_ready(self, handle: int, room: worker_pb2.KvRoom) -> None:
        """Of what it reads ahead there are more pages."""
        if handle in self._prefetches:
            self._prefetches[handle][1].source.room.CopyFrom(room)
        else:
            self._ready[handle] = worker_pb2.PagesReady(handle=handle, room=room)
            self._wake.set()

    def leave_prefetch(self, handle: int) -> None:
        """Its submit will not come."""
        if handle in self._ahead and self._forget_ahead(handle):
            self._aborts.append(handle)
            self._wake.set()

    def _forget_ahead(self, handle: int) -> bool:
        """Whether the worker has heard of it, if there was one."""
        self.ahead_tokens -= self._ahead.pop(handle, 0)
        self._ready.pop(handle, None)
        return self._prefetches.pop(handle, None) is None

    def leave_room(self, handle: int) -> None:
        """Of what its worker has handed over: nobody will come for the pages that it keeps of it."""
        if self.info is not None:
            self._aborts.append(handle)
            self._wake.set()

    async def run(self) -> None:
        kept = self._dialer.kept(self.address, Role.WORKER)
        try:
            await keep_connected("worker", self.address, lambda: self._session(kept))
        finally:
            await kept.close()

    async def _session(self, kept: KeptChannel) -> None:
        call: Call = worker_pb2_grpc.WorkerStub(kept.now()).Generate(wait_for_ready=True)
        writer: asyncio.Task[None] | None = None
        listener: asyncio.Task[None] | None = None
        try:
            async with kept.opening():
                first = await self._read(call)
            if not first.HasField("hello"):
                raise StreamBroken("the first message is no hello")
            self.info = self.last_info = first.hello
            self.model_version = _version_of(self.info)
            self.load, self.met = None, True
            self.draining = False
            logger.info("worker connected", extra=fields(address=self.address, worker=self.info.worker_id, model=self.info.model))
            writer = asyncio.create_task(self._write(call))
            writer.add_done_callback(lambda _: call.cancel())
            listener = asyncio.create_task(self._end_when_silent(call))
            self._events.on_hello(self)
            while True:
                message = await self._read(call)
                self._heard += 1
                if message.HasField("load"):
                    self.load, self.told_at = message.load, asyncio.get_running_loop().time()
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
        """Raises StreamBroken: sessions and ids of prompts are by worker and by model."""
        if (info.worker_id, info.model) != (before.worker_id, before.model):
            raise StreamBroken("a second hello that names another worker or model")
        self.info, self.model_version = info, _version_of(info)
        logger.info("worker has other weights", extra=fields(address=self.address, worker=info.worker_id, revision=info.revision))
        self._events.on_hello(self)

    def _reset(self) -> None:
        orphans = list(self.open.values())
        for handle, occupant in self.open.items():
            occupant.lost(handle, heard=handle not in self._submits)
        self.info = self.load = None
        self.open.clear()
        self.open_tokens, self.ahead_tokens, self.kept_until = 0, 0, 0.0
        for unsent in (self._submits, self._aborts, self._ahead, self._heard_ahead, self._prefetches, self._ready):
            unsent.clear()
        self._events.on_down(self, orphans)

    def _words_due(self) -> int | None:
        """Of a worker that tells its load they are due all the time."""
        return self._heard if self.load is not None else None

    def _steps_due(self) -> int | None:
        return self._words_due() if self.open else None

    async def _end_when_silent(self, call: Call) -> None:
        why = await until_lost(self.address, self._patience, self._words_due, self._steps_due)
        logger.warning("worker is lost: %s", why, extra=fields(address=self.address))
        call.cancel()

    @staticmethod
    async def _read(call: Call) -> worker_pb2.GenerateResponse:
        message = await call.read()
        if not isinstance(message, worker_pb2.GenerateResponse):
            raise StreamBroken("ended by peer")
        return message

    def _next_message(self) -> worker_pb2.GenerateRequest:
        """All aborts, and prefetches and submits up to about MESSAGE_BYTES, the first one in any case."""
        message = worker_pb2.GenerateRequest(aborts=self._aborts, ready=self._ready.values())
        self._aborts.clear()
        self._ready.clear()
        size, predicts = 0, self.info is not None and self.info.reads_predictions
        while self._prefetches and size < MESSAGE_BYTES:
            occupant, prefetch = self._prefetches.pop(next(iter(self._prefetches)))
            added = message.prefetches.add()
            added.CopyFrom(prefetch)
            added.prompt_ids.extend(occupant.token_ids)
            size += ID_BYTES * len(added.prompt_ids)
        while self._submits and size < MESSAGE_BYTES:
            handle = next(iter(self._submits))
            submit = message.submits.add()
            submit.CopyFrom(self._submits.pop(handle))
            self._heard_ahead.discard(handle)
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
                while self._submits or self._aborts or self._prefetches or self._ready:
                    await call.write(self._next_message())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees the same end, with its reason


def _version_of(info: worker_pb2.WorkerInfo) -> ModelVersion:
    return ModelVersion(info.model, info.revision, info.tokenizer)
