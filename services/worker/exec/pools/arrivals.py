"""Pages that come into the pools layer by layer beside the steps, and who waits for them.

The core hears of a load before its last bytes are there. Whoever may use its pages from then on has them in a slot's table, by an
update of a step that is launched later: that step waits for each layer as it comes to it, and all that is behind it on the
forward stream finds them there. Whoever else reads or writes pages, of the pools or of the memory that they come from, settles
first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.worker.core.contracts.transfers import I32
from services.worker.exec.streams.cuda_streams import Arrival

MOST_GROUPS = 16  # that a load is cut into: each costs a launch, and an event


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Layers of all pools, by their number there, in the order in which they come. of: the group of each layer."""

    layers: tuple[tuple[int, ...], ...]
    of: tuple[int, ...]

    @classmethod
    def for_pools(cls, num_layers: Sequence[int]) -> LayerGroups:
        """num_layers: of each pool. The first pool's layers come last: what drafts computes ahead of the model."""
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
    """next: the first group that no step has waited for: where that is none, all later steps are behind it."""

    pages: I32
    groups: LayerGroups
    arrival: Arrival
    next: int = 0

    @property
    def count(self) -> int:
        return len(self.groups.layers)

    def wait(self, group: int) -> None:
        if group >= self.next:
            self.arrival.wait(group)
            self.next = group + 1


class Arrivals:
    """add() and settle() are called on any thread, all else where steps are launched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: tuple[_Coming, ...] = ()
        self._awaited: list[_Coming] = []

    def add(self, pages: I32, groups: LayerGroups, arrival: Arrival) -> None:
        """Before the core hears that they have come."""
        with self._lock:
            self._coming = (*(each for each in self._coming if not each.arrival.is_over), _Coming(pages, groups, arrival))

    def settle(self) -> None:
        """Blocks until all that was added is there. Raises NeverCame."""
        for each in self._coming:
            each.arrival.settle(each.count - 1)

    def expect(self, pages: I32) -> None:
        """The step that is launched next is the first with these pages in its tables."""
        if not self._coming:
            return
        with self._lock:
            self._coming = tuple(each for each in self._coming if not each.arrival.is_over)
            coming = [each for each in self._coming if each.next < each.count and each not in self._awaited]
        self._awaited += [each for each in coming if np.isin(pages, each.pages).any()]

    def wait(self, layer: int) -> None:
        """What is launched next reads this layer, by its number in all pools."""
        for each in self._awaited:
            each.wait(each.groups.of[layer])

    def wait_all(self) -> None:
        """What is launched next reads any of them, or the step is launched: later ones find all there."""
        while self._awaited:
            self._awaited[-1].wait(self._awaited[-1].count - 1)
            self._awaited.pop()
