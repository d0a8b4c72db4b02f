"""The limits of an executor's CUDA graphs, and the number of known tokens per row that a replayed step can compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The steps that an executor can replay as one graph; other steps are eager, which means launched kernel by kernel.

    A row of a graph is one token: n tokens of one sequence take n rows, and each row reads the KV of its whole context.
    """

    rows: int = 0  # rows of the largest graph; 0: no step is replayed
    # Largest number of KV tokens that a replayed step may read beyond one read of each sequence's context. Reading this many
    # tokens takes as long as the extra time of an eager step.
    rereads: int = 0
    eager_cost: float = 0.0  # extra time of an eager step, in multiples of a replayed decode step's time

    def hold(self, starts: I32, num_tokens: I32) -> bool:
        """Returns whether a graph can replay a step whose rows compute these tokens of running sequences.

        Args:
            starts: int32[rows], first position of each row.
            num_tokens: int32[rows], tokens of each row.
        """
        if int(num_tokens.sum()) > self.rows:
            return False
        return step_rereads(starts, num_tokens) <= self.rereads


def rereads(start: int, count: int) -> int:
    """Returns the number of KV tokens that graph rows at the positions start to start + count - 2 read.

    The row at the last position, start + count - 1, does not count, because an eager step would also read that row's context.
    """
    return (count - 1) * start + count * (count - 1) // 2


def step_rereads(starts: I32, num_tokens: I32) -> int:
    """Returns the sum of rereads() over the rows of a step."""
    more = np.flatnonzero(num_tokens > 1)
    return sum(map(rereads, starts[more].tolist(), num_tokens[more].tolist()))


def strides(limits: GraphLimits, starts: Sequence[int], left: Sequence[int], num_rows: int) -> list[int] | None:
    """Returns the number of known tokens that each row computes in the next step, so that a graph can replay the step.

    Each row computes at least one token. If the graph has too few rows for all known tokens, rows at the beginning of `starts`
    get more tokens than rows at its end.

    The result is None if one eager step that computes all known tokens is better. This is the case if

    - `num_rows` is larger than the largest graph;
    - computing all known tokens in a graph would reread more than `limits.rereads` KV tokens; or
    - the number of steps that one eager step saves, sum(ceil(left / stride) - 1), exceeds eager_cost * num_rows. This product is
      the delay that the eager step causes, summed over all sequences, in decode steps.

    Args:
        limits: limits of the executor's graphs.
        starts: first position of each row.
        left: number of known tokens of each row that have no KV yet.
        num_rows: number of all sequences in the step, including these rows.
    """
    assert len(starts) == len(left) <= num_rows, "num_rows includes the given rows"
    free_rows = limits.rows - num_rows
    if free_rows < 0 or sum(map(rereads, starts, left)) > limits.rereads:
        return None
    taken = []
    for known in left:
        count = 1 + min(known - 1, free_rows)
        free_rows -= count - 1
        taken.append(count)
    assert free_rows >= 0 and min(taken, default=1) > 0, "a graph computes at least one token of each row"
    saved = sum(-(-known // count) - 1 for known, count in zip(left, taken, strict=True))
    return None if saved > limits.eager_cost * num_rows else taken
