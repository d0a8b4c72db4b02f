"""Paged KV memory: the KV of a token per attention layer, and pools whose layers may differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.contracts.ops import Kernels


class LayerWaits(Protocol):
    """Waits for layers before they are read; see Arrivals."""

    def wait(self, layer: int) -> None: ...


class PoolTooSmall(ValueError):
    """Raised if the free memory cannot hold the pages of one sequence."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The size of one layer's KV of a token."""

    kv_heads: int  # key/value heads
    key_dim: int  # elements of a key, per head
    value_dim: int  # elements of a value, per head

    @property
    def size(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KVPool:
    """The KV of all layers of a model. The forward stream and the page mover write it."""

    keys: tuple[Tensor, ...]  # per layer [pages, kv heads, page size, key_dim] in the model dtype; every page id is usable
    values: tuple[Tensor, ...]  # per layer [pages, kv heads, page size, value_dim]
    arrivals: LayerWaits | None = None  # layer-wise loads into the pool, None if there are no such loads
    first: int = 0  # number of the pool's first layer across all pools

    def __post_init__(self) -> None:
        assert len(self.keys) == len(self.values), "each layer has keys and values"

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values for the next launch on the current stream, which waits for a load if needed."""
        if self.arrivals is not None:
            self.arrivals.wait(self.first + index)
        return self.keys[index], self.values[index]


NO_POOL = KVPool((), ())  # in place of a pool whose memory is released


def bytes_per_token(layers: Sequence[LayerKV], dtype: torch.dtype) -> int:
    """Returns the bytes of keys and values over all layers."""
    return sum(layer.size for layer in layers) * dtype.itemsize


def kv_pool_tokens(free_bytes: int, mem_fraction_static: float, token_bytes: int) -> int:
    """Returns the number of tokens that fit into a part of the free memory.

    Args:
        free_bytes: free memory after loading the weights.
        mem_fraction_static: the part.
        token_bytes: bytes of a token's KV.
    """
    assert token_bytes > 0, "a token takes memory"
    return max(0, int(free_bytes * mem_fraction_static)) // token_bytes


def allocate(
    layers: Sequence[LayerKV],
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    kernels: Kernels,
    arrivals: LayerWaits | None = None,
    first: int = 0,
) -> KVPool:
    """Allocates a pool.

    Args:
        layers: sizes of the layers.
        num_pages: pages of the pool.
        page_size: tokens of a page.
        dtype: dtype of keys and values.
        kernels: allocates tensors in the form that its kernels need.
        arrivals: see KVPool.
        first: see KVPool.
    """
    assert num_pages > 0 and page_size > 0 and all(layer.size > 0 for layer in layers), "a pool of nothing"
    shapes = [(num_pages, layer.kv_heads, page_size) for layer in layers]
    keys = [kernels.allocate_pool((*shape, layer.key_dim), dtype) for shape, layer in zip(shapes, layers, strict=True)]
    values = [kernels.allocate_pool((*shape, layer.value_dim), dtype) for shape, layer in zip(shapes, layers, strict=True)]
    assert len(keys) == len(values) == len(layers), "each layer has keys and values"
    return KVPool(tuple(keys), tuple(values), arrivals, first)
