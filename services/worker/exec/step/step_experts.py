"""Collects the experts that computed a step's tokens: row counts for the expert distribution record, and ids for requests.

A model with experts stores the ids of a pass in a buffer with a constant address, so that a captured graph writes them, too. The
next pass overwrites the buffer. The ids are therefore counted or copied on the device directly after each pass, and the step's
readback brings the results to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootstock_llm.services.worker.core.contracts.plan import I32, BatchPlan
from rootstock_llm.services.worker.exec.contracts.step_data import ForwardBatch
from rootstock_llm.services.worker.exec.streams.copies import Readback

ROUTED = "routed"  # section of the upload with the tokens of a pass whose expert ids go to the host
COUNTS = "expert_rows"  # name of the counts in the readback


def routed_tokens(plan: BatchPlan, columns: ForwardBatch) -> I32:
    """Returns int32[n]: the indices in the pass of the tokens whose expert ids go to the host, in the order of routed_rows."""
    if not len(plan.routed_rows):
        return plan.routed_rows
    ends = np.cumsum(plan.num_tokens)
    first = (ends - plan.num_tokens)[plan.routed_rows] + plan.routed_offsets
    tokens = np.concatenate([np.arange(begin, end) for begin, end in zip(first, ends[plan.routed_rows], strict=True)])
    return (tokens if columns.order is None else np.argsort(columns.order)[tokens]).astype(np.int32)


@dataclass(frozen=True, slots=True)
class RoutedPart:
    """Rows of one pass whose expert ids are in the readback."""

    name: str  # name of the tensor in the readback, int16[tokens, layers, chosen]
    rows: tuple[int, ...]  # rows of the whole plan
    sizes: tuple[int, ...]  # number of tokens of each row


class StepExperts:
    """The experts of one step, collected pass by pass. Belongs to the thread that launches steps."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None  # int32[layers, experts]; None if no pass was counted
        self.parts: list[RoutedPart] = []

    def add(
        self,
        plan: BatchPlan,
        rows: NDArray[np.int64],
        ids: Tensor,
        num_experts: int,
        views: Mapping[str, Tensor],
        readback: Readback,
    ) -> None:
        """Launches the counting and the copies that a plan asks for. Called on the forward stream, after the plan's pass.

        Args:
            plan: the rows of the pass.
            rows: int64[rows of the plan], the row of the whole plan for each row.
            ids: int32[layers, T, chosen], the experts of the pass. Padding comes last.
            num_experts: experts of a layer.
            views: the upload of the pass, with routed_tokens() if the plan has routed rows.
            readback: the step's readback.
        """
        if len(plan.routed_rows):
            name, sizes = f"experts_{len(self.parts)}", plan.num_tokens[plan.routed_rows] - plan.routed_offsets
            chosen = ids.index_select(1, views[ROUTED].long())
            readback.add(name, chosen.transpose(0, 1).to(torch.int16, memory_format=torch.contiguous_format))
            self.parts.append(RoutedPart(name, tuple(rows[plan.routed_rows].tolist()), tuple(sizes.tolist())))
        if plan.counts_experts:
            if self._counts is None:
                self._counts = torch.zeros((len(ids), num_experts), dtype=torch.int32, device=ids.device)
            # Few operators, because on a CPU each of them takes about 40 µs after the layers have filled the caches with weights.
            self._counts.scatter_(1, ids[:, : int(plan.num_tokens.sum())].flatten(1).long(), 1, reduce="add")

    def launch(self, readback: Readback) -> None:
        """Adds the counts to the readback. No call of add() may follow."""
        if self._counts is not None:
            readback.add(COUNTS, self._counts)

    def results(self, host: Mapping[str, Tensor]) -> tuple[I32 | None, dict[int, NDArray[np.uint16]]]:
        """Returns StepResult.expert_rows and StepResult.routed_experts from the tensors of the readback."""
        found: dict[int, list[NDArray[np.uint16]]] = {}
        for part in self.parts:
            ids = host[part.name].numpy().view(np.uint16)
            assert len(ids) == sum(part.sizes), "the readback has the ids of each row's tokens"
            for row, own in zip(part.rows, np.split(ids, np.cumsum(part.sizes)[:-1]), strict=True):
                found.setdefault(row, []).append(own)
        # Each row gets a copy. A view would keep the ids of all rows in memory until the request's next message.
        routed = {row: np.concatenate(pieces) for row, pieces in found.items()}
        counts = host.get(COUNTS)
        return None if counts is None else counts.numpy(), routed
