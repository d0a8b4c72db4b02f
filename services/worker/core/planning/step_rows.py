"""The rows of a step while it is planned, and the plan that is built from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.plan import I32, BatchPlan, ForwardMode, SlotParams, no_tokens
from services.worker.core.kv.memory import TableUpdates
from services.worker.core.kv.tree_node import TOKEN_BYTES
from services.worker.core.requests.request import Request
from services.worker.core.requests.slot_columns import SlotColumns

T = TypeVar("T", bound=np.generic)

_NONE: I32 = np.empty(0, dtype=np.int32)
_NONE_SAMPLED: NDArray[np.bool_] = np.empty(0, dtype=np.bool_)
_MODES = {(True, False): ForwardMode.EXTEND, (False, True): ForwardMode.DECODE, (True, True): ForwardMode.MIXED}


@dataclass(frozen=True, slots=True)
class Extend:
    """A row that computes known tokens."""

    key: tuple[int, int]  # (peer, handle) of the request
    start: int  # first position
    tokens: int  # number of tokens


@dataclass(frozen=True, slots=True)
class Step:
    """A plan and the data that its commit needs."""

    plan: BatchPlan
    requests: list[Request]  # request of each row
    epochs: NDArray[np.int64]  # [rows], epoch of each slot when the step was planned

    def extends(self) -> list[Extend]:
        """Returns the extend rows of the step."""
        rows = zip(self.requests, self.plan.starts.tolist(), self.plan.num_tokens.tolist(), strict=True)
        return [Extend((r.peer, r.handle), start, count) for r, start, count in islice(rows, self.plan.num_extend)]


@dataclass(slots=True)
class ExtendRows:
    """The extend rows as parallel lists."""

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sample: list[bool] = field(default_factory=list)
    input_ids: list[NDArray[np.int32]] = field(default_factory=list)
    admitted: list[SlotParams] = field(default_factory=list)
    logprobs: list[tuple[int, int, int]] = field(default_factory=list)  # (row, offset, next token) of rows with prompt logprobs

    def admit(self, request: Request, slot: int, drafted_for: bool) -> None:
        """Adds the parameters of a request that begins in this step.

        Args:
            request: the request.
            slot: its slot.
            drafted_for: whether it may get draft tokens. The drafter then needs its tokens and its prediction.
        """
        params = request.params
        penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0 or params.dry
        history = np.frombuffer(request.kv.token_key, dtype=np.int32) if penalised or drafted_for else _NONE
        prediction, stops = request.prediction if drafted_for else _NONE, request.stop_token_ids
        self.admitted.append(SlotParams(slot, request.num_prompt_tokens, params, stops, history, prediction, drafted_for))

    def add(self, request: Request, start: int, count: int, last: bool) -> None:
        """Adds a row of `count` tokens from `start` on. `last` says whether it is the last chunk."""
        known = len(request.kv.token_key) // TOKEN_BYTES
        assert 0 <= start < start + count <= known, "an extend row computes tokens that are known"
        assert last == (start + count == known), "the last chunk ends with the last known token, no other does"
        if request.params.prompt_logprobs_from >= 0:
            self._add_logprobs(request, start, count)
        self.requests.append(request)
        self.starts.append(start)
        self.counts.append(count)
        self.sample.append(last)
        self.input_ids.append(np.frombuffer(request.kv.token_key, dtype=np.int32)[start : start + count])

    def _add_logprobs(self, request: Request, start: int, count: int) -> None:
        """Records the prompt tokens whose logprobs the row computes.

        The token at position p predicts the token at p + 1.
        """
        end, length = start + count, request.num_prompt_tokens
        if request.progress.logprob_planned >= length or end < request.progress.logprob_planned:
            return
        following = int(request.prompt_ids[end]) if end < length else -1
        offset = request.progress.logprob_planned - 1 - start
        assert 0 <= offset < count, "the first logprob that is wanted lies in the row"
        self.logprobs.append((len(self.requests), offset, following))
        request.progress.logprob_planned = min(end, length - 1) + 1


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode rows as parallel columns."""

    requests: list[Request]
    slots: NDArray[np.int64]
    drafts: I32 = field(default_factory=no_tokens)  # see BatchPlan.drafts; empty unless the executor drafts

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the rows compute."""
        return len(self.requests) + (int(self.drafts.sum()) if len(self.drafts) else 0)


NO_DECODES = DecodeRows([], np.empty(0, dtype=np.int64))


def build_step(step_id: int, extends: ExtendRows, decodes: DecodeRows, columns: SlotColumns, updates: TableUpdates) -> Step:
    """Builds the plan of a step from its rows and the pending page-table updates."""
    num_extend, num_decode = len(extends.requests), len(decodes.requests)
    extend_slots = [r.kv.lease.slot for r in extends.requests if r.kv.lease]
    assert len(decodes.slots) == num_decode, "each decode row has a slot"
    slots = _before(extend_slots, decodes.slots)
    drafts = decodes.drafts
    counts, sampled = _NONE, _NONE_SAMPLED
    if num_decode:
        counts, sampled = np.empty(num_decode, dtype=np.int32), np.empty(num_decode, dtype=np.bool_)
        counts.fill(1)
        sampled.fill(True)
    sample = _before(extends.sample, sampled)
    if len(drafts):
        assert len(drafts) == num_decode and drafts.min() >= 0, "drafts of each decode row"
        counts, drafts = counts + drafts, _before([0] * num_extend, drafts)
    starts = _before(extends.starts, columns.computed[decodes.slots] - (counts if len(drafts) else 1) if num_decode else _NONE)
    logprobs = np.array(extends.logprobs, dtype=np.int32).T.copy() if extends.logprobs else (_NONE, _NONE, _NONE)
    table_slots, table_firsts, table_counts, table_pages = updates
    plan = BatchPlan(
        step_id=step_id,
        mode=_MODES[bool(num_extend), bool(num_decode)],
        num_extend=num_extend,
        slots=slots.astype(np.int32),
        starts=starts.astype(np.int32, copy=False),
        num_tokens=_before(extends.counts, counts),
        input_ids=_joined(extends.input_ids),
        sample=sample,
        mask_rows=(columns.masked[slots] & sample).nonzero()[0].astype(np.int32),
        prompt_logprob_rows=logprobs[0],
        prompt_logprob_offsets=logprobs[1],
        prompt_logprob_nexts=logprobs[2],
        admitted=tuple(extends.admitted),
        table_slots=table_slots,
        table_firsts=table_firsts,
        table_counts=table_counts,
        table_pages=table_pages,
        drafts=drafts,
    )
    assert len(slots) == len(starts) == len(sample) == len(plan.num_tokens), "columns of one step are of one length"
    if num_extend:
        assert len(set(extend_slots)) == num_extend, "each extend row has a slot of its own"
        assert len(plan.input_ids) == sum(extends.counts), "a token for every position of the extend rows"
        ends = plan.starts[:num_extend] + plan.num_tokens[:num_extend]
        assert ends.tolist() == columns.computed[slots[:num_extend]].tolist(), "a row ends where its slot is planned to"
    assert len(table_slots) == len(table_firsts) == len(table_counts) <= len(table_pages), "an update has a page"
    return Step(plan, extends.requests + decodes.requests, columns.epoch[slots])


def _joined(rows: Sequence[I32]) -> I32:
    """Returns the concatenation of the rows as a new array."""
    if len(rows) == 1:
        return rows[0].copy()
    return np.concatenate(rows) if rows else _NONE


def _before(values: Sequence[int], rest: NDArray[T]) -> NDArray[T]:
    """Returns the values, in the type of `rest`, followed by `rest`. Without values, returns `rest` itself."""
    if not values:
        return rest
    first = np.array(values, dtype=rest.dtype)
    return np.concatenate([first, rest]) if len(rest) else first
