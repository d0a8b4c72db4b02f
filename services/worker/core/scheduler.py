"""The scheduler core: messages and results in, plans and outputs out. Pure: no clock, no I/O, no threads, no tensors.

One caller, in this order per turn: messages, plan, (launch), commit of the step before. At most one step is uncommitted
when a plan is made. The same calls give the same plans. Semantics: docs/architecture.md and CORE.md's terms.
"""

from __future__ import annotations

from services.worker.core.committer import Committer
from services.worker.core.config import SchedulerConfig
from services.worker.core.finish import Ending, TailDecoder, tail_tokens
from services.worker.core.invariants import violations
from services.worker.core.messages import ErrorCode, FinishReason, StepOutput, StepStats, Submit
from services.worker.core.plan import BatchPlan, StepResult
from services.worker.core.planner import Planner, Step
from services.worker.core.request import Request
from services.worker.core.request_table import RequestTable
from services.worker.core.sampling import FORCE_STREAM_INTERVAL

_CANCELLED = Ending(FinishReason.ABORT, error=ErrorCode.CANCELLED, message="the request was aborted")


class Scheduler:
    def __init__(self, config: SchedulerConfig, decoder: TailDecoder) -> None:
        self.config = config
        self.table = RequestTable(config)
        self._planner = Planner(config, self.table)
        self._committer = Committer(config, self.table, decoder)
        self._flight: list[Step] = []
        self._next_seq = 0

    @property
    def idle(self) -> bool:
        """No request is here. A step may still be uncommitted."""
        return not self.table.by_key

    def submit(self, message: Submit, now: float) -> None:
        """Queues a request, or ends it at once with an error. Raises ValueError if the peer's handle is in use."""
        if (message.peer, message.handle) in self.table.by_key:
            raise ValueError(f"handle {message.handle} is in use")
        if refusal := self._refusal(message):
            self.table.refuse(message.peer, message.handle, message.request_id, *refusal)
            return
        self._next_seq += 1
        params = message.params
        eos = () if params.ignore_eos else self.config.eos_token_ids
        request = Request(
            seq=self._next_seq,
            peer=message.peer,
            handle=message.handle,
            request_id=message.request_id,
            prompt_ids=message.prompt_ids,
            params=params,
            stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
            namespace=message.salt,
            priority=message.priority,
            interval=params.stream_interval if message.stream else FORCE_STREAM_INTERVAL,
            arrival=now,
            deadline=now + message.timeout_s if message.timeout_s else float("inf"),
            tail_tokens=tail_tokens(params.stop),
        )
        request.rekey()
        self.table.enqueue(request)

    def abort(self, peer: int, handle: int, now: float) -> None:
        """Ends the request, in whatever phase it is; what it held is free on return. Unknown handles have ended before."""
        request = self.table.by_key.get((peer, handle))
        if request is not None:
            self.table.end(request, _CANCELLED, now)

    def abort_peer(self, peer: int, now: float) -> None:
        """Ends every request of a front end that has gone."""
        for request in [r for r in self.table.by_key.values() if r.peer == peer]:
            self.table.end(request, _CANCELLED, now)

    def end_all(self, message: str, now: float) -> None:
        """Ends every request: the worker is going away."""
        ending = Ending(FinishReason.ABORT, error=ErrorCode.UNAVAILABLE, message=message)
        for request in list(self.table.by_key.values()):
            self.table.end(request, ending, now)

    def self_check(self) -> list[str]:
        """While idle: what breaks an invariant, after which the memory is made anew. Empty when all is well."""
        found = violations(self.table)
        if self.idle and not self._flight:
            if self.table.memory.num_leased:
                found.append(f"{self.table.memory.num_leased} pages are leased by nobody")
            if found:
                self.table.reset_memory()
        return found

    def plan(self, now: float) -> BatchPlan | None:
        """The next step to launch. None: nothing can run before the step in flight is committed, or nothing is here."""
        assert len(self._flight) <= 1, "two steps are uncommitted"
        for request, message in self.table.expired(now):
            self.table.end(request, Ending(FinishReason.ABORT, error=ErrorCode.TIMEOUT, message=message), now)
        if self.idle:
            self._planner.ratio.reset()
            self.table.batch_is_full = False
            return None
        step = self._planner.plan(now, self._flight[0].plan.step_id if self._flight else -1)
        if step is None:
            return None
        self._flight.append(step)
        return step.plan

    def commit(self, result: StepResult, now: float) -> None:
        """Takes in the result of the oldest uncommitted step."""
        step = self._take_flight(result.step_id)
        self._committer.commit(step, result, now)

    def fail(self, step_id: int, message: str, now: float) -> None:
        """The oldest uncommitted step failed as a whole: its requests end with an error, the others go on."""
        ending = Ending(FinishReason.ABORT, error=ErrorCode.INTERNAL, message=message)
        for request in self._take_flight(step_id).requests:
            if self.table.by_key.get((request.peer, request.handle)) is request:
                self.table.end(request, ending, now)

    def take_output(self) -> StepOutput | None:
        """What front ends are to be told since the last call."""
        peers = self.table.outputs.take()
        return StepOutput(peers) if peers else None

    def flush_cache(self) -> int:
        """Forgets every cached prefix that no running request uses; returns the number of pages freed."""
        return self.table.memory.flush()

    def stats(self) -> StepStats:
        table, memory = self.table, self.table.memory
        return StepStats(
            num_running=table.num_running,
            num_waiting=table.num_waiting,
            pages_leased=memory.num_leased,
            pages_cached=memory.tree.num_pages,
            pages_evictable=memory.tree.num_evictable,
            pages_free=memory.pages.num_free,
            new_token_ratio=self._planner.ratio.value,
            batch_is_full=table.batch_is_full,
            prompt_tokens_total=table.prompt_tokens_total,
            cached_tokens_total=table.cached_tokens_total,
            generated_tokens_total=table.generated_tokens_total,
            retractions_total=table.retractions_total,
            evicted_pages_total=memory.evicted_pages_total,
            requests_total=table.requests_total,
            aborts_total=table.aborts_total,
        )

    def _take_flight(self, step_id: int) -> Step:
        step = self._flight.pop(0)
        assert step.plan.step_id == step_id, "results come back in the order of their plans"
        return step

    def _refusal(self, message: Submit) -> tuple[ErrorCode, str] | None:
        config = self.config
        length = len(message.prompt_ids)
        if self.table.num_waiting >= config.max_queued_requests:
            return ErrorCode.QUEUE_FULL, "the request queue is full"
        if length < 1:
            return ErrorCode.INVALID_ARGUMENT, "the prompt is empty"
        if length >= config.context_len:
            return ErrorCode.INVALID_ARGUMENT, f"the prompt has {length} tokens; the context holds {config.context_len}"
        if length + message.params.max_new_tokens > config.context_len:
            return ErrorCode.INVALID_ARGUMENT, "prompt and max_new_tokens together exceed the context"
        if -(-length // config.page_size) > config.num_pages:
            size = config.num_pages * config.page_size
            return ErrorCode.OUT_OF_MEMORY, f"the prompt has {length} tokens; the KV pool holds {size}"
        return None
