"""Steps whose decode rows verify draft tokens. A draft token is accepted if the request's draw at its position is this token.

A decode row with draft tokens becomes one row of the runner per token. These rows are sampled position by position: first the
first token of every row, then the second, and so on. Each position sees the state after the positions before it, as in separate
steps. Penalties, draws, log probabilities and faults are therefore those of plain decoding. After a rejected draft token, the
device turns the remaining rows of that decode row into padding, without the host.

The host needs the number of accepted draft tokens before the next step, because the start of a row and the text for drafting
depend on it. forward() therefore waits for earlier steps if one of them verifies draft tokens, or if its plan requests draft
tokens. Otherwise it waits only if its plan has known tokens for a running request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.plan import BatchPlan, RowFault, StepResult, no_tokens
from rootstock_llm.services.worker.exec.contracts.drafter import Computed, Drafter, Kept
from rootstock_llm.services.worker.exec.contracts.protocol import NO_MASKS, Masks
from rootstock_llm.services.worker.exec.contracts.step_data import Places, SampleBatch
from rootstock_llm.services.worker.exec.step.model_runner import DeviceRunner, StepRun
from rootstock_llm.services.worker.exec.step.passes import NOTHING
from rootstock_llm.services.worker.exec.streams.copies import Readback
from rootstock_llm.services.worker.exec.streams.cuda_streams import Moment

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Drafted:
    """A launched step. Dictionaries have the row of the plan as key."""

    plan: BatchPlan  # as the scheduler made it
    inner: StepRun  # the runner's step, with a row for each token of a drafted row
    firsts: I64  # int64[rows], first row of the inner plan for each row of the plan
    holders: I64  # int64[rows], number of the slot's admission that the row belongs to
    draft_tokens: dict[int, list[int]]  # draft tokens; sample() removes draft tokens without a grammar mask
    proposed: dict[int, int]  # number of draft tokens before that removal
    predicted: list[int]  # rows whose draft tokens come from a prediction
    sampled: list[int] = field(default_factory=list)  # rows that sample
    kept: dict[int, Kept] = field(default_factory=dict)  # hidden states of the target for all computed tokens of decode rows
    runs: dict[int, list[int]] = field(default_factory=dict)  # tokens of each row that samples, once they are on the host
    told: StepResult | None = None  # result of the inner step, or None until its tokens are on the host
    spans: list[tuple[Moment, Moment]] = field(default_factory=list)  # begin and end of each part of the step's cost

    @property
    def verifies(self) -> bool:
        return self.inner.known is not None


def reads_nothing(_: int) -> Kept:
    """Returns no hidden states, for drafters that do not read the target's."""
    return ()


class DraftedSteps:
    """Runs steps on a DeviceRunner and verifies draft tokens. Called by the thread that launches steps."""

    def __init__(
        self,
        runner: DeviceRunner,
        drafter: Drafter,
        max_slots: int,
        max_tokens: int,
        read: Callable[[int], Kept] = reads_nothing,
    ) -> None:
        """Takes the runner.

        Args:
            max_tokens: of one pass, draft tokens included.
            read: returns the target's hidden states that the drafter needs, for the first n tokens of the last pass.
        """
        self._runner, self._drafter, self._max_tokens, self._read = runner, drafter, max_tokens, read
        # int64[slots]: tokens with valid KV, which is the position of the next token; number of admissions to the slot.
        self._lengths, self._holders = np.zeros((2, max_slots), dtype=np.int64)
        self._drafted_for = np.zeros(max_slots, dtype=np.bool_)  # slots whose request is drafted for
        self._steps: dict[int, _Drafted] = {}
        self._unsettled: list[_Drafted] = []  # sampled steps whose tokens are not on the host yet, in order

    def forward(self, run: StepRun) -> None:
        plan, streams = run.plan, self._runner.streams
        with streams.on_forward():
            try:
                spans = self._wait_for_lengths(plan)
                self._begin()
            finally:  # even if this step fails: a later plan may use these pages and continue after these tokens
                extends = plan.num_extend
                self._lengths[plan.slots[:extends]] = plan.starts[:extends] + plan.num_tokens[:extends]
                self._runner.map_pages(plan)
            begun = streams.moment()  # after begin(), whose work for earlier prompts is no cost of this step
            self._tell_given(plan)
            draft_tokens = self._proposed(plan)
        run.publish(draft_tokens)
        step = self._resolved(plan, draft_tokens)
        self._steps[plan.step_id] = step
        self._runner.forward(step.inner)
        step.spans = [*spans, (begun, streams.moment())]

    def sample(self, run: StepRun, masks: Masks, behind: Masks) -> None:
        plan, step, streams = run.plan, self._steps[run.plan.step_id], self._runner.streams
        begun = streams.moment()
        own = {int(step.firsts[row]): mask for row, mask in masks.items()}
        for row in plan.mask_rows.tolist():
            later = behind.get(row, ())
            own |= {int(step.firsts[row]) + place: mask for place, mask in enumerate(later, 1)}
            if row in step.draft_tokens:
                step.draft_tokens[row] = step.draft_tokens[row][: len(later)]
        if step.inner.in_pieces:  # pieces leave out the rows of draft tokens
            step.draft_tokens.clear()
        placed = partial(self._places, step) if step.verifies and not step.inner.in_pieces else None
        try:
            batches = step.inner.batches
            there = {row for batch in batches for row in batch.rows.tolist()}
            step.sampled = [row for row in np.flatnonzero(plan.sample).tolist() if int(step.firsts[row]) in there]
            self._runner.sample(step.inner, own, NO_MASKS, placed)
            with streams.on_forward():
                self._keep(step)
        except BaseException:  # any exception: the result of a failed step is never requested
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
            for place in range(first, first + len(own)):
                if place in inner.logprobs:
                    logprobs[len(tokens) + place - first] = inner.logprobs[place]
                if place in inner.faults:
                    faults[row] = inner.faults[place]
            tokens += own
        drafted = np.zeros(run.plan.num_rows, dtype=np.int32)
        for row, count in step.proposed.items():
            drafted[row] = count
        flat, seconds = np.array(tokens, dtype=np.int32), sum(end.seconds_since(begun) for begun, end in step.spans)
        told = replace(inner, tokens=flat, counts=counts, drafted=drafted, faults=faults, logprobs=logprobs, seconds=seconds)
        if not step.predicted:
            return told
        predicted = np.zeros(run.plan.num_rows, dtype=np.bool_)
        predicted[step.predicted] = True
        return replace(told, predicted=predicted)

    def release(self, run: StepRun) -> None:
        step = self._steps.pop(run.plan.step_id, None)
        self._runner.release(run if step is None else step.inner)

    # Before the forward pass

    def _wait_for_lengths(self, plan: BatchPlan) -> list[tuple[Moment, Moment]]:
        """Waits for the tokens of the steps before, if the plan needs them or the positions that they decide.

        Returns:
            The span in which the device had no work because of the wait; empty without a wait.
        """
        if not self._unsettled:
            return []
        if not (plan.drafts.any() or any(step.verifies for step in self._unsettled) or self._goes_on_otherwise(plan)):
            return []
        last = self._unsettled[-1]
        self._settled(last)
        return [(last.spans[-1][1], self._runner.streams.moment())]

    def _goes_on_otherwise(self, plan: BatchPlan) -> bool:
        """Returns whether the plan has known tokens for a running request whose last sampled tokens are not on the host yet.

        The drafter must receive the sampled tokens before the known tokens, which may replace them.
        """
        given = set(plan.slots[: plan.num_extend].tolist())
        given.difference_update(admitted.slot for admitted in plan.admitted)  # slots of new requests
        return bool(given) and any(
            int(step.plan.slots[row]) in given and self._told_of(step, row) for step in self._unsettled for row in step.sampled
        )

    def _begin(self) -> None:
        try:
            self._drafter.begin()
        except torch.OutOfMemoryError as error:
            logger.warning("out of memory in the drafter; draft tokens get worse: %s", error)

    def _tell_given(self, plan: BatchPlan) -> None:
        for admitted in plan.admitted:
            self._drafted_for[admitted.slot] = admitted.drafted_for
            self._holders[admitted.slot] += 1
            if admitted.drafted_for:
                self._drafter.admit(admitted)
        ends = np.cumsum(plan.num_tokens[: plan.num_extend]).tolist()
        for row, end in enumerate(ends):
            slot, ids = int(plan.slots[row]), plan.input_ids[end - int(plan.num_tokens[row]) : end]
            if self._drafted_for[slot]:
                self._drafter.know(slot, int(plan.starts[row]), ids.tolist())

    def _proposed(self, plan: BatchPlan) -> dict[int, list[int]]:
        """Returns draft tokens by row, no more than the pass has free tokens for."""
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
            logger.warning("out of memory in the drafter; no draft tokens in step %d: %s", plan.step_id, error)
            return {}
        return {rows[slot]: draft for slot, draft in proposed.items() if draft}

    def _resolved(self, plan: BatchPlan, draft_tokens: dict[int, list[int]]) -> _Drafted:
        """Returns the step with its inner plan: each draft token has a row, and decode rows start at their true position."""
        if not (draft_tokens or plan.drafts.any()):
            return self._plain(plan)
        extends = plan.num_extend
        counts = np.ones(plan.num_rows, dtype=np.int64)
        for row, draft in draft_tokens.items():
            counts[row] += len(draft)
        firsts = np.cumsum(counts) - counts
        rows = np.repeat(np.arange(plan.num_rows), counts)
        starts = plan.starts.astype(np.int64)
        starts[extends:] = self._lengths[plan.slots[extends:]]
        assert (starts <= plan.starts).all(), "a row begins no later than it was planned to"
        index = np.arange(len(rows)) - firsts[rows]
        inner = replace(
            _mapped(plan),
            slots=plan.slots[rows],
            starts=(starts[rows] + index).astype(np.int32),
            num_tokens=np.where(rows < extends, plan.num_tokens[rows], 1).astype(np.int32),
            sample=plan.sample[rows],
            mask_rows=firsts[plan.mask_rows].astype(np.int32),
            drafts=no_tokens(),
        )
        run = StepRun(inner, Readback(self._runner.streams))
        if draft_tokens:
            run.known = np.full(len(plan.input_ids) + len(rows) - extends, -1, dtype=np.int32)
            at = len(plan.input_ids) - extends
            for row, draft in draft_tokens.items():
                first = at + int(firsts[row]) + 1
                run.known[first : first + len(draft)] = draft
        predicted = [row for row in draft_tokens if self._drafter.predicted(int(plan.slots[row]))]
        proposed = {row: len(draft) for row, draft in draft_tokens.items()}
        return _Drafted(plan, run, firsts, self._holders[plan.slots], draft_tokens, proposed, predicted)

    def _plain(self, plan: BatchPlan) -> _Drafted:
        """Returns the step of a plan that asks for no draft tokens."""
        starts, rows = plan.starts.copy(), np.arange(plan.num_rows)
        starts[plan.num_extend :] = self._lengths[plan.slots[plan.num_extend :]]
        assert (starts <= plan.starts).all(), "a row begins no later than it was planned to"
        inner = replace(_mapped(plan), starts=starts, drafts=no_tokens())
        run = StepRun(inner, Readback(self._runner.streams))
        return _Drafted(plan, run, rows, self._holders[plan.slots], {}, {}, [])

    # After the forward pass

    def _places(self, step: _Drafted, batch: SampleBatch) -> Places:
        """Returns the positions of the batch's rows. Decode rows with more draft tokens come first at each position.

        Args:
            batch: all rows of the inner plan that sample.
        """
        index = {int(row): place for place, row in enumerate(batch.rows.tolist())}
        draft_tokens = {row: step.draft_tokens.get(row, []) for row in step.sampled}
        rows = sorted(step.sampled, key=lambda row: -len(draft_tokens[row]))
        order, sizes, known = [index[int(step.firsts[row])] for row in rows], [len(rows)], []
        for place in range(len(draft_tokens[rows[0]])):
            rows = [row for row in rows if place < len(draft_tokens[row])]
            order += [index[int(step.firsts[row]) + place + 1] for row in rows]
            known += [draft_tokens[row][place] for row in rows]
            sizes.append(len(rows))
        return Places(np.array(order, dtype=np.int64), tuple(sizes), np.array(known, dtype=np.int32))

    def _keep(self, step: _Drafted) -> None:
        """Copies the hidden states that the next pass overwrites, and records the effects that do not depend on the tokens.

        Extend rows are reported to the drafter. The lengths of decode rows grow by one if the step verifies no draft tokens.
        """
        plan, kept = step.plan, dict[int, Kept]()
        try:
            kept = self._copied(step)
        except torch.OutOfMemoryError as error:
            logger.warning("out of memory for the drafter's input of step %d; draft tokens get worse: %s", plan.step_id, error)
        given = []
        for row in range(plan.num_extend):
            if self._told_of(step, row):
                count = int(plan.num_tokens[row])
                given.append(Computed(int(plan.slots[row]), int(plan.starts[row]), count, kept.pop(row, None), given=True))
        step.kept = kept
        self._drafter.computed(given)
        for row in step.sampled:
            if row >= plan.num_extend and not step.verifies:
                self._lengths[plan.slots[row]] += 1

    def _copied(self, step: _Drafted) -> dict[int, Kept]:
        """Returns copies of the target's hidden states by row of the plan, for the rows that the drafter follows.

        Returns:
            Empty if the drafter reads no hidden states, or if several passes computed the step.
        """
        plan, inner, kept = step.plan, step.inner, dict[int, Kept]()
        of_pass = () if inner.in_pieces else self._read(int(inner.plan.num_tokens.sum()))
        if not of_pass:
            return kept
        offsets = np.cumsum(inner.plan.num_tokens) - inner.plan.num_tokens
        for row, first in enumerate(step.firsts.tolist()):
            if self._told_of(step, row):
                count = int(plan.num_tokens[row]) if row < plan.num_extend else 1 + len(step.draft_tokens.get(row, ()))
                kept[row] = self._runner.kept(inner, of_pass, int(offsets[first]), count)
        return kept

    def _settled(self, step: _Drafted) -> StepResult:
        """Waits for the tokens of the step and of all steps before it, and records their effects in order."""
        while step in self._unsettled:
            self._settle(self._unsettled.pop(0))
        if step.told is None:  # an earlier attempt raised; this one raises its error again
            self._settle(step)
        assert step.told is not None, "a settled step has its tokens"
        return step.told

    def _settle(self, step: _Drafted) -> None:
        plan, inner = step.plan, step.inner
        told = self._runner.result(inner)
        step.runs = {row: self._run_of(step, told, row) for row in step.sampled}
        if step.verifies:
            for row, run in step.runs.items():
                self._lengths[plan.slots[row]] += len(run) if row >= plan.num_extend else 0
        step.told = told  # before the drafter is called, which may raise
        kept, step.kept = step.kept, {}
        computed = []
        for row, run in step.runs.items():
            if not self._told_of(step, row):
                continue
            slot = int(plan.slots[row])
            self._drafter.sampled(slot, run)
            if row >= plan.num_extend:
                own = tuple(each[: len(run)] for each in kept[row]) if row in kept else None
                computed.append(Computed(slot, int(inner.plan.starts[step.firsts[row]]), len(run), own, given=False))
        self._drafter.computed(computed)

    def _run_of(self, step: _Drafted, told: StepResult, row: int) -> list[int]:
        """Returns the accepted draft tokens of the row and the token sampled after them."""
        first, draft = int(step.firsts[row]), step.draft_tokens.get(row, [])
        tokens: list[int] = told.tokens[first : first + len(draft) + 1].tolist()
        for place, token in enumerate(draft):
            if first + place in told.faults or tokens[place] != token:
                return tokens[: place + 1]
        return tokens

    def _told_of(self, step: _Drafted, row: int) -> bool:
        """Returns whether the drafter follows the row.

        It does if the slot still has the same request, this request gets draft tokens, and the row has no fault OUT_OF_MEMORY.
        """
        slot = step.plan.slots[row]
        same = self._holders[slot] == step.holders[row]
        return bool(same and self._drafted_for[slot]) and int(step.firsts[row]) not in step.inner.faults


def _mapped(plan: BatchPlan) -> BatchPlan:
    """Returns the plan without its page-table updates, which are applied already."""
    return replace(plan, table_slots=NOTHING, table_firsts=NOTHING, table_counts=NOTHING, table_pages=NOTHING)
