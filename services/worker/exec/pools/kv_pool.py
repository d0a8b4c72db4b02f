"""Paged key/value memory: what each attention layer keeps of a token, and pools for layers that may differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.contracts.ops import Kernels


class LayerWaits(Protocol):
    """See Arrivals."""

    def wait(self, layer: int) -> None: ...


class PoolTooSmall(ValueError):
    """The memory left does not hold even one sequence's page."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Sizes are numbers of elements, per token and key/value head."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def size(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KVPool:
    """Written on the forward stream, and by who moves pages.

    keys, values: per layer, [pages, kv heads, page size, head_dim] in the model dtype. Every page id is usable. arrivals: what
    comes into it by layers, None where nothing does. first: the number of its first layer among those of all pools."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    arrivals: LayerWaits | None = None
    first: int = 0

    def __post_init__(self) -> None:
        assert len(self.keys) == len(self.values), "each layer has keys and values"

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Its keys and values for what is launched next on the current stream, which finds there what a step waits for."""
        if self.arrivals is not None:
            self.arrivals.wait(self.first + index)
        return self.keys[index], self.values[index]


NO_POOL = KVPool((), ())  # while its memory is given back


def bytes_per_token(layers: Sequence[LayerKV], dtype: torch.dtype) -> int:
    """Over all layers, keys and values."""
    return sum(layer.size for layer in layers) * dtype.itemsize


def kv_pool_tokens(free_bytes: int, mem_fraction_static: float, token_bytes: int) -> int:
    """Tokens that fit into mem_fraction_static of free_bytes, which is what is left after the weights."""
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
    """Keys [pages, kv heads, page size, key_dim] and values [.., value_dim] of each layer. arrivals, first: see KVPool."""
    assert num_pages > 0 and page_size > 0 and all(layer.size > 0 for layer in layers), "a pool of nothing"
    shapes = [(num_pages, layer.kv_heads, page_size) for layer in layers]
    keys = [kernels.allocate_pool((*shape, layer.key_dim), dtype) for shape, layer in zip(shapes, layers, strict=True)]
    values = [kernels.allocate_pool((*shape, layer.value_dim), dtype) for shape, layer in zip(shapes, layers, strict=True)]
    assert len(keys) == len(values) == len(layers), "each layer has keys and values"
    return KVPool(tuple(keys), tuple(values), arrivals, first)
