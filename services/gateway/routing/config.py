"""The routing settings of an operator."""

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
    load_weight: float = 1.0  # score that a load of one mean load costs; a match of the whole prompt scores 1
    load_bound: float = 1.4  # largest load to which a match or a routing key may bring a worker, in mean loads
    load_floor: float = 4.0  # lowest mean load, in requests per worker, so that an almost idle fleet does not scatter prefixes
    min_match_tokens: int = 64  # shorter matches are ignored
    # A prompt without a match may go to any worker whose load exceeds the least load by at most the larger of near_requests and
    # near_rel mean loads.
    near_requests: float = 1.0
    near_rel: float = 0.05
