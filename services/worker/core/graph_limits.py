"""Which steps an executor replays as one graph, and how far rows come in such a step whose next tokens are known already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """A graph's rows are tokens: n tokens of one sequence are n rows of it, each of which reads its own context.

    rows: of the largest graph; 0: no step is replayed. rereads: tokens of KV that a replayed step may read beside those that
    it would read with one row for each sequence. eager_cost: what a step that is launched kernel by kernel takes longer
    than a replayed one, in decode steps.
    """

    rows: int = 0
    rereads: int = 0
    eager_cost: float = 0.0

    def hold(self, starts: I32, num_tokens: I32) -> bool:
        """starts, num_tokens: int32[rows], of a step that extends nothing but what is known of begun sequences."""
        if int(num_tokens.sum()) > self.rows:
            return False
        more = np.flatnonzero(num_tokens > 1)
        return sum(map(rereads, starts[more].tolist(), num_tokens[more].tolist())) <= self.rereads


def rereads(start: int, count: int) -> int:
    """Tokens of KV that `count` rows at positions from `start` on read beside those that the last of them reads."""
    return (count - 1) * start + count * (count - 1) // 2


def strides(limits: GraphLimits, starts: Sequence[int], left: Sequence[int], num_rows: int) -> list[int] | None:
    """How many of its `left` known tokens each row computes in the next step, from `starts` on: as many as a graph holds, and
    one at least. None: all of them, for the step is no graph's in any case, or because the steps that these rows are saved
    outweigh what a step without a graph costs all of its `num_rows` sequences, these among them."""
    room, readable = limits.rows - num_rows, limits.rereads
    if room < 0:
        return None
    taken = []
    for start, known in zip(starts, left, strict=True):
        count = 1 + min(known - 1, room, _most_more(start, readable))
        room -= count - 1
        readable -= rereads(start, count)
        taken.append(count)
    saved = sum(-(-known // count) - 1 for known, count in zip(left, taken, strict=True))
    return None if saved > limits.eager_cost * num_rows else taken


def _most_more(start: int, readable: int) -> int:
    """The largest n for which rereads(start, n + 1) <= readable."""
    b = 2 * start + 1
    return (isqrt(b * b + 8 * readable) - b) // 2
