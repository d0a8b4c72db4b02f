"""NewTokenRatio: the share of running requests' remaining max_new_tokens that admission reserves
(docs/design/scheduler.md#new_token_ratio)."""

from __future__ import annotations

INIT_RATIO = 0.7
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20


class NewTokenRatio:
    """Starts high, decays linearly with decode steps to a floor, jumps up on retraction, starts over when idle."""

    def __init__(self, conservativeness: float) -> None:
        self.rebase(conservativeness)

    def rebase(self, conservativeness: float) -> None:
        """Starts over with another factor on the initial ratio."""
        self._init = min(INIT_RATIO * conservativeness, 1.0)
        self._floor = self._init * MIN_RATIO_FACTOR
        self._decay = (self._init - self._floor) / DECAY_STEPS
        self.value = self._init
        assert 0 <= self._floor <= self._init <= 1, "a share"

    def step(self) -> None:
        """One decode step went well."""
        self.value = max(self.value - self._decay, self._floor)

    def raise_on_retract(self, num_decoded: int, batch_size: int, sum_max_new: int) -> None:
        """num_decoded, sum_max_new: outputs so far and at most, summed over the rows that stay; batch_size: their number."""
        assert num_decoded >= 0 and batch_size > 0, "some rows stay"
        self.value = min(1.0, (num_decoded + RETRACT_DECODE_STEPS * batch_size) / (sum_max_new + 1))

    def reset(self) -> None:
        self.value = self._init
