"""What guesses at the tokens to come of a slot. Its guesses cost or save time; what is said does not depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.core.contracts.plan import SlotParams

BETWEEN_TEXTS = -1  # in the token ids of several


@dataclass(frozen=True, slots=True)
class Computed:
    """Positions start .. start + count - 1 of a slot, whose KV counts. first: index of the first one's token in the pass that has
    computed it; -1 where that is not known, for there were several passes. given: by the plan, and not sampled."""

    slot: int
    start: int
    count: int
    first: int
    given: bool


class Drafter(Protocol):
    """Calls are of the thread that launches steps, in the order of steps; of one step in the order below. Pages are those of the
    table, and hold what a drafter keeps of a token beside what the target does. Of a slot whose holder wants no guesses it hears
    nothing until the next one is admitted."""

    def begin(self) -> None:
        """Before anything of a step: slots and pages are still those of the step before."""

    def admit(self, slot: SlotParams) -> None:
        """The slot has a new holder, whose tokens so far are its history."""

    def know(self, slot: int, start: int, ids: Sequence[int]) -> None:
        """What stands at positions from start on, and nothing behind it."""

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """Guesses at the next tokens of slots: as many as are wanted of each, or fewer. The pages for them are in the table."""

    def predicted(self, slot: int) -> bool:
        """Whether its guesses, proposed last, are of the request's prediction."""

    def sampled(self, slot: int, tokens: Sequence[int]) -> None:
        """The next tokens, of which all but the last were guessed right."""

    def computed(self, rows: Sequence[Computed]) -> None:
        """Of all rows of the step, once it has been sampled."""
