"""What the forward thread of the CPU executor runs: model, pools, relay, sampler and pooling, step by step."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.contracts.ops import RaggedRows
from services.worker.core.contracts.plan import BatchPlan, StepResult
from services.worker.exec.contracts.causal_model import CausalModel
from services.worker.exec.contracts.protocol import Masks
from services.worker.exec.future_map import FutureMap
from services.worker.exec.logprobs import PromptScores
from services.worker.exec.pools.embedding_pool import Embedded, EmbeddingPool, PoolingConfig, PoolingKind, embedded
from services.worker.exec.pools.pools import KVPool, PageTable
from services.worker.exec.sampler import Sampled, Sampler

LAST_TOKEN = PoolingConfig(PoolingKind.LAST, True)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a forward pass leaves for sampling. rows: int64[n], of the plan, that sample; logits: float32[n, V], valid until
    the next forward pass, None without rows."""

    rows: NDArray[np.int64]
    logits: torch.Tensor | None
    prompts: PromptScores
    embedded: Embedded


@dataclass(slots=True)
class CpuRun:
    """A launched step. Everything but plan and done belongs to the forward thread until done is set."""

    plan: BatchPlan
    masks: Masks = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)
    computed: Computed | None = None
    result: StepResult | None = None
    error: BaseException | None = None


class ModelRunner:
    """Owned by the forward thread from its first step on. pooling: for requests that want a vector. A model whose every
    request does is never asked for logits."""

    def __init__(
        self,
        model: CausalModel,
        pool: KVPool,
        table: PageTable,
        futures: FutureMap,
        sampler: Sampler,
        vocab_size: int,
        pooling: PoolingConfig = LAST_TOKEN,
    ) -> None:
        self._model = model
        self._pool = pool
        self._table = table
        self._futures = futures
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._embeddings = EmbeddingPool(pooling, len(table.tensor))

    def forward(self, run: CpuRun) -> None:
        plan = run.plan
        self._table.update(plan)
        self._admit(plan)
        self._sampler.follow(plan)
        if plan.num_rows == 0:
            return
        self._model.forward(self._input_ids(plan), self._rows(plan), self._pool)
        run.computed = self._computed(plan)

    def hold(self, model: CausalModel | None, pool: KVPool | None) -> None:
        """Puts another model, another pool, in the place of its own; None leaves what is there. Between two steps."""
        self._model = model or self._model
        self._pool = pool or self._pool

    def _admit(self, plan: BatchPlan) -> None:
        for slot in plan.admitted:
            self._sampler.admit(slot)
            self._embeddings.admit(slot)
        if plan.admitted:
            self._futures.poison(torch.tensor([slot.slot for slot in plan.admitted]))

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

    def _computed(self, plan: BatchPlan) -> Computed:
        """Asks for the sampled rows' logits last: each request for logits overwrites the one before."""
        prompts = self._sampler.prompt_logprobs(plan, self._model.logits)
        vectors = self._embeddings.pool(plan, self._model.states)
        rows = np.flatnonzero(plan.sample & ~self._embeddings.wanted(plan.slots))
        ends = torch.from_numpy(np.cumsum(plan.num_tokens)[rows] - 1)
        return Computed(rows, self._model.logits(ends) if len(rows) else None, prompts, embedded(vectors))

    def sample(self, run: CpuRun) -> None:
        plan, tokens, computed = run.plan, np.zeros(run.plan.num_rows, dtype=np.int32), run.computed
        if computed is None:
            run.result = StepResult(plan.step_id, tokens)
            return
        rows, sampled = computed.rows, self._sampled(run, computed)
        tokens[rows] = sampled.tokens.numpy()
        faults = {int(rows[index]): fault for index, fault in sampled.faults.items()}
        run.result = StepResult(
            step_id=plan.step_id,
            tokens=tokens,
            faults={**computed.prompts.faults, **computed.embedded.faults, **faults},
            logprobs={int(rows[index]): values for index, values in sampled.logprobs.items()},
            prompt_logprobs=computed.prompts.logprobs,
            embeddings=computed.embedded.vectors,
        )
        run.computed = None

    def _sampled(self, run: CpuRun, computed: Computed) -> Sampled:
        plan, rows = run.plan, computed.rows
        if computed.logits is None:
            return Sampled(torch.empty(0, dtype=torch.int64), {}, {})
        masks = {index: run.masks[row] for index, row in enumerate(rows.tolist()) if row in run.masks} if run.masks else {}
        positions = (plan.starts + plan.num_tokens)[rows]
        sampled = self._sampler.sample(computed.logits, plan.slots[rows], positions, masks)
        self._futures.write(torch.from_numpy(plan.slots[rows].astype(np.int64)), sampled.tokens)
        return sampled
