"""What the forward thread of the CPU executor runs: decoder, pools, relay and sampler, step by step."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.ops import RaggedRows
from services.worker.core.plan import BatchPlan, StepResult
from services.worker.exec.decoder import Decoder
from services.worker.exec.future_map import FutureMap
from services.worker.exec.pools import KVPool, PageTable
from services.worker.exec.protocol import Masks
from services.worker.exec.sampler import Sampler


@dataclass(slots=True)
class CpuRun:
    """A launched step. Everything but plan and done belongs to the forward thread until done is set."""

    plan: BatchPlan
    masks: Masks = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    logits: torch.Tensor | None = None
    result: StepResult | None = None
    error: BaseException | None = None


class ModelRunner:
    """Owned by the forward thread from its first step on."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, table: PageTable, futures: FutureMap, sampler: Sampler, vocab_size: int
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._table = table
        self._futures = futures
        self._sampler = sampler
        self._vocab_size = vocab_size

    def forward(self, run: CpuRun) -> None:
        plan = run.plan
        self._table.update(plan)
        for slot in plan.admitted:
            self._sampler.admit(slot)
        if plan.admitted:
            self._futures.poison(torch.tensor([slot.slot for slot in plan.admitted]))
        if plan.num_rows == 0:
            return
        rows = self._rows(plan)
        ends = np.cumsum(plan.num_tokens)[plan.sample] - 1
        run.logits = self._decoder.forward(self._input_ids(plan), rows, self._pool, torch.from_numpy(ends))

    def _input_ids(self, plan: BatchPlan) -> torch.Tensor:
        """int64[T], kept inside the vocabulary: a row that is dropped later may bring anything."""
        given = torch.from_numpy(plan.input_ids.astype(np.int64))
        relayed = self._futures.gather(torch.from_numpy(plan.slots[plan.num_extend :].astype(np.int64)))
        return torch.cat((given, relayed)).clamp_(0, self._vocab_size - 1)

    def _rows(self, plan: BatchPlan) -> RaggedRows:
        counts = plan.num_tokens
        starts = np.minimum(plan.starts, self._table.capacity - counts)
        offsets = (np.cumsum(counts) - counts).astype(np.int32)
        positions = (np.repeat(starts - offsets, counts) + np.arange(int(counts.sum()))).astype(np.int32)
        locations = self._table.locations(np.repeat(plan.slots, counts), positions)
        return RaggedRows(
            page_table=self._table.tensor,
            slots=torch.from_numpy(plan.slots.copy()),  # torch wants writable arrays; plans may be frozen
            starts=torch.from_numpy(starts),
            num_tokens=torch.from_numpy(counts.copy()),
            offsets=torch.from_numpy(offsets),
            positions=torch.from_numpy(positions),
            locations=torch.from_numpy(locations),
            max_context=int((starts + counts).max()),
        )

    def sample(self, run: CpuRun) -> None:
        plan, tokens = run.plan, np.zeros(run.plan.num_rows, dtype=np.int32)
        rows = np.flatnonzero(plan.sample)
        if run.logits is None or not len(rows):
            run.result = StepResult(plan.step_id, tokens, {}, {})
            return
        sampled = self._sampler.sample(run.logits, plan.slots[rows], (plan.starts + plan.num_tokens)[rows])
        self._futures.write(torch.from_numpy(plan.slots[rows].astype(np.int64)), sampled.tokens)
        tokens[rows] = sampled.tokens.numpy()
        run.result = StepResult(
            step_id=plan.step_id,
            tokens=tokens,
            faults={int(rows[index]): fault for index, fault in sampled.faults.items()},
            logprobs={int(rows[index]): values for index, values in sampled.logprobs.items()},
        )
        run.logits = None
