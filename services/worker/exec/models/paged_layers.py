"""Paged attention as an attention implementation of transformers. A layer finds the step in its module's StepHolder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from kernels.contracts.ops import Kernels, RaggedRows
from services.worker.exec.models.attention_layers import AttentionLayer, StepHolder, step_of
from services.worker.exec.pools.kv_pool import KVPool

PAGED_ATTENTION = "rootstock_paged"


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The state of a forward pass over T tokens."""

    rows: RaggedRows
    pool: KVPool
    # by the layer's number in the model
    layers: Mapping[int, AttentionLayer]
    kernels: Kernels


@dataclass(frozen=True, slots=True)
class PagedLayers:
    """Implements StepAttention for the layers of one model."""

    # attached to the model
    holder: StepHolder
    # by the layer's number in the model
    layers: Mapping[int, AttentionLayer]
    kernels: Kernels

    def begin(self, rows: RaggedRows, pool: KVPool) -> None:
        assert len(pool.keys) == len(self.layers), "a pool for each layer"
        self.holder.step = PagedStep(rows, pool, self.layers, self.kernels)

    def using(self, kernels: Kernels) -> PagedLayers:
        return replace(self, kernels=kernels)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *_: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """Writes keys and values to the layer's pages, then attends to them. Ignores the mask: rows and window define it.

    Args:
        query: [1, H, T, D].
        key: [1, G, T, D].
        value: [1, G, T, E].

    Returns:
        [1, T, H, E], and None in place of attention weights.
    """
    number, step = module.layer_idx, step_of(module)
    assert isinstance(number, int) and isinstance(step, PagedStep)
    layer, rows = step.layers[number], step.rows
    assert query.shape[2] == key.shape[2] == value.shape[2] == len(rows.positions), "the layer's tokens are the step's"
    assert key.shape[3] == layer.kv.key_dim and value.shape[3] == layer.kv.value_dim, "the layer has the probed sizes"
    keys, values = step.pool.layer(layer.index)
    step.kernels.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), rows, keys, values)
    q = query[0].transpose(0, 1)
    out = q.new_empty(q.shape[0], q.shape[1], layer.kv.value_dim)
    scale = q.shape[2] ** -0.5 if scaling is None else float(scaling)
    if softcap or s_aux is not None or layer.kv.key_dim != layer.kv.value_dim:
        step.kernels.general_attention(out, q, keys, values, rows, scale, layer.window, softcap or 0.0, s_aux)
    else:
        _through_kernel(step.kernels, out, q, keys, values, rows, scale, layer.window)
    return out[None], None


def _through_kernel(
    kernels: Kernels, out: Tensor, q: Tensor, keys: Tensor, values: Tensor, rows: RaggedRows, scale: float, window: int
) -> None:
    """Calls the kernel with q in the first columns of a qkv matrix. It reads no other columns."""
    tokens, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    qkv = q.new_empty(tokens, (heads + 2 * kv_heads) * head_dim)
    qkv[:, : heads * head_dim] = q.reshape(tokens, -1)
    kernels.paged_attention(out.view(tokens, -1), qkv, keys, values, rows, scale, window)


AttentionInterface.register(PAGED_ATTENTION, attend)
