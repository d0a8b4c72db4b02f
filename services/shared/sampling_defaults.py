"""What a request that does not say how to sample is sampled with. Pure.

For the worker that makes the defaults and the gateway that puts them into requests. A model or an operator may choose those of
the parameters that services/shared/sampling_parameters.py marks so; all others have the API's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from services.shared.sampling_parameters import SCALAR


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
        return replace(self, **{name: SCALAR[name].resolved(value) for name, value in values.items()})

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in NAMES}


API_DEFAULTS = SamplingDefaults()
NAMES = tuple(field.name for field in fields(SamplingDefaults))


def fault(name: str, value: Any) -> str:
    """What is wrong with a value of one of NAMES; "" if nothing is."""
    return SCALAR[name].fault(value)
