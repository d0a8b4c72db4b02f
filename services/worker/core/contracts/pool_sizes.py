"""Splits a device's memory between the pages and the units of cache groups (docs/design/cache-groups.md).

The names of ratios are those of SGLang's flags.
"""

from __future__ import annotations

from dataclasses import dataclass

from rootstock_llm.services.worker.core.contracts.cache_groups import CacheGroup, CacheKind, states_per_slot


class PoolTooSmall(ValueError):
    """Raised if the free memory cannot hold a page, the pages or units of one request, or max_mamba_cache_size states."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Numbers of pages and units of a pool."""

    pages: int
    windows: int = 0  # units of the WINDOW group; 0 if windowed layers have their KV in pages, or if there are none
    states: int = 0  # units of the STATE group; 0 without recurrent layers

    def groups(self, window: int, window_bytes: int = 0, state_bytes: int = 0) -> tuple[CacheGroup, ...]:
        """Returns the cache groups with these units.

        Args:
            window: largest window of the model's layers in tokens.
            window_bytes: bytes of a window unit.
            state_bytes: bytes of a state.
        """
        windows = (CacheGroup(CacheKind.WINDOW, self.windows, window, window_bytes),) if self.windows else ()
        return windows + ((CacheGroup(CacheKind.STATE, self.states, unit_bytes=state_bytes),) if self.states else ())

    def max_running_requests(self, wanted: int, max_drafts: int = 0) -> int:
        """Returns the number of requests whose states fit, at most `wanted`. See SchedulerConfig.max_drafts."""
        return min(wanted, self.states // states_per_slot(max_drafts)) if self.states else wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The bytes of a model's caches, and the settings by which memory is split between them."""

    page_bytes: int  # bytes of a page of tokens in the layers whose KV is in pages; 0 if there are none
    least_pages: int = 0  # smallest number of pages of a pool if pages take no bytes (page_bytes is 0)
    window_bytes: int = 0  # bytes of a window unit; 0 without a WINDOW group
    state_bytes: int = 0  # bytes of a state; 0 without recurrent layers
    scratch_states: int = 0  # states that a pool has in addition, for the executor's own use
    replay_bytes: int = 0  # bytes of the saved inputs of recurrent layers, from which accepted draft tokens are replayed
    max_drafts: int = 0  # largest number of draft tokens of a decode row
    max_slots: int = 1  # largest number of running requests
    slot_windows: int = 0  # largest number of window units that one request may need
    swa_full_tokens_ratio: float = 0.8  # window units per page
    mamba_full_memory_ratio: float = 2.0  # bytes of states per byte of KV
    max_mamba_cache_size: int = 0  # number of states; 0: mamba_full_memory_ratio decides

    @property
    def page_cost(self) -> float:
        """Bytes of a page with its share of units."""
        kv = self.page_bytes + self._windows_per_page * self.window_bytes
        return kv * (1.0 + self._state_share)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that a pool of any size takes for the executor's own use."""
        return self.scratch_states * self.state_bytes + self.replay_bytes

    @property
    def _slot_states(self) -> int:
        return states_per_slot(self.max_drafts)

    def bytes_of(self, sizes: PoolSizes) -> int:
        """Returns the bytes of pools of these sizes."""
        units = sizes.windows * self.window_bytes + sizes.states * self.state_bytes
        return sizes.pages * self.page_bytes + units + self.scratch_bytes

    @property
    def _windows_per_page(self) -> float:
        return self.swa_full_tokens_ratio if self.window_bytes else 0.0

    @property
    def _state_share(self) -> float:
        return self.mamba_full_memory_ratio if self.state_bytes and not self.max_mamba_cache_size else 0.0

    def split(self, budget: int) -> PoolSizes:
        """Returns the sizes of pools that take at most `budget` bytes.

        Raises:
            PoolTooSmall: the units of one request, or max_mamba_cache_size states, do not fit. The message names the units and
                the bytes.
        """
        assert self.page_cost > 0, "a token takes memory in some layer"
        budget = max(budget, 0)
        given = self.max_mamba_cache_size * self.state_bytes
        pages = max(0, int((budget - self.scratch_bytes - given) / self.page_cost))
        sizes = self.with_units(pages)
        taken = self.bytes_of(PoolSizes(0, sizes.windows, sizes.states))
        if sizes.states and taken > budget:
            whose = "of max_mamba_cache_size" if self.max_mamba_cache_size else "for one request"
            count, own = sizes.states, f"{self.scratch_states} of the worker's own"
            replay = f" and {_mib(self.replay_bytes)} of inputs of draft tokens" if self.replay_bytes else ""
            raise PoolTooSmall(
                f"{count} states {whose} and {own}, {_mib(self.state_bytes)} each,{replay} do not fit into {_mib(budget)}"
            )
        if taken > budget:
            raise PoolTooSmall(
                f"{self.slot_windows} window units of {_mib(self.window_bytes)} for one request do not fit into {_mib(budget)}"
            )
        # One request needs more units than the ratios give for this number of pages. Fewer pages fit beside these units.
        if taken + pages * self.page_bytes > budget and self.page_bytes:
            pages = (budget - taken) // self.page_bytes
        return PoolSizes(max(pages, self.least_pages), sizes.windows, sizes.states)

    def with_units(self, pages: int) -> PoolSizes:
        """Returns the sizes that the ratios give for a number of pages, with at least the units of one request."""
        windows = max(int(pages * self._windows_per_page), self.slot_windows) if self.window_bytes else 0
        if not self.state_bytes:
            return PoolSizes(pages, windows)
        kv = pages * self.page_bytes + windows * self.window_bytes
        states = self.max_mamba_cache_size or int(kv * self._state_share / self.state_bytes)
        return PoolSizes(pages, windows, max(states, self._slot_states))

    def for_pages(self, pages: int, budget: int) -> PoolSizes:
        """Returns the pool sizes for a number of pages that a setting gives.

        Unless max_mamba_cache_size is set, there are at least enough states for max_slots requests, with one cached state for
        each. If `budget` bytes do not suffice for them, there are as many states as fit, but at least those of one request.
        """
        sizes = self.with_units(pages)
        if not self.state_bytes or self.max_mamba_cache_size:
            return sizes
        rest = budget - self.bytes_of(PoolSizes(pages, sizes.windows))
        most = max(rest // self.state_bytes, self._slot_states)
        return PoolSizes(pages, sizes.windows, min(max(sizes.states, (self._slot_states + 1) * self.max_slots), most))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
