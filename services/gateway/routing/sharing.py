"""Whether prompts of late have had prefixes in common: a new prefix is then worth placing where other gateways would too."""

from __future__ import annotations

_MEMORY = 32  # decisions, about
_ENOUGH = 0.1


class SharingMeter:
    """One per model and gateway. Everything is taken to be shared until it has shown that it is not: after a cold start, many
    prompts arrive before the first match."""

    def __init__(self) -> None:
        self._share = 1.0

    @property
    def seen(self) -> bool:
        """Whether of the last decisions at least one in ten had a match."""
        return self._share >= _ENOUGH

    def decided(self, matched: bool) -> None:
        """matched: some worker had a prefix of the prompt."""
        self._share += (matched - self._share) / _MEMORY
