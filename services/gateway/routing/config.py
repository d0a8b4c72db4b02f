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

    # The load is out of balance if a worker has over gate_abs more requests than the least loaded one, and over gate_rel times
    # its requests (balance_abs_threshold and balance_rel_threshold of SGLang's router).
    gate_abs: float = 64.0
    gate_rel: float = 1.5
    # A match of the whole prompt adds 1 to the score of a worker, and each mean load of the worker subtracts load_weight.
    load_weight: float = 1.0
    # Largest load of a worker, with the new request, at which a match or a routing key may choose the worker. In mean loads.
    load_bound: float = 1.4
    # Smallest value of the mean load, in requests per worker. So a few requests in an almost idle fleet do not spread a prefix.
    load_floor: float = 4.0
    min_match_tokens: int = 64  # a match of fewer tokens counts as none
    # A prompt without a match may go to any worker whose load exceeds the least load by at most the larger of near_requests and
    # near_rel mean loads.
    near_requests: float = 1.0
    near_rel: float = 0.05
