"""Simulates an executor: it advances the clock by the time model and reads tokens from the script, without KV.

A row's token depends only on its request and its position, so a request continues at the same token after a retraction. The
device has one stream: steps run in sequence. A draft token is accepted if the script's token at its position is even. About
half of the script's tokens are even.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.sim.core.run.remote_reads import RemoteReads
from rootstock_llm.services.sim.core.trace.script import Script
from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, SlotParams, StepResult
from rootstock_llm.services.worker.core.contracts.reservations import ReservationEvents
from rootstock_llm.services.worker.core.contracts.transfers import Fact, PageOperation
from rootstock_llm.services.worker.exec.contracts.operations import Operation, OperationRefused
from rootstock_llm.services.worker.exec.contracts.protocol import NO_MASKS, DraftTokens, Masks, Run
from rootstock_llm.services.worker.exec.fake import TimeModel


class VirtualClock:
    """Virtual time in seconds since the simulation began. Only the simulation and its executor advance it."""

    def __init__(self) -> None:
        self.now = 0.0

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def pass_until(self, at: float) -> None:
        """Advances the clock to `at` if this is in the future."""
        self.now = max(self.now, at)


I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SimRun:
    """A launched step."""

    plan: BatchPlan
    tokens: I32  # see StepResult
    begin: float  # virtual time at which the device begins the step
    end: float  # virtual time at which the device ends the step
    counts: I32 | None  # see StepResult
    drafted: I32 | None  # see StepResult
    seconds: float  # duration of the step


class SimExecutor:
    """Implements Executor. A request's params.seed is its index in the trace, by which the script finds the request's tokens.

    `reads` are the reads of other workers' KV, or None in a simulation of a single worker.
    """

    def __init__(
        self, script: Script, num_slots: int, time_model: TimeModel, clock: VirtualClock, reads: RemoteReads | None = None
    ) -> None:
        self._script = script
        self._time_model = time_model
        self._clock = clock
        self._reads = reads
        self._busy_until = 0.0
        self._prompt_len = np.zeros(num_slots, dtype=np.int32)
        self._lengths = np.zeros(num_slots, dtype=np.int32)  # computed tokens per slot, without rejected draft tokens
        self._outputs: I32 = np.zeros((num_slots, 1), dtype=np.int32)

    def forward(self, plan: BatchPlan) -> SimRun:
        for admitted in plan.admitted:
            self._admit(admitted)
        begin, seconds = max(self._busy_until, self._clock.now), self._time_model.seconds(plan)
        self._busy_until = begin + seconds
        self._lengths[plan.slots[: plan.num_extend]] = (plan.starts + plan.num_tokens)[: plan.num_extend]
        tokens, counts, drafted = self._verified(plan) if len(plan.drafts) else (self._tokens(plan), None, None)
        return SimRun(plan, tokens, begin, self._busy_until, counts, drafted, seconds)

    def draft_tokens(self, run: Run) -> DraftTokens:
        return {}

    def sample(self, run: Run, masks: Masks, behind: Masks = NO_MASKS) -> None:
        """Does nothing: the time model's steps include sampling."""

    def wait(self, run: Run) -> StepResult:
        """Advances the clock to the end of the step."""
        assert isinstance(run, SimRun), "the run is one of this executor's"
        self._clock.pass_until(run.end)
        return StepResult(run.plan.step_id, run.tokens, counts=run.counts, drafted=run.drafted, seconds=run.seconds)

    def transfer(self, operations: Sequence[PageOperation]) -> None:
        assert self._reads is not None, "only workers with remote reads transfer pages"
        self._reads.begin(operations, max(self._busy_until, self._clock.now))

    def facts(self) -> Sequence[Fact]:
        return () if self._reads is None else self._reads.ended(self._clock.now)

    def wake_on_facts(self, wake: Callable[[], None]) -> None:
        """Does nothing, because no thread waits: facts() returns the operations that have ended at the clock's virtual time."""

    def change_reservations(self, events: ReservationEvents) -> None:
        assert self._reads is not None, "only workers with remote reads have KV reservations"
        self._reads.change_reservations(events, self._clock.now)

    def apply(self, operation: Operation) -> None:
        raise OperationRefused("a simulated worker has no memory to release and no device to profile")

    def close(self) -> None:
        self._outputs = np.zeros((0, 1), dtype=np.int32)

    def _admit(self, admitted: SlotParams) -> None:
        tokens = self._script.output(admitted.params.seed)
        if (missing := len(tokens) - self._outputs.shape[1]) > 0:
            self._outputs = np.pad(self._outputs, ((0, 0), (0, missing)))
        self._outputs[admitted.slot, : len(tokens)] = tokens
        self._prompt_len[admitted.slot] = admitted.num_prompt_tokens

    def _tokens(self, plan: BatchPlan) -> I32:
        """Returns the next token of each row.

        A row that samples no token, or has passed its request's end, gets an arbitrary token.
        """
        index = plan.starts + plan.num_tokens - self._prompt_len[plan.slots]
        tokens: I32 = self._outputs[plan.slots, np.clip(index, 0, self._outputs.shape[1] - 1)]
        return tokens

    def _verified(self, plan: BatchPlan) -> tuple[I32, I32, I32]:
        """Returns (tokens of all rows, tokens per row, draft tokens per row) of a step. Advances the lengths of its decode rows.

        Rows of requests with a grammar get no draft tokens, because the simulation has no masks to verify them.
        """
        drafted = plan.drafts.copy()
        drafted[plan.mask_rows] = 0
        lengths = self._lengths[plan.slots]
        lengths[plan.num_extend :] += 1
        runs = []
        for slot, length, number in zip(plan.slots.tolist(), lengths.tolist(), drafted.tolist(), strict=True):
            first = length - int(self._prompt_len[slot])
            run = self._outputs[slot, np.clip(np.arange(first, first + number + 1), 0, self._outputs.shape[1] - 1)]
            wrong = np.flatnonzero(run[:number] % 2)
            runs.append(run[: int(wrong[0]) + 1] if len(wrong) else run)
        counts = np.array([len(run) for run in runs], dtype=np.int32)
        self._lengths[plan.slots] = lengths + counts - 1
        return np.concatenate(runs), counts, drafted
