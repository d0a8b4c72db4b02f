"""An executor that keeps time and nothing else: no KV, no pages, tokens read from the script.

A row's token depends on its position alone, so that a request goes on where it was after a retraction. It stands for a
device with one stream: steps run one after another, each as long as the time model says. A draft token is right if the script's
token at its position is even, which about half of them are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.sim.core.run.clock import VirtualClock
from services.sim.core.run.peer_reads import PeerReads
from services.sim.core.trace.script import Script
from services.worker.core.contracts.plan import BatchPlan, SlotParams, StepResult
from services.worker.core.contracts.rooms import RoomEvents
from services.worker.core.contracts.transfers import Fact, PageOperation
from services.worker.exec.contracts.operations import Operation, OperationRefused
from services.worker.exec.contracts.protocol import NO_MASKS, Guesses, Masks, Run
from services.worker.exec.fake import TimeModel

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SimRun:
    """begin, end: when the device works on the step. tokens, counts, drafted: see StepResult. seconds: of the step."""

    plan: BatchPlan
    tokens: I32
    begin: float
    end: float
    counts: I32 | None
    drafted: I32 | None
    seconds: float


class SimExecutor:
    """Implements exec.protocol.Executor. params.seed of a request is its place in the trace: how the script finds it. reads: of
    other workers' KV, None where there are no others."""

    def __init__(
        self, script: Script, num_slots: int, time_model: TimeModel, clock: VirtualClock, reads: PeerReads | None = None
    ) -> None:
        self._script = script
        self._time_model = time_model
        self._clock = clock
        self._reads = reads
        self._busy_until = 0.0
        self._prompt_len = np.zeros(num_slots, dtype=np.int32)
        self._lengths = np.zeros(num_slots, dtype=np.int32)  # computed tokens of each slot's sequence, wrong drafts left out
        self._outputs: I32 = np.zeros((num_slots, 1), dtype=np.int32)

    def forward(self, plan: BatchPlan) -> SimRun:
        for admitted in plan.admitted:
            self._admit(admitted)
        begin, seconds = max(self._busy_until, self._clock.now), self._time_model.seconds(plan)
        self._busy_until = begin + seconds
        self._lengths[plan.slots[: plan.num_extend]] = (plan.starts + plan.num_tokens)[: plan.num_extend]
        tokens, counts, drafted = self._verified(plan) if len(plan.drafts) else (self._tokens(plan), None, None)
        return SimRun(plan, tokens, begin, self._busy_until, counts, drafted, seconds)

    def guesses(self, run: Run) -> Guesses:
        return {}

    def sample(self, run: Run, masks: Masks, behind: Masks = NO_MASKS) -> None:
        """The time model's steps end with their sampling."""

    def wait(self, run: Run) -> StepResult:
        """Passes the time until the step is done."""
        assert isinstance(run, SimRun), "a run of another executor"
        self._clock.pass_until(run.end)
        return StepResult(run.plan.step_id, run.tokens, counts=run.counts, drafted=run.drafted, seconds=run.seconds)

    def transfer(self, operations: Sequence[PageOperation]) -> None:
        assert self._reads is not None, "pages are read where there are other workers"
        self._reads.begin(operations, max(self._busy_until, self._clock.now))

    def facts(self) -> Sequence[Fact]:
        return () if self._reads is None else self._reads.ended(self._clock.now)

    def wake_on_facts(self, wake: Callable[[], None]) -> None:
        """Nobody is woken: what becomes of operations is a matter of the clock."""

    def rooms(self, events: RoomEvents) -> None:
        assert self._reads is not None, "rooms are kept for other workers"
        self._reads.rooms(events, self._clock.now)

    def apply(self, operation: Operation) -> None:
        raise OperationRefused("a simulation has no memory to release and nothing to profile")

    def close(self) -> None:
        self._outputs = np.zeros((0, 1), dtype=np.int32)

    def _admit(self, admitted: SlotParams) -> None:
        tokens = self._script.output(admitted.params.seed)
        if (missing := len(tokens) - self._outputs.shape[1]) > 0:
            self._outputs = np.pad(self._outputs, ((0, 0), (0, missing)))
        self._outputs[admitted.slot, : len(tokens)] = tokens
        self._prompt_len[admitted.slot] = admitted.num_prompt_tokens

    def _tokens(self, plan: BatchPlan) -> I32:
        """Rows that sample nothing, or run on past their request's end, get some token of no meaning."""
        place = plan.starts + plan.num_tokens - self._prompt_len[plan.slots]
        tokens: I32 = self._outputs[plan.slots, np.clip(place, 0, self._outputs.shape[1] - 1)]
        return tokens

    def _verified(self, plan: BatchPlan) -> tuple[I32, I32, I32]:
        """Returns tokens, counts and drafted of a step with draft tokens, and moves the lengths of its decode rows.

        A row under a grammar gets no draft tokens, because the simulation has no masks to verify them with.
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
