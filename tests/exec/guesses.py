"""A drafter for tests and benchmarks that proposes known outputs with random errors."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from rootstock_llm.services.worker.core.contracts.plan import SlotParams
from rootstock_llm.services.worker.exec.contracts.drafter import Computed


class Guesses:
    """A Drafter that has the complete texts of all requests and proposes their tokens with random errors.

    `drafted` counts the draft tokens, and `accepted` counts the accepted draft tokens.
    """

    def __init__(self, texts: Sequence[Sequence[int]], errors: float, vocab_size: int, seed: int = 3) -> None:
        """Creates a drafter without slots.

        Args:
            texts: complete texts; a slot's text is the one that begins with the slot's tokens.
            errors: share of wrong draft tokens.
            vocab_size: number of tokens of the vocabulary.
            seed: seed of the random errors.
        """
        self._known, self._errors, self._rng = [list(text) for text in texts], errors, random.Random(seed)
        self._vocab_size = vocab_size
        self._texts: dict[int, list[int]] = {}
        self.accepted = self.drafted = 0

    def begin(self) -> None:
        """Does nothing, because this drafter computes nothing."""

    def admit(self, slot: SlotParams) -> None:
        self._texts[slot.slot] = slot.history.tolist()

    def set_tokens(self, slot: int, start: int, ids: Sequence[int]) -> None:
        text = self._texts[slot]
        assert len(text) >= start, "reported tokens must continue the known text without a gap"
        text[start:] = ids

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        return {slot: self._guess(slot, most) for slot, most in wanted.items()}

    def _guess(self, slot: int, most: int) -> list[int]:
        text = self._texts[slot]
        found = next((known for known in self._known if known[: len(text)] == text), text)
        guess = found[len(text) : len(text) + most]
        self.drafted += len(guess)
        return [(token + 1) % self._vocab_size if self._rng.random() < self._errors else token for token in guess]

    def used_prediction(self, slot: int) -> bool:
        """Returns False, because the drafter uses no prediction."""
        return False

    def sampled(self, slot: int, tokens: Sequence[int]) -> None:
        self._texts[slot].extend(tokens)
        self.accepted += len(tokens) - 1

    def computed(self, rows: Sequence[Computed]) -> None:
        """Checks the positions of the computed rows: they must end within the known text and include no rejected draft token."""
        for row in rows:
            known = len(self._texts[row.slot])
            assert known - 1 <= row.start + row.count <= (known if row.from_plan else known - 1), (
                "a reported row ends within the known text"
            )
