"""Decides what the next step runs: extends first, else decodes, retracting where memory has run out (reference 2 §4, §9).

Sees lengths only, never the tokens of the step in flight. Advances `computed` and `planned_out`; commit follows later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.worker.core.config import SchedulerConfig
from services.worker.core.finish import Ending
from services.worker.core.messages import ErrorCode, FinishReason
from services.worker.core.new_token_ratio import NewTokenRatio
from services.worker.core.plan import BatchPlan, ForwardMode, SlotParams
from services.worker.core.prefill_adder import AddResult, PrefillAdder, RunningRow
from services.worker.core.request import Request
from services.worker.core.request_table import RequestTable

_NO_HISTORY = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Step:
    """A plan with what commit needs to know about its rows. epochs: int64[rows], of the slots when they were planned."""

    plan: BatchPlan
    requests: list[Request]
    epochs: NDArray[np.int64]


@dataclass(slots=True)
class _ExtendRows:
    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sample: list[bool] = field(default_factory=list)
    input_ids: list[NDArray[np.int32]] = field(default_factory=list)
    admitted: list[SlotParams] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    requests: list[Request]
    slots: NDArray[np.int64]


_NO_DECODES = _DecodeRows([], np.empty(0, dtype=np.int64))


class Planner:
    def __init__(self, config: SchedulerConfig, table: RequestTable) -> None:
        self._config = config
        self._table = table
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self._step_id = 0
        self._decode_steps = 0

    def plan(self, now: float, flight_step: int) -> Step | None:
        """The next step, or None where nothing can run before the step in flight (`flight_step`, -1: none) is committed."""
        before = self._table.retractions_total
        decodes = self._decode_rows(now, flight_step) if self._config.enable_mixed_chunk else _NO_DECODES
        # What this plan has retracted must not come back in it: its token in flight is still to be committed.
        may_admit = self._table.retractions_total == before
        extends = self._extend_rows(now, len(decodes.requests), flight_step, may_admit)
        if not extends.requests and not self._config.enable_mixed_chunk:
            decodes = self._decode_rows(now, flight_step)
        if not extends.requests and not decodes.requests:
            return None
        return self._build(extends, decodes)

    # Extends

    def _extend_rows(self, now: float, num_decode_rows: int, flight_step: int, may_admit: bool) -> _ExtendRows:
        rows = _ExtendRows()
        table = self._table
        if not table.extending and (table.batch_is_full or not table.num_waiting):
            return rows
        config = self._config
        adder = PrefillAdder(
            config.page_size,
            self._running_rows(),
            self.ratio.value,
            config.max_prefill_tokens,
            config.chunked_prefill_size,
            num_decode_rows,
        )
        for request in list(table.extending):
            self._continue_extend(request, adder, rows, now, flight_step)
        if may_admit and not table.batch_is_full and not table.extending:
            self._admit_waiting(adder, rows, now)
        return rows

    def _running_rows(self) -> list[RunningRow]:
        columns = self._table.columns
        slots = self._table.decoding_slots()
        left = np.maximum(columns.max_new[slots] - columns.planned_out[slots], 0).tolist()
        held = columns.computed[slots].tolist()
        return [
            RunningRow(remaining, kv, request.params.ignore_eos)
            for request, remaining, kv in zip(self._table.decoding, left, held, strict=True)
        ]

    def _continue_extend(self, request: Request, adder: PrefillAdder, rows: _ExtendRows, now: float, flight_step: int) -> None:
        lease = request.lease
        assert lease is not None
        start = int(self._table.columns.computed[lease.slot])
        count = adder.chunk(start, int(self._table.columns.target[lease.slot]) - start)
        if count > 0 and not self._add_extend(request, start, count, adder, rows) and not rows.requests:
            self._relieve_extend(request, now, flight_step)

    def _relieve_extend(self, request: Request, now: float, flight_step: int) -> None:
        """No page for a started extend: others will free some, or retracting other extends does, or it cannot run here."""
        if self._table.num_running > 1 or flight_step >= 0:
            return
        self._table.end(request, self._too_small(), now)

    def _admit_waiting(self, adder: PrefillAdder, rows: _ExtendRows, now: float) -> None:
        table = self._table
        while (request := table.next_waiting()) and not adder.exhausted:
            if not table.memory.slots.num_free:
                table.batch_is_full = True
                return
            result = self._admit(request, adder, rows, now)
            if result is AddResult.NO_TOKEN:
                table.batch_is_full = table.num_running > 0
            if result is not AddResult.CONTINUE:
                return

    def _admit(self, request: Request, adder: PrefillAdder, rows: _ExtendRows, now: float) -> AddResult:
        """Two phases: lock the hit, then see whether the rest fits; on failure only the lock has to be undone."""
        table = self._table
        match = table.memory.match(request.namespace, request.key)
        table.memory.lock(match)
        start = len(match.pages) * self._config.page_size
        extend = len(request.key) // 4 - start
        max_new = request.params.max_new_tokens - len(request.output_ids)
        available = table.memory.num_available * self._config.page_size
        result, count = adder.admit(available, start, extend, max_new, request.params.ignore_eos)
        if result is AddResult.NO_TOKEN and not table.num_running:
            # Alone it must get its chance: submit() saw to it that the prompt fits the whole pool.
            result, count = AddResult.CONTINUE, adder.chunk(start, extend)
        if result is not AddResult.CONTINUE:
            table.memory.unlock(match)
            return result
        if not table.memory.num_available:
            # Its own cached pages fill the pool, and it needs one more.
            table.memory.unlock(match)
            table.end(request, self._too_small(), now)
            return result
        lease = table.begin(request, match, now)
        added = self._add_extend(request, start, count, adder, rows)
        assert added, "admission without a page to begin with"
        rows.admitted.append(self._slot_params(lease.slot, request))
        return result

    def _add_extend(self, request: Request, start: int, count: int, adder: PrefillAdder, rows: _ExtendRows) -> bool:
        """Plans tokens start .. start+count of the request, fewer if the pool has not the pages. False: none at all."""
        table, lease = self._table, request.lease
        assert lease is not None
        count = table.memory.grow(lease, start + count) - start
        if count <= 0:
            return False
        columns = table.columns
        target = int(columns.target[lease.slot])
        last = start + count == target
        rows.requests.append(request)
        rows.starts.append(start)
        rows.counts.append(count)
        rows.sample.append(last)
        rows.input_ids.append(np.frombuffer(request.key, dtype=np.int32)[start : start + count])
        columns.computed[lease.slot] = start + count
        max_new = request.params.max_new_tokens - len(request.output_ids)
        adder.added(count, target - start - count, max_new, request.params.ignore_eos)
        if last:
            columns.planned_out[lease.slot] += 1
            table.decode(request)
        return True

    def _slot_params(self, slot: int, request: Request) -> SlotParams:
        params = request.params
        penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
        history = np.frombuffer(request.key, dtype=np.int32) if penalised else _NO_HISTORY
        return SlotParams(slot, request.num_prompt_tokens, params, request.stop_token_ids, history)

    # Decodes

    def _decode_rows(self, now: float, flight_step: int) -> _DecodeRows:
        """Rows that take a decode step now, each with room for its token. May retract, and end a request alone."""
        table = self._table
        self._retract_for_test(flight_step)
        before = table.retractions_total
        rows, need = self._make_room(now, flight_step)
        if table.retractions_total > before:
            self._raise_ratio()
        if not rows.requests:
            return rows
        if len(need):
            table.memory.grow_each(need)
        table.columns.computed[rows.slots] += 1
        table.columns.planned_out[rows.slots] += 1
        self._decode_steps += 1
        if table.retractions_total == before:
            self.ratio.step()
        return rows

    def _candidates(self) -> tuple[_DecodeRows, NDArray[np.int32]]:
        """Decode rows that still have output to come, and the slots among them that need one more page."""
        table, columns = self._table, self._table.columns
        slots = table.decoding_slots()
        requests = list(table.decoding)
        more = columns.planned_out[slots] < columns.max_new[slots]
        if not more.all():
            requests = [r for r, m in zip(requests, more.tolist(), strict=True) if m]
            slots = slots[more]
        need = slots[columns.computed[slots] >= table.memory.slots.num_pages[slots] * self._config.page_size]
        return _DecodeRows(requests, slots), need.astype(np.int32)

    def _make_room(self, now: float, flight_step: int) -> tuple[_DecodeRows, NDArray[np.int32]]:
        """The rows of the next decode step and the slots that get a page, after retracting until those pages are there.

        Victims: lowest priority, then least output, then longest prompt; extends among them. The last row stays: it
        waits while a step is in flight, for that may free something, and is ended if nothing can.
        """
        table = self._table
        while True:
            rows, need = self._candidates()
            if len(need) <= table.memory.num_available:
                return rows, need
            victims = rows.requests + table.extending
            if len(victims) > 1:
                table.retract(min(victims, key=_victim_order), flight_step)
            elif flight_step >= 0:
                return _NO_DECODES, need[:0]
            else:
                table.end(rows.requests[0], self._too_small(), now)

    def _retract_for_test(self, flight_step: int) -> None:
        every = self._config.retract_interval
        victims = self._table.decoding
        if every and victims and self._decode_steps % every == every - 1:
            self._table.retract(min(victims, key=_victim_order), flight_step)
            self._decode_steps += 1

    def _raise_ratio(self) -> None:
        rows = self._table.decoding
        if not rows:
            return
        decoded = sum(len(r.output_ids) for r in rows)
        self.ratio.raise_on_retract(decoded, len(rows), sum(r.params.max_new_tokens for r in rows))

    def _too_small(self) -> Ending:
        size = self._config.num_pages * self._config.page_size
        message = f"the KV pool of {size} tokens cannot hold this request, even alone"
        return Ending(FinishReason.ABORT, error=ErrorCode.OUT_OF_MEMORY, message=message)

    # The plan

    def _build(self, extends: _ExtendRows, decodes: _DecodeRows) -> Step:
        columns = self._table.columns
        num_extend, num_decode = len(extends.requests), len(decodes.requests)
        extend_slots = [r.lease.slot for r in extends.requests if r.lease]
        slots = np.concatenate([np.array(extend_slots, dtype=np.int64), decodes.slots])
        starts = np.concatenate([np.array(extends.starts, dtype=np.int64), columns.computed[decodes.slots] - 1])
        updates = self._table.memory.take_table_updates()
        self._step_id += 1
        plan = BatchPlan(
            step_id=self._step_id,
            mode=_MODES[bool(num_extend), bool(num_decode)],
            num_extend=num_extend,
            slots=slots.astype(np.int32),
            starts=starts.astype(np.int32),
            num_tokens=np.array(extends.counts + [1] * num_decode, dtype=np.int32),
            input_ids=np.concatenate(extends.input_ids) if extends.input_ids else _NO_HISTORY,
            sample=np.array(extends.sample + [True] * num_decode, dtype=np.bool_),
            mask_rows=_NO_HISTORY,
            prompt_logprob_rows=_NO_HISTORY,
            prompt_logprob_offsets=_NO_HISTORY,
            prompt_logprob_nexts=_NO_HISTORY,
            admitted=tuple(extends.admitted),
            table_slots=updates.slots,
            table_firsts=updates.firsts,
            table_counts=updates.counts,
            table_pages=updates.pages,
        )
        return Step(plan, extends.requests + decodes.requests, columns.epoch[slots])


_MODES = {(True, False): ForwardMode.EXTEND, (False, True): ForwardMode.DECODE, (True, True): ForwardMode.MIXED}


def _victim_order(request: Request) -> tuple[int, int, int]:
    return request.priority, len(request.output_ids), -request.num_prompt_tokens
