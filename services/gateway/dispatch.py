"""Places choices on workers and carries what comes back to the detokenizers. The one writer of where a choice is.

A choice is in exactly one place: the waiting queue (no worker is connected), one WorkerLink's `open`, or nowhere. A request that
fails or ends is released from wherever it is; release is idempotent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import worker_pb2
from services.gateway import sessions
from services.gateway.detok_link import DetokPool
from services.gateway.errors import ApiError, from_worker, internal, unavailable
from services.gateway.generation import ModelInfo
from services.gateway.metrics import GatewayMetrics
from services.gateway.reconnect import StreamBroken
from services.gateway.request_state import Choice, ClientRequest
from services.gateway.routing import WorkerLoad, least_requests
from services.gateway.settings import GatewaySettings
from services.gateway.worker_link import WorkerLink
from services.shared.log import fields

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # submits of one choice: a request that kills its worker does not go on to kill them all


class Dispatcher:
    def __init__(
        self,
        settings: GatewaySettings,
        detoks: DetokPool,
        handles: Iterator[int],
        metrics: GatewayMetrics,
        changed: Callable[[], None],
    ) -> None:
        self.model: ModelInfo | None = None  # of the last hello; kept while no worker is connected
        self.links = [WorkerLink(address, self) for address in settings.workers]
        self._settings = settings
        self._detoks = detoks
        self._handles = handles
        self._retries = metrics.retries.labels("worker")
        self._changed = changed
        self._waiting: dict[Choice, None] = {}
        self._strangers = 0  # requests that wait for the first hello
        self._model_known = asyncio.Event()
        self._picks = 0
        self.last_step_at: float | None = None  # of any worker, in the loop's time
        metrics.watch_connected("worker", self.connected)
        metrics.queue_length.set_function(lambda: float(self.queue_length))

    @property
    def queue_length(self) -> int:
        return len(self._waiting) + self._strangers

    def connected(self) -> int:
        return len(self._usable())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for link in self.links:
                group.create_task(link.run())

    async def wait_for_model(self) -> ModelInfo:
        """What the workers serve; waits for the first worker. Raises ApiError at the deadline."""
        if self.model is None:
            self._check_queue(1)
            self._strangers += 1
            try:
                await asyncio.wait_for(self._model_known.wait(), self._settings.wait_for_worker_s)
            except TimeoutError:
                raise self._no_worker() from None
            finally:
                self._strangers -= 1
        assert self.model is not None
        return self.model

    def start(self, request: ClientRequest) -> None:
        """Places every choice. Raises ApiError if they would have to wait and the queue is full."""
        if not self._usable():
            self._check_queue(len(request.choices))
        for choice in request.choices:
            self._place(choice)

    def release(self, choice: Choice) -> None:
        self._withdraw(choice)
        self._detoks.drop(choice.decoding)

    def _withdraw(self, choice: Choice) -> None:
        if choice.waiting is not None:
            choice.waiting.cancel()
            choice.waiting = None
            self._waiting.pop(choice, None)
        if choice.link is not None:
            choice.link.abort(choice.handle)
            choice.link = None

    def abort(self, choice: Choice) -> None:
        """Ends a choice with what has come so far; its last text is still to come. No effect on one that has ended."""
        if choice.decoding.finished or choice.ending is not None or choice.request.error is not None:
            return
        self._withdraw(choice)
        prompt_tokens, completion_tokens = len(choice.prompt.ids), len(choice.output_ids)
        reason = pb.FINISH_REASON_ABORT
        choice.finish(worker_pb2.Finish(reason=reason, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens))
        self._detoks.touch(choice.decoding)

    def ready_workers(self) -> list[tuple[str, str]]:
        """(worker id, address) of those that take requests."""
        return [(link.info.worker_id, link.address) for link in self._usable() if link.info is not None]

    def _usable(self) -> list[WorkerLink]:
        return [link for link in self.links if link.info is not None and not link.draining]

    def _check_queue(self, more: int) -> None:
        if self.queue_length + more > self._settings.max_waiting_requests:
            raise unavailable("No worker is connected, and the queue is full.", self._settings.retry_after_s, "queue_full")

    def _no_worker(self) -> ApiError:
        return unavailable("No worker is connected.", self._settings.retry_after_s, "no_worker")

    def _place(self, choice: Choice) -> None:
        link = self._pick(choice, [link for link in self._usable() if link.address not in choice.refused_by])
        if link is not None:
            self._submit(choice, link)
        elif choice.waiting is None:
            self._waiting[choice] = None
            loop = asyncio.get_running_loop()
            choice.waiting = loop.call_later(self._settings.wait_for_worker_s, self._expire, choice)

    @staticmethod
    def _pick(choice: Choice, links: Sequence[WorkerLink]) -> WorkerLink | None:
        session = choice.generation.session
        if session is None:
            index = least_requests([WorkerLoad(len(link.open), link.last_pick) for link in links])
        else:
            index = sessions.place(session.session_id, [link.info.worker_id if link.info else "" for link in links])
        return None if index is None else links[index]

    def _submit(self, choice: Choice, link: WorkerLink) -> None:
        request, generation = choice.request, choice.generation
        self._picks += 1
        link.last_pick = self._picks
        choice.attempts += 1
        choice.link, choice.handle = link, next(self._handles)
        left_s = self._settings.request_timeout_s - (request.clock() - request.arrived)
        message = worker_pb2.Submit(
            handle=choice.handle,
            request_id=choice.request_id,
            prompt_ids=choice.prompt.ids,
            sampling=choice.sampling,
            stream=generation.stream,
            cache_salt=generation.cache_salt,
            priority=generation.priority,
            timeout_ms=max(1, int(left_s * 1000)),
            routing_key=generation.routing_key,
            session=generation.session,
        )
        link.submit(choice, message)
        request.submitted()

    def _expire(self, choice: Choice) -> None:
        held_elsewhere = choice.generation.session is not None and self._usable()
        retry_after_s = self._settings.retry_after_s
        choice.request.fail(sessions.session_worker_away(retry_after_s) if held_elsewhere else self._no_worker())

    def on_hello(self, link: WorkerLink) -> None:
        info = link.info
        assert info is not None
        known = self.model
        others = [other for other in self._usable() if other is not link]
        served = self._settings.model_name or info.model
        if known is not None and others and others[0].info is not None and others[0].info.model != info.model:
            logger.error("worker serves another model and is not used", extra=fields(address=link.address, model=info.model))
            link.draining = True
            return
        generates = info.generates or not info.embedding_size
        self.model = ModelInfo(served, info.context_len, info.vocab_size, generates, info.embedding_size)
        self._model_known.set()
        self._changed()
        waiting = list(self._waiting)
        self._waiting.clear()
        for choice in waiting:
            if choice.waiting is not None:
                choice.waiting.cancel()
                choice.waiting = None
            self._place(choice)

    def on_step(self, link: WorkerLink, step: worker_pb2.StepOutput) -> None:
        self.last_step_at = asyncio.get_running_loop().time()
        token_ids = list(step.token_ids)
        if len(step.handles) != len(step.counts) or sum(step.counts) != len(token_ids):
            raise StreamBroken("a step whose arrays do not fit")
        position = 0
        for handle, count in zip(step.handles, step.counts, strict=True):
            begin, position = position, position + count
            choice = link.open.get(handle)
            if choice is None:
                continue  # aborted here, and the worker did not know yet
            choice.output_ids += token_ids[begin:position]
            self._detoks.touch(choice.decoding)
        self._on_logprobs(link, step)
        for finish in step.finishes:
            choice = link.open.get(finish.handle)
            if choice is not None:
                self._finish(link, choice, finish)

    @staticmethod
    def _on_logprobs(link: WorkerLink, step: worker_pb2.StepOutput) -> None:
        for rows in step.logprobs:
            if (choice := link.open.get(rows.handle)) is not None:
                choice.add_logprobs(rows)
        for rows in step.prompt_logprobs:
            if (choice := link.open.get(rows.handle)) is not None:
                choice.add_prompt_logprobs(rows)

    def _finish(self, link: WorkerLink, choice: Choice, finish: worker_pb2.Finish) -> None:
        del link.open[finish.handle]
        choice.link = None
        if finish.reason in (pb.FINISH_REASON_ABORT, pb.FINISH_REASON_UNSPECIFIED):
            self._aborted(link, choice, finish)
        elif choice.generation.wants_logprobs and len(choice.logprobs) != len(choice.output_ids):
            choice.request.fail(internal("The worker's log probabilities do not fit its tokens."))
        else:
            choice.finish(finish)
            if choice.ending is None:
                self._detoks.touch(choice.decoding)

    def _aborted(self, link: WorkerLink, choice: Choice, finish: worker_pb2.Finish) -> None:
        names, grammar_field = choice.generation.fields, choice.generation.grammar_field
        error = from_worker(finish.error, finish.message, self._settings.retry_after_s, names, grammar_field)
        elsewhere = False
        if finish.error == pb.ERROR_CODE_UNAVAILABLE:
            link.draining = elsewhere = True
            self._changed()
        elif finish.error == pb.ERROR_CODE_QUEUE_FULL:
            choice.refused_by.append(link.address)
            elsewhere = any(other.address not in choice.refused_by for other in self._usable())
        if elsewhere and self._may_move(choice):
            self._restart(choice)
        else:
            choice.request.fail(error)

    def on_down(self, link: WorkerLink, orphans: list[Choice]) -> None:
        self._changed()
        for choice in orphans:
            choice.link = None
            choice.refused_by.clear()
        for choice in orphans:
            if choice.request.error is not None:
                continue  # a sibling has just ended the whole request
            if self._may_move(choice):
                self._restart(choice)
            elif choice.generation.session is not None:
                choice.request.fail(sessions.session_worker_away(self._settings.retry_after_s))
            else:
                message = "The worker was lost before the answer was complete."
                choice.request.fail(unavailable(message, self._settings.retry_after_s, "worker_lost"))

    @staticmethod
    def _may_move(choice: Choice) -> bool:
        """A turn of a session goes on from what only its worker has."""
        return choice.can_restart and choice.attempts < MAX_ATTEMPTS and choice.generation.session is None

    def _restart(self, choice: Choice) -> None:
        self._retries.inc()
        self.release(choice)
        choice.restart()
        self._place(choice)
