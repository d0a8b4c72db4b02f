"""Places choices on workers, moves them on when a worker is lost, and carries what comes back to the detokenizers. The one
writer of where a choice is.

A choice's Placement is in exactly one place: its pool's queue (no worker has room), its pool's `moved` (its worker was lost, and
none has room yet) or `parked` (its session's worker is not connected), one WorkerLink's `open` (two with a hedge), or nowhere. A
request that fails or ends is released from wherever it is; release is idempotent. A choice that moves takes its prompt and its
output along: the next worker goes on where the last one was heard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import worker_pb2
from services.gateway.config.settings import GatewaySettings
from services.gateway.dispatch import sessions, worker_errors
from services.gateway.dispatch.fleet import Fleet
from services.gateway.dispatch.model_catalog import ModelCatalog
from services.gateway.dispatch.pace import Pace
from services.gateway.dispatch.placement import Home, Link, Placement, Pool, PrefetchedPages, reservation_of
from services.gateway.dispatch.refusals import Refusals
from services.gateway.dispatch.waiting import Waiting
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.peers.detokenizer_link import DetokPool
from services.gateway.peers.reconnect import StreamBroken
from services.gateway.request.choice import Choice
from services.gateway.request.errors import ApiError, internal, unavailable
from services.gateway.request.generation import ModelVersion
from services.gateway.request.request import RunningRequest
from services.gateway.routing import session_home
from services.gateway.routing.columns import Pick
from services.shared.observe.log_fields import fields
from services.shared.rpc.dialer import IN_THE_CLEAR, Dialer

logger = logging.getLogger(__name__)

MAX_CRASHES = 3  # workers that a choice may lose soon after they got it: one that kills its workers does not kill them all
SHORT_LIFE_S = 10.0
CROWDED_S = 1.0  # a worker tells its load as often
SESSION, RETRY, HEDGE, READER, HOME = "session", "retry", "hedge", "reader", "home"


class Dispatcher:
    def __init__(
        self,
        settings: GatewaySettings,
        detoks: DetokPool,
        handles: Iterator[int],
        metrics: GatewayMetrics,
        changed: Callable[[], None],
        weights: Mapping[str, float] | None = None,
        dialer: Dialer = IN_THE_CLEAR,
    ) -> None:
        """weights: shares of keys while requests wait, by their names."""
        self.fleet = Fleet(settings, self, self._ticked, weights, dialer)
        self._settings = settings
        self._refusals = Refusals(settings.retry_after_s, metrics)
        self._waiting = Waiting(settings, self._refusals, metrics, self._place)
        self.catalog = ModelCatalog(settings, self.fleet.pools, self.fleet.may_grow, self._refusals)
        self._placements: dict[Choice, Placement] = {}  # from start to release
        self._detoks = detoks
        self._handles = handles
        self._metrics = metrics
        self._changed = changed
        clock = asyncio.get_running_loop().time
        self.pace = Pace(lambda: sum(self.waiting_by_model().values()), settings.retry_after_s, clock)
        self.last_step_at: float | None = None  # of any worker, in the loop's time
        metrics.watch_connected("worker", self.connected)
        metrics.watch_queue(self.waiting_by_model)

    def waiting_by_model(self) -> dict[str, int]:
        """What waits for a worker, by model; "" for requests whose model nobody has named."""
        return self.catalog.waiting()

    def num_waiting_anywhere(self) -> int:
        """Choices that wait for a worker here, or at a worker for its next step, as each told last. Where a model has no worker
        nobody is in their way."""
        at_workers = sum(link.load.num_waiting for link in self.fleet.links.values() if link.load is not None)
        here = sum(pool.num_waiting for pool in self.fleet.pools.values() if pool.columns.usable.any())
        return here + int(at_workers)

    def connected(self) -> int:
        return len(self.fleet.usable())

    async def run(self) -> None:
        await self.fleet.run()

    def start(self, request: RunningRequest, refused_by: Collection[str] = ()) -> None:
        """Places every choice, or lets it wait. refused_by: addresses of workers that get none of it while there are others.
        Raises ApiError if the queue is full, or if a score is wanted and every worker is of an earlier version."""
        pool = self.fleet.pools[request.model.name]
        if pool.model.source != request.model.source:
            raise self._replaced()
        if request.generation.sampling.HasField("score") and pool.lacks_scores:
            raise self._refusals.no_scores()
        batch = next(self._handles) if request.choices[0].part is not request.choices[-1].part else 0
        home = Home() if batch and request.generation.sampling.HasField("score") else None
        queued: list[Placement] = []
        for choice in request.choices:
            if choice.number == 0:
                first = None
            placement = Placement(request, choice, pool, first, refused_by, batch, home)
            first = first or placement
            self._placements[choice] = placement
            if choice.resumed is not None:
                placement.resume(choice.resumed)
            if placement.has_begun:
                self._resume(placement)
            elif placement.in_session:
                if not self._place(placement):
                    self._waiting.park(placement)
            elif queued or pool.num_waiting or not self._place(placement):
                queued.append(placement)
        self._waiting.wait(pool, queued)
        self._waiting.pump(pool)  # what waits may wait for one worker only

    def _resume(self, placement: Placement) -> None:
        """It began elsewhere: it goes on as one whose worker was lost does."""
        if not self._place(placement):
            self._waiting.wait_first(placement)
            self._waiting.give_up(placement.pool, self.fleet.may_serve)

    def _replaced(self) -> ApiError:
        """The gateway's one name has got another model, to which ids of the old one mean nothing."""
        return unavailable("The model is being replaced.", self._settings.retry_after_s, "model_replaced")

    def release(self, choice: Choice) -> None:
        placement = self._placements.pop(choice, None)
        if placement is not None:
            self._withdraw(placement)
        self._detoks.drop(choice.decoding)

    def _withdraw(self, placement: Placement) -> None:
        self._waiting.leave(placement)
        for link in placement.withdraw():
            self._has_room(placement.pool, link)
        if placement.placed_at:  # one that no worker has had has cost nothing
            self._waiting.charge(placement)

    def abort(self, choice: Choice) -> bool:
        """Ends a choice with what has come so far; its last text is still to come. False for one that has ended."""
        placement = self._placements.get(choice)
        if placement is None or choice.worker_ending is not None or choice.request.error is not None:
            return False
        self._withdraw(placement)
        prompt_tokens, completion_tokens = len(choice.prompt.ids), len(choice.output_ids)
        reason = pb.FINISH_REASON_ABORT
        choice.finish(worker_pb2.Finish(reason=reason, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens))
        self._detoks.touch(choice.decoding)
        return True

    def computed_by(self, choice: Choice) -> tuple[ModelVersion | None, str]:
        """What its output is of: weights, and the fingerprint of what decides its bits beside them."""
        placement = self._placements.get(choice)
        return (None, "") if placement is None else (placement.model_version, placement.numerics)

    def worker_ids(self, choice: Choice) -> list[str]:
        """Of those that it is on."""
        placement = self._placements.get(choice)
        return placement.worker_ids() if placement is not None else []

    # Placing

    def _place(self, placement: Placement) -> bool:
        """Gives it to a worker, if there is one with room that would take it."""
        pool, session = placement.pool, placement.choice.generation.session
        if session is not None:
            links = pool.homes()  # also those that take nothing new: it can go nowhere else
            index = session_home.place(placement.choice.session_id, [link.info.worker_id if link.info else "" for link in links])
            if index is None or links[index].paused:
                return False
            self._submit(placement, links[index], SESSION, 0)
            return True
        if (reader := placement.reader) is not None and pool.takes(reader.link, placement):
            self._submit(placement, reader.link, READER, reader.predicted_tokens)
            return True
        now, home = asyncio.get_running_loop().time(), placement.home
        if home is not None and home.link is not None and (pick := pool.pick_at(home.link, placement, now)) is not None:
            self._submit(placement, home.link, HOME, pick.predicted_tokens)
            return True
        pick = pool.pick(placement, now)
        if pick is None:
            return False
        prefill = self._pick_prefill(placement, pick, now)
        at = prefill or pick
        self._submit(placement, pool.links[at.row], at.reason, at.predicted_tokens, hands_over=prefill is not None)
        return True

    def _pick_prefill(self, placement: Placement, pick: Pick, now: float, without: Link | None = None) -> Pick | None:
        if placement.prefilled or not placement.choice.generates:
            return None
        return placement.pool.pick_prefill(placement, now, pick, self._settings.disaggregation_min_tokens, without)

    def _submit(self, placement: Placement, link: Link, reason: str, predicted_tokens: int, hands_over: bool = False) -> None:
        handle, request = placement.handle_at(link) or next(self._handles), placement.request
        placement.place(link, handle, predicted_tokens, request.clock())
        self._send(placement, link, handle, reason, predicted_tokens, hands_over)
        self._metrics.other_numerics.inc(placement.changes_numerics)
        after_s = self._settings.hedge_after_s
        if after_s and not placement.in_session and not placement.has_begun:
            placement.hedge_after(after_s, partial(self._hedge, placement))
        request.submitted()

    def _send(
        self, placement: Placement, link: Link, handle: int, reason: str, predicted_tokens: int, hands_over: bool = False
    ) -> None:
        request, choice, pool = placement.request, placement.choice, placement.pool
        generation = choice.generation
        worker_id = link.info.worker_id if link.info is not None else ""
        if request.course is not None:
            request.course.placed(worker_id)
        now = request.clock()
        left_s = self._settings.request_timeout_s - (now - request.arrived)
        submit = worker_pb2.Submit(
            handle=handle,
            request_id=choice.request_id,
            output_ids=choice.output_ids,
            stream=generation.stream,
            cache_salt=choice.cache_salt,
            priority=choice.priority,
            timeout_ms=max(1, int(left_s * 1000)),
            routing_key=generation.routing_key,
            session=generation.session,
            revision="" if link.model_version is None else link.model_version.revision,
            tenant=request.caller.tenant,
            batch=placement.batch,
            tenant_weight=request.caller.weight,
            hand_over=hands_over,
            source=placement.take_source(link, handle),
        )
        if generation.session is not None:
            submit.session.session_id = choice.session_id
        if choice.trace is not None:
            tokens = len(choice.prompt.ids)
            submit.traceparent = choice.trace.submits(link.address, worker_id, submit, reason, tokens, predicted_tokens)
        link.submit(placement, submit)
        pool.picked(placement, link, now + self._settings.speculative_s)
        link.breaker.begin(now)
        pool.refresh(link, now)  # a probe is the only one
        self._waiting.charge(placement)
        self._metrics.decisions.labels(reason).inc()

    def _hedge(self, placement: Placement) -> None:
        """Makes the copy, unless the first token has come or nobody else has room. It, too, may go through a prefill worker, and
        has a room of its own then."""
        if placement.link is None or placement.has_begun or len(placement.choice.prompt_logprobs):
            return
        pool = placement.pool
        now = asyncio.get_running_loop().time()
        pick = pool.pick(placement, now, without=placement.link)
        if pick is not None:
            prefill = self._pick_prefill(placement, pick, now, without=placement.link)
            at = prefill or pick
            link, handle = pool.links[at.row], next(self._handles)
            placement.copy_to(link, handle)
            self._send(placement, link, handle, HEDGE, at.predicted_tokens, hands_over=prefill is not None)

    def _settle(self, placement: Placement, link: Link) -> None:
        """This link's copy goes on alone."""
        loser = placement.settle(link)
        if loser is not None:
            self._has_room(placement.pool, loser)

    def _has_room(self, pool: Pool, link: Link) -> None:
        """The link has lost a request, for whatever reason."""
        self.fleet.refresh(link)
        self._waiting.pump(pool)

    # What links tell

    def _ticked(self) -> None:
        self._changed()
        for pool in self.fleet.pools.values():
            self._waiting.give_up(pool, self.fleet.may_serve)
            self._waiting.pump(pool)

    def on_hello(self, link: Link) -> None:
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

    def on_load(self, link: Link) -> None:
        assert link.load is not None
        pool = self.fleet.pool_of(link)
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
        self.fleet.refresh(link)
        if link.refuses_new:
            self._waiting.give_up(pool, self.fleet.may_serve)
        self._waiting.pump(pool)

    def on_step(self, link: Link, step: worker_pb2.StepOutput) -> None:
        self.last_step_at = asyncio.get_running_loop().time()
        token_ids = list(step.token_ids)
        predicted = step.predicted_handles, step.accepted_prediction_tokens, step.rejected_prediction_tokens
        fits = len(step.handles) == len(step.counts) and len({*map(len, predicted)}) == 1
        if not fits or sum(step.counts) != len(token_ids):
            raise StreamBroken("a step whose arrays do not fit")
        position = 0
        for handle, count in zip(step.handles, step.counts, strict=True):
            begin, position = position, position + count
            placement = link.open.get(handle)
            if placement is None:
                continue  # aborted here, and the worker did not know yet
            if placement.hedge is not None:
                self._settle(placement, link)
            placement.choice.extend(token_ids[begin:position])
            link.open_tokens += count
            self._detoks.touch(placement.choice.decoding)
        self._on_logprobs(link, step)
        for handle, accepted, rejected in zip(*predicted, strict=True):
            if (placement := link.open.get(handle)) is not None:
                placement.choice.set_predicted(accepted, rejected)
        for ready in step.ready:
            if (placement := link.open.get(ready.handle)) is not None:
                self._on_ready(link, placement, ready)
        for finish in step.finishes:
            placement = link.close(finish.handle)
            if placement is not None:
                self._finish(link, placement, finish)

    def _on_logprobs(self, link: Link, step: worker_pb2.StepOutput) -> None:
        try:
            for rows in step.logprobs:
                if (placement := link.open.get(rows.handle)) is not None:
                    placement.choice.add_logprobs(rows)
            for rows in step.prompt_logprobs:
                if (placement := link.open.get(rows.handle)) is not None:
                    self._settle(placement, link)
                    placement.choice.add_prompt_logprobs(rows)
        except ValueError as error:
            raise StreamBroken(str(error)) from None

    def _on_ready(self, link: Link, placement: Placement, ready: worker_pb2.PagesReady) -> None:
        """The link's worker has computed further pages of a prompt: who will go on with it reads them meanwhile."""
        pages = placement.prefetched_of(ready.handle)
        if pages is not None:
            pages.link.more_ready(pages.handle, ready.room)
            return
        pool, now = placement.pool, asyncio.get_running_loop().time()
        pick = pool.pick_reader(placement, now, link)
        if pick is not None:
            reader, handle = pool.links[pick.row], next(self._handles)
            placement.prefetch(ready.handle, link, reader, handle, ready.room, pick.predicted_tokens)
            pool.picked(placement, reader, now + self._settings.speculative_s)
            pool.recount(reader)
            self._metrics.prefetches.inc()

    def _finish(self, link: Link, placement: Placement, finish: worker_pb2.Finish) -> None:
        choice = placement.choice
        self._judge(link, choice, finish)
        if finish.reason != pb.FINISH_REASON_ABORT:
            self._settle(placement, link)
        elif placement.survives(link):
            self._has_room(placement.pool, link)
            return
        prefetched = placement.take_prefetched(finish.handle)
        placement.leave()
        if finish.reason == pb.FINISH_REASON_HANDED_OVER:
            self._handed_over(link, placement, finish, prefetched)
            self._has_room(placement.pool, link)
            return
        if prefetched is not None:
            prefetched.release()
        self.pace.completed()
        self._waiting.charge(placement)
        if finish.reason in (pb.FINISH_REASON_ABORT, pb.FINISH_REASON_UNSPECIFIED):
            self._aborted(link, placement, finish)
        elif choice.lacks_logprobs:
            placement.request.fail(internal("The worker's log probabilities do not fit its tokens."))
        elif not choice.fits(finish):
            placement.request.fail(internal("The worker's log probabilities do not fit the labels of the score."))
        else:
            if choice.number == 0:  # as cached tokens are counted
                self._metrics.predicted_tokens.inc(placement.predicted_tokens)
            choice.finish(finish)
            if choice.ending is None:
                self._detoks.touch(choice.decoding)
        self._has_room(placement.pool, link)

    def _handed_over(
        self, link: Link, placement: Placement, finish: worker_pb2.Finish, prefetched: PrefetchedPages | None
    ) -> None:
        reservation = reservation_of(link, finish, asyncio.get_running_loop().time())
        placement.hand_over(reservation, prefetched)
        placement.choice.handed_over(finish)
        self._metrics.handovers.labels("none" if reservation is None else "room").inc()
        self.fleet.refresh(link)
        if not self._place(placement):
            self._waiting.wait_first(placement)
            self._waiting.give_up(placement.pool, self.fleet.may_serve)

    def _judge(self, link: Link, choice: Choice, finish: worker_pb2.Finish) -> None:
        """What an end says of the worker."""
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

    def _aborted(self, link: Link, placement: Placement, finish: worker_pb2.Finish) -> None:
        choice, code = placement.choice, finish.error
        if code == pb.ERROR_CODE_QUEUE_FULL:
            link.crowded_until = placement.request.clock() + CROWDED_S
        self.fleet.refresh(link)
        if code == pb.ERROR_CODE_UNAVAILABLE and placement.in_session:
            placement.request.fail(sessions.session_worker_away(self._settings.retry_after_s))
        elif code == pb.ERROR_CODE_UNAVAILABLE and choice.can_move:
            self._move(placement, "drain")
        elif code == pb.ERROR_CODE_QUEUE_FULL and choice.can_move:
            self._move(placement, RETRY)
        elif code == pb.ERROR_CODE_OTHER_WEIGHTS:
            self._other_weights(link, placement)
        elif code == pb.ERROR_CODE_INTERNAL and self._may_retry(link, placement):
            placement.count_retry()
            self._move(placement, RETRY)
        else:
            placement.request.fail(worker_errors.of_finish(finish, choice, self._settings.retry_after_s))

    def _other_weights(self, link: Link, placement: Placement) -> None:
        """The submit has crossed the hello that tells of others. A worker that names the ones that it refuses gets one more
        chance: it may have had others in between."""
        request, contradicts = placement.request, placement.model_version == link.model_version
        if placement.in_session:
            request.fail(sessions.session_weights_replaced(self._settings.retry_after_s))
        elif contradicts and placement.retried:
            link.breaker.failed(request.clock())
            request.fail(internal("The worker refuses the weights that it names."))
        elif placement.choice.can_move:
            if contradicts:
                placement.count_retry()
            self._move(placement, "weights")

    @staticmethod
    def _may_retry(link: Link, placement: Placement) -> bool:
        """A fault before the first token: once, where there is another worker."""
        if placement.has_begun or placement.retried or not placement.choice.can_move:
            return False
        placement.refused(link.address)
        return any(other.address not in placement.refused_by for other in placement.pool.usable())

    def on_down(self, link: Link, orphans: list[Placement]) -> None:
        self.fleet.leave(link)
        self._changed()
        if orphans and not link.draining:
            link.breaker.failed(asyncio.get_running_loop().time())
        orphans = [placement for placement in orphans if not placement.survives(link)]
        for placement in orphans:
            placement.leave()
            placement.forget_refusals()
        for placement in orphans:
            if placement.request.error is None:  # else a sibling has just ended the whole request
                self._go_on(placement, link)
            self._waiting.pump(placement.pool)  # who was to come to a reader may have left room there
        for other in self.fleet.unused(link):
            self.on_hello(other)

    def _go_on(self, placement: Placement, link: Link) -> None:
        """With a choice whose worker, the link's, was lost."""
        request, retry_after_s = placement.request, self._settings.retry_after_s
        if not link.draining:  # else it was about to end anyway
            placement.count_crash(survived=request.clock() - placement.placed_at >= SHORT_LIFE_S)
        if placement.choice.can_move and placement.crashes <= MAX_CRASHES:
            self._move(placement, "lost")
        elif placement.in_session:
            request.fail(sessions.session_worker_away(retry_after_s))
        else:
            message = "The worker was lost before the answer was complete."
            request.fail(unavailable(message, retry_after_s, "worker_lost"))

    def _move(self, placement: Placement, cause: str) -> None:
        """To another worker, with the output so far."""
        choice, tokens = placement.choice, len(placement.choice.output_ids)
        self._metrics.moves.labels(cause, "begun" if tokens else "new").inc()
        told = fields(**placement.request.origin.log_fields, choice=choice.request_id, cause=cause, output_tokens=tokens)
        logger.info("request moves to another worker", extra=told)
        choice.leave_worker()
        if not self._place(placement):
            self._waiting.wait_first(placement)
            self._waiting.give_up(placement.pool, self.fleet.may_serve)
