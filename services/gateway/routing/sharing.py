"""Measures whether recent prompts share prefixes.

If they do, placing a new prefix on the worker that other gateways would choose too is worth it.
"""

from __future__ import annotations

_MEMORY = 32  # approximate number of decisions in the average
_ENOUGH = 0.1  # least share of decisions with a match


class SharingMeter:
    """The share of recent routing decisions with a match, for one model at this gateway.

    It begins at 1, because many prompts may arrive after a cold start before the first match.
    """

    def __init__(self) -> None:
        self._share = 1.0

    @property
    def seen(self) -> bool:
        """Whether at least one in ten of the last decisions had a match."""
        return self._share >= _ENOUGH

    def decided(self, matched: bool) -> None:
        """Counts a decision. `matched`: a worker had a prefix of the prompt."""
        self._share += (matched - self._share) / _MEMORY
