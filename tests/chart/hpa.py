"""Computes replicas like Kubernetes' HorizontalPodAutoscaler: ratios with a tolerance, stabilisation windows and policies.

Source: Kubernetes documentation, Horizontal Pod Autoscaling, "Algorithm details" and "Configurable scaling behavior".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SYNC_S = 15.0
TOLERANCE = 0.1


@dataclass(frozen=True)
class External:
    """A metric of type External."""

    total: float  # value of the metric, summed over all replicas
    target: float  # target value per replica


@dataclass(frozen=True)
class Pods:
    """A metric of type Pods."""

    values: Sequence[float]  # values of the pods that report one
    missing: int  # number of starting pods, which report no value
    target: float  # target value per pod


Reading = External | Pods


def wanted(reading: Reading, replicas: int) -> int:
    """Returns the number of replicas that one metric requires."""
    if isinstance(reading, External):
        return replicas if _near_one(reading.total / (reading.target * replicas)) else math.ceil(reading.total / reading.target)
    if not reading.values:
        return replicas
    count = len(reading.values)
    ratio = sum(reading.values) / count / reading.target
    if not reading.missing:
        return replicas if _near_one(ratio) else math.ceil(ratio * count)
    # A pod without a value counts as 0 if the ratio asks for more replicas, and as the target if it asks for fewer.
    filled = sum(reading.values) + (reading.missing * reading.target if ratio < 1 else 0.0)
    count += reading.missing
    again = filled / count / reading.target
    if _near_one(again) or (ratio < 1) != (again < 1):
        return replicas
    result = math.ceil(again * count)
    return replicas if (result > replicas) != (again > 1) else result


def _near_one(ratio: float) -> bool:
    return abs(ratio - 1.0) <= TOLERANCE


class Autoscaler:
    """One HPA with its history. Times are in seconds.

    Args:
        spec: spec of an autoscaling/v2 HPA whose `behavior` has scaleUp and scaleDown.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._least, self._most = int(spec["minReplicas"]), int(spec["maxReplicas"])
        self._up, self._down = spec["behavior"]["scaleUp"], spec["behavior"]["scaleDown"]
        self._recommended: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []

    def replicas(self, now: float, current: int, readings: Sequence[Reading]) -> int:
        desired = max(wanted(reading, current) for reading in readings)
        stable = self._stabilised(now, current, desired)
        allowed = self._limited(now, current, stable)
        if allowed != current:
            self._changes.append((now, allowed - current))
        return allowed

    def _stabilised(self, now: float, current: int, desired: int) -> int:
        """Returns the stabilised number of replicas.

        The number increases to the smallest recommendation of the scale-up window, and decreases to the largest recommendation of
        the scale-down window.
        """
        self._recommended.append((now, desired))
        up_s, down_s = self._up["stabilizationWindowSeconds"], self._down["stabilizationWindowSeconds"]
        up = min(value for at, value in self._recommended if at > now - up_s or at == now)
        down = max(value for at, value in self._recommended if at > now - down_s or at == now)
        return min(max(current, up), down)

    def _limited(self, now: float, current: int, desired: int) -> int:
        if desired > current:
            limits = [self._up_limit(policy, now, current) for policy in self._up["policies"]]
            return min(desired, max(limits), self._most)
        if desired < current:
            limits = [self._down_limit(policy, now, current) for policy in self._down["policies"]]
            return max(desired, min(limits), self._least)
        return desired

    def _begin(self, policy: Mapping[str, Any], now: float, current: int) -> int:
        """Returns the number of replicas at the beginning of the policy's period."""
        return current - sum(change for at, change in self._changes if at > now - policy["periodSeconds"])

    def _up_limit(self, policy: Mapping[str, Any], now: float, current: int) -> int:
        begun = self._begin(policy, now, current)
        return begun + policy["value"] if policy["type"] == "Pods" else math.ceil(begun * (1 + policy["value"] / 100))

    def _down_limit(self, policy: Mapping[str, Any], now: float, current: int) -> int:
        begun = self._begin(policy, now, current)
        return begun - policy["value"] if policy["type"] == "Pods" else int(begun * (1 - policy["value"] / 100))
