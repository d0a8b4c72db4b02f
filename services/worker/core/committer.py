"""Takes a step's result into the state: tokens, finishes, sharing of computed pages, and what front ends are told.

Rows whose request has left since the step was planned are dropped; of a request retracted meanwhile the token counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.worker.core.config import SchedulerConfig
from services.worker.core.finish import Ending, TailDecoder, check_fault, check_finished
from services.worker.core.plan import RowFault, StepResult
from services.worker.core.planner import Step
from services.worker.core.radix_cache import TOKEN_BYTES
from services.worker.core.request import Phase, Request
from services.worker.core.request_table import RequestTable

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Committer:
    def __init__(self, config: SchedulerConfig, table: RequestTable, decoder: TailDecoder) -> None:
        self._config = config
        self._table = table
        self._decoder = decoder

    def commit(self, step: Step, result: StepResult, now: float) -> None:
        plan, columns = step.plan, self._table.columns
        live = columns.epoch[plan.slots] == step.epochs
        if not live.all():
            self._commit_gone(step, result, ~live, now)
        sound = live & ~np.isin(np.arange(plan.num_rows), list(result.faults)) if result.faults else live
        columns.committed[plan.slots[sound]] = (plan.starts + plan.num_tokens)[sound]
        self._publish_extends(step, sound)
        rows = np.flatnonzero(plan.sample & live)
        if len(rows):
            self._commit_tokens(step, result, rows, now)

    def _publish_extends(self, step: Step, sound: Mask) -> None:
        """Prompts are shared as soon as their pages are computed, never before, and not where the computation went wrong."""
        for row in range(step.plan.num_extend):
            request = step.requests[row]
            if sound[row] and request.lease is not None:
                committed = int(self._table.columns.committed[request.lease.slot])
                self._table.memory.publish(request.lease, request.key[: committed * TOKEN_BYTES])

    def _commit_tokens(self, step: Step, result: StepResult, rows: I64, now: float) -> None:
        columns = self._table.columns
        slots = step.plan.slots[rows]
        tokens = result.tokens[rows]
        requests = step.requests if len(rows) == len(step.requests) else [step.requests[r] for r in rows.tolist()]
        count = columns.num_out[slots] + 1
        look = (count >= columns.max_new[slots]) | columns.special[slots]
        look |= (columns.stop_ids[slots] == tokens[:, None]).any(axis=1) & (count >= columns.min_new[slots])
        look |= (tokens < 0) | (tokens >= self._config.vocab_size)
        if result.faults:
            look |= np.isin(rows, list(result.faults))
        endings = self._take_tokens(requests, tokens, look, rows, result.faults)
        columns.num_out[slots] = count
        self._table.generated_tokens_total += len(rows)
        self._emit(slots, tokens, count, requests, endings)
        for at, ending in endings.items():
            self._table.end(requests[at], ending, now)

    def _take_tokens(
        self, requests: list[Request], tokens: NDArray[np.int32], look: Mask, rows: I64, faults: dict[int, RowFault]
    ) -> dict[int, Ending]:
        """Appends the tokens; returns the requests that end, by their place in `requests`."""
        endings: dict[int, Ending] = {}
        for at in np.flatnonzero(look).tolist():
            ending = check_fault(int(tokens[at]), self._config.vocab_size, faults.get(int(rows[at])))
            if ending is not None:
                endings[at] = ending
        if endings:
            for at, (request, token) in enumerate(zip(requests, tokens.tolist(), strict=True)):
                if at not in endings:
                    request.output_ids.append(token)
        else:
            for request, token in zip(requests, tokens.tolist(), strict=True):
                request.output_ids.append(token)
        for at in np.flatnonzero(look).tolist():
            if at not in endings and (ending := check_finished(requests[at], self._decoder)):
                endings[at] = ending
        return endings

    def _emit(
        self, slots: NDArray[np.int32], tokens: NDArray[np.int32], count: I64, requests: list[Request], endings: dict[int, Ending]
    ) -> None:
        """Rows that go on and are due: every `interval` tokens, and the first token at once."""
        columns = self._table.columns
        sent = columns.sent[slots]
        due = (count - sent >= columns.interval[slots]) | (sent == 0)
        if endings:
            due[list(endings)] = False
        at = np.flatnonzero(due)
        if not len(at):
            return
        slots, tokens, count = slots[at], tokens[at], count[at]
        fresh = count - columns.sent[slots]
        columns.sent[slots] = count
        if (fresh == 1).all():
            parts = None
        else:
            parts = [requests[i].output_ids[-n:] for i, n in zip(at.tolist(), fresh.tolist(), strict=True)]
        peers = columns.peer[slots]
        for peer in np.unique(peers).tolist():
            mine = np.flatnonzero(peers == peer)
            flat = tokens[mine].tolist() if parts is None else [t for i in mine.tolist() for t in parts[i]]
            self._table.outputs.add_rows(peer, columns.handle[slots[mine]].tolist(), fresh[mine].tolist(), flat)

    def _commit_gone(self, step: Step, result: StepResult, gone: Mask, now: float) -> None:
        for row in np.flatnonzero(gone & step.plan.sample).tolist():
            request = step.requests[row]
            if request.phase is not Phase.WAITING or request.flight_step != result.step_id:
                continue
            token = int(result.tokens[row])
            ending = check_fault(token, self._config.vocab_size, result.faults.get(row))
            if ending is None:
                request.output_ids.append(token)
                request.rekey()
                self._table.generated_tokens_total += 1
                ending = check_finished(request, self._decoder)
            if ending is not None:
                self._table.end(request, ending, now)
            else:
                self._emit_waiting(request)

    def _emit_waiting(self, request: Request) -> None:
        fresh = len(request.output_ids) - request.num_sent
        if fresh >= request.interval or request.num_sent == 0:
            request.num_sent += fresh
            self._table.outputs.add_rows(request.peer, [request.handle], [fresh], request.output_ids[-fresh:])
