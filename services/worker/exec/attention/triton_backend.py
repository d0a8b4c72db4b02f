"""Attention by our Triton kernels: prompts in tiles, and decode rows with split keys.

In a mixed step, attention has two launches per layer, or one in deterministic mode.

The scratch memory is allocated once, so that its addresses in captured graphs stay valid. A captured launch depends only on the
number of rows and the longest possible context. Its kernels read the lengths of rows on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import RaggedRows, ScoreRule
from rootstock_llm.kernels.triton.attention.attention import (
    AttentionCall,
    AttentionScratch,
    allocate_scratch,
    run_attention,
)
from rootstock_llm.kernels.triton.attention.attention_plan import (
    HeadShape,
    Launch,
    fixed_scratch_bounds,
    fixed_split_size,
    num_multiprocessors,
    plan_decode,
    plan_extend,
    plan_fixed,
    reach,
    scratch_bounds,
    shared_memory_of,
)
from rootstock_llm.services.worker.exec.attention.backend import AttentionBatch, AttentionShape

ITEM_SIZES = (2, 4)  # bytes of an element, for all dtypes of models, because the dtype is known only in attend()


class TritonAttention:
    """An AttentionBackend of our Triton kernels.

    In deterministic mode, the bits of a row's result depend only on the tokens of its sequence.
    """

    name = "triton"
    captures = True

    def __init__(self, shape: AttentionShape, device: torch.device, deterministic: bool = False) -> None:
        self._max_context, self._deterministic = shape.max_context, deterministic
        self._multiprocessors = num_multiprocessors(device)
        group = shape.num_heads // shape.num_kv_heads
        dims, shared = (shape.head_dim, shape.value_dim), shared_memory_of(device)
        self._heads = {size: HeadShape(shape.num_kv_heads, group, *dims, size, shared) for size in ITEM_SIZES}
        self._scratch = self._allocate(device)
        self._batch: AttentionBatch | None = None
        self._launches: dict[tuple[int, int], tuple[Launch, ...]] = {}  # by item size and window

    def _allocate(self, device: torch.device) -> AttentionScratch:
        bounds = [
            fixed_scratch_bounds(heads, self._max_context, self._multiprocessors)
            if self._deterministic
            else scratch_bounds(heads, self._multiprocessors)
            for heads in self._heads.values()
        ]
        lanes, counters = (max(column) for column in zip(*bounds, strict=True))
        return allocate_scratch(lanes, counters, self._heads[ITEM_SIZES[0]].value_dim, device)

    def plan(self, batch: AttentionBatch) -> None:
        """Stores the batch. It copies and launches nothing, because attend() reads lengths from the host and from the device."""
        self._batch = batch
        self._launches.clear()

    def attend(self, out: Tensor, q: Tensor, k_pool: Tensor, v_pool: Tensor, rows: RaggedRows, rule: ScoreRule) -> None:
        assert len(out) == len(q) and k_pool.shape[0] == v_pool.shape[0], "the tensors are those of one step and one pool"
        itemsize = q.element_size()
        heads = self._heads[itemsize]
        if (itemsize, rule.window) not in self._launches:
            self._launches[itemsize, rule.window] = self._planned(heads, rule.window)
        call = AttentionCall.of(out, q, k_pool, v_pool, rows, rule)
        for launch in self._launches[itemsize, rule.window]:
            run_attention(call, heads, launch, self._scratch)

    def _planned(self, heads: HeadShape, window: int) -> tuple[Launch, ...]:
        batch, multiprocessors = self._batch, self._multiprocessors
        assert batch is not None, "plan() is called before attend()"
        if self._deterministic:
            return (self._fixed(batch, heads, window),)
        if batch.graph:
            return (plan_decode(heads, 0, batch.graph, reach(self._max_context, window), multiprocessors),)
        extends, rows = batch.num_extend, len(batch.starts)
        ends, launches = batch.starts + batch.num_tokens, []
        if extends:
            tokens, longest = int(batch.num_tokens[:extends].sum()), reach(int(ends[:extends].max()), window)
            launches.append(plan_extend(heads, extends, tokens, longest, multiprocessors))
        if rows > extends:
            longest = reach(int(ends[extends:].max()), window)
            launches.append(plan_decode(heads, extends, rows - extends, longest, multiprocessors))
        return tuple(launches)

    def _fixed(self, batch: AttentionBatch, heads: HeadShape, window: int) -> Launch:
        split_size = fixed_split_size(self._max_context)
        if batch.graph:
            longest = reach(self._max_context, window)
            return plan_fixed(heads, batch.graph, batch.graph, longest, split_size, self._multiprocessors, one_token=True)
        tokens, longest = int(batch.num_tokens.sum()), reach(int((batch.starts + batch.num_tokens).max()), window)
        one_token = not batch.num_extend
        return plan_fixed(heads, len(batch.starts), tokens, longest, split_size, self._multiprocessors, one_token)

    def release_graphs(self) -> None:
        """Does nothing, because steps without a graph use the same scratch memory."""
