"""What guesses at the tokens to come of a slot. Its guesses cost or save time; what is said does not depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.worker.core.contracts.plan import SlotParams

if TYPE_CHECKING:
    from torch import Tensor

BETWEEN_TEXTS = -1  # in the token ids of several
Kept = tuple["Tensor", ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """Positions start .. start + count - 1 of a slot, whose KV counts. kept: [count, H] each, what the target has kept of their
    tokens, and nobody else has; None where that is not known, for there were several passes, or nothing is read of it. given:
    by the plan, and not sampled."""

    slot: int
    start: int
    count: int
    kept: Kept | None
    given: bool


class Drafter(Protocol):
    """Calls are of the thread that launches steps, on the forward stream, in the order of steps; of one step in the order below,
    but that the tokens of a step may be told once the next one has begun, where that one asks for no guesses. Pages are those of
    the table, and hold what a drafter keeps of a token beside what the target does. Of a slot whose holder wants no guesses it
    hears nothing until the next one is admitted."""

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
        """Of the given rows of the step once its sampling is launched, and of the others once their tokens are told."""
