"""Valid and invalid values of sampling parameters, from their table."""

from __future__ import annotations

from typing import Any

import numpy as np

from rootstock_llm.services.shared.sampling_parameters import PARAMETERS, Kind, SamplingParameter

NUMERIC = tuple(row for row in PARAMETERS if row.kind in (Kind.NUMBER, Kind.INTEGER))
WRONG_TYPES: dict[Kind, tuple[Any, ...]] = {
    Kind.NUMBER: ("1", True, [1]),
    Kind.INTEGER: ("1", True, 1.5),
    Kind.FLAG: ("true", 1, 0),
}


def typical(row: SamplingParameter) -> Any:
    """Returns a valid value that is not neutral. A float is exact in float32."""
    if row.kind is Kind.FLAG:
        return not row.default
    assert row.low is not None
    if row.kind is Kind.INTEGER:
        return max(int(row.low), 0) + 3
    assert row.high is not None
    return float(np.float32(row.low + (row.high - row.low) / 4))


def outside(row: SamplingParameter) -> list[float]:
    """Returns the nearest values below and above the range, and the lower limit if the range excludes it."""
    if row.kind is Kind.INTEGER:
        return [int(limit) + step for limit, step in ((row.low, -1), (row.high, 1)) if limit is not None]
    ends = ((row.low, -np.inf), (row.high, np.inf))
    excluded = [row.low] if row.excludes_low and row.low is not None else []
    return excluded + [float(np.nextafter(np.float32(limit), np.float32(far))) for limit, far in ends if limit is not None]


def name_of(row: SamplingParameter) -> str:
    """Returns the id of a test's case."""
    return "/".join(dict.fromkeys(row.names.values()))
