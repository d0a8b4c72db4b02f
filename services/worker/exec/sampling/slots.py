"""The table of sampling parameters by slot on the device. Owned by the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.contracts.sample_ops import SlotColumn, SlotTable
from services.worker.core.contracts.plan import SlotParams
from services.worker.exec.sampling.admission import Admission
from services.worker.exec.sampling.token_sets import WORD_BITS

MAX_BIASES = 1024  # per slot; the limit of a request
MAX_STOPS = 512  # per slot: stop tokens of the request and of the model


def allocate_slot_table(max_slots: int, vocab_size: int, device: torch.device) -> SlotTable:
    """Returns a table of zeros, which means greedy sampling without edits."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return SlotTable(
        params=zeros(max_slots, SlotColumn.WIDTH),
        counts=zeros(max_slots, vocab_size, dtype=torch.int16),
        words=zeros(max_slots, -(-vocab_size // WORD_BITS)),
        bias_ids=zeros(max_slots, MAX_BIASES),
        biases=zeros(max_slots, MAX_BIASES, dtype=torch.float32),
        stop_ids=zeros(max_slots, MAX_STOPS),
    )


class TooManyEdits(ValueError):
    """A slot has more logit biases or stop tokens than the table holds. Its rows fault."""


class DeviceSlots:
    """The table on the device. It is written on the forward stream, in the order of steps."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self.table = allocate_slot_table(max_slots, vocab_size, device)

    def admission(self, admitted: Sequence[SlotParams]) -> Admission:
        """Returns the columns of the slots. Raises TooManyEdits."""
        admission = Admission.of(admitted, self._vocab_size)
        for column, limit, noun in (
            (SlotColumn.NUM_BIASES, MAX_BIASES, "logit biases"),
            (SlotColumn.NUM_STOPS, MAX_STOPS, "stop tokens"),
        ):
            if len(admitted) and admission.params[:, column].max() > limit:
                raise TooManyEdits(f"more than {limit} {noun}")
        return admission

    def admit(self, views: Mapping[str, Tensor]) -> None:
        """Writes an uploaded Admission into the table."""
        table, slots = self.table, views["slots"].long()
        assert len(views["params"]) == len(slots) * SlotColumn.WIDTH, "each slot has a row of parameters"
        assert len(views["words"]) == len(views["word_slots"]) * table.words.shape[1], "and of words, where it has any"
        table.params.index_copy_(0, slots, views["params"].view(-1, SlotColumn.WIDTH))
        if len(views["bias_slots"]):
            places = views["bias_slots"].long(), views["bias_places"].long()
            table.bias_ids.index_put_(places, views["bias_ids"])
            table.biases.index_put_(places, views["biases"].view(torch.float32))
        if len(views["stop_slots"]):
            places = views["stop_slots"].long(), views["stop_places"].long()
            table.stop_ids.index_put_(places, views["stop_ids"])
        if len(views["word_slots"]):
            table.words.index_copy_(0, views["word_slots"].long(), views["words"].view(-1, table.words.shape[1]))
        if len(views["counted_slots"]):
            table.counts.index_fill_(0, views["counted_slots"].long(), 0)
            places = views["count_slots"].long(), views["count_ids"].long()
            table.counts.index_put_(places, views["counts"].to(torch.int16))

    def adjust_counts(self, slots: Tensor, ids: Tensor, changes: Tensor) -> None:
        """Adds `changes` to counts[slots, ids]. Each pair of slot and id occurs once."""
        assert len(slots) == len(ids) == len(changes), "a change has its slot and its token"
        places = slots.long(), ids.long()
        self.table.counts.index_put_(places, self.table.counts[places] + changes.to(torch.int16))


def merged_changes(changes: Mapping[tuple[int, int], int]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Returns slots, ids and changes as parallel columns, without changes of 0."""
    kept = [(slot, token, change) for (slot, token), change in changes.items() if change]
    columns = np.array(kept, dtype=np.int32).reshape(-1, 3)
    assert (columns[:, 2] != 0).all(), "what comes to nothing is left out"
    return columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy()
