"""The state of running requests in columns by slot, so that a step with many rows takes a few array operations."""

from __future__ import annotations

import numpy as np

from services.worker.core.requests.request import Request

STOP_IDS = 8  # stop token ids per slot in the column; requests with more ids are marked as special


class SlotColumns:
    """Arrays of length num_slots. An entry is valid while its slot is leased."""

    def __init__(self, num_slots: int) -> None:
        def column() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return np.zeros(num_slots, dtype=np.int64)

        self.epoch = column()  # rises when the slot is freed; a step compares it to find rows whose lease has ended
        self.computed = column()  # tokens whose KV the planned steps have written or will write
        self.committed = column()  # tokens whose KV the committed steps have written
        self.target = column()  # prompt and output at the admission or the last grammar jump, where extending ends
        self.planned_out = column()  # output tokens, including those in flight
        self.num_out = column()  # committed output tokens
        self.sent = column()  # output tokens that were sent to the gateway
        self.max_new = column()
        self.min_new = column()
        self.interval = column()
        self.peer = column()
        self.handle = np.zeros(num_slots, dtype=np.uint64)
        self.draftable = np.zeros(num_slots, dtype=np.bool_)  # may get draft tokens
        self.special = np.zeros(num_slots, dtype=np.bool_)  # the end of the request depends on more than stop_ids and lengths
        self.masked = np.zeros(num_slots, dtype=np.bool_)  # sampling needs the grammar's mask
        self.wants_logprobs = np.zeros(num_slots, dtype=np.bool_)  # the client wants logprobs of output tokens
        self.predicted = np.zeros(num_slots, dtype=np.bool_)  # the client has sent a prediction
        self.ignore_eos = np.zeros(num_slots, dtype=np.bool_)
        # The token that the step in flight samples is already known and counted.
        self.redundant = np.zeros(num_slots, dtype=np.bool_)
        self.stop_ids = np.full((num_slots, STOP_IDS), -1, dtype=np.int64)

    def begin(self, slot: int, request: Request, num_cached: int) -> None:
        """Fills the columns for a request that is admitted with `num_cached` tokens of KV."""
        outputs = len(request.progress.output_ids)
        target = request.num_prompt_tokens + outputs
        assert 0 <= num_cached < target, "an admitted request has a token to compute"
        assert request.progress.num_sent <= outputs, "the gateway has no more tokens than the output"
        self.computed[slot] = self.committed[slot] = num_cached
        self.target[slot] = target
        self.planned_out[slot] = self.num_out[slot] = outputs
        self.sent[slot] = request.progress.num_sent
        self.max_new[slot] = request.most_outputs
        self.min_new[slot] = request.params.min_new_tokens
        self.interval[slot] = request.interval
        self.peer[slot] = request.peer
        self.handle[slot] = request.handle
        ids = request.stop_token_ids
        params = request.params
        self.draftable[slot] = params.speculative and params.samples
        self.masked[slot] = params.grammar is not None and params.samples
        self.wants_logprobs[slot] = request.wants_logprobs
        self.predicted[slot] = len(request.prediction) > 0
        self.redundant[slot] = False
        self.ignore_eos[slot] = params.ignore_eos
        strings = bool(params.stop or params.stop_regex)
        leaves = not params.samples or request.kv.reservation is not None
        self.special[slot] = strings or len(ids) > STOP_IDS or params.grammar is not None or leaves
        self.stop_ids[slot] = -1
        if ids:
            self.stop_ids[slot, : min(len(ids), STOP_IDS)] = ids[:STOP_IDS]

    def drop_flight(self, slot: int) -> None:
        """Makes the commit of the step in flight ignore the slot's row."""
        self.epoch[slot] += 1
        self.computed[slot] = self.committed[slot]
        self.planned_out[slot] = self.num_out[slot]

    def end(self, slot: int) -> None:
        assert self.committed[slot] <= self.computed[slot], "a step was committed that was not planned"
        assert self.sent[slot] <= self.num_out[slot] <= self.planned_out[slot], "told, committed and planned outputs"
        self.epoch[slot] += 1
