"""A grammar for tests. The allowed tokens depend only on the output position, so that outputs can be computed independently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec, Matcher


def spec(seed: int, length: int) -> GrammarSpec:
    return GrammarSpec(GrammarKind.EBNF, f"{seed} {length}")


class PositionMatcher:
    """A matcher whose output positions form groups of 4, 8, 12 or 16 positions. The seed selects the size of all groups.

    In every second group, each position allows one token. In the other groups, each position allows one token in three.
    """

    def __init__(self, seed: int, length: int, vocab_size: int) -> None:
        self.seed, self.length, self.vocab_size = seed, length, vocab_size
        self.accepted = 0
        self.cost_s = 0.0

    fault = ""

    @property
    def terminated(self) -> bool:
        return self.accepted >= self.length

    def allowed(self, position: int) -> NDArray[np.int64]:
        tokens = np.arange(self.vocab_size)
        if (position // (4 * (1 + self.seed % 4)) + self.seed) % 2 == 0:
            return tokens[[(self.seed + 13 * position) % self.vocab_size]]
        return tokens[tokens % 3 == position % 3]

    def mask(self) -> NDArray[np.uint32]:
        bits = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.uint8)
        bits[self.allowed(self.accepted)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> bool:
        if self.terminated or token not in self.allowed(self.accepted):
            return False
        self.accepted += 1
        return True

    def take_cost(self) -> float:
        cost, self.cost_s = self.cost_s, 0.0
        return cost

    def forced(self) -> Sequence[int]:
        out = []
        position = self.accepted
        while position < self.length and len(allowed := self.allowed(position)) == 1:
            out.append(int(allowed[0]))
            position += 1
        if len(out) < 2:
            return ()
        self.accepted = position
        return out


def masks_behind(
    matchers: Sequence[tuple[int, PositionMatcher]], guesses: Mapping[int, Sequence[int]]
) -> dict[int, list[NDArray[np.uint32]]]:
    """Returns, by row, the mask after each of the row's draft tokens.

    A row's list ends before the first draft token that the grammar refuses or that completes the grammar.
    """
    masks: dict[int, list[NDArray[np.uint32]]] = {}
    for row, matcher in matchers:
        ahead = copy(matcher)
        for token in guesses.get(row, ()):
            if not ahead.accept(token) or ahead.terminated:
                break
            masks.setdefault(row, []).append(ahead.mask())
    return masks


class ReadyBook:
    """A grammar book in which every grammar is compiled."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def open(self, spec: GrammarSpec, tenant: bytes = b"") -> Matcher | None:
        return self.matcher(spec)

    def matcher(self, spec: GrammarSpec) -> PositionMatcher:
        seed, length = map(int, spec.source.split())
        return PositionMatcher(seed, length, self.vocab_size)


class SlowBook(ReadyBook):
    """A grammar book in which only the grammars in `ready` are compiled. Other requested grammars wait in `pending`."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.ready: set[GrammarSpec] = set()
        self.pending: dict[GrammarSpec, None] = {}

    def open(self, spec: GrammarSpec, tenant: bytes = b"") -> Matcher | None:
        if spec not in self.ready:
            self.pending[spec] = None
            return None
        return self.matcher(spec)
