"""Decides which layers of a model have pages, windows and states, computes the sizes of their pools, and allocates the pools."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from rootstock_llm.kernels.contracts.ops import Kernels
from rootstock_llm.services.worker.core.contracts.cache_groups import draft_window_tokens, window_pages
from rootstock_llm.services.worker.core.contracts.pool_sizes import CacheShape, PoolSizes, PoolTooSmall
from rootstock_llm.services.worker.exec.contracts.options import DeviceOptions
from rootstock_llm.services.worker.exec.pools import kv_pool
from rootstock_llm.services.worker.exec.pools.host_memory import free_memory
from rootstock_llm.services.worker.exec.pools.kv_pool import Arrivals, KVPool, LayerCache, LayerKV, LayerState
from rootstock_llm.services.worker.exec.step.saved_inputs import saved_tokens


class ModelPools:
    """Computes the sizes of the pools of a model and its draft model, and allocates the pools."""

    def __init__(
        self,
        layers: tuple[LayerCache, ...],
        draft_layers: tuple[LayerKV, ...],
        dtype: torch.dtype,
        page_size: int,
        max_slots: int,
        context_len: int,
        device: torch.device,
        kernels: Kernels,
        options: DeviceOptions,
        arrivals: Arrivals,
    ) -> None:
        """Chooses the caches of the layers.

        Args:
            layers: caches of the model's layers.
            draft_layers: KV of the draft model's layers; empty without a draft model.
            dtype: dtype of keys and values.
            kernels: kernels that will use the pools.
            arrivals: layer-wise loads into the pools.
        """
        self._layers, self._draft_layers, self._dtype, self._page_size = layers, draft_layers, dtype, page_size
        self._max_slots, self._context_len, self._device = max_slots, context_len, device
        self._kernels, self._options, self._arrivals = kernels, options, arrivals
        self.has_states = any(isinstance(layer, LayerState) for layer in layers)
        windows = [layer.window for layer in layers if isinstance(layer, LayerKV)]
        # In tiers below the device, units take the space of whole pages. Pages have bytes only if they have the KV of some layer.
        moves = options.tiers is not None or options.peers is not None
        # Largest window in tokens of the layers whose KV is in window units; 0 if there is no such layer. If pages would
        # otherwise have no bytes for tiers or KV transfers, windowed layers have their KV in pages.
        in_pages_only = moves and 0 not in windows
        self.window = 0 if in_pages_only else max(windows, default=0)

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in the pages, of the model and of the draft model."""
        draft = kv_pool.bytes_per_token(self._draft_layers, self._dtype)
        return kv_pool.bytes_per_token(self._layers, self._dtype, self.window > 0) + draft

    @property
    def layout(self) -> str:
        """Dtype, page size and sizes of the layers, which determine the bytes of pages and units."""
        layers: list[object] = []
        for layer in (*self._layers, *self._draft_layers):
            sizes: object = layer
            if isinstance(layer, LayerKV):
                in_window = (layer.window,) if self.window and layer.window else ()
                sizes = (layer.kv_heads, layer.key_dim, layer.value_dim, *in_window)
            layers.append(sizes)
        return f"{self._dtype} {self._page_size} {layers}"

    @cached_property
    def caches(self) -> CacheShape:
        """The bytes of pages and units, and the settings by which memory is split between them."""
        size, options = self._page_size, self._options
        pages_per_slot = -(-self._context_len // size)
        longest = max(options.max_chunk or self._context_len, draft_window_tokens(options.max_drafts))
        return CacheShape(
            page_bytes=self.token_bytes * size,
            least_pages=0 if self.token_bytes else self._max_slots * pages_per_slot,
            window_bytes=kv_pool.window_bytes_per_token(self._layers, self._dtype) * size if self.window else 0,
            state_bytes=kv_pool.state_bytes(self._layers, self._dtype),
            scratch_states=kv_pool.SCRATCH_STATES if self.has_states else 0,
            max_slots=self._max_slots,
            slot_windows=window_pages(self.window + longest, size, pages_per_slot) if self.window else 0,
            replay_bytes=self._saved_tokens * kv_pool.input_bytes(self._layers, self._dtype),
            max_drafts=options.max_drafts,
            swa_full_tokens_ratio=options.swa_full_tokens_ratio,
            mamba_full_memory_ratio=options.mamba_full_memory_ratio,
            max_mamba_cache_size=options.max_mamba_cache_size if self.has_states else 0,
        )

    @property
    def _saved_tokens(self) -> int:
        """Number of tokens whose inputs the recurrent layers can save."""
        return saved_tokens(self._max_slots, self._options.max_drafts) if self.has_states else 0

    @property
    def smallest(self) -> PoolSizes:
        """The sizes of a pool with one page, and one unit of each group."""
        return PoolSizes(1, int(self.window > 0), int(self.has_states))

    def host_sizes(self, mem_fraction_static: float) -> PoolSizes:
        """Returns the sizes of pools that take at most mem_fraction_static of the host's free memory. Raises PoolTooSmall."""
        sizes = self.caches.split(host_budget(mem_fraction_static))
        if sizes.pages < 1:
            size, num_bytes = self._page_size, self.caches.page_bytes
            raise PoolTooSmall(
                f"no KV page of {size} tokens ({num_bytes} bytes) fits into {mem_fraction_static:g} of the free memory"
            )
        return sizes

    def allocate(self, sizes: PoolSizes, draft_layers: tuple[LayerKV, ...] | None = None) -> KVPool:
        """Allocates a pool.

        On a GPU, keys and values are filled with zeros: attention multiplies masked values by 0, and 0 times a NaN in new memory
        would be NaN.

        Args:
            sizes: numbers of pages and units.
            draft_layers: layers of the draft model, or None for those of the model.
        """
        with self._device:  # for kernels that allocate on torch's default device
            if draft_layers is None:
                own, first, saved = self._layers, 0, self._saved_tokens
            else:  # a draft model has all its KV in pages
                own, first, saved, sizes = draft_layers, len(self._layers), 0, PoolSizes(sizes.pages)
            pool = kv_pool.allocate(own, sizes, self._page_size, self._dtype, self._kernels, self._arrivals, first, saved)
        if self._device.type == "cuda":
            for each in (*pool.keys, *pool.values):
                each.zero_()
        return pool

    def report(self, sizes: PoolSizes, progress: Callable[[str], None]) -> None:
        """Passes a line for the log about each kind of cache to `progress`."""
        size, caches = self._page_size, self.caches
        progress(f"KV pool: {sizes.pages} pages of {size} tokens, {sizes.pages * caches.page_bytes >> 20} MiB")
        if sizes.windows:
            megabytes = sizes.windows * caches.window_bytes >> 20
            progress(f"windows of up to {self.window} tokens: {sizes.windows} units of {size} tokens, {megabytes} MiB")
        if sizes.states:
            megabytes = sizes.states * caches.state_bytes >> 20
            running = sizes.max_running_requests(self._max_slots, self._options.max_drafts)
            progress(f"states of recurrent layers: {sizes.states} states, {megabytes} MiB, for {running} running requests")
        if caches.replay_bytes:
            progress(f"inputs of draft tokens for recurrent layers: {caches.replay_bytes >> 20} MiB")


def host_budget(mem_fraction_static: float) -> int:
    """Returns the bytes of the host's free memory that pools may take."""
    return int(free_memory() * mem_fraction_static)
