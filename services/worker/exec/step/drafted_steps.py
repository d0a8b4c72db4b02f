"""Runs steps whose decode rows verify draft tokens. A draft token is accepted if sampling at its position returns the same token.

In the plan for the runner (the inner plan), a decode row with k draft tokens is replaced by k + 1 inner rows of one token each.
The inner rows are sampled position by position: those of the first position of all decode rows, then those of the second, and so
on. Each position sees the sampling state after the positions before it, as in separate steps. Penalties, draws, log probabilities
and faults are therefore the same as without draft tokens. After a rejected draft token, the device turns the later inner rows of
that decode row into padding.

The host needs the number of accepted draft tokens before the next step, because the next position and the text for drafting
depend on it. forward() waits for earlier steps in three cases: an earlier step verifies draft tokens, the plan requests draft
tokens, or the plan has tokens for a running request whose last sampled tokens are not on the host yet.

In recurrent layers, the k + 1 inner rows are one row. SavedInputs records which accepted tokens a step replays there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.plan import I32, BatchPlan, RowFault, StepResult, no_tokens
from rootstock_llm.services.worker.exec.contracts.draft_states import CONTINUED
from rootstock_llm.services.worker.exec.contracts.drafter import Computed, Drafter, HiddenStates
from rootstock_llm.services.worker.exec.contracts.protocol import NO_MASKS, Masks
from rootstock_llm.services.worker.exec.contracts.step_data import SampleBatch, SampleOrder
from rootstock_llm.services.worker.exec.step.model_runner import DeviceRunner, StepRun
from rootstock_llm.services.worker.exec.step.passes import NOTHING
from rootstock_llm.services.worker.exec.step.saved_inputs import SavedInputs
from rootstock_llm.services.worker.exec.streams.copies import Readback
from rootstock_llm.services.worker.exec.streams.cuda_streams import Moment

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _DraftedStep:
    """A launched step. The keys of dictionaries are rows of the plan."""

    plan: BatchPlan  # the scheduler's plan
    inner: StepRun  # the runner's step, whose plan has a row for each token of a decode row with draft tokens
    firsts: I64  # int64[rows], first row of the inner plan for each row of the plan
    admissions: I64  # int64[rows], number of admissions to the row's slot when the step was launched
    draft_tokens: dict[int, list[int]]  # draft tokens; sample() removes those without a grammar mask
    proposed: dict[int, int]  # number of draft tokens before sample() removes some
    predicted: list[int]  # rows whose draft tokens come from the client's prediction
    sampled: list[int] = field(default_factory=list)  # rows that sample
    hidden: dict[int, HiddenStates] = field(default_factory=dict)  # the target's hidden states for all tokens of a decode row
    runs: dict[int, list[int]] = field(
        default_factory=dict
    )  # accepted draft tokens and the next token, once they are on the host
    result: StepResult | None = None  # result of the inner step, or None until its tokens are on the host
    spans: list[tuple[Moment, Moment]] = field(default_factory=list)  # (begin, end) of the parts whose sum is the step's duration

    @property
    def verifies(self) -> bool:
        """Whether the step verifies draft tokens."""
        return self.inner.known is not None


def reads_nothing(_: int) -> HiddenStates:
    """Returns no hidden states, for drafters that read none."""
    return ()


class DraftedSteps:
    """Runs steps on a DeviceRunner and verifies draft tokens. Called by the thread that launches steps."""

    def __init__(
        self,
        runner: DeviceRunner,
        drafter: Drafter,
        max_slots: int,
        max_tokens: int,
        max_drafts: int,
        read: Callable[[int], HiddenStates] = reads_nothing,
    ) -> None:
        """Stores the runner and the drafter.

        Args:
            max_slots: number of slots.
            max_tokens: largest number of tokens of one pass, draft tokens included.
            max_drafts: largest number of draft tokens of a row.
            read: returns the target's hidden states that the drafter reads, for the first n tokens of the last pass.
        """
        self._runner, self._drafter, self._max_tokens, self._read = runner, drafter, max_tokens, read
        # int64[slots] each: number of tokens with valid KV, which is the position of the next token; number of admissions.
        self._lengths, self._admissions = np.zeros((2, max_slots), dtype=np.int64)
        self._drafted_for = np.zeros(max_slots, dtype=np.bool_)  # SlotParams.drafted_for of each slot's request
        self._inputs = SavedInputs(max_slots, max_drafts)  # used if the model has recurrent layers
        self._steps: dict[int, _DraftedStep] = {}  # launched steps without a result, by step id
        self._unsettled: list[_DraftedStep] = []  # sampled steps whose tokens are not on the host yet, oldest first

    def forward(self, run: StepRun) -> None:
        plan, streams = run.plan, self._runner.streams
        with streams.on_forward():
            try:
                spans = self._wait_for_lengths(plan)
                self._begin()
            finally:  # also if this step fails, because later plans may use its pages and continue at its positions
                extends = plan.num_extend
                self._lengths[plan.slots[:extends]] = plan.starts[:extends] + plan.num_tokens[:extends]
                self._runner.map_pages(plan)
            begun = streams.moment()  # after begin(), which computes entries of earlier prompts
            self._report_plan_tokens(plan)
            draft_tokens = self._proposed(plan)
        run.publish(draft_tokens)
        step = self._inner_step(plan, draft_tokens)
        self._steps[plan.step_id] = step
        self._runner.forward(step.inner)
        step.spans = [*spans, (begun, streams.moment())]

    def sample(self, run: StepRun, masks: Masks, behind: Masks) -> None:
        plan, step, streams = run.plan, self._steps[run.plan.step_id], self._runner.streams
        begun = streams.moment()
        own = {int(step.firsts[row]): mask for row, mask in masks.items()}
        for row in plan.mask_rows.tolist():
            later = behind.get(row, ())
            own |= {int(step.firsts[row]) + index: mask for index, mask in enumerate(later, 1)}
            if row in step.draft_tokens:
                step.draft_tokens[row] = step.draft_tokens[row][: len(later)]
        if step.inner.in_pieces:  # pieces do not compute the rows of draft tokens
            step.draft_tokens.clear()
        order = partial(self._sample_order, step) if step.verifies and not step.inner.in_pieces else None
        try:
            batches = step.inner.batches
            there = {row for batch in batches for row in batch.rows.tolist()}
            step.sampled = [row for row in np.flatnonzero(plan.sample).tolist() if int(step.firsts[row]) in there]
            self._runner.sample(step.inner, own, NO_MASKS, order)
            with streams.on_forward():
                self._record_sampled(step)
        except BaseException:  # result(), which removes the step, is not called for a failed step
            del self._steps[plan.step_id]
            raise
        self._unsettled.append(step)
        step.spans.append((begun, streams.moment()))

    def result(self, run: StepRun) -> StepResult:
        step = self._steps.pop(run.plan.step_id)
        inner = self._settled(step)
        tokens: list[int] = []
        counts = np.ones(run.plan.num_rows, dtype=np.int32)
        faults: dict[int, RowFault] = {}
        logprobs = {}
        for row, first in enumerate(step.firsts.tolist()):
            own = step.runs.get(row, [0])
            counts[row] = len(own)
            for inner_row in range(first, first + len(own)):
                if inner_row in inner.logprobs:
                    logprobs[len(tokens) + inner_row - first] = inner.logprobs[inner_row]
                if inner_row in inner.faults:
                    faults[row] = inner.faults[inner_row]
            tokens += own
        drafted = np.zeros(run.plan.num_rows, dtype=np.int32)
        for row, count in step.proposed.items():
            drafted[row] = count
        flat, seconds = np.array(tokens, dtype=np.int32), sum(end.seconds_since(begun) for begun, end in step.spans)
        rows, routed = _expert_rows(step, inner, counts), _routed_experts(step, inner, counts)
        result = replace(inner, tokens=flat, counts=counts, drafted=drafted, faults=faults, logprobs=logprobs, seconds=seconds)
        result = replace(result, expert_rows=rows, routed_experts=routed)
        if not step.predicted:
            return result
        predicted = np.zeros(run.plan.num_rows, dtype=np.bool_)
        predicted[step.predicted] = True
        return replace(result, predicted=predicted)

    def release(self, run: StepRun) -> None:
        step = self._steps.pop(run.plan.step_id, None)
        self._runner.release(run if step is None else step.inner)

    # Before the forward pass

    def _wait_for_lengths(self, plan: BatchPlan) -> list[tuple[Moment, Moment]]:
        """Waits for the sampled tokens of earlier steps if the plan depends on them, see the module's docstring.

        Returns:
            The span of time in which the device had no work because of the wait; empty without a wait.
        """
        if not self._unsettled:
            return []
        if not (plan.drafts.any() or any(step.verifies for step in self._unsettled) or self._extends_unsettled(plan)):
            return []
        last = self._unsettled[-1]
        self._settled(last)
        return [(last.spans[-1][1], self._runner.streams.moment())]

    def _extends_unsettled(self, plan: BatchPlan) -> bool:
        """Returns whether the plan has tokens for a running request whose last sampled tokens are not on the host yet.

        The drafter must receive the sampled tokens first, because the tokens of the plan may replace them.
        """
        slots = set(plan.slots[: plan.num_extend].tolist())
        slots.difference_update(admitted.slot for admitted in plan.admitted)  # slots of new requests
        return bool(slots) and any(
            int(step.plan.slots[row]) in slots and self._is_followed(step, row)
            for step in self._unsettled
            for row in step.sampled
        )

    def _begin(self) -> None:
        try:
            self._drafter.begin()
        except torch.OutOfMemoryError as error:
            logger.warning("no memory for the drafter's entries; later draft tokens are less often accepted: %s", error)

    def _report_plan_tokens(self, plan: BatchPlan) -> None:
        """Reports the admissions and the tokens of the plan to the drafter."""
        for admitted in plan.admitted:
            self._drafted_for[admitted.slot] = admitted.drafted_for
            self._admissions[admitted.slot] += 1
            if admitted.drafted_for:
                self._drafter.admit(admitted)
        ends = np.cumsum(plan.num_tokens[: plan.num_extend]).tolist()
        for row, end in enumerate(ends):
            slot, ids = int(plan.slots[row]), plan.input_ids[end - int(plan.num_tokens[row]) : end]
            if self._drafted_for[slot]:
                self._drafter.set_tokens(slot, int(plan.starts[row]), ids.tolist())

    def _proposed(self, plan: BatchPlan) -> dict[int, list[int]]:
        """Returns draft tokens by row, as many as the plan requests and the pass can compute."""
        if not len(plan.drafts):
            return {}
        free = self._max_tokens - len(plan.input_ids) - (plan.num_rows - plan.num_extend)
        rows, wanted = {}, {}
        for row in np.flatnonzero(plan.drafts).tolist():
            slot = int(plan.slots[row])
            if free <= 0:
                break
            rows[slot], wanted[slot] = row, min(int(plan.drafts[row]), free)
            free -= wanted[slot]
        try:
            proposed = self._drafter.propose(wanted)
        except torch.OutOfMemoryError as error:
            logger.warning("no memory for drafting; step %d has no draft tokens: %s", plan.step_id, error)
            return {}
        return {rows[slot]: draft for slot, draft in proposed.items() if draft}

    def _inner_step(self, plan: BatchPlan, draft_tokens: dict[int, list[int]]) -> _DraftedStep:
        """Returns the step with its inner plan. Decode rows start at the position that the accepted draft tokens have reached."""
        if not (draft_tokens or plan.drafts.any()):
            return self._without_drafts(plan)
        extends = plan.num_extend
        counts = np.ones(plan.num_rows, dtype=np.int64)
        for row, draft in draft_tokens.items():
            counts[row] += len(draft)
        firsts = np.cumsum(counts) - counts
        rows = np.repeat(np.arange(plan.num_rows), counts)
        starts = plan.starts.astype(np.int64)
        starts[extends:] = self._lengths[plan.slots[extends:]]
        assert (starts <= plan.starts).all(), "a row starts at the planned position, or earlier if draft tokens were rejected"
        replays = self._inputs.replays_of(plan, starts) if len(plan.state_before) else None
        index = np.arange(len(rows)) - firsts[rows]
        inner = replace(
            _without_table_updates(plan),
            slots=plan.slots[rows],
            starts=(starts[rows] + index).astype(np.int32),
            num_tokens=np.where(rows < extends, plan.num_tokens[rows], 1).astype(np.int32),
            sample=plan.sample[rows],
            mask_rows=firsts[plan.mask_rows].astype(np.int32),
            drafts=no_tokens(),
        )
        routed_rows, routed_offsets = _routed_columns(plan, rows, draft_tokens)
        inner = replace(inner, routed_rows=routed_rows, routed_offsets=routed_offsets)
        if len(plan.state_before):
            inner = replace(
                inner,
                state_before=np.where(index > 0, CONTINUED, plan.state_before[rows]).astype(np.int32),
                state_after=plan.state_after[rows],
                state_cuts=plan.state_cuts[rows],
                state_at_cut=plan.state_at_cut[rows],
                state_starts=plan.state_starts[rows],
            )
        run = StepRun(inner, Readback(self._runner.streams), replays=replays)
        if draft_tokens:
            run.known = np.full(len(plan.input_ids) + len(rows) - extends, -1, dtype=np.int32)
            at = len(plan.input_ids) - extends
            for row, draft in draft_tokens.items():
                first = at + int(firsts[row]) + 1
                run.known[first : first + len(draft)] = draft
        predicted = [row for row in draft_tokens if self._drafter.used_prediction(int(plan.slots[row]))]
        proposed = {row: len(draft) for row, draft in draft_tokens.items()}
        return _DraftedStep(plan, run, firsts, self._admissions[plan.slots], draft_tokens, proposed, predicted)

    def _without_drafts(self, plan: BatchPlan) -> _DraftedStep:
        """Returns the step of a plan that requests no draft tokens."""
        starts, rows = plan.starts.copy(), np.arange(plan.num_rows)
        starts[plan.num_extend :] = self._lengths[plan.slots[plan.num_extend :]]
        assert (starts <= plan.starts).all(), "a row starts at the planned position, or earlier if draft tokens were rejected"
        replays = self._inputs.replays_of(plan, starts.astype(np.int64)) if len(plan.state_before) else None
        inner = replace(_without_table_updates(plan), starts=starts, drafts=no_tokens())
        run = StepRun(inner, Readback(self._runner.streams), replays=replays)
        return _DraftedStep(plan, run, rows, self._admissions[plan.slots], {}, {}, [])

    # After the forward pass

    def _sample_order(self, step: _DraftedStep, batch: SampleBatch) -> SampleOrder:
        """Returns the order in which the batch's rows are sampled. Decode rows with more draft tokens come first.

        Args:
            batch: all rows of the inner plan that sample.
        """
        index_of = {int(row): index for index, row in enumerate(batch.rows.tolist())}
        draft_tokens = {row: step.draft_tokens.get(row, []) for row in step.sampled}
        rows = sorted(step.sampled, key=lambda row: -len(draft_tokens[row]))
        order, sizes, known = [index_of[int(step.firsts[row])] for row in rows], [len(rows)], []
        for number in range(len(draft_tokens[rows[0]])):
            rows = [row for row in rows if number < len(draft_tokens[row])]
            order += [index_of[int(step.firsts[row]) + number + 1] for row in rows]
            known += [draft_tokens[row][number] for row in rows]
            sizes.append(len(rows))
        return SampleOrder(np.array(order, dtype=np.int64), tuple(sizes), np.array(known, dtype=np.int32))

    def _record_sampled(self, step: _DraftedStep) -> None:
        """Copies the hidden states, which the next pass overwrites, and records the positions that the step has computed.

        Extend rows are reported to the drafter. If the step verifies no draft tokens, the lengths of decode rows grow by one.
        """
        plan, hidden = step.plan, dict[int, HiddenStates]()
        try:
            hidden = self._copied_states(step)
        except torch.OutOfMemoryError as error:
            logger.warning(
                "no memory for the drafter's input of step %d; later draft tokens are less often accepted: %s",
                plan.step_id,
                error,
            )
        computed = []
        for row in range(plan.num_extend):
            if self._is_followed(step, row):
                count, own = int(plan.num_tokens[row]), hidden.pop(row, None)
                computed.append(Computed(int(plan.slots[row]), int(plan.starts[row]), count, own, from_plan=True))
        step.hidden = hidden
        self._drafter.computed(computed)
        for row in step.sampled:
            if row >= plan.num_extend and not step.verifies:
                self._lengths[plan.slots[row]] += 1

    def _copied_states(self, step: _DraftedStep) -> dict[int, HiddenStates]:
        """Copies the target's hidden states of the rows that the drafter follows.

        Returns:
            Copies by row of the plan. Empty if the drafter reads no hidden states, or if several passes computed the step.
        """
        plan, inner, copies = step.plan, step.inner, dict[int, HiddenStates]()
        of_pass = () if inner.in_pieces else self._read(int(inner.plan.num_tokens.sum()))
        if not of_pass:
            return copies
        offsets = np.cumsum(inner.plan.num_tokens) - inner.plan.num_tokens
        for row, first in enumerate(step.firsts.tolist()):
            if self._is_followed(step, row):
                count = int(plan.num_tokens[row]) if row < plan.num_extend else 1 + len(step.draft_tokens.get(row, ()))
                copies[row] = self._runner.copied_states(inner, of_pass, int(offsets[first]), count)
        return copies

    def _settled(self, step: _DraftedStep) -> StepResult:
        """Waits for the tokens of the step and of all earlier steps, and records them in order.

        Returns the inner step's result.
        """
        while step in self._unsettled:
            self._settle(self._unsettled.pop(0))
        if step.result is None:  # an earlier call has raised an error, which _settle() raises again
            self._settle(step)
        assert step.result is not None, "a settled step has a result"
        return step.result

    def _settle(self, step: _DraftedStep) -> None:
        plan, inner = step.plan, step.inner
        result = self._runner.result(inner)
        step.runs = {row: self._run_of(step, result, row) for row in step.sampled}
        if step.verifies:
            for row, run in step.runs.items():
                self._lengths[plan.slots[row]] += len(run) if row >= plan.num_extend else 0
        step.result = result  # before the calls of the drafter, which may raise
        hidden, step.hidden = step.hidden, {}
        computed = []
        for row, run in step.runs.items():
            if not self._is_followed(step, row):
                continue
            slot = int(plan.slots[row])
            self._drafter.sampled(slot, run)
            if row >= plan.num_extend:
                own = tuple(each[: len(run)] for each in hidden[row]) if row in hidden else None
                computed.append(Computed(slot, int(inner.plan.starts[step.firsts[row]]), len(run), own, from_plan=False))
        self._drafter.computed(computed)

    def _run_of(self, step: _DraftedStep, result: StepResult, row: int) -> list[int]:
        """Returns the accepted draft tokens of the row, and the token sampled after them."""
        first, draft = int(step.firsts[row]), step.draft_tokens.get(row, [])
        tokens: list[int] = result.tokens[first : first + len(draft) + 1].tolist()
        for index, token in enumerate(draft):
            if first + index in result.faults or tokens[index] != token:
                return tokens[: index + 1]
        return tokens

    def _is_followed(self, step: _DraftedStep, row: int) -> bool:
        """Returns whether the drafter must receive the row's tokens.

        This is the case if the slot still has the same request, the request was admitted with drafted_for, and the row has no
        fault OUT_OF_MEMORY.
        """
        slot = step.plan.slots[row]
        same = self._admissions[slot] == step.admissions[row]
        return bool(same and self._drafted_for[slot]) and int(step.firsts[row]) not in step.inner.faults


def _routed_columns(plan: BatchPlan, rows: I64, draft_tokens: Collection[int]) -> tuple[I32, I32]:
    """Returns the columns routed_rows and routed_offsets of an inner plan.

    If the plan counts experts, the host also needs the experts of all draft tokens, to subtract those of rejected ones.

    Args:
        plan: the scheduler's plan.
        rows: row of the plan for each row of the inner plan.
        draft_tokens: rows of the plan with draft tokens.
    """
    wanted, offsets = np.zeros(plan.num_rows, dtype=np.bool_), np.zeros(plan.num_rows, dtype=np.int32)
    wanted[plan.routed_rows], offsets[plan.routed_rows] = True, plan.routed_offsets
    wanted[list(draft_tokens)] |= plan.counts_experts
    inner_rows = np.flatnonzero(wanted[rows])
    return inner_rows.astype(np.int32), offsets[rows[inner_rows]]


def _routed_experts(step: _DraftedStep, inner: StepResult, counts: I32) -> dict[int, NDArray[np.uint16]]:
    """Returns StepResult.routed_experts, without rejected draft tokens. `counts` is StepResult.counts."""
    found = {}
    for row in step.plan.routed_rows.tolist():
        first = int(step.firsts[row])
        ids = [inner.routed_experts.get(at) for at in range(first, first + int(counts[row]))]
        known = [each for each in ids if each is not None]
        if len(known) == len(ids):
            found[row] = known[0] if len(known) == 1 else np.concatenate(known)
    return found


def _expert_rows(step: _DraftedStep, inner: StepResult, counts: I32) -> I32 | None:
    """Returns StepResult.expert_rows: those of the inner step, less the rows of rejected draft tokens that it has computed."""
    if inner.expert_rows is None:
        return None
    expert_rows = inner.expert_rows.copy()
    for row, proposed in step.proposed.items():
        first = int(step.firsts[row])
        for at in range(first + int(counts[row]), first + 1 + proposed):
            if at in inner.routed_experts:
                np.subtract.at(expert_rows, (np.arange(len(expert_rows))[:, None], inner.routed_experts[at][0]), 1)
    return expert_rows


def _without_table_updates(plan: BatchPlan) -> BatchPlan:
    """Returns the plan without its updates of page tables and window tables, which map_pages() has applied."""
    plan = replace(plan, table_slots=NOTHING, table_firsts=NOTHING, table_counts=NOTHING, table_pages=NOTHING)
    return replace(plan, window_slots=NOTHING, window_firsts=NOTHING, window_counts=NOTHING, window_units=NOTHING)
