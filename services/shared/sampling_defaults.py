"""The sampling parameters of a request that does not set them. No I/O.

The worker makes the defaults, and the gateway puts them into requests. A model or an operator may choose the defaults of
parameters with `of_model` in services/shared/sampling_parameters.py. Other parameters keep the API's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from services.shared.sampling_parameters import SCALAR


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The defaults of a model. The values in this class are the API's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def over(self, values: Mapping[str, Any]) -> SamplingDefaults:
        """Returns the defaults with these values replaced. The values must have passed fault()."""
        return replace(self, **{name: SCALAR[name].resolved(value) for name, value in values.items()})

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in NAMES}


API_DEFAULTS = SamplingDefaults()
NAMES = tuple(field.name for field in fields(SamplingDefaults))


def fault(name: str, value: Any) -> str:
    """Returns the fault of a value for a parameter in NAMES, or "" if the value is valid."""
    return SCALAR[name].fault(value)
