"""Plans a step: extend rows if there are any, otherwise decode rows, or both in a mixed step.

A plan depends on the lengths of the requests, and not on the tokens of the step in flight. It advances the columns `computed` and
`planned_out`; the commit advances `committed`, `num_out` and `sent`. docs/design/scheduler.md has the rules
(#which-rows-a-step-has, #retraction, #new_token_ratio).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.config import SchedulerConfig
from rootstock_llm.services.worker.core.contracts.counters import Counters
from rootstock_llm.services.worker.core.contracts.plan import VERIFIED_TOKENS
from rootstock_llm.services.worker.core.kv.memory import KVMemory
from rootstock_llm.services.worker.core.planning.draft_controller import DraftController
from rootstock_llm.services.worker.core.planning.expert_record import ExpertRecord
from rootstock_llm.services.worker.core.planning.extend_planner import ExtendPlanner
from rootstock_llm.services.worker.core.planning.step_rows import Step, StepRows, build_step
from rootstock_llm.services.worker.core.requests.gates import too_small
from rootstock_llm.services.worker.core.requests.lifecycle import RequestLifecycle
from rootstock_llm.services.worker.core.requests.queues import RequestQueues
from rootstock_llm.services.worker.core.requests.request import Request, SlotColumns
from rootstock_llm.services.worker.core.requests.waiting_queue import victim_order

INIT_RATIO = 0.7
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20


class NewTokenRatio:
    """The share of the running requests' remaining output that admission reserves (docs/design/scheduler.md#new_token_ratio).

    The ratio starts high, falls linearly with each decode step to a floor, and is computed anew after a retraction. When the
    worker is idle, it is set to the start value.
    """

    def __init__(self, conservativeness: float) -> None:
        self.rebase(conservativeness)

    def rebase(self, conservativeness: float) -> None:
        """Sets the ratio to its start value for another schedule_conservativeness."""
        self._init = min(INIT_RATIO * conservativeness, 1.0)
        self._floor = self._init * MIN_RATIO_FACTOR
        self._decay = (self._init - self._floor) / DECAY_STEPS
        self.value = self._init
        assert 0 <= self._floor <= self._init <= 1, "the ratio is a share"

    def step(self) -> None:
        """Lowers the ratio after a decode step without retraction."""
        self.value = max(self.value - self._decay, self._floor)

    def raise_on_retract(self, num_decoded: int, batch_size: int, sum_max_new: int) -> None:
        """Sets the ratio after a retraction to the share that the remaining rows need.

        Args:
            num_decoded: sum of these rows' output tokens.
            batch_size: number of these rows.
            sum_max_new: sum of these rows' largest numbers of output tokens.
        """
        assert num_decoded >= 0 and batch_size > 0, "at least one row was not retracted"
        self.value = min(1.0, (num_decoded + RETRACT_DECODE_STEPS * batch_size) / (sum_max_new + 1))

    def reset(self) -> None:
        self.value = self._init


class DecodePlanner:
    """Plans the decode rows of a step, and retracts requests if there are no pages for the next tokens."""

    def __init__(
        self,
        config: SchedulerConfig,
        queues: RequestQueues,
        memory: KVMemory,
        columns: SlotColumns,
        counters: Counters,
        lifecycle: RequestLifecycle,
        ratio: NewTokenRatio,
        draft_controller: DraftController | None,
    ) -> None:
        self.config = config  # replaced by Planner.retune()
        self._queues, self._memory, self._columns, self._counters = queues, memory, columns, counters
        self._lifecycle, self._ratio = lifecycle, ratio
        self._draft_controller = draft_controller  # unset if the executor does not draft
        self._decode_steps = 0

    @property
    def num_candidates(self) -> int:
        """Number of decoding requests that may have further output."""
        return len(self._candidates()[0])

    def plan(self, rows: StepRows, now: float, flight_step: int, step_id: int) -> None:
        """Sets the decode rows of a step, and allocates the pages for their tokens.

        If there are too few pages, retracts requests. If a single request is left and needs more pages than the pool has, ends it
        with an error.
        """
        self._retract_for_test(flight_step, step_id)
        self._leave_windows()
        before = self._counters.retractions_total
        requests, slots, need = self._free_pages(now, flight_step, step_id)
        if self._counters.retractions_total > before:
            self._raise_ratio()
        if not requests:
            return
        if len(need):
            self._memory.grow_each(need)
        starts = self._columns.computed[slots]
        self._columns.computed[slots] += 1
        self._columns.planned_out[slots] += 1
        rows.decodes, rows.decode_slots = requests, slots
        if self._draft_controller is not None:
            rows.drafts = self._drafts(slots, self._draft_controller)
        if self._memory.units is not None:
            rows.decode_states = self._memory.units.decode(slots, starts, rows.drafts)
        self._decode_steps += 1
        if self._counters.retractions_total == before:
            self._ratio.step()

    def _candidates(self) -> tuple[list[Request], NDArray[np.int64], NDArray[np.int32]]:
        """Returns the decoding requests that may have further output, their slots, and the slots that need one more page."""
        columns = self._columns
        slots = self._queues.decoding_slots()
        requests = list(self._queues.decoding)
        more = columns.planned_out[slots] < columns.max_new[slots]
        if not more.all():
            requests = [r for r, m in zip(requests, more.tolist(), strict=True) if m]
            slots = slots[more]
        spare = self._memory.slots.num_pages[slots] * self.config.page_size - columns.computed[slots]
        need = slots[spare <= 0]
        assert not len(need) or spare[spare.argmin()] == 0, "a row computes at most the tokens of its pages"
        return requests, slots, need.astype(np.int32)

    def _leave_windows(self) -> None:
        """Frees the window units behind the decode rows. If reservations shrink, waiting requests may be admitted again."""
        units, slots = self._memory.units, self._memory.slots
        if units is None or not self._queues.decoding:
            return
        decoding = self._queues.decoding_slots()
        planned, committed = self._columns.computed[decoding], self._columns.committed[decoding]
        if units.leave_decode(decoding, planned, committed, slots.num_pages, slots.num_shared):
            self._queues.batch_is_full = False

    def _drafts(self, slots: NDArray[np.int64], draft_controller: DraftController) -> NDArray[np.int32]:
        """Returns the number of draft tokens of each row, and allocates pages for them.

        The number of a row is limited by DraftController, by the row's remaining output and by VERIFIED_TOKENS. If the free pages
        do not suffice, no row gets draft tokens, because draft tokens must not evict cached pages.
        """
        columns = self._columns
        most = min(self.config.max_drafts, max(0, VERIFIED_TOKENS // len(slots) - 1))
        left = np.where(columns.draftable[slots], columns.max_new[slots] - columns.planned_out[slots], 0)
        drafts = draft_controller.choose(slots, np.minimum(left, most)) if most else draft_controller.crowded(slots)
        over = columns.computed[slots] + drafts - self._memory.slots.num_pages[slots] * self.config.page_size
        need = -(-np.maximum(over, 0) // self.config.page_size)
        if need.sum() > self._memory.pages.num_free:
            drafts[:], need[:] = 0, 0
        for number in range(int(need.max())):
            self._memory.grow_each(slots[need > number].astype(np.int32))
        assert drafts.min() >= 0, "draft tokens are within the remaining output"
        columns.computed[slots] += drafts
        columns.planned_out[slots] += drafts
        return drafts.astype(np.int32)

    def _free_pages(
        self, now: float, flight_step: int, step_id: int
    ) -> tuple[list[Request], NDArray[np.int64], NDArray[np.int32]]:
        """Frees pages until there are enough for the next decode step.

        Releases the pins of waiting requests, and then retracts decoding and extending requests until one is left. This request
        waits while a step, an operation or a reservation may free pages, and otherwise ends with an error.

        Returns:
            The requests of the decode rows, their slots, and the slots that need one more page.
        """
        while True:
            requests, slots, need = self._candidates()
            if len(need) <= self._memory.num_available:
                return requests, slots, need
            if self._lifecycle.release_pins():
                continue
            victims = requests + self._queues.extending
            if len(victims) > 1:
                self._lifecycle.retract(min(victims, key=victim_order), flight_step, step_id)
            elif flight_step >= 0 or self._lifecycle.pages_may_come_back:
                return [], slots[:0], need[:0]
            else:
                self._lifecycle.end(requests[0], too_small(self.config), now)

    def _retract_for_test(self, flight_step: int, step_id: int) -> None:
        """Retracts a request at the configured interval of decode steps."""
        every = self.config.retract_interval
        victims = self._queues.decoding
        if every and victims and self._decode_steps % every == every - 1:
            self._lifecycle.retract(min(victims, key=victim_order), flight_step, step_id)
            self._decode_steps += 1

    def _raise_ratio(self) -> None:
        rows = self._queues.decoding
        if not rows:
            return
        decoded = sum(len(r.progress.output_ids) for r in rows)
        self._ratio.raise_on_retract(decoded, len(rows), sum(r.most_outputs for r in rows))


class Planner:
    """Plans steps. Owns ExtendPlanner, DecodePlanner and NewTokenRatio."""

    def __init__(
        self,
        config: SchedulerConfig,
        queues: RequestQueues,
        memory: KVMemory,
        columns: SlotColumns,
        counters: Counters,
        lifecycle: RequestLifecycle,
        draft_controller: DraftController | None,
        expert_record: ExpertRecord,
    ) -> None:
        self.config = config  # replaced by retune()
        self._expert_record = expert_record
        self._queues, self._memory, self._columns, self._counters = queues, memory, columns, counters
        self._draft_controller = draft_controller  # unset if the executor does not draft
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self.extends = ExtendPlanner(config, queues, memory, columns, lifecycle, draft_controller)
        self._decodes = DecodePlanner(config, queues, memory, columns, counters, lifecycle, self.ratio, draft_controller)
        self._step_id = 0
        self._extends_in_a_row = 0

    def rest(self) -> None:
        """Resets the state that depends on recent load, because the worker is idle."""
        self.ratio.reset()
        if self._draft_controller is not None:
            self._draft_controller.rest()

    def retune(self, config: SchedulerConfig, running_limit: int, ratio: float | None) -> None:
        """Applies changed settings.

        Args:
            config: the new configuration.
            running_limit: largest number of running requests.
            ratio: the new-token ratio, or None to leave it unchanged.
        """
        self.extends.running_limit = running_limit
        if config.schedule_conservativeness != self.config.schedule_conservativeness:
            self.ratio.rebase(config.schedule_conservativeness)
        if ratio is not None:
            self.ratio.value = ratio
        self.config = self.extends.config = self._decodes.config = config

    def plan(self, now: float, flight: Step | None) -> Step | None:
        """Returns the next step, or None if no row can be planned now."""
        flight_step = flight.plan.step_id if flight else -1
        self._step_id += 1
        assert flight_step < self._step_id, "steps are numbered in the order of their plans"
        self._memory.settle_units()
        self.extends.preempt(self.ratio.value, flight, self._step_id)
        rows = StepRows()
        if self._decodes_are_due():
            self._extends_in_a_row = 0
            self._decodes.plan(rows, now, flight_step, self._step_id)
        if not rows.decodes:
            self._plan_both(rows, now, flight, flight_step)
        if not rows.extends and not rows.decodes:
            return None
        self._extends_in_a_row = self._extends_in_a_row + 1 if rows.extends and not rows.decodes else 0
        updates = self._memory.take_table_updates(), self._memory.take_window_updates()
        return build_step(self._step_id, rows, self._columns, *updates, counts_experts=self._expert_record.is_running)

    def _plan_both(self, rows: StepRows, now: float, flight: Step | None, flight_step: int) -> None:
        """Plans extend rows. Plans decode rows if they share the step, or if there are no extend rows."""
        # If an extending request has output already, decode rows share the step, so that they are not delayed.
        shared = self.config.enable_mixed_chunk or any(r.progress.output_ids for r in self._queues.extending)
        before = self._counters.retractions_total
        if shared:
            self._decodes.plan(rows, now, flight_step, self._step_id)
        # This plan does not admit a request that it has retracted, because the request's token in flight is not committed.
        may_admit = self._counters.retractions_total == before
        self.extends.plan(rows, now, self.ratio.value, flight, self._step_id, may_admit)
        if not rows.extends and not shared:
            self._decodes.plan(rows, now, flight_step, self._step_id)

    def _decodes_are_due(self) -> bool:
        """Returns whether decode rows have waited for the largest allowed number of consecutive extend steps."""
        if not self._extends_in_a_row:
            return False
        return 0 < self.extends.steps_in_a_row <= self._extends_in_a_row and self._decodes.num_candidates > 0
