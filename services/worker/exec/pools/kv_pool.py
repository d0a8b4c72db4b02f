"""Paged KV memory: the KV of a token per attention layer, pools whose layers may differ, and layer-wise loads into them.

A load runs on a thread in parallel with the steps. The core gets the fact of a load before its last bytes have arrived. From
then on, a step may have these pages in its tables. The first step with these pages waits on the forward stream for each layer
before it reads the layer. Later work on the forward stream therefore finds complete pages. All other readers and writers of these
pages, or of their host memory, call settle() first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import Kernels
from rootstock_llm.services.worker.core.contracts.transfers import EARLY_S, I32
from rootstock_llm.services.worker.exec.streams.cuda_streams import Arrival, NeverCame, Streams

MOST_GROUPS = 16  # largest number of groups of layers per load, because each group takes a launch and an event
SAYS_BYTES = 16 << 20  # smallest size in bytes of a load whose rate is used to predict the duration of later loads


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
    arrivals: Arrivals | None = None  # layer-wise loads into the pool, None if there are no such loads
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
    """Returns the number of tokens whose KV fits into a share of the free memory.

    Args:
        free_bytes: free memory after the weights were loaded.
        mem_fraction_static: the share, 0 to 1.
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
    arrivals: Arrivals | None = None,
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
    assert num_pages > 0 and page_size > 0 and all(layer.size > 0 for layer in layers), "a pool has pages and layers with KV"
    shapes = [(num_pages, layer.kv_heads, page_size) for layer in layers]
    keys = [kernels.allocate_pool((*shape, layer.key_dim), dtype) for shape, layer in zip(shapes, layers, strict=True)]
    values = [kernels.allocate_pool((*shape, layer.value_dim), dtype) for shape, layer in zip(shapes, layers, strict=True)]
    assert len(keys) == len(values) == len(layers), "each layer has keys and values"
    return KVPool(tuple(keys), tuple(values), arrivals, first)


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of layers in which a load arrives. Layers are numbered across all pools."""

    layers: tuple[tuple[int, ...], ...]  # layers of each group, in the order of arrival
    of: tuple[int, ...]  # group of each layer

    @classmethod
    def for_pools(cls, num_layers: Sequence[int]) -> LayerGroups:
        """Returns the groups for pools with these numbers of layers.

        The first pool's layers come last, because a draft model computes with its own pool before the target runs.
        """
        total, first = sum(num_layers), num_layers[0]
        assert total, "pools have layers"
        order = [*range(first, total), *range(first)]
        layers = tuple(tuple(part.tolist()) for part in np.array_split(order, min(MOST_GROUPS, total)))
        of = [0] * total
        for group, part in enumerate(layers):
            for layer in part:
                of[layer] = group
        return cls(layers, tuple(of))


@dataclass(slots=True, eq=False)
class _Coming:
    """A load that is not known to be complete."""

    pages: I32
    groups: LayerGroups
    arrival: Arrival
    next: int = 0  # first group that no step has waited for; if there is no such group, all later steps run after the load

    @property
    def count(self) -> int:
        return len(self.groups.layers)

    def wait(self, group: int) -> None:
        if group >= self.next:
            self.arrival.wait(group)
            self.next = group + 1


class Arrivals:
    """The loads that steps may have to wait for. Any thread may call add() and settle(), the launching thread everything else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: tuple[_Coming, ...] = ()
        self._awaited: list[_Coming] = []

    def add(self, pages: I32, groups: LayerGroups, arrival: Arrival) -> None:
        """Registers a load, before its fact is reported to the core."""
        with self._lock:
            self._coming = (*(each for each in self._coming if not each.arrival.is_over), _Coming(pages, groups, arrival))

    def settle(self) -> None:
        """Blocks until all registered loads are complete. Raises NeverCame."""
        for each in self._coming:
            each.arrival.settle(each.count - 1)

    def expect(self, pages: I32) -> None:
        """Declares that the next launched step is the first one with these pages in its tables."""
        if not self._coming:
            return
        with self._lock:
            self._coming = tuple(each for each in self._coming if not each.arrival.is_over)
            coming = [each for each in self._coming if each.next < each.count and each not in self._awaited]
        self._awaited += [each for each in coming if np.isin(pages, each.pages).any()]

    def wait(self, layer: int) -> None:
        """Makes the forward stream wait for a layer, numbered across all pools, before the next launch reads it."""
        for each in self._awaited:
            each.wait(each.groups.of[layer])

    def wait_all(self) -> None:
        """Makes the forward stream wait for all layers.

        Called before a launch that reads any layer, and after the step's launches.
        """
        while self._awaited:
            self._awaited[-1].wait(self._awaited[-1].count - 1)
            self._awaited.pop()


class LayerLoads:
    """Loads pages.

    For a device, all groups are queued on its stream at once; on a host, the thread copies one group after another.
    """

    def __init__(self, streams: Streams, arrivals: Arrivals) -> None:
        self._streams, self._arrivals = streams, arrivals
        self._bytes_s = 0.0  # rate of the last large load; 0 before the first one

    def load(
        self, bring: Callable[[int], None], pages: I32, groups: LayerGroups, num_bytes: int, tell: Callable[[], None]
    ) -> tuple[float, bool]:
        """Loads pages and returns when all groups are complete.

        Args:
            bring: copies a group, on the current stream.
            pages: int32[n], pages of the pool.
            groups: groups of layers.
            num_bytes: size of the load.
            tell: called before the last group is complete, when the rest is expected to take less than EARLY_S. From then on,
                steps wait for the load.

        Returns:
            The duration in seconds, and whether `tell` was called.

        Raises:
            NeverCame: the load failed after `tell` was called.
            Exception: the load failed before, and no step waits for it.
        """
        count, told = len(groups.layers), False
        arrival = self._streams.arrival(count)
        try:
            if not self._streams.on_host:
                for group in range(count):
                    bring(group)
                    arrival.came(group)
            for group in range(count):
                if not told and num_bytes * (count - group) <= self._bytes_s * EARLY_S * count:
                    self._arrivals.add(pages, groups, arrival)
                    told = True
                    tell()
                self._wait_for(arrival, group, bring)
        except Exception as error:  # errors of a driver, or of a host without memory
            if not told:
                raise
            arrival.failed(error)
            raise NeverCame(f"could not load pages for which steps wait: {error!r}") from error
        seconds = arrival.seconds
        if num_bytes >= SAYS_BYTES:
            self._bytes_s = num_bytes / max(seconds, 1e-9)
        return seconds, told

    def _wait_for(self, arrival: Arrival, group: int, bring: Callable[[int], None]) -> None:
        if self._streams.on_host:
            bring(group)
            arrival.came(group)
        else:
            arrival.settle(group)
