"""Steps whose decode rows verify guesses: each guessed token is computed in the step of the one before it, and counts if that is
what the request's own draw says there.

A drafted row goes to the runner as one row for each of its tokens. They are sampled place by place, all rows' first tokens first,
as so many steps would: with the state that the places before have left, so penalties, draws, log probabilities and faults are
those of plain decoding. A row leaves where a token is not what was guessed. Values are read between places: this is for streams
on which all that was launched is done.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.core.contracts.plan import BatchPlan, RowFault, StepResult, no_tokens
from services.worker.exec.contracts.drafter import Computed, Drafter
from services.worker.exec.contracts.protocol import NO_MASKS, Masks
from services.worker.exec.contracts.step_data import Batch
from services.worker.exec.contracts.step_parts import Launched
from services.worker.exec.step.model_runner import DeviceRun, DeviceRunner
from services.worker.exec.step.plan_pieces import NOTHING
from services.worker.exec.streams.readback import Readback

I64 = NDArray[np.int64]


@dataclass(slots=True)
class _Drafted:
    """A step. inner: what the runner computes of it. firsts: int64[rows], of each row of the plan its first one there. guesses:
    by row of the plan, as far as a grammar allows them; proposed: how many there were before; predicted: rows whose guesses are
    of a prediction. runs: tokens of each row that samples. seconds: that the step has taken so far."""

    inner: DeviceRun
    firsts: I64
    guesses: dict[int, list[int]]
    proposed: dict[int, int]
    predicted: list[int]
    runs: dict[int, list[int]] = field(default_factory=dict)
    seconds: float = 0.0


class DraftedSteps:
    """What an executor asks of a DeviceRunner, with guesses. lengths: int64[slots], tokens of each slot whose KV counts: where
    its next one stands. guessable: bool[slots], of whose holder the drafter hears."""

    def __init__(self, runner: DeviceRunner, drafter: Drafter, max_slots: int, max_tokens: int) -> None:
        self._runner, self._drafter, self._max_tokens = runner, drafter, max_tokens
        self._lengths = np.zeros(max_slots, dtype=np.int64)
        self._guessable = np.zeros(max_slots, dtype=np.bool_)
        self._steps: dict[int, _Drafted] = {}

    def forward(self, run: DeviceRun) -> None:
        plan = run.plan
        try:
            self._drafter.begin()
        finally:  # whatever becomes of this step: a later one may be planned with these pages
            self._runner.map_pages(plan)
        begun = time.perf_counter()  # what prompts left to do is no decode step's cost
        for admitted in plan.admitted:
            self._guessable[admitted.slot] = admitted.params.speculative
            if admitted.params.speculative:
                self._drafter.admit(admitted)
        ends = np.cumsum(plan.num_tokens[: plan.num_extend]).tolist()
        for row, end in enumerate(ends):
            slot, ids = int(plan.slots[row]), plan.input_ids[end - int(plan.num_tokens[row]) : end]
            if self._guessable[slot]:
                self._drafter.know(slot, int(plan.starts[row]), ids.tolist())
        guesses = self._guesses(plan)
        run.guess(guesses)
        step = self._resolved(plan, guesses)
        self._steps[plan.step_id] = step
        self._runner.forward(step.inner)
        step.seconds = time.perf_counter() - begun

    def sample(self, run: DeviceRun, masks: Masks, behind: Masks) -> None:
        step, begun = self._steps[run.plan.step_id], time.perf_counter()
        own = {int(step.firsts[row]): mask for row, mask in masks.items()}
        for row in run.plan.mask_rows.tolist():
            ahead = behind.get(row, ())
            own |= {int(step.firsts[row]) + place: mask for place, mask in enumerate(ahead, 1)}
            if row in step.guesses:
                step.guesses[row] = step.guesses[row][: len(ahead)]
        try:
            self._runner.sample(step.inner, NO_MASKS, NO_MASKS, lambda batch: self._launch(run.plan, step, batch, own))
            self._drafter.computed(self._computed(run.plan, step))
        except BaseException:  # of any kind: nobody asks for the result of a step that has failed
            del self._steps[run.plan.step_id]
            raise
        step.seconds += time.perf_counter() - begun

    def _computed(self, plan: BatchPlan, step: _Drafted) -> list[Computed]:
        """Of a decode row what its guesses have proved to be; what one that was given up has computed counts for nothing."""
        inner = step.inner
        offsets = np.cumsum(inner.plan.num_tokens) - inner.plan.num_tokens
        rows = []
        for row, first in enumerate(step.firsts.tolist()):
            given = row < plan.num_extend
            count, slot = int(plan.num_tokens[row]) if given else len(step.runs.get(row, ())), int(plan.slots[row])
            if count and first not in inner.faults and self._guessable[slot]:
                place = -1 if inner.in_pieces else int(offsets[first])
                rows.append(Computed(slot, int(inner.plan.starts[first]), count, place, given))
        return rows

    def result(self, run: DeviceRun) -> StepResult:
        step = self._steps.pop(run.plan.step_id)
        inner = self._runner.result(step.inner)
        tokens: list[int] = []
        counts = np.ones(run.plan.num_rows, dtype=np.int32)
        faults: dict[int, RowFault] = {}
        logprobs = {}
        for row, first in enumerate(step.firsts.tolist()):
            own = step.runs.get(row, [0])
            counts[row] = len(own)
            for place in range(first, first + len(own)):
                if place in inner.logprobs:
                    logprobs[len(tokens) + place - first] = inner.logprobs[place]
                if place in inner.faults:
                    faults[row] = inner.faults[place]
            tokens += own
        drafted = np.zeros(run.plan.num_rows, dtype=np.int32)
        for row, count in step.proposed.items():
            drafted[row] = count
        flat = np.array(tokens, dtype=np.int32)
        told = replace(inner, tokens=flat, counts=counts, drafted=drafted, faults=faults, logprobs=logprobs, seconds=step.seconds)
        if not step.predicted:
            return told
        predicted = np.zeros(run.plan.num_rows, dtype=np.bool_)
        predicted[step.predicted] = True
        return replace(told, predicted=predicted)

    def release(self, run: DeviceRun) -> None:
        step = self._steps.pop(run.plan.step_id, None)
        self._runner.release(run if step is None else step.inner)

    def _guesses(self, plan: BatchPlan) -> dict[int, list[int]]:
        """By row, as far as the step has room for them."""
        if not len(plan.drafts):
            return {}
        room = self._max_tokens - len(plan.input_ids) - (plan.num_rows - plan.num_extend)
        rows, wanted = {}, {}
        for row in np.flatnonzero(plan.drafts).tolist():
            slot = int(plan.slots[row])
            if room <= 0:
                break
            rows[slot], wanted[slot] = row, min(int(plan.drafts[row]), room)
            room -= wanted[slot]
        return {rows[slot]: guess for slot, guess in self._drafter.propose(wanted).items() if guess}

    def _resolved(self, plan: BatchPlan, guesses: dict[int, list[int]]) -> _Drafted:
        """The step as a plan that says where its decode rows begin, a row for each token."""
        extends = plan.num_extend
        counts = np.ones(plan.num_rows, dtype=np.int64)
        for row, guess in guesses.items():
            counts[row] += len(guess)
        firsts = np.cumsum(counts) - counts
        rows = np.repeat(np.arange(plan.num_rows), counts)
        starts = plan.starts.astype(np.int64)
        starts[extends:] = self._lengths[plan.slots[extends:]]
        assert (starts <= plan.starts).all(), "a row begins no later than it was planned to"
        ahead = np.arange(len(rows)) - firsts[rows]
        inner = replace(
            plan,
            slots=plan.slots[rows],
            starts=(starts[rows] + ahead).astype(np.int32),
            num_tokens=np.where(rows < extends, plan.num_tokens[rows], 1).astype(np.int32),
            sample=plan.sample[rows],
            mask_rows=firsts[plan.mask_rows].astype(np.int32),
            drafts=no_tokens(),
            table_slots=NOTHING,
            table_firsts=NOTHING,
            table_counts=NOTHING,
            table_pages=NOTHING,
        )
        run = DeviceRun(inner, Readback(self._runner.streams))
        if guesses:
            run.known = np.full(len(plan.input_ids) + len(rows) - extends, -1, dtype=np.int32)
            at = len(plan.input_ids) - extends
            for row, guess in guesses.items():
                first = at + int(firsts[row]) + 1
                run.known[first : first + len(guess)] = guess
        predicted = [row for row in guesses if self._drafter.predicted(int(plan.slots[row]))]
        return _Drafted(run, firsts, guesses, {row: len(guess) for row, guess in guesses.items()}, predicted)

    def _launch(self, plan: BatchPlan, step: _Drafted, batch: Batch, masks: Masks) -> list[Launched]:
        """Place by place. batch: rows of the runner's, each with its logits; all of them, unless the step was cut in pieces."""
        index = {int(row): place for place, row in enumerate(batch.rows.tolist())}
        rows = alive = [row for row in np.flatnonzero(plan.sample).tolist() if int(step.firsts[row]) in index]
        launched = []
        place = 0
        while alive:
            whole = place == 0 and len(alive) == len(batch.rows)
            own = batch if whole else self._part(batch, [index[int(step.firsts[row]) + place] for row in alive])
            launched.append(self._runner.sampler.launch(own, masks, None))
            outcome = self._runner.sampler.outcome(launched[-1])
            going = []
            for at, row in enumerate(alive):
                token, guess = int(outcome.tokens[at]), step.guesses.get(row, [])
                step.runs.setdefault(row, []).append(token)
                if at not in outcome.faults and place < len(guess) and guess[place] == token:
                    going.append(row)
            alive, place = going, place + 1
        self._note(plan, step, rows)
        return launched

    def _part(self, batch: Batch, places: list[int]) -> Batch:
        chosen, rows = torch.tensor(places), batch.space.rows
        space = self._runner.sampler.passing_space(rows.slots[chosen], rows.positions[chosen])
        return Batch(batch.slots[places], batch.rows[places], batch.logits[chosen], space, fixed=False)

    def _note(self, plan: BatchPlan, step: _Drafted, rows: list[int]) -> None:
        for row in rows:
            slot, tokens = int(plan.slots[row]), step.runs[row]
            if row < plan.num_extend:
                self._lengths[slot] = int(plan.starts[row]) + int(plan.num_tokens[row])
            else:
                self._lengths[slot] += len(tokens)
            if self._guessable[slot]:
                self._drafter.sampled(slot, tokens)
