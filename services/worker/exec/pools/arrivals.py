"""Layer-wise loads of pages into the pools, and the steps that wait for them.

The core gets the fact of a load before its last bytes have arrived. From then on, a step may have these pages in its tables. The
first such step waits on the forward stream for each layer before it reads it. Later work on the forward stream then finds the
pages complete. All other readers and writers of these pages, or of the memory that they come from, call settle() first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.worker.core.contracts.transfers import I32
from services.worker.exec.streams.cuda_streams import Arrival

MOST_GROUPS = 16  # groups of layers per load; each costs a launch and an event


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
