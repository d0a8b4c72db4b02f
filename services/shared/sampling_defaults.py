"""What a request that does not say how to sample is sampled with. Pure.

One table, for the worker that makes the defaults and the gateway that puts them into requests. Five parameters have defaults
that a model or an operator may choose; all others have the API's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from services.shared import limits

TOP_K_RANGE = (-1, limits.MAX_TOP_K)
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": limits.TEMPERATURE_RANGE,
    "top_p": limits.TOP_P_RANGE,
    "top_k": TOP_K_RANGE,
    "min_p": limits.MIN_P_RANGE,
    "repetition_penalty": limits.REPETITION_PENALTY_RANGE,
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """As they stand here they are the API's. top_k: -1 for all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def over(self, values: Mapping[str, Any]) -> SamplingDefaults:
        """With these in place of its own. They have passed `fault`."""
        return replace(self, **{name: (value or -1) if name == "top_k" else value for name, value in values.items()})

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


API_DEFAULTS = SamplingDefaults()
NAMES = tuple(field.name for field in fields(SamplingDefaults))


def fault(name: str, value: Any) -> str:
    """What is wrong with a value of one of NAMES; "" if nothing is."""
    low, high = RANGES[name]
    kinds, what = ((int,), "whole number") if name == "top_k" else ((int, float), "number")
    fits = type(value) in kinds and low <= value <= high
    return "" if fits else f"must be a {what} from {low:.10g} to {high:.10g}"
