"""What guesses at the tokens to come of a slot. Its guesses cost or save time; what is said does not depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.worker.core.contracts.plan import SlotParams


class Drafter(Protocol):
    """Calls are of the thread that launches steps, in the order of steps."""

    def admit(self, slot: SlotParams) -> None:
        """The slot has a new holder, whose tokens so far are its history."""

    def know(self, slot: int, start: int, ids: Sequence[int]) -> None:
        """What stands at positions from start on, and nothing behind it."""

    def propose(self, slot: int, most: int) -> list[int]:
        """Guesses at the next tokens, `most` of them or fewer."""

    def sampled(self, slot: int, tokens: Sequence[int]) -> None:
        """The next tokens, of which all but the last were guessed right."""
