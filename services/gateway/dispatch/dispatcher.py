"""Places choices on workers, moves them on when a worker is lost, and carries what comes back to the detokenizers. The one
writer of where a choice is.

A choice is in exactly one place: its pool's queue (no worker has room), its pool's `moved` (its worker was lost, and none has
room yet) or `parked` (its session's worker is not connected), one WorkerLink's `open` (two with a hedge), or nowhere. A request
that fails or ends is released from wherever it is; release is idempotent. A choice that moves takes its prompt and its output
along: the next worker goes on where the last one was heard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import worker_pb2
from services.gateway import hedging
from services.gateway.config.settings import GatewaySettings
from services.gateway.dispatch import sessions
from services.gateway.dispatch.fleet import Fleet
from services.gateway.dispatch.model_catalog import ModelCatalog
from services.gateway.dispatch.model_pool import ModelPool
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.peers.detokenizer_link import DetokPool
from services.gateway.peers.reconnect import StreamBroken
from services.gateway.peers.worker_link import WorkerLink
from services.gateway.request.errors import ApiError, from_worker, internal, unavailable
from services.gateway.request.request import Choice, ClientRequest
from services.gateway.waiting import Waiting
from services.shared.observe import log

logger = logging.getLogger(__name__)

MAX_CRASHES = 3  # workers that a choice may lose soon after they got it: one that kills its workers does not kill them all
SHORT_LIFE_S = 10.0
CROWDED_S = 1.0  # a worker tells its load as often
SESSION, RETRY, HEDGE = "session", "retry", "hedge"


class Dispatcher:
    def __init__(
        self,
        settings: GatewaySettings,
        detoks: DetokPool,
        handles: Iterator[int],
        metrics: GatewayMetrics,
        changed: Callable[[], None],
    ) -> None:
        self.fleet = Fleet(settings, self, metrics, self._ticked)
        self._settings = settings
        self._waiting = Waiting(settings, metrics, self._place)
        self.catalog = ModelCatalog(settings, self.fleet, self._waiting)
        self._detoks = detoks
        self._handles = handles
        self._metrics = metrics
        self._changed = changed
        self.last_step_at: float | None = None  # of any worker, in the loop's time
        metrics.watch_connected("worker", self.connected)
        metrics.watch_queue(self.waiting_by_model)

    def waiting_by_model(self) -> dict[str, int]:
        """What waits for a worker, by model; "" for requests whose model no worker has named yet."""
        return {"": self.catalog.strangers, **{name: pool.num_waiting for name, pool in self.fleet.pools.items()}}

    def connected(self) -> int:
        return len(self.fleet.usable())

    async def run(self) -> None:
        await self.fleet.run()

    def start(self, request: ClientRequest) -> None:
        """Places every choice, or lets it wait. Raises ApiError if the queue is full."""
        pool = self.fleet.pools[request.model.name]
        if pool.model.source != request.model.source:
            raise self._replaced()
        for choice in request.choices:
            choice.pool = pool
            if choice.generation.session is not None:
                if not self._place(pool, choice):
                    self._waiting.park(pool, choice)
            elif pool.num_waiting or not self._place(pool, choice):
                self._waiting.wait(pool, choice)
        self._waiting.pump(pool)  # what waits may wait for one worker only

    def _replaced(self) -> ApiError:
        """The gateway's one name has got another model, to which ids of the old one mean nothing."""
        return unavailable("The model is being replaced.", self._settings.retry_after_s, "model_replaced")

    def release(self, choice: Choice) -> None:
        self._withdraw(choice)
        self._detoks.drop(choice.decoding)

    def _withdraw(self, choice: Choice) -> None:
        pool = choice.pool
        if pool is None:
            return
        self._waiting.leave(pool, choice)
        copy = hedging.cancel(choice)
        if copy is not None:
            self._has_room(pool, copy)
        if choice.link is not None:
            link, choice.link = choice.link, None
            link.abort(choice.handle)
            self._has_room(pool, link)
        if choice.placed_at:  # one that no worker has had has cost nothing
            self._waiting.charge(pool, choice)

    def abort(self, choice: Choice) -> bool:
        """Ends a choice with what has come so far; its last text is still to come. False for one that has ended."""
        if choice.decoding.finished or choice.ending is not None or choice.request.error is not None:
            return False
        self._withdraw(choice)
        prompt_tokens, completion_tokens = len(choice.prompt.ids), len(choice.output_ids)
        reason = pb.FINISH_REASON_ABORT
        choice.finish(worker_pb2.Finish(reason=reason, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens))
        self._detoks.touch(choice.decoding)
        return True

    # Placing

    def _place(self, pool: ModelPool, choice: Choice) -> bool:
        """Gives it to a worker, if there is one with room that would take it."""
        session = choice.generation.session
        if session is not None:
            links = list(pool.links.values())  # also those that take nothing new: it can go nowhere else
            index = sessions.place(session.session_id, [link.info.worker_id if link.info else "" for link in links])
            if index is None or links[index].paused:
                return False
            self._submit(pool, choice, links[index], SESSION, 0)
            return True
        pick = pool.pick(choice)
        if pick is None:
            return False
        self._submit(pool, choice, pool.links[pick.row], pick.reason, pick.predicted_tokens)
        return True

    def _submit(self, pool: ModelPool, choice: Choice, link: WorkerLink, reason: str, predicted_tokens: int) -> None:
        now = choice.request.clock()
        choice.link, choice.handle = link, next(self._handles)
        choice.placed_at, choice.predicted_tokens = now, predicted_tokens
        if not choice.output_ids:
            choice.weights = link.weights
        self._send(pool, choice, link, choice.handle, reason, predicted_tokens)
        after_s = self._settings.hedge_after_s
        if after_s and choice.generation.session is None and not choice.output_ids:
            choice.hedge_timer = asyncio.get_running_loop().call_later(after_s, self._hedge, pool, choice)
        choice.request.submitted()

    def _send(self, pool: ModelPool, choice: Choice, link: WorkerLink, handle: int, reason: str, predicted_tokens: int) -> None:
        request, generation = choice.request, choice.generation
        now = request.clock()
        left_s = self._settings.request_timeout_s - (now - request.arrived)
        submit = worker_pb2.Submit(
            handle=handle,
            request_id=choice.request_id,
            output_ids=choice.output_ids,
            sampling=choice.sampling,
            stream=generation.stream,
            cache_salt=generation.cache_salt,
            priority=generation.priority,
            timeout_ms=max(1, int(left_s * 1000)),
            routing_key=generation.routing_key,
            session=generation.session,
            revision="" if link.weights is None else link.weights.revision,
        )
        if choice.trace is not None:
            submit.traceparent = choice.trace.submits(link, submit, len(choice.prompt.ids), reason, predicted_tokens)
        link.submit(choice, submit)
        pool.picked(choice, link.row, now + self._settings.speculative_s)
        link.breaker.begin(now)
        pool.refresh(link, now)  # a probe is the only one
        self._waiting.charge(pool, choice)
        self._metrics.decisions.labels(reason).inc()

    def _hedge(self, pool: ModelPool, choice: Choice) -> None:
        """Makes the copy, unless the first token has come or nobody else has room."""
        choice.hedge_timer = None
        if choice.link is None or choice.output_ids or len(choice.prompt_logprobs):
            return
        pick = pool.pick(choice, without=choice.link)
        if pick is not None:
            choice.hedge = hedging.Hedge(pool.links[pick.row], next(self._handles), pool.links[pick.row].weights)
            self._send(pool, choice, choice.hedge.link, choice.hedge.handle, HEDGE, pick.predicted_tokens)

    def _settle(self, choice: Choice, link: WorkerLink) -> None:
        """This link's copy goes on alone."""
        loser = hedging.settle(choice, link)
        if loser is not None and choice.pool is not None:
            self._has_room(choice.pool, loser)

    def _has_room(self, pool: ModelPool, link: WorkerLink) -> None:
        """The link has lost a request, for whatever reason."""
        if link.pool is not None:
            link.pool.refresh(link, asyncio.get_running_loop().time())
        self._waiting.pump(pool)

    # What links tell

    def _ticked(self) -> None:
        self._changed()
        for pool in self.fleet.pools.values():
            self._waiting.give_up(pool, self.fleet.may_serve)
            self._waiting.pump(pool)

    def on_hello(self, link: WorkerLink) -> None:
        pool = self.fleet.join(link)
        for old in self.fleet.take_replaced():
            self._waiting.fail_all(old, self._replaced())
        if pool is None:
            return
        self._waiting.wake_parked(pool)
        self._waiting.give_up(pool, self.fleet.may_serve)
        self.catalog.grown()
        self._changed()
        self._waiting.pump(pool)

    def on_load(self, link: WorkerLink) -> None:
        assert link.load is not None
        pool = link.pool
        if pool is None:
            return
        if link.load.draining != link.draining:
            link.draining = link.load.draining
            self._changed()
        if link.load.paused != link.paused:
            link.paused = link.load.paused
            pool.refresh_all(asyncio.get_running_loop().time())
            self._changed()
            self._waiting.wake_parked(pool)
        link.crowded_until = 0.0
        pool.refresh(link, asyncio.get_running_loop().time())
        self._waiting.pump(pool)

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
            if choice.hedge is not None:
                self._settle(choice, link)
            choice.output_ids += token_ids[begin:position]
            link.open_tokens += count
            self._detoks.touch(choice.decoding)
        self._on_logprobs(link, step)
        for finish in step.finishes:
            choice = link.close(finish.handle)
            if choice is not None:
                self._finish(link, choice, finish)

    def _on_logprobs(self, link: WorkerLink, step: worker_pb2.StepOutput) -> None:
        for rows in step.logprobs:
            if (choice := link.open.get(rows.handle)) is not None:
                choice.add_logprobs(rows)
        for rows in step.prompt_logprobs:
            if (choice := link.open.get(rows.handle)) is not None:
                self._settle(choice, link)
                choice.add_prompt_logprobs(rows)

    def _finish(self, link: WorkerLink, choice: Choice, finish: worker_pb2.Finish) -> None:
        pool = choice.pool
        assert pool is not None
        now = choice.request.clock()
        if choice.trace is not None:
            choice.trace.finished(finish)
        if finish.error == pb.ERROR_CODE_INTERNAL:
            link.breaker.failed(now)
        elif finish.reason != pb.FINISH_REASON_ABORT:
            link.breaker.succeeded(now)
        if finish.error == pb.ERROR_CODE_UNAVAILABLE:
            link.draining = True
            self._changed()
        if finish.reason != pb.FINISH_REASON_ABORT:
            self._settle(choice, link)
        elif hedging.survives(choice, link):
            self._has_room(pool, link)
            return
        choice.link = None
        hedging.cancel(choice)
        self._waiting.charge(pool, choice)
        if finish.reason in (pb.FINISH_REASON_ABORT, pb.FINISH_REASON_UNSPECIFIED):
            self._aborted(pool, link, choice, finish)
        elif choice.generation.wants_logprobs and len(choice.logprobs) != len(choice.output_ids):
            choice.request.fail(internal("The worker's log probabilities do not fit its tokens."))
        else:
            self._metrics.predicted_tokens.inc(choice.predicted_tokens)
            choice.finish(finish)
            if choice.ending is None:
                self._detoks.touch(choice.decoding)
        self._has_room(pool, link)

    def _aborted(self, pool: ModelPool, link: WorkerLink, choice: Choice, finish: worker_pb2.Finish) -> None:
        names, grammar_field = choice.generation.fields, choice.generation.grammar_field
        error = from_worker(finish.error, finish.message, self._settings.retry_after_s, names, grammar_field)
        if finish.error == pb.ERROR_CODE_QUEUE_FULL:
            link.crowded_until = choice.request.clock() + CROWDED_S
        if link.pool is not None:
            link.pool.refresh(link, choice.request.clock())
        if finish.error == pb.ERROR_CODE_UNAVAILABLE and choice.generation.session is not None:
            choice.request.fail(sessions.session_worker_away(self._settings.retry_after_s))
        elif finish.error == pb.ERROR_CODE_UNAVAILABLE and choice.can_move:
            self._move(pool, choice, "drain")
        elif finish.error == pb.ERROR_CODE_QUEUE_FULL and choice.can_move:
            self._move(pool, choice, RETRY)
        elif finish.error == pb.ERROR_CODE_OTHER_WEIGHTS:
            self._other_weights(pool, link, choice)
        elif finish.error == pb.ERROR_CODE_INTERNAL and self._may_retry(pool, link, choice):
            choice.retried = True
            self._move(pool, choice, RETRY)
        else:
            choice.request.fail(error)

    def _other_weights(self, pool: ModelPool, link: WorkerLink, choice: Choice) -> None:
        """The submit has crossed the hello that tells of others. A worker that names the ones that it refuses gets one more
        chance: it may have had others in between."""
        contradicts = choice.weights == link.weights
        if choice.generation.session is not None:
            choice.request.fail(sessions.session_weights_replaced(self._settings.retry_after_s))
        elif contradicts and choice.retried:
            link.breaker.failed(choice.request.clock())
            choice.request.fail(internal("The worker refuses the weights that it names."))
        elif choice.can_move:
            choice.retried = choice.retried or contradicts
            self._move(pool, choice, "weights")

    @staticmethod
    def _may_retry(pool: ModelPool, link: WorkerLink, choice: Choice) -> bool:
        """A fault before the first token: once, where there is another worker."""
        if choice.output_ids or choice.retried or not choice.can_move:
            return False
        choice.refused_by.append(link.address)
        return any(other.address not in choice.refused_by for other in pool.usable())

    def on_down(self, link: WorkerLink, orphans: list[Choice]) -> None:
        self.fleet.leave(link)
        self._changed()
        if orphans and not link.draining:
            link.breaker.failed(asyncio.get_running_loop().time())
        orphans = [choice for choice in orphans if not hedging.survives(choice, link)]
        for choice in orphans:
            choice.link = None
            choice.refused_by.clear()
            hedging.cancel(choice)
        for choice in orphans:
            if choice.request.error is None:  # else a sibling has just ended the whole request
                self._go_on(choice, link)
        for other in self.fleet.unused(link):
            self.on_hello(other)

    def _go_on(self, choice: Choice, link: WorkerLink) -> None:
        """With a choice whose worker, the link's, was lost."""
        pool, retry_after_s = choice.pool, self._settings.retry_after_s
        assert pool is not None
        survived = choice.request.clock() - choice.placed_at >= SHORT_LIFE_S
        if not link.draining:  # else it was about to end anyway
            choice.crashes = 1 if survived else choice.crashes + 1
        if choice.can_move and choice.crashes <= MAX_CRASHES:
            self._move(pool, choice, "lost")
        elif choice.generation.session is not None:
            choice.request.fail(sessions.session_worker_away(retry_after_s))
        else:
            message = "The worker was lost before the answer was complete."
            choice.request.fail(unavailable(message, retry_after_s, "worker_lost"))

    def _move(self, pool: ModelPool, choice: Choice, cause: str) -> None:
        """To another worker, with the output so far."""
        self._metrics.moves.labels(cause, "begun" if choice.output_ids else "new").inc()
        logger.info(
            "request moves to another worker",
            extra=log.fields(
                **choice.request.origin.log_fields, choice=choice.request_id, cause=cause, output_tokens=len(choice.output_ids)
            ),
        )
        choice.move()
        if not self._place(pool, choice):
            self._waiting.wait_first(pool, choice)
            self._waiting.give_up(pool, self.fleet.may_serve)
