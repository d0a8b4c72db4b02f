"""Places choices on workers, moves them when a worker is lost, and passes output to choices and detokenizers.

Only the dispatcher moves a choice. The Placement of a choice is in exactly one place:

- its pool's `queue`, because no worker has a free slot;
- its pool's `moved`, because its worker was lost and no other worker has a free slot yet;
- its pool's `parked`, because the worker of its session is not connected;
- the `open` requests of one WorkerLink, or of two WorkerLinks if the choice has a hedge copy.

A choice has a Placement from start() to release(). release() removes the choice from all these places, and is idempotent. If a
choice moves, the next worker gets its prompt and its output, and continues after the last token that the gateway received.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

from rootstock_llm.protos import common_pb2 as pb
from rootstock_llm.protos import worker_pb2
from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.gateway.dispatch import sessions
from rootstock_llm.services.gateway.dispatch.fleet import Fleet
from rootstock_llm.services.gateway.dispatch.placement import Home, Link, Placement, Pool, PrefetchedPages, reservation_of
from rootstock_llm.services.gateway.dispatch.refusals import Refusals, error_of_finish
from rootstock_llm.services.gateway.dispatch.waiting import ModelCatalog, Pace, Waiting
from rootstock_llm.services.gateway.generation.choice import Choice
from rootstock_llm.services.gateway.generation.errors import ApiError, internal, unavailable
from rootstock_llm.services.gateway.generation.request import ModelVersion
from rootstock_llm.services.gateway.generation.running import RunningRequest
from rootstock_llm.services.gateway.observe.metrics import GatewayMetrics
from rootstock_llm.services.gateway.remote.connection import StreamBroken
from rootstock_llm.services.gateway.remote.detokenizer_link import DetokPool
from rootstock_llm.services.gateway.routing import session_home
from rootstock_llm.services.gateway.routing.policies import Pick
from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.rpc.dialer import PLAINTEXT, Dialer

logger = logging.getLogger(__name__)

MAX_CRASHES = 3  # lost workers in a row after which a choice may still move; with one more, its request may crash every worker
SHORT_LIFE_S = 10.0  # a worker that computed the choice for this many seconds before its loss restarts the count of crashes
FULL_S = 1.0  # seconds without submits after a worker's queue was full; equals the interval of its load reports
SESSION, RETRY, HEDGE, READER, HOME = "session", "retry", "hedge", "reader", "home"  # metric labels: reasons, and causes of moves


class Dispatcher:
    """Owns the placements of all choices. Each process has one Dispatcher, on its event loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        detoks: DetokPool,
        handles: Iterator[int],
        metrics: GatewayMetrics,
        changed: Callable[[], None],
        weights: Mapping[str, float] | None = None,
        dialer: Dialer = PLAINTEXT,
    ) -> None:
        """Makes a dispatcher without workers.

        Args:
            handles: Yields numbers that are unique in this process. They identify choices on the streams to workers.
            changed: Called when the set of usable workers may have changed.
            weights: Weights of API keys in the queue, by name of the API key. None: all weights are equal.
        """
        self.fleet = Fleet(settings, self, self._on_tick, weights, dialer)
        self._settings = settings
        self._refusals = Refusals(settings.retry_after_s, metrics)
        self._waiting = Waiting(settings, self._refusals, metrics, self._place)
        self.catalog = ModelCatalog(settings, self.fleet.pools, self.fleet.may_grow, self._refusals)
        self._placements: dict[Choice, Placement] = {}  # by choice, from start() to release()
        self._detoks = detoks
        self._handles = handles
        self._metrics = metrics
        self._changed = changed
        clock = asyncio.get_running_loop().time
        self.pace = Pace(lambda: sum(self.waiting_by_model().values()), settings.retry_after_s, clock)
        self.last_step_at: float | None = None  # loop time of the last step of any worker
        metrics.watch_connected("worker", self.connected)
        metrics.watch_queue(self.waiting_by_model)

    def waiting_by_model(self) -> dict[str, int]:
        """Returns the number of waiting choices by model name; see ModelCatalog.waiting()."""
        return self.catalog.waiting()

    def num_waiting_anywhere(self) -> int:
        """Returns the number of choices that wait in this gateway or in the queue of a worker.

        Choices that wait in this gateway for a model without a usable worker do not count.
        """
        at_workers = sum(link.load.num_waiting for link in self.fleet.links.values() if link.load is not None)
        in_gateway = sum(pool.num_waiting for pool in self.fleet.pools.values() if pool.columns.usable.any())
        return in_gateway + int(at_workers)

    def connected(self) -> int:
        return len(self.fleet.usable())

    async def run(self) -> None:
        await self.fleet.run()

    def start(self, request: RunningRequest, refused_by: Collection[str] = ()) -> None:
        """Places or queues every choice.

        Args:
            refused_by: Addresses of workers that get the request only if no other worker takes requests.

        Raises:
            ApiError: Too many choices wait, all workers refuse new requests, the model is being replaced, or no worker supports
                the requested scores.
        """
        pool = self.fleet.pools[request.model.name]
        if pool.model.source != request.model.source:
            raise self._model_replaced_error()
        if request.params.sampling.HasField("score") and pool.lacks_scores:
            raise self._refusals.no_scores()
        batch = next(self._handles) if len(request.prompts) > 1 else 0
        home = Home() if batch and request.params.sampling.HasField("score") else None
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
        self._waiting.pump(pool)  # a free slot that does not suit the first queued choice may suit a later one

    def _resume(self, placement: Placement) -> None:
        """Places or queues a choice that has output from another gateway, as after the loss of its worker."""
        if not self._place(placement):
            self._waiting.queue_first(placement)
            self._waiting.fail_unservable(placement.pool, self.fleet.may_serve)

    def _model_replaced_error(self) -> ApiError:
        """Returns the error of a request whose model name now belongs to another model, so that its token ids are invalid."""
        return unavailable("The model is being replaced.", self._settings.retry_after_s, "model_replaced")

    def release(self, choice: Choice) -> None:
        placement = self._placements.pop(choice, None)
        if placement is not None:
            self._withdraw(placement)
        self._detoks.drop(choice.decoding)

    def _withdraw(self, placement: Placement) -> None:
        self._waiting.remove(placement)
        for link in placement.withdraw():
            self._fill_free_slot(placement.pool, link)
        if placement.placed_at:  # a choice that was never on a worker is not charged
            self._waiting.charge(placement)

    def abort(self, choice: Choice) -> bool:
        """Ends a choice with the output so far. The detokenizer still sends the text of this output.

        Returns:
            False if the choice had ended before.
        """
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
        """Returns the model version and the numerics of the choice's output; None and "" before the first worker."""
        placement = self._placements.get(choice)
        return (None, "") if placement is None else (placement.model_version, placement.numerics)

    def worker_ids(self, choice: Choice) -> list[str]:
        """Returns the ids of the workers that compute the choice: two if the choice has a hedge copy."""
        placement = self._placements.get(choice)
        return placement.worker_ids() if placement is not None else []

    # Placing

    def _place(self, placement: Placement) -> bool:
        """Submits a choice to a worker. Returns False if no worker that may get it has a free slot."""
        pool, session = placement.pool, placement.choice.params.session
        if session is not None:
            links = pool.session_links()  # includes workers that refuse new requests, because a session cannot move
            index = session_home.worker_index(
                placement.choice.session_id, [link.info.worker_id if link.info else "" for link in links]
            )
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
        if placement.prefilled or not placement.choice.generates or placement.experts_per_token:
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
        params = choice.params
        worker_id = link.info.worker_id if link.info is not None else ""
        request.placed(worker_id)
        now = request.clock()
        left_s = self._settings.request_timeout_s - (now - request.arrived)
        submit = worker_pb2.Submit(
            handle=handle,
            request_id=choice.request_id,
            output_ids=choice.output_ids,
            stream=params.stream,
            cache_salt=choice.cache_salt,
            priority=choice.priority,
            timeout_ms=max(1, int(left_s * 1000)),
            routing_key=params.routing_key,
            session=params.session,
            revision="" if link.model_version is None else link.model_version.revision,
            tenant=request.caller.tenant,
            batch=placement.batch,
            tenant_weight=request.caller.weight,
            hand_over=hands_over,
            source=placement.take_source(link, handle),
            routed_experts_from=choice.routed_experts_from,
        )
        if params.session is not None:
            submit.session.session_id = choice.session_id
        if choice.trace is not None:
            tokens = len(choice.prompt.ids)
            submit.traceparent = choice.trace.submits(link.address, worker_id, submit, reason, tokens, predicted_tokens)
        link.submit(placement, submit)
        pool.record_pick(placement, link, now + self._settings.speculative_s)
        link.breaker.begin(now)
        pool.refresh(link, now)  # if the request is a probe, the breaker allows no other request until the probe's result
        self._waiting.charge(placement)
        self._metrics.decisions.labels(reason).inc()

    def _hedge(self, placement: Placement) -> None:
        """Makes a hedge copy of a choice on a second worker, unless the choice has output or no other worker has a free slot.

        If the copy starts at a prefill worker, it gets its own KV reservation.
        """
        choice = placement.choice
        if placement.link is None or placement.has_begun or len(choice.prompt_logprobs) or choice.routed_experts:
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
        """Keeps the submit to `link`, whose worker has sent output, and aborts the other submit of a hedged choice."""
        loser = placement.settle(link)
        if loser is not None:
            self._fill_free_slot(placement.pool, loser)

    def _fill_free_slot(self, pool: Pool, link: Link) -> None:
        """Updates routing after a slot of the link has become free, and places waiting choices."""
        self.fleet.refresh(link)
        self._waiting.pump(pool)

    # Events of links

    def _on_tick(self) -> None:
        self._changed()
        for pool in self.fleet.pools.values():
            self._waiting.fail_unservable(pool, self.fleet.may_serve)
            self._waiting.pump(pool)

    def on_hello(self, link: Link) -> None:
        pool = self.fleet.join(link)
        for old in self.fleet.take_replaced():
            self._waiting.fail_all(old, self._model_replaced_error())
        if pool is None:
            return
        self._waiting.wake_parked(pool)
        self._waiting.fail_unservable(pool, self.fleet.may_serve)
        self.catalog.wake_waiting()
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
        link.full_until = 0.0
        self.fleet.refresh(link)
        if link.refuses_new:
            self._waiting.fail_unservable(pool, self.fleet.may_serve)
        self._waiting.pump(pool)

    def on_step(self, link: Link, step: worker_pb2.StepOutput) -> None:
        self.last_step_at = asyncio.get_running_loop().time()
        token_ids = list(step.token_ids)
        predicted = step.predicted_handles, step.accepted_prediction_tokens, step.rejected_prediction_tokens
        is_consistent = len(step.handles) == len(step.counts) and len({*map(len, predicted)}) == 1
        if not is_consistent or sum(step.counts) != len(token_ids):
            raise StreamBroken("the worker sent a step whose arrays have unequal lengths")
        position = 0
        for handle, count in zip(step.handles, step.counts, strict=True):
            begin, position = position, position + count
            placement = link.open.get(handle)
            if placement is None:
                continue  # the gateway has aborted the choice, and the worker has not received the abort yet
            if placement.hedge is not None:
                self._settle(placement, link)
            placement.choice.extend(token_ids[begin:position])
            link.open_tokens += count
            self._detoks.touch(placement.choice.decoding)
        self._on_token_values(link, step)
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

    def _on_token_values(self, link: Link, step: worker_pb2.StepOutput) -> None:
        """Passes the log probabilities and the routed experts of a step to the choices."""
        try:
            for rows in step.logprobs:
                if (placement := link.open.get(rows.handle)) is not None:
                    placement.choice.add_logprobs(rows)
            for rows in step.prompt_logprobs:
                if (placement := link.open.get(rows.handle)) is not None:
                    self._settle(placement, link)
                    placement.choice.add_prompt_logprobs(rows)
            for routed in step.routed_experts:
                if (placement := link.open.get(routed.handle)) is not None:
                    self._settle(placement, link)
                    placement.choice.add_routed_experts(routed.ids)
        except ValueError as error:
            raise StreamBroken(str(error)) from None

    def _on_ready(self, link: Link, placement: Placement, ready: worker_pb2.PagesReady) -> None:
        """Lets a decode worker read pages of a prompt that the prefill worker of `link` has computed so far.

        The first call for a prompt picks the decode worker.
        """
        pages = placement.prefetched_of(ready.handle)
        if pages is not None:
            pages.link.report_ready_pages(pages.handle, ready.room)
            return
        pool, now = placement.pool, asyncio.get_running_loop().time()
        pick = pool.pick_reader(placement, now, link)
        if pick is not None:
            reader, handle = pool.links[pick.row], next(self._handles)
            placement.prefetch(ready.handle, link, reader, handle, ready.room, pick.predicted_tokens)
            pool.record_pick(placement, reader, now + self._settings.speculative_s)
            pool.recount(reader)
            self._metrics.prefetches.inc()

    def _finish(self, link: Link, placement: Placement, finish: worker_pb2.Finish) -> None:
        choice = placement.choice
        self._update_breaker(link, choice, finish)
        if finish.reason != pb.FINISH_REASON_ABORT:
            self._settle(placement, link)
        elif placement.continues_without(link):
            self._fill_free_slot(placement.pool, link)
            return
        prefetched = placement.take_prefetched(finish.handle)
        placement.leave()
        if finish.reason == pb.FINISH_REASON_HANDED_OVER:
            self._on_handed_over(link, placement, finish, prefetched)
            self._fill_free_slot(placement.pool, link)
            return
        if prefetched is not None:
            prefetched.release()
        self.pace.completed()
        self._waiting.charge(placement)
        if finish.reason in (pb.FINISH_REASON_ABORT, pb.FINISH_REASON_UNSPECIFIED):
            self._on_aborted(link, placement, finish)
        elif choice.lacks_logprobs:
            placement.request.fail(internal("The worker returned a wrong number of log probabilities for the output tokens."))
        elif choice.lacks_routed_experts(finish):
            placement.request.fail(internal("The worker returned a wrong number of routed experts."))
        elif not choice.has_all_label_logprobs(finish):
            placement.request.fail(internal("The worker returned a wrong number of log probabilities for the score's labels."))
        else:
            if choice.number == 0:  # cached tokens are counted once for each prompt
                self._metrics.predicted_tokens.inc(placement.predicted_tokens)
            choice.finish(finish)
            if choice.ending is None:
                self._detoks.touch(choice.decoding)
        self._fill_free_slot(placement.pool, link)

    def _on_handed_over(
        self, link: Link, placement: Placement, finish: worker_pb2.Finish, prefetched: PrefetchedPages | None
    ) -> None:
        reservation = reservation_of(link, finish, asyncio.get_running_loop().time())
        placement.hand_over(reservation, prefetched)
        placement.choice.handed_over(finish)
        self._metrics.handovers.labels("none" if reservation is None else "room").inc()
        self.fleet.refresh(link)
        if not self._place(placement):
            self._waiting.queue_first(placement)
            self._waiting.fail_unservable(placement.pool, self.fleet.may_serve)

    def _update_breaker(self, link: Link, choice: Choice, finish: worker_pb2.Finish) -> None:
        """Updates the worker's circuit breaker, its draining state and the trace after a choice has ended at the worker."""
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

    def _on_aborted(self, link: Link, placement: Placement, finish: worker_pb2.Finish) -> None:
        choice, code = placement.choice, finish.error
        if code == pb.ERROR_CODE_QUEUE_FULL:
            link.full_until = placement.request.clock() + FULL_S
        self.fleet.refresh(link)
        if code == pb.ERROR_CODE_UNAVAILABLE and placement.in_session:
            placement.request.fail(sessions.session_worker_away(self._settings.retry_after_s))
        elif code == pb.ERROR_CODE_UNAVAILABLE and choice.can_move:
            self._move(placement, "drain")
        elif code == pb.ERROR_CODE_QUEUE_FULL and choice.can_move:
            self._move(placement, RETRY)
        elif code == pb.ERROR_CODE_OTHER_WEIGHTS:
            self._on_other_weights(link, placement)
        elif code == pb.ERROR_CODE_INTERNAL and self._may_retry(link, placement):
            placement.count_retry()
            self._move(placement, RETRY)
        else:
            placement.request.fail(error_of_finish(finish, choice, self._settings.retry_after_s))

    def _on_other_weights(self, link: Link, placement: Placement) -> None:
        """Moves a choice that a worker has refused because the submit names another model version than the worker has.

        Usually, the worker's new hello was on its way when the gateway sent the submit. If the last hello names the same version
        as the submit, the worker may have changed its version twice, and the choice is retried once.
        """
        request, contradicts = placement.request, placement.model_version == link.model_version
        if placement.in_session:
            request.fail(sessions.session_weights_replaced(self._settings.retry_after_s))
        elif contradicts and placement.retried:
            link.breaker.failed(request.clock())
            request.fail(internal("The worker refuses the model version that it reports."))
        elif placement.choice.can_move:
            if contradicts:
                placement.count_retry()
            self._move(placement, "weights")

    @staticmethod
    def _may_retry(link: Link, placement: Placement) -> bool:
        """Returns whether a choice is retried after a fault of its worker.

        A choice without output is retried once, if another usable worker has not refused it. The faulty worker counts as a
        worker that has refused the choice.
        """
        if placement.has_begun or placement.retried or not placement.choice.can_move:
            return False
        placement.refused(link.address)
        return any(other.address not in placement.refused_by for other in placement.pool.usable())

    def on_down(self, link: Link, orphans: list[Placement]) -> None:
        self.fleet.leave(link)
        self._changed()
        if orphans and not link.draining:
            link.breaker.failed(asyncio.get_running_loop().time())
        orphans = [placement for placement in orphans if not placement.continues_without(link)]
        for placement in orphans:
            placement.leave()
            placement.forget_refusals()
        for placement in orphans:
            if placement.request.error is None:  # an earlier iteration may have failed the request because of another choice
                self._move_or_fail(placement, link)
            self._waiting.pump(placement.pool)  # the released prefetch of a choice may have freed a slot on a decode worker
        for other in self.fleet.refused_links(link):
            self.on_hello(other)

    def _move_or_fail(self, placement: Placement, link: Link) -> None:
        """Moves a choice whose worker was lost, or fails its request."""
        request, retry_after_s = placement.request, self._settings.retry_after_s
        if not link.draining:  # the end of a draining worker is no crash
            placement.count_crash(survived=request.clock() - placement.placed_at >= SHORT_LIFE_S)
        if placement.choice.can_move and placement.crashes <= MAX_CRASHES:
            self._move(placement, "lost")
        elif placement.in_session:
            request.fail(sessions.session_worker_away(retry_after_s))
        else:
            message = "The worker was lost before the response was complete."
            request.fail(unavailable(message, retry_after_s, "worker_lost"))

    def _move(self, placement: Placement, cause: str) -> None:
        """Places a choice with its output so far on another worker, or queues it."""
        choice, tokens = placement.choice, len(placement.choice.output_ids)
        self._metrics.moves.labels(cause, "begun" if tokens else "new").inc()
        about = fields(**placement.request.origin.log_fields, choice=choice.request_id, cause=cause, output_tokens=tokens)
        logger.info("request moves to another worker", extra=about)
        choice.leave_worker()
        if not self._place(placement):
            self._waiting.queue_first(placement)
            self._waiting.fail_unservable(placement.pool, self.fleet.may_serve)
