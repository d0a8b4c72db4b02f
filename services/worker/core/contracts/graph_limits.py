"""Limits of the steps that an executor replays as one graph, and the share of known tokens that fits into such a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The limits of an executor's graphs.

    A graph's rows are tokens: n tokens of one sequence take n rows, and each row reads its whole context.
    """

    rows: int = 0  # rows of the largest graph; 0: no step is replayed
    # Limit of the tokens of KV that a replayed step reads in addition to one read per sequence. Reading them takes as long as the
    # extra time of an eager step.
    rereads: int = 0
    eager_cost: float = 0.0  # extra time of a step that is launched kernel by kernel, in decode steps

    def hold(self, starts: I32, num_tokens: I32) -> bool:
        """Returns whether a graph can replay a step that only extends known tokens of running sequences.

        Args:
            starts: int32[rows], first position of each row.
            num_tokens: int32[rows], tokens of each row.
        """
        if int(num_tokens.sum()) > self.rows:
            return False
        return step_rereads(starts, num_tokens) <= self.rereads


def rereads(start: int, count: int) -> int:
    """Returns the tokens of KV that `count` rows from position `start` on read in addition to the reads of the last row."""
    return (count - 1) * start + count * (count - 1) // 2


def step_rereads(starts: I32, num_tokens: I32) -> int:
    """Returns the sum of rereads() over the rows of a step."""
    more = np.flatnonzero(num_tokens > 1)
    return sum(map(rereads, starts[more].tolist(), num_tokens[more].tolist()))


def strides(limits: GraphLimits, starts: Sequence[int], left: Sequence[int], num_rows: int) -> list[int] | None:
    """Returns the number of known tokens that each row computes in the next step, so that a graph can replay the step.

    Each row computes at least one token. If a graph has too few rows for all known tokens, the first rows of the list get more.
    The result is None if every row should compute all of its known tokens in an eager step. This is the case if

    - no graph has `num_rows` rows;
    - reading the context again takes longer than the extra time of an eager step; or
    - the steps that these rows save outweigh the extra time, which delays all `num_rows` sequences.

    Args:
        limits: limits of the executor's graphs.
        starts: first position of each row.
        left: known tokens of each row.
        num_rows: number of all sequences in the step, these rows included.
    """
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
