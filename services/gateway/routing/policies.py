"""The routing policies, which choose a worker for a request from arrays, without I/O.

The filters (filters.py) leave the rows of workers that are ready and have free slots, and preferably the adapter. A policy
chooses one of these rows and gives the reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.gateway.routing.columns import Ask, Pick, WorkerColumns
from services.gateway.routing.config import RoutingConfig, RoutingPolicy
from services.gateway.routing.filters import has_room, ready_rows, rows_with_room, with_adapter, with_room
from services.gateway.routing.load import least, load_over_mean, near_idlest, over_gate, relative_load, running_slots
from services.gateway.routing.rendezvous import rendezvous_weights

__all__ = ["REASONS", "Policy", "RoutingConfig", "RoutingPolicy", "has_room", "make_policy", "rows_with_room"]

REASONS = (
    "round_robin",
    "random",
    "least_requests",
    "least_tokens",
    "power_of_two",
    "affinity",
    "affinity_overflow",
    "prefix",
    "prefix_overflow",
    "no_match",
    "load_gate",
)


@dataclass(frozen=True, slots=True)
class Routable:
    """The input of a policy."""

    ask: Ask
    workers: WorkerColumns
    rows: NDArray[np.int64]  # rows to choose from, never empty
    ready: NDArray[np.int64]  # rows of all ready workers, full ones included
    config: RoutingConfig
    rng: random.Random


Chooser = Callable[[Routable], tuple[int, str]]


class Policy:
    """A routing policy, made by make_policy()."""

    def __init__(self, choose: Chooser, config: RoutingConfig, rng: random.Random) -> None:
        self._choose, self._config, self._rng = choose, config, rng

    def pick(self, ask: Ask, workers: WorkerColumns) -> Pick | None:
        """Chooses a worker. Changes nothing; the caller counts the pick in the columns.

        Returns:
            None if no ready worker has free slots.
        """
        ready = ready_rows(ask, workers)
        rows = with_room(ready, workers)
        if not len(rows):
            return None
        rows = with_adapter(rows, ready, ask, workers, self._config)
        row, reason = self._choose(Routable(ask, workers, rows, ready, self._config, self._rng))
        return Pick(row, reason, 0 if ask.matched is None else int(ask.matched[row]))


def make_policy(name: str, config: RoutingConfig, rng: random.Random) -> Policy:
    """Returns the policy with a name of RoutingPolicy. Raises ValueError for another name."""
    return Policy(_CHOOSERS[RoutingPolicy(name)], config, rng)


def _round_robin(c: Routable) -> tuple[int, str]:
    return int(c.rows[c.workers.last_pick[c.rows].argmin()]), "round_robin"


def _random(c: Routable) -> tuple[int, str]:
    return int(c.rows[c.rng.randrange(len(c.rows))]), "random"


def _least_loaded(c: Routable) -> int:
    return least(c.rows, relative_load(c.rows, c.workers), c.workers)


def _least_requests(c: Routable) -> tuple[int, str]:
    return _least_loaded(c), "least_requests"


def _least_tokens(c: Routable) -> tuple[int, str]:
    return least(c.rows, c.workers.tokens[c.rows] / running_slots(c.rows, c.workers), c.workers), "least_tokens"


def _power_of_two(c: Routable) -> tuple[int, str]:
    """Chooses the less loaded of two random workers (Mitzenmacher 2001)."""
    two = np.array(c.rng.sample(range(len(c.rows)), min(2, len(c.rows))))
    rows = c.rows[two]
    return least(rows, relative_load(rows, c.workers), c.workers), "power_of_two"


def _affinity(c: Routable) -> tuple[int, str]:
    if not c.ask.key:
        return _least_requests(c)
    return _by_key(c, over_gate(c.ready, c.ready, c.workers, c.config))


def _by_key(c: Routable, too_busy: NDArray[np.bool_]) -> tuple[int, str]:
    """Chooses the first allowed worker in the order of the routing key (bounded loads: Mirrokni et al. 2018).

    Args:
        too_busy: bool[ready], workers to avoid.
    """
    weights = rendezvous_weights(c.ask.key, c.workers.key[c.ready])
    first = int(c.ready[weights.argmax()])
    rows = c.ready[~too_busy & np.isin(c.ready, c.rows, assume_unique=True)]
    if not len(rows):
        return _least_loaded(c), "affinity_overflow"
    weights = rendezvous_weights(c.ask.key, c.workers.key[rows])
    row = int(rows[weights.argmax()])
    return row, "affinity" if row == first else "affinity_overflow"


def _prefix_aware(c: Routable) -> tuple[int, str]:
    """Chooses the worker with the highest score = saved / prompt tokens - load_weight x load in units of the mean load.

    A match counts nothing at a worker whose load would be above load_bound x the mean load. So a match of the whole prompt wins
    while the load of its worker is at most 1 / load_weight mean loads higher, and no prefix brings a worker above the bound.
    Further requests with the prefix go to a less loaded worker, which then caches the prefix too. If no worker has a match,
    _without_match() chooses. If the load is out of balance, the least loaded worker is chosen.
    """
    if len(c.ready) > 1 and over_gate(c.ready, c.ready, c.workers, c.config).any():
        return _least_loaded(c), "load_gate"
    matched = np.zeros(len(c.rows), np.int64) if c.ask.matched is None else c.ask.matched[c.rows]
    matched = np.where(matched >= c.config.min_match_tokens, matched, 0)
    if not matched.any():
        return _without_match(c)
    load = load_over_mean(c.rows, c.ready, c.workers, c.config)
    matched[load > c.config.load_bound] = 0
    saved = matched if c.ask.saved is None else np.where(matched > 0, c.ask.saved[c.rows], 0.0)
    score = saved / max(c.ask.prompt_tokens, 1) - c.config.load_weight * load
    best = least(c.rows, -score, c.workers)
    return best, "prefix" if matched[c.rows == best].any() else "prefix_overflow"


def _without_match(c: Routable) -> tuple[int, str]:
    """Chooses a worker for a prompt that no worker has cached.

    A request with a routing key goes to the key's worker within load_bound, so that prompts of one user meet there. Otherwise,
    the first block of the prompt chooses among the least loaded workers. So gateways that get the same new prefix at the same
    time choose the same worker without communication.
    """
    if c.ask.key:
        return _by_key(c, load_over_mean(c.ready, c.ready, c.workers, c.config) > c.config.load_bound)
    if not c.ask.first_block:
        return _least_loaded(c), "no_match"
    rows = c.rows[near_idlest(c.rows, c.workers, c.config)]
    weights = rendezvous_weights(c.ask.first_block.hex(), c.workers.key[rows])
    return int(rows[weights.argmax()]), "no_match"


_CHOOSERS: dict[RoutingPolicy, Chooser] = {
    RoutingPolicy.ROUND_ROBIN: _round_robin,
    RoutingPolicy.RANDOM: _random,
    RoutingPolicy.LEAST_REQUESTS: _least_requests,
    RoutingPolicy.LEAST_TOKENS: _least_tokens,
    RoutingPolicy.POWER_OF_TWO: _power_of_two,
    RoutingPolicy.AFFINITY: _affinity,
    RoutingPolicy.PREFIX_AWARE: _prefix_aware,
}
