"""The memory of a model's caches: KV in pages, and the units of its cache groups; loads that fill pages layer by layer.

A layer with full attention has its KV in pages. A layer with a window has its KV in pages, or in units of the WINDOW group. Such
a unit has as many tokens as a page. A recurrent layer has states in units of the STATE group (docs/design/cache-groups.md).

A load runs on a thread in parallel with the steps. Its completion report (Fact) may go to the core before its last layers have
arrived (an early fact). From then on, a step may have the pages in its page table. On the forward stream, the first such step
waits for each layer of the load before it reads the layer, so that all later work on this stream finds complete pages. All other
readers and writers of these pages, or of the host memory that is loaded, call settle() first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rootstock_llm.kernels.contracts.ops import Kernels
from rootstock_llm.services.worker.core.contracts.cache_groups import CacheKind
from rootstock_llm.services.worker.core.contracts.pool_sizes import PoolSizes
from rootstock_llm.services.worker.core.contracts.transfers import EARLY_S, I32
from rootstock_llm.services.worker.exec.streams.cuda_streams import Arrival, LoadFailed, Streams

MOST_GROUPS = 16  # largest number of groups of layers per load; each group takes a launch and an event
MIN_RATED_BYTES = 16 << 20  # smallest size of a load whose rate predicts the duration of later loads


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The size of a token's KV in one layer."""

    kv_heads: int  # key/value heads
    key_dim: int  # elements of a key, per head
    value_dim: int  # elements of a value, per head
    window: int = 0  # number of last tokens, the token included, to which a token attends; 0 for all

    @property
    def size(self) -> int:
        """Number of elements of a token's keys and values."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerState:
    """The size of the state of one recurrent layer: the last inputs of a convolution, and a matrix for each head."""

    taps: int  # width of the convolution, which reads the last `taps - 1` inputs
    channels: int  # elements of an input
    heads: int
    key_dim: int  # rows of a matrix
    value_dim: int  # columns of a matrix

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of one state. The matrices are float32, and the inputs have the model dtype."""
        return (self.taps - 1) * self.channels * dtype.itemsize + 4 * self.heads * self.key_dim * self.value_dim

    @property
    def input_size(self) -> int:
        """Number of elements of the inputs of one token: the channels, and two gates for each head."""
        return self.channels + 2 * self.heads


LayerCache = LayerKV | LayerState
SCRATCH_STATES = 2  # states at the end of a pool, for steps that are computed in pieces


@dataclass(frozen=True, slots=True)
class KVPool:
    """The caches of all layers of a model. The forward stream and the page mover write it."""

    # Per layer [pages, kv heads, page size, key_dim] in the model dtype; every page id is usable. For a windowed layer, the first
    # dimension may be window units. For a recurrent layer, [states, taps - 1, channels] in the model dtype.
    keys: tuple[Tensor, ...]
    # Per layer [pages, kv heads, page size, value_dim]; for a recurrent layer, float32[states, heads, key_dim, value_dim].
    values: tuple[Tensor, ...]
    arrivals: Arrivals | None = None  # layer-wise loads into the pool, None if there are no such loads
    first: int = 0  # number of the pool's first layer; layers are numbered across the pools of model and draft model
    num_states: int = 0  # number of states of each recurrent layer, without the SCRATCH_STATES after them
    # Cache group of each layer, None for a layer in pages; empty: all layers are in pages.
    kinds: tuple[CacheKind | None, ...] = ()
    # Saved inputs of draft tokens, by recurrent layer: [tokens, channels] and [tokens, 2 heads] in the model dtype. Empty without
    # draft tokens.
    inputs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.keys) == len(self.values), "each layer has keys and values"

    def kind(self, index: int) -> CacheKind | None:
        """Returns the cache group of a layer, or None if its KV is in pages."""
        return self.kinds[index] if self.kinds else None

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Returns a layer's keys and values for the next launch. The current stream waits for loads of the layer first.

        For a recurrent layer, returns the two parts of its states, and then the two parts of the saved inputs if there are any.
        """
        if self.arrivals is not None:
            self.arrivals.wait(self.first + index)
        return self.keys[index], self.values[index], *self.inputs.get(index, ())


NO_POOL = KVPool((), ())  # stands for a pool whose memory is released or not allocated yet


def bytes_per_token(layers: Sequence[LayerCache], dtype: torch.dtype, in_windows: bool = False) -> int:
    """Returns the bytes of a token's keys and values in the pages.

    Args:
        in_windows: whether windowed layers have their KV in units instead of pages.
    """
    return sum(_kv_bytes(layer, dtype) for layer in layers if isinstance(layer, LayerKV) and not (in_windows and layer.window))


def window_bytes_per_token(layers: Sequence[LayerCache], dtype: torch.dtype) -> int:
    """Returns the bytes of a token's keys and values over all windowed layers."""
    return sum(_kv_bytes(layer, dtype) for layer in layers if isinstance(layer, LayerKV) and layer.window)


def state_bytes(layers: Sequence[LayerCache], dtype: torch.dtype) -> int:
    """Returns the bytes of a state over all recurrent layers."""
    return sum(layer.num_bytes(dtype) for layer in layers if isinstance(layer, LayerState))


def input_bytes(layers: Sequence[LayerCache], dtype: torch.dtype) -> int:
    """Returns the bytes of the saved inputs of one token over all recurrent layers."""
    return sum(layer.input_size * dtype.itemsize for layer in layers if isinstance(layer, LayerState))


def _kv_bytes(layer: LayerKV, dtype: torch.dtype) -> int:
    return layer.size * dtype.itemsize


def allocate(
    layers: Sequence[LayerCache],
    sizes: PoolSizes,
    page_size: int,
    dtype: torch.dtype,
    kernels: Kernels,
    arrivals: Arrivals | None = None,
    first: int = 0,
    saved_tokens: int = 0,
) -> KVPool:
    """Allocates a pool with undefined content.

    Args:
        layers: sizes of each layer's cache.
        sizes: numbers of pages and units.
        page_size: tokens of a page.
        dtype: dtype of keys and values.
        kernels: kernels that will use the pool; they allocate its tensors in the form that they need.
        arrivals: see KVPool.
        first: see KVPool.
        saved_tokens: number of tokens whose inputs the recurrent layers can save; 0 without draft tokens.
    """
    assert sizes.pages > 0 and page_size > 0, "a pool has pages"
    keys, values, kinds = [], [], list[CacheKind | None]()
    inputs: dict[int, tuple[Tensor, Tensor]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, LayerState):
            kinds.append(CacheKind.STATE)
            assert sizes.states > 0, "a pool of recurrent layers has states"
            count = sizes.states + SCRATCH_STATES
            keys.append(kernels.allocate_pool((count, layer.taps - 1, layer.channels), dtype))
            values.append(kernels.allocate_pool((count, layer.heads, layer.key_dim, layer.value_dim), torch.float32))
            if saved_tokens:
                channels = kernels.allocate_pool((saved_tokens, layer.channels), dtype)
                inputs[index] = channels, kernels.allocate_pool((saved_tokens, 2 * layer.heads), dtype)
            continue
        assert layer.size > 0, "a token has keys and values"
        in_windows = bool(layer.window and sizes.windows)
        kinds.append(CacheKind.WINDOW if in_windows else None)
        count = sizes.windows if in_windows else sizes.pages
        shape = (count, layer.kv_heads, page_size)
        keys.append(kernels.allocate_pool((*shape, layer.key_dim), dtype))
        values.append(kernels.allocate_pool((*shape, layer.value_dim), dtype))
    return KVPool(tuple(keys), tuple(values), arrivals, first, sizes.states, tuple(kinds), inputs)


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of layers in which pages are loaded. Layers are numbered across the pools of model and draft model."""

    layers: tuple[tuple[int, ...], ...]  # layers of each group, in the order of arrival
    of: tuple[int, ...]  # group of each layer

    @classmethod
    def for_pools(cls, num_layers: Sequence[int], without_pages: Collection[int] = ()) -> LayerGroups:
        """Returns the groups for pools with these numbers of layers. The first pool is the model's.

        The model's layers come last, because the draft model computes with its pool before the model runs.

        Args:
            num_layers: number of layers of each pool.
            without_pages: layers without pages. They are in no group, and a step that waits for them waits for the first group.
        """
        total, first = sum(num_layers), num_layers[0]
        order = [layer for layer in (*range(first, total), *range(first)) if layer not in without_pages]
        assert order, "a layer has pages"
        layers = tuple(tuple(part.tolist()) for part in np.array_split(order, min(MOST_GROUPS, len(order))))
        of = [0] * total
        for group, part in enumerate(layers):
            for layer in part:
                of[layer] = group
        return cls(layers, tuple(of))


@dataclass(slots=True, eq=False)
class _RunningLoad:
    """A load that may not be complete yet."""

    pages: I32  # ids of the loaded pages
    groups: LayerGroups
    arrival: Arrival
    next: int = 0  # first group for which the forward stream has not waited; `count` if the stream has waited for all groups

    @property
    def count(self) -> int:
        """Number of groups of layers."""
        return len(self.groups.layers)

    def wait(self, group: int) -> None:
        if group >= self.next:
            self.arrival.wait(group)
            self.next = group + 1


class Arrivals:
    """The loads for which steps may have to wait.

    Any thread may call add() and settle(). The thread that launches steps makes all other calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: tuple[_RunningLoad, ...] = ()  # registered loads; replaced under the lock
        self._awaited: list[_RunningLoad] = []  # loads with pages in the tables of the step that is launched now

    def add(self, pages: I32, groups: LayerGroups, arrival: Arrival) -> None:
        """Registers a load. Called before the early fact of the load is reported to the core."""
        with self._lock:
            running = (each for each in self._running if not each.arrival.is_over)
            self._running = (*running, _RunningLoad(pages, groups, arrival))

    def settle(self) -> None:
        """Blocks until all registered loads are complete. Raises LoadFailed."""
        for each in self._running:
            each.arrival.settle(each.count - 1)

    def expect(self, pages: I32) -> None:
        """Declares that the step that is launched next gets these pages in its page tables."""
        if not self._running:
            return
        with self._lock:
            self._running = tuple(each for each in self._running if not each.arrival.is_over)
            running = [each for each in self._running if each.next < each.count and each not in self._awaited]
        self._awaited += [each for each in running if np.isin(pages, each.pages).any()]

    def wait(self, layer: int) -> None:
        """Makes the forward stream wait for a layer of the awaited loads. Called before a launch that reads the layer."""
        for each in self._awaited:
            each.wait(each.groups.of[layer])

    def wait_all(self) -> None:
        """Makes the forward stream wait for all layers of the awaited loads.

        Called before a launch that may read any layer, such as a graph, and at the end of each step.
        """
        while self._awaited:
            self._awaited[-1].wait(self._awaited[-1].count - 1)
            self._awaited.pop()


class LayerLoads:
    """Loads pages into the pools, group by group of layers, on the calling thread.

    For a GPU, the thread launches the copies of all groups, and then waits for them. On a CPU, it copies one group after another.
    """

    def __init__(self, streams: Streams, arrivals: Arrivals) -> None:
        self._streams, self._arrivals = streams, arrivals
        self._bytes_s = 0.0  # bytes per second of the last load of at least MIN_RATED_BYTES; 0 before the first one

    def load(
        self, copy_group: Callable[[int], None], pages: I32, groups: LayerGroups, num_bytes: int, report: Callable[[], None]
    ) -> tuple[float, bool]:
        """Loads pages and returns when all groups are complete.

        Args:
            copy_group: copies the layers of a group on the current stream.
            pages: int32[n], pages of the pools.
            groups: groups of layers.
            num_bytes: bytes of the whole load.
            report: reports the load to the core early. It is called when the groups that are not complete are expected to take
                less than EARLY_S seconds. From then on, steps may wait for the load.

        Returns:
            The duration in seconds, and whether `report` was called.

        Raises:
            LoadFailed: the load failed after `report` was called.
            Exception: the load failed before, and no step waits for it.
        """
        count, reported = len(groups.layers), False
        arrival = self._streams.arrival(count)
        try:
            if not self._streams.on_host:
                for group in range(count):
                    copy_group(group)
                    arrival.add(group)
            for group in range(count):
                if not reported and num_bytes * (count - group) <= self._bytes_s * EARLY_S * count:
                    self._arrivals.add(pages, groups, arrival)
                    reported = True
                    report()
                self._wait_for(arrival, group, copy_group)
        except Exception as error:  # an error of any type, such as errors of a driver
            if not reported:
                raise
            arrival.failed(error)
            raise LoadFailed(f"could not load KV pages for which steps wait: {error!r}") from error
        seconds = arrival.seconds
        if num_bytes >= MIN_RATED_BYTES:
            self._bytes_s = num_bytes / max(seconds, 1e-9)
        return seconds, reported

    def _wait_for(self, arrival: Arrival, group: int, copy_group: Callable[[int], None]) -> None:
        if self._streams.on_host:
            copy_group(group)
            arrival.add(group)
        else:
            arrival.settle(group)
