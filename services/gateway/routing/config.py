"""The names of the routing policies, and their parameters."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class RoutingPolicy(enum.StrEnum):
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    LEAST_REQUESTS = "least_requests"
    LEAST_TOKENS = "least_tokens"
    POWER_OF_TWO = "power_of_two"
    AFFINITY = "affinity"
    PREFIX_AWARE = "prefix_aware"


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """The parameters of the policies."""

    # n is the number of requests of the least loaded worker. The load is out of balance if another worker has more than
    # n + gate_abs and more than gate_rel * n requests. SGLang's router: balance_abs_threshold and balance_rel_threshold.
    gate_abs: float = 64.0
    gate_rel: float = 1.5
    # Score of a worker: part of the prompt that its cache saves (Hits.saved, 0 to 1) minus load_weight times its load, in units
    # of the mean load.
    load_weight: float = 1.0
    # If a worker's load with the new request would exceed load_bound mean loads, its match and the routing key do not count.
    load_bound: float = 1.4
    # Lower limit of the mean load, in requests per worker. Without this limit, a few requests in an almost idle fleet would
    # exceed load_bound, and one prefix would be cached at several workers.
    load_floor: float = 4.0
    min_match_tokens: int = 64  # a match of fewer tokens counts as none
    # A prompt without a match may go to any worker whose load is near the least load. The difference is at most near_requests or
    # near_rel mean loads, whichever is larger.
    near_requests: float = 1.0
    near_rel: float = 0.05
