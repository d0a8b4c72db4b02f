"""Which steps an executor replays as one graph, and how far rows come in such a step whose next tokens are known already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """A graph's rows are tokens: n tokens of one sequence are n rows of it, each of which reads its own context.

    rows: of the largest graph; 0: no step is replayed. eager_cost: what a step that is launched kernel by kernel takes longer
    than a replayed one, in decode steps. rereads: tokens of KV that can be read in that time, the most that a replayed step
    reads beside those that it would read with one row for each sequence.
    """

    rows: int = 0
    rereads: int = 0
    eager_cost: float = 0.0

    def hold(self, starts: I32, num_tokens: I32) -> bool:
        """starts, num_tokens: int32[rows], of a step that extends nothing but what is known of begun sequences."""
        if int(num_tokens.sum()) > self.rows:
            return False
        return step_rereads(starts, num_tokens) <= self.rereads


def rereads(start: int, count: int) -> int:
    """Tokens of KV that `count` rows at positions from `start` on read beside those that the last of them reads."""
    return (count - 1) * start + count * (count - 1) // 2


def step_rereads(starts: I32, num_tokens: I32) -> int:
    """rereads() over the rows of a step."""
    more = np.flatnonzero(num_tokens > 1)
    return sum(map(rereads, starts[more].tolist(), num_tokens[more].tolist()))


def strides(limits: GraphLimits, starts: Sequence[int], left: Sequence[int], num_rows: int) -> list[int] | None:
    """How many of its `left` known tokens each row computes in the next step, from `starts` on: all of them, if a graph has room,
    else as many as it has, and one at least. None: all, in a step that no graph holds, because none could; or because the
    context that would be read again takes longer; or because the steps that these rows are saved outweigh what such a step
    costs all of its `num_rows` sequences, these among them."""
    assert len(starts) == len(left) <= num_rows, "these rows are among the step's sequences"
    room = limits.rows - num_rows
    if room < 0 or sum(map(rereads, starts, left)) > limits.rereads:
        return None
    taken = []
    for known in left:
        count = 1 + min(known - 1, room)
        room -= count - 1
        taken.append(count)
    assert room >= 0 and min(taken, default=1) > 0, "a graph has room for a token of each"
    saved = sum(-(-known // count) - 1 for known, count in zip(left, taken, strict=True))
    return None if saved > limits.eager_cost * num_rows else taken
