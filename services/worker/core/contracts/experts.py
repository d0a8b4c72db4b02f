"""The experts of a mixture model, and the number of rows that each of them computed. Plain data.

An expert is a feed-forward network of a sparse layer. For each row, the layer's router chooses some of its experts. Shared
experts, which compute every row, do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The sizes of a model's sparse layers. All sparse layers have the same numbers of experts and of chosen experts."""

    layers: tuple[int, ...]  # indices of the sparse layers in the model, rising
    num_experts: int  # experts of a layer, without shared experts
    num_chosen: int  # experts that compute a row

    def __post_init__(self) -> None:
        assert self.layers and 0 < self.num_chosen <= self.num_experts <= 1 << 16, "expert ids fit into uint16"

    @property
    def ids_per_token(self) -> int:
        """Number of expert ids of one token, over all sparse layers."""
        return len(self.layers) * self.num_chosen


@dataclass(frozen=True, slots=True)
class ExpertDistribution:
    """The counts of an expert distribution record at one time."""

    shape: ExpertShape
    is_running: bool  # whether the record counts further steps
    num_tokens: int  # tokens of the counted steps
    rows: NDArray[np.int64]  # int64[layers, experts], rows that each expert computed
    balancedness: float  # see ExpertRecord.balancedness
