"""What the scheduler knows of running requests, in columns by slot, so that a step over many rows is a few array operations."""

from __future__ import annotations

import numpy as np

from services.worker.core.requests.request import Request

STOP_IDS = 8  # stop token ids that are compared in columns; a request with more is looked at by itself


class SlotColumns:
    """Arrays of length num_slots. A row is meaningful while its slot is leased.

    epoch: changes whenever the slot is given back, so that a step in flight can tell its rows from later ones. computed,
    committed: tokens whose KV is or will be written by steps planned / committed so far. target: tokens to extend at this
    admission. planned_out, num_out, sent: output tokens planned / committed / told to the front end. draftable: tokens may be
    guessed ahead. special: the finish rules need more than stop_ids. masked: sampling needs the grammar's mask. wants_logprobs:
    of outputs. predicted: its client has said a prediction. redundant: the token that the step in flight samples is known already
    and was counted.
    """

    def __init__(self, num_slots: int) -> None:
        def column() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return np.zeros(num_slots, dtype=np.int64)

        self.epoch = column()
        self.computed = column()
        self.committed = column()
        self.target = column()
        self.planned_out = column()
        self.num_out = column()
        self.sent = column()
        self.max_new = column()
        self.min_new = column()
        self.interval = column()
        self.peer = column()
        self.handle = np.zeros(num_slots, dtype=np.uint64)
        self.draftable = np.zeros(num_slots, dtype=np.bool_)
        self.special = np.zeros(num_slots, dtype=np.bool_)
        self.masked = np.zeros(num_slots, dtype=np.bool_)
        self.wants_logprobs = np.zeros(num_slots, dtype=np.bool_)
        self.predicted = np.zeros(num_slots, dtype=np.bool_)
        self.ignore_eos = np.zeros(num_slots, dtype=np.bool_)
        self.redundant = np.zeros(num_slots, dtype=np.bool_)
        self.stop_ids = np.full((num_slots, STOP_IDS), -1, dtype=np.int64)

    def begin(self, slot: int, request: Request, num_cached: int) -> None:
        """Fills the slot's row for a request that is being admitted with `num_cached` tokens of KV."""
        outputs = len(request.progress.output_ids)
        target = request.num_prompt_tokens + outputs
        assert 0 <= num_cached < target, "whoever is admitted has a token to compute"
        assert request.progress.num_sent <= outputs, "a front end was told more than there is"
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
        """What a step in flight computes for the slot does not count."""
        self.epoch[slot] += 1
        self.computed[slot] = self.committed[slot]
        self.planned_out[slot] = self.num_out[slot]

    def end(self, slot: int) -> None:
        assert self.committed[slot] <= self.computed[slot], "a step was committed that was not planned"
        assert self.sent[slot] <= self.num_out[slot] <= self.planned_out[slot], "told, committed and planned outputs"
        self.epoch[slot] += 1
