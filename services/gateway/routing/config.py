"""What an operator may choose about routing."""

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
    """gate_abs and gate_rel: load is out of balance where it differs by more than so many requests and by more than this
    factor (SGLang's router: balance_abs_threshold, balance_rel_threshold). load_weight: what a load of one mean more costs,
    in full matches. load_bound: a match or a key takes no worker above so many times the mean load. load_floor: requests per
    worker that the mean counts as at least, so that a fleet almost at rest does not scatter a prefix over one request's
    difference. min_match_tokens: a shorter match is none. near_requests, near_rel: a worker is as good as the idlest for a
    prefix that nobody has if it has no more than so many requests above it, or this share of the mean."""

    gate_abs: float = 64.0
    gate_rel: float = 1.5
    load_weight: float = 1.0
    load_bound: float = 1.4
    load_floor: float = 4.0
    min_match_tokens: int = 64
    near_requests: float = 1.0
    near_rel: float = 0.05
