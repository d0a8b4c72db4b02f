"""The plan of a step: extend rows if there are any, otherwise decode rows, or both if they share a step.

A plan uses only lengths, never the tokens of the step in flight. It advances `computed` and `planned_out`; the commit advances
the other counters later. docs/design/scheduler.md#which-rows-a-step-has has the rules.
"""

from __future__ import annotations

from services.worker.core.contracts.config import SchedulerConfig
from services.worker.core.contracts.counters import Counters
from services.worker.core.kv.memory import KVMemory
from services.worker.core.planning.decode_planner import DecodePlanner, NewTokenRatio
from services.worker.core.planning.draft_controller import DraftController
from services.worker.core.planning.extend_planner import ExtendPlanner
from services.worker.core.planning.step_rows import NO_DECODES, ExtendRows, Step, build_step
from services.worker.core.requests.lifecycle import RequestLifecycle
from services.worker.core.requests.queues import RequestQueues
from services.worker.core.requests.slot_columns import SlotColumns


class Planner:
    """Plans steps. Owns the planners of extends and decodes and the new-token ratio."""

    def __init__(
        self,
        config: SchedulerConfig,
        queues: RequestQueues,
        memory: KVMemory,
        columns: SlotColumns,
        counters: Counters,
        lifecycle: RequestLifecycle,
        draft_controller: DraftController | None,
    ) -> None:
        self.config = config  # replaced by retune()
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
            ratio: the new-token ratio, or None to leave it.
        """
        self.extends.running_limit = running_limit
        if config.schedule_conservativeness != self.config.schedule_conservativeness:
            self.ratio.rebase(config.schedule_conservativeness)
        if ratio is not None:
            self.ratio.value = ratio
        self.config = self.extends.config = self._decodes.config = config

    def plan(self, now: float, flight: Step | None) -> Step | None:
        """Returns the next step, or None if nothing can run before the step in flight is committed."""
        flight_step = flight.plan.step_id if flight else -1
        self._step_id += 1
        assert flight_step < self._step_id, "steps are numbered in the order of their plans"
        self.extends.preempt(self.ratio.value, flight, self._step_id)
        if self._decodes_are_due() and (step := self._decode_only(now, flight_step)):
            return step
        # Requests that extend again after decoding share a step with decodes, which a step of extends alone would delay.
        shared = self.config.enable_mixed_chunk or any(r.progress.output_ids for r in self._queues.extending)
        before = self._counters.retractions_total
        decodes = self._decodes.plan(now, flight_step, self._step_id) if shared else NO_DECODES
        # A request that this plan retracts is not admitted in it, because its token in flight is not committed.
        may_admit = self._counters.retractions_total == before
        extends = self.extends.plan(
            now, self.ratio.value, decodes.num_tokens if decodes.requests else 0, flight, self._step_id, may_admit
        )
        if not extends.requests and not shared:
            decodes = self._decodes.plan(now, flight_step, self._step_id)
        if not extends.requests and not decodes.requests:
            return None
        self._extends_in_a_row = self._extends_in_a_row + 1 if extends.requests and not decodes.requests else 0
        return build_step(self._step_id, extends, decodes, self._columns, self._memory.take_table_updates())

    def _decodes_are_due(self) -> bool:
        """Returns whether decode rows have waited for the allowed number of extend steps."""
        if not self._extends_in_a_row:
            return False
        return 0 < self.extends.steps_in_a_row <= self._extends_in_a_row and self._decodes.num_candidates > 0

    def _decode_only(self, now: float, flight_step: int) -> Step | None:
        """Returns a step without extend rows, or None if no request can decode."""
        self._extends_in_a_row = 0
        decodes = self._decodes.plan(now, flight_step, self._step_id)
        if not decodes.requests:
            return None
        return build_step(self._step_id, ExtendRows(), decodes, self._columns, self._memory.take_table_updates())
