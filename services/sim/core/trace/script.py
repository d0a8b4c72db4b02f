"""What is said in a simulation: the token ids of every prompt and output of a trace, a function of the trace alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.sim.core.trace.trace import Trace

I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]

EOS_ID = 1
FIRST_ID = 2
TOKEN_BITS = 30
VOCAB_SIZE = FIRST_ID + (1 << TOKEN_BITS)  # large, so that tokens that should differ do
_DROPPED_BITS = np.uint64(64 - TOKEN_BITS)
_LOOSE = np.uint64(0x5851F42D4C957F2D)  # sets tokens outside the blocks apart from those of the block with the same number


class Script:
    """Requests are named by their place in the trace. Nothing is kept: ids are computed when asked for."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._block_size = trace.block_size

    def prompt(self, index: int) -> I32:
        """int32[input_len]."""
        return self._context(index, 0, self._trace.requests[index].input_len)

    def output(self, index: int) -> I32:
        """int32[output_len], the last one EOS_ID; none of a request that ends with its prompt."""
        request = self._trace.requests[index]
        tokens = self._context(index, request.input_len, request.input_len + request.output_len)
        tokens[-1:] = EOS_ID
        return tokens

    def forced(self, index: int) -> tuple[tuple[int, int], ...]:
        """(first, count) of runs of output tokens."""
        return self._trace.requests[index].forced

    def _context(self, index: int, start: int, end: int) -> I32:
        """Tokens start .. end - 1 of the request's prompt and output."""
        size = self._block_size
        blocks = self._trace.requests[index].blocks[start // size : -(-end // size)]
        covered = min(max(start, start // size * size + len(blocks) * size), end)
        numbers = np.arange(start, end, dtype=np.uint64)
        if covered > start:
            seeds = np.repeat(_mix(np.array(blocks, dtype=np.uint64)), size)
            inside = numbers[: covered - start]
            inside %= np.uint64(size)
            inside += seeds[start % size : start % size + len(inside)]
        numbers[covered - start :] += _mix(np.array([index], dtype=np.uint64) ^ _LOOSE)
        return (_mix(numbers) >> _DROPPED_BITS).astype(np.int32) + np.int32(FIRST_ID)


def _mix(values: U64) -> U64:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014), in place: neighbouring numbers become unrelated ones."""
    values += np.uint64(0x9E3779B97F4A7C15)
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
