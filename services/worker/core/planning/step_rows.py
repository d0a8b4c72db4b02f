"""The rows and the budgets of the step that is being planned, and the plan that is built from the rows.

The budgets (docs/design/scheduler.md#admission-and-budgets) are in tokens:

- total: KV that admitted requests may need
- input: tokens of this step
- chunk: size at which prompts are cut
- logprob: prompt tokens with logprobs

ExtendPlanner uses the budgets.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.plan import I32, BatchPlan, ForwardMode, SlotParams, no_tokens
from rootstock_llm.services.worker.core.kv.memory import NO_UPDATES, TableUpdates
from rootstock_llm.services.worker.core.kv.slot_states import NO_DECODE_STATES, DecodeStates, RowStates
from rootstock_llm.services.worker.core.kv.tree_node import TOKEN_BYTES
from rootstock_llm.services.worker.core.requests.request import Request, SlotColumns

# Largest number of further output tokens that the budgets count for a request that may stop early, as in SGLang.
CLIP_MAX_NEW_TOKENS = 4096
MIN_CHUNK_SHARE = 8  # adapted_chunk() returns at least 1/8 of chunked_prefill_size
MIN_PACED_SHARE = 32  # paced_chunk() returns at least 1/32 of chunked_prefill_size
FADES = 0.7  # factor of earlier measurements when a new one is added
OUTLIER = 4.0  # a time above this multiple of the average counts as this multiple
BUCKETS = 32  # classes of decode steps, by the bit length of the number of rows
MOST_TOKENS = 1 << 30  # largest number of steps or tokens that ChunkPace returns
T = TypeVar("T", bound=np.generic)
_NONE: I32 = np.empty(0, dtype=np.int32)
_NO_SLOTS: NDArray[np.int64] = np.empty(0, dtype=np.int64)
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
    epochs: NDArray[np.int64]  # [rows], epoch of each row's slot when the step was planned, see SlotColumns.epoch

    def extends(self) -> list[Extend]:
        """Returns the extend rows of the step."""
        rows = zip(self.requests, self.plan.starts.tolist(), self.plan.num_tokens.tolist(), strict=True)
        return [Extend((r.peer, r.handle), start, count) for r, start, count in islice(rows, self.plan.num_extend)]


def _no_slots() -> NDArray[np.int64]:
    """Returns a shared empty array, which must not be written to."""
    return _NO_SLOTS


@dataclass(slots=True)
class StepRows:
    """The rows of the step that is being planned."""

    # Extend rows as parallel lists
    extends: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sample: list[bool] = field(default_factory=list)
    input_ids: list[NDArray[np.int32]] = field(default_factory=list)
    admitted: list[SlotParams] = field(default_factory=list)
    logprobs: list[tuple[int, int, int]] = field(default_factory=list)  # (row, offset, next token) of rows with prompt logprobs
    routed: list[tuple[int, int]] = field(default_factory=list)  # (row, offset) of extend rows that return routed experts
    states: list[RowStates] = field(default_factory=list)  # of the extend rows; empty without recurrent layers
    # Decode rows as parallel columns
    decodes: list[Request] = field(default_factory=list)
    decode_slots: NDArray[np.int64] = field(default_factory=_no_slots)
    drafts: I32 = field(default_factory=no_tokens)  # see BatchPlan.drafts; empty unless the executor drafts
    decode_states: DecodeStates = NO_DECODE_STATES  # of the decode rows

    @property
    def num_decode_tokens(self) -> int:
        """Number of tokens that the decode rows compute."""
        return len(self.decodes) + (int(self.drafts.sum()) if len(self.drafts) else 0)

    def admit(self, request: Request, slot: int, drafted_for: bool) -> None:
        """Adds the parameters of a request that begins in this step.

        Args:
            request: the request.
            slot: its slot.
            drafted_for: whether it may get draft tokens. The drafter then gets its tokens and its prediction.
        """
        params = request.params
        penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0 or params.dry
        history = np.frombuffer(request.kv.token_key, dtype=np.int32) if penalised or drafted_for else _NONE
        prediction, stops = request.prediction if drafted_for else _NONE, request.stop_token_ids
        self.admitted.append(SlotParams(slot, request.num_prompt_tokens, params, stops, history, prediction, drafted_for))

    def add(self, request: Request, start: int, count: int, last: bool) -> None:
        """Adds a row of `count` tokens from position `start` on. `last` is True if it is the request's last chunk."""
        known = len(request.kv.token_key) // TOKEN_BYTES
        assert 0 <= start < start + count <= known, "an extend row computes known tokens"
        assert last == (start + count == known), "only the last chunk ends with the last known token"
        if request.params.prompt_logprobs_from >= 0:
            self._add_logprobs(request, start, count)
        if request.returns_experts and start + count > request.progress.routed_planned:
            offset = max(request.progress.routed_planned - start, 0)
            assert start + offset == request.progress.routed_planned, "the routed experts of each position are returned once"
            self.routed.append((len(self.extends), offset))
            request.progress.routed_planned = start + count
        self.extends.append(request)
        self.starts.append(start)
        self.counts.append(count)
        self.sample.append(last)
        self.input_ids.append(np.frombuffer(request.kv.token_key, dtype=np.int32)[start : start + count])

    def _add_logprobs(self, request: Request, start: int, count: int) -> None:
        """Records which logprobs of prompt tokens the row computes.

        The row's token at position p gives the logprob of the prompt token at p + 1.
        """
        end, length = start + count, request.num_prompt_tokens
        if request.progress.logprob_planned >= length or end < request.progress.logprob_planned:
            return
        following = int(request.prompt_ids[end]) if end < length else -1
        offset = request.progress.logprob_planned - 1 - start
        assert 0 <= offset < count, "the row computes the first of its logprobs"
        self.logprobs.append((len(self.extends), offset, following))
        request.progress.logprob_planned = min(end, length - 1) + 1


def build_step(
    step_id: int,
    rows: StepRows,
    columns: SlotColumns,
    updates: TableUpdates,
    windows: TableUpdates = NO_UPDATES,
    counts_experts: bool = False,
) -> Step:
    """Builds the plan of a step from its rows and the pending updates of the page tables and of the window tables."""
    num_extend, num_decode = len(rows.extends), len(rows.decodes)
    extend_slots = [r.kv.lease.slot for r in rows.extends if r.kv.lease]
    assert len(rows.decode_slots) == num_decode, "each decode row has a slot"
    slots = _before(extend_slots, rows.decode_slots)
    drafts = rows.drafts
    counts, sampled = _NONE, _NONE_SAMPLED
    if num_decode:
        counts, sampled = np.empty(num_decode, dtype=np.int32), np.empty(num_decode, dtype=np.bool_)
        counts.fill(1)
        sampled.fill(True)
    sample = _before(rows.sample, sampled)
    if len(drafts):
        assert len(drafts) == num_decode and drafts.min() >= 0, "each decode row has a number of drafts"
        counts, drafts = counts + drafts, _before([0] * num_extend, drafts)
    decode_starts = columns.computed[rows.decode_slots] - (counts if len(drafts) else 1) if num_decode else _NONE
    starts = _before(rows.starts, decode_starts)
    logprobs = np.array(rows.logprobs, dtype=np.int32).T.copy() if rows.logprobs else (_NONE, _NONE, _NONE)
    routed = _routed_columns(rows, columns)
    table_slots, table_firsts, table_counts, table_pages = updates
    states = _state_columns(rows)
    plan = BatchPlan(
        step_id=step_id,
        mode=_MODES[bool(num_extend), bool(num_decode)],
        num_extend=num_extend,
        slots=slots.astype(np.int32),
        starts=starts.astype(np.int32, copy=False),
        num_tokens=_before(rows.counts, counts),
        input_ids=_joined(rows.input_ids),
        sample=sample,
        mask_rows=(columns.masked[slots] & sample).nonzero()[0].astype(np.int32),
        prompt_logprob_rows=logprobs[0],
        prompt_logprob_offsets=logprobs[1],
        prompt_logprob_nexts=logprobs[2],
        admitted=tuple(rows.admitted),
        table_slots=table_slots,
        table_firsts=table_firsts,
        table_counts=table_counts,
        table_pages=table_pages,
        drafts=drafts,
        window_slots=windows[0],
        window_firsts=windows[1],
        window_counts=windows[2],
        window_units=windows[3],
        state_before=states[0],
        state_after=states[1],
        state_cuts=states[2],
        state_at_cut=states[3],
        state_starts=states[4],
        counts_experts=counts_experts,
        routed_rows=routed[0],
        routed_offsets=routed[1],
    )
    assert len(slots) == len(starts) == len(sample) == len(plan.num_tokens), "the columns have equal lengths"
    if num_extend:
        assert len(set(extend_slots)) == num_extend, "no two extend rows have the same slot"
        assert len(plan.input_ids) == sum(rows.counts), "each position of an extend row has a token"
        ends = plan.starts[:num_extend] + plan.num_tokens[:num_extend]
        assert ends.tolist() == columns.computed[slots[:num_extend]].tolist(), "a row ends at its slot's `computed`"
    assert len(table_slots) == len(table_firsts) == len(table_counts) <= len(table_pages), "each update has at least one page"
    return Step(plan, rows.extends + rows.decodes, columns.epoch[slots])


def _state_columns(rows: StepRows) -> tuple[I32, I32, I32, I32, I32]:
    """Returns the plan's columns of states: before, after, cuts, at_cut and starts. Empty without recurrent layers."""
    decodes = rows.decode_states
    if not rows.states and not len(decodes.before):
        return _NONE, _NONE, _NONE, _NONE, _NONE
    return (
        _before([states.before for states in rows.states], decodes.before),
        _before([states.after for states in rows.states], decodes.after),
        _before([states.cut for states in rows.states], decodes.cuts),
        _before([states.at_cut for states in rows.states], decodes.at_cut),
        _before([states.start for states in rows.states], decodes.starts),
    )


def _routed_columns(rows: StepRows, columns: SlotColumns) -> tuple[I32, I32]:
    """Returns the plan's columns routed_rows and routed_offsets."""
    (decodes,) = columns.returns_experts[rows.decode_slots].nonzero()
    if not rows.routed and not len(decodes):
        return _NONE, _NONE
    numbers = (decodes + len(rows.extends)).astype(np.int32)
    extends = [row for row, _ in rows.routed]
    return _before(extends, numbers), _before([offset for _, offset in rows.routed], np.zeros_like(numbers))


def _joined(rows: Sequence[I32]) -> I32:
    """Returns the concatenation of the rows as a new array."""
    if len(rows) == 1:
        return rows[0].copy()
    return np.concatenate(rows) if rows else _NONE


def _before(values: Sequence[int], rest: NDArray[T]) -> NDArray[T]:
    """Returns the concatenation of values and rest, with the dtype of `rest`. If `values` is empty, returns `rest` itself."""
    if not values:
        return rest
    first = np.array(values, dtype=rest.dtype)
    return np.concatenate([first, rest]) if len(rest) else first


class AddResult(enum.IntEnum):
    CONTINUE = 0
    NO_TOKEN = 1  # the KV pool is exhausted: batch_is_full
    OTHER = 2  # a budget of this step is exhausted


@dataclass(frozen=True, slots=True)
class RunningRows:
    """The decoding requests as parallel columns."""

    remaining: NDArray[np.int64]  # [n], largest number of output tokens that are left
    kv_tokens: NDArray[np.int64]  # [n], tokens of KV that become available when the request ends
    ignore_eos: NDArray[np.bool_]  # [n]


NO_ROWS = RunningRows(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_))


class PrefillAdder:
    """The remaining budgets of the step that is being planned.

    Decode rows of the same step also use the input and chunk budgets. At least one page of each budget is left for extends, so
    that decode rows never starve extends.
    """

    def __init__(self, page_size: int) -> None:
        """The budgets are undefined until begin() is called."""
        self._page_size = page_size

    def begin(
        self,
        rows: RunningRows,
        new_token_ratio: float,
        max_prefill_tokens: int,
        chunked_prefill_size: int,
        num_decode_tokens: int,
        max_requests: int,
        max_logprob_tokens: int,
    ) -> None:
        """Sets the budgets of a step.

        Args:
            rows: the decoding requests.
            new_token_ratio: share of the decoding requests' remaining output for which KV is reserved.
            max_prefill_tokens: input budget.
            chunked_prefill_size: chunk budget; 0: prompts are not cut.
            num_decode_tokens: tokens of the decode rows in the same step.
            max_requests: largest number of extend rows of the step; 0 for no limit.
            max_logprob_tokens: logprob budget.
        """
        assert len(rows.remaining) == len(rows.kv_tokens) == len(rows.ignore_eos), "the columns have equal lengths"
        self._rows = rows
        self._ratio = new_token_ratio
        self._added: list[tuple[int, int, bool]] = []  # (remaining output tokens, tokens of KV, ignore_eos) of this step's rows
        outputs = float(np.minimum(rows.remaining, CLIP_MAX_NEW_TOKENS).sum()) if len(rows.remaining) else 0.0
        self._reserved = outputs * new_token_ratio
        self._input = max(max_prefill_tokens - num_decode_tokens, self._page_size)
        self._chunk = max(chunked_prefill_size - num_decode_tokens, self._page_size) if chunked_prefill_size else None
        self._logprobs = max_logprob_tokens
        self._requests_left = max_requests or None
        self._pending = 0
        self._empty = True
        self.set_aside = 0  # tokens of KV that admit() must leave free for started extends

    def chunk(self, start: int, remaining: int, logprobs: bool) -> int:
        """Returns the number of tokens of an extend that fit into this step: all, a part that ends at a page boundary, or 0.

        Args:
            start: first position of the extend.
            remaining: tokens left to extend.
            logprobs: whether the logprob budget limits the extend.
        """
        assert start >= 0 and remaining > 0, "an extend has tokens to compute"
        if self._requests_left == 0:
            return 0
        if self._chunk is None and not logprobs:
            return remaining if remaining <= self._input or self._empty else 0
        budget = self._input if self._chunk is None else min(self._input, self._chunk)
        if logprobs:
            budget = min(budget, self._logprobs)
        if remaining <= budget:
            return remaining
        end = (start + budget) // self._page_size * self._page_size
        return max(end - start, 0)

    def admit(
        self, available: int, start: int, extend: int, max_new: int, ignore_eos: bool, logprobs: bool
    ) -> tuple[AddResult, int]:
        """Decides whether a waiting request may be admitted.

        Args:
            available: tokens of KV that are free or evictable; the pages of the request's hit are locked and do not count.
            start: first position to extend.
            extend: tokens to extend.
            max_new: largest number of further output tokens.
            ignore_eos: whether the request cannot stop early.
            logprobs: whether it needs logprobs of its prompt.

        Returns:
            The result, and the number of tokens that this step computes; 0 unless the result is CONTINUE.
        """
        available -= self.set_aside
        need = self._ceil(extend) + min(max_new, CLIP_MAX_NEW_TOKENS)
        if ignore_eos:
            if not self._fits_until_finishes(available, extend, max_new):
                return AddResult.NO_TOKEN, 0
        elif need >= available - self._reserved:
            return AddResult.NO_TOKEN, 0
        if self._input <= 0:
            return AddResult.OTHER, 0
        count = self.chunk(start, extend, logprobs)
        return (AddResult.CONTINUE, count) if count > 0 else (AddResult.OTHER, 0)

    def added(self, count: int, remaining: int, max_new: int, ignore_eos: bool, logprobs: bool) -> None:
        """Subtracts a planned row from the budgets. The KV of the row's tokens is already allocated.

        Args:
            count: tokens of the row.
            remaining: tokens left to extend after the row.
            max_new: largest number of further output tokens.
            ignore_eos: whether the request cannot stop early.
            logprobs: whether the row computes logprobs of its prompt.
        """
        assert count > 0 and remaining >= 0, "a row computes at least one and at most all remaining tokens"
        self._empty = False
        self._input -= count
        self._logprobs -= count if logprobs else 0
        if self._requests_left is not None:
            self._requests_left -= 1
            assert self._requests_left >= 0, "a step has at most max_requests extend rows"
        if self._chunk is not None:
            self._chunk -= count
        self._reserved += self._ceil(remaining) + min(max_new, CLIP_MAX_NEW_TOKENS)
        self._pending += self._ceil(remaining)
        assert not logprobs or self._logprobs >= 0, "a step computes at most max_logprob_tokens"
        self._added.append((max_new, count + remaining, ignore_eos))

    @property
    def exhausted(self) -> bool:
        """Whether no further extend row fits into the step."""
        return self._input <= 0 or (self._chunk is not None and self._chunk <= 0) or self._requests_left == 0

    def _fits_until_finishes(self, available: int, extend: int, max_new: int) -> bool:
        """Returns whether the KV suffices at the end of each request, if all requests decode in parallel until they end.

        A request that may stop early is assumed to end after the share `new_token_ratio` of its remaining output. Each end makes
        the request's KV available to the others.
        """
        running = self._rows
        left = np.where(running.ignore_eos, running.remaining, (running.remaining * self._ratio).astype(np.int64))
        added = [(more if ignores else int(more * self._ratio), kv_tokens) for more, kv_tokens, ignores in self._added]
        late = np.array([*added, (max_new, extend)], dtype=np.int64)
        steps = np.concatenate([left, late[:, 0]])
        order = np.argsort(steps, kind="stable")
        steps, kv_tokens = steps[order], np.concatenate([running.kv_tokens, late[:, 1]])[order]
        alive = np.arange(len(steps), 0, -1)
        free = available - self._pending - self._ceil(extend) + np.cumsum(kv_tokens) - kv_tokens
        return bool((free - steps * alive > alive * self._page_size).all())

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self._page_size) * self._page_size


def adapted_chunk(chunked_prefill_size: int, page_size: int, num_decoding: int, half_at: int) -> int:
    """Returns the chunk size while `num_decoding` rows wait for their next token.

    The size is in whole pages and at least one page. With `half_at` decoding rows, it is half of `chunked_prefill_size`.
    If `chunked_prefill_size` or `half_at` is 0, the result is `chunked_prefill_size`.
    """
    if not chunked_prefill_size or not half_at:
        return chunked_prefill_size
    size = max(chunked_prefill_size * half_at // (half_at + num_decoding), chunked_prefill_size // MIN_CHUNK_SHARE)
    return max(size // page_size * page_size, page_size)


def paced_chunk(chunked_prefill_size: int, page_size: int, tokens: int) -> int:
    """Returns the chunk size of a step that has time for `tokens` tokens, in whole pages.

    The size is at least 1/MIN_PACED_SHARE of `chunked_prefill_size`. If `chunked_prefill_size` is 0, the result is 0.
    """
    if not chunked_prefill_size:
        return 0
    size = min(max(tokens, chunked_prefill_size // MIN_PACED_SHARE), chunked_prefill_size)
    return max(size // page_size * page_size, page_size)


class ChunkPace:
    """Sizes chunks by the times of recent steps, so that decode rows wait at most a given time for their next token.

    The estimated time of a step is the sum of two parts:

    - the measured time of a decode step (a step without extends) with about as many decode rows; if the step has no decode rows,
      the shortest measured time of a decode step
    - a time per extended token, which is an average of recent steps, because it depends on the contexts of the prompts

    The caller passes the times, so that the same calls give the same chunks.
    """

    def __init__(self) -> None:
        self._extended = self._seconds = 0.0  # sums of extended tokens and of their seconds, with fading weights
        self._decode_s = [0.0] * BUCKETS  # mean seconds of a step without extends, by bucket; 0: unknown

    def record(self, extended: int, rows: int, seconds: float, least: int) -> None:
        """Records the time of a step.

        Args:
            extended: number of extended tokens.
            rows: number of decode rows.
            seconds: time of the step; 0 if unknown.
            least: smallest number of extended tokens of a step that updates the time per token.
        """
        assert extended >= 0 and rows >= 0, "the numbers of tokens and rows are not negative"
        if seconds <= 0:
            return
        if not extended:
            before = self._decode_s[rows.bit_length()]
            now = FADES * before + (1 - FADES) * min(seconds, OUTLIER * before) if before else seconds
            self._decode_s[rows.bit_length()] = now
        elif extended >= least:
            own = seconds - min(self._decode_step_s(rows) if rows else self._shortest_step_s(), seconds / 2)
            if self._extended:
                own = min(own, OUTLIER * extended * self._seconds / self._extended)
            self._extended, self._seconds = FADES * self._extended + extended, FADES * self._seconds + own

    @property
    def is_known(self) -> bool:
        """Whether the time per token is known."""
        return self._extended > 0

    def steps(self, within_s: float, decoding: int, size: int) -> int:
        """Returns the smallest number of extend steps, at least 1, that take at least `within_s` together with one decode step.

        The time per token must be known.

        Args:
            within_s: time in seconds.
            decoding: number of decode rows.
            size: tokens of an extend step.
        """
        step_s = size * self._seconds / self._extended + self._shortest_step_s()
        return max(math.ceil(min((within_s - self._decode_step_s(decoding)) / step_s, MOST_TOKENS)), 1)

    def tokens(self, within_s: float, decoding: int, steps: int) -> int:
        """Returns the number of tokens per extend step with which `steps` extend steps and one decode step take `within_s`.

        The extended tokens get at least as much time as the decode step, or `within_s` if that is shorter, because smaller extend
        steps would only be more numerous. The steps may therefore take longer. The time per token must be known.

        Args:
            within_s: time limit in seconds.
            decoding: number of decode rows.
            steps: number of extend steps before the decode step; 0 if the extends share the step of the decode rows.
        """
        alone = self._decode_step_s(decoding)
        left = max(within_s - alone - steps * self._shortest_step_s(), min(alone, within_s))
        return int(min(left / max(steps, 1) / self._seconds * self._extended, MOST_TOKENS))

    def _decode_step_s(self, rows: int) -> float:
        """Returns the mean seconds of a step with about `rows` decode rows. If unknown, the value for fewer rows, or 0."""
        return next((seconds for seconds in self._decode_s[rows.bit_length() : 0 : -1] if seconds), 0.0)

    def _shortest_step_s(self) -> float:
        """Returns the shortest known seconds of a step without extends; 0 if none is known."""
        return min((seconds for seconds in self._decode_s if seconds), default=0.0)
