"""Derives from a trace the token ids of every prompt and output, and the grammars that force runs of outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.sim.core.trace.trace import Trace
from rootstock_llm.services.worker.core.contracts.grammar import GrammarKind, GrammarSpec

I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]

EOS_ID = 1
FIRST_ID = 2
TOKEN_BITS = 30
VOCAB_SIZE = FIRST_ID + (1 << TOKEN_BITS)  # large, so that unrelated tokens differ
_DROPPED_BITS = np.uint64(64 - TOKEN_BITS)
# Makes a request's tokens outside of blocks differ from the tokens of the block whose id is the request's index.
_LOOSE = np.uint64(0x5851F42D4C957F2D)


class Script:
    """Computes token ids on demand. Requests are named by their index in the trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._block_size = trace.block_size

    def prompt(self, index: int) -> I32:
        """Returns the token ids of a request's prompt, int32[input_len]."""
        return self._context(index, 0, self._trace.requests[index].input_len)

    def output(self, index: int) -> I32:
        """Returns the token ids of a request's output, int32[output_len]. The last one is EOS_ID.

        Empty for a request that ends with its prompt.
        """
        request = self._trace.requests[index]
        tokens = self._context(index, request.input_len, request.input_len + request.output_len)
        tokens[-1:] = EOS_ID
        return tokens

    def forced(self, index: int) -> tuple[tuple[int, int], ...]:
        """Returns (index of the first token, number of tokens) of each run of output tokens that the grammar forces."""
        return self._trace.requests[index].forced

    def _context(self, index: int, start: int, end: int) -> I32:
        """Returns the tokens `start` to `end - 1` of the request's prompt and output."""
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
    """Applies the finaliser of splitmix64 (Steele et al., OOPSLA 2014) in place.

    The results of neighbouring numbers are unrelated.
    """
    values += np.uint64(0x9E3779B97F4A7C15)
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def grammar_of(trace: Trace, index: int) -> GrammarSpec | None:
    """Returns a grammar whose source is the request's index, or None if no run of the request is forced."""
    return GrammarSpec(GrammarKind.EBNF, str(index)) if trace.requests[index].forced else None


class ScriptMatcher:
    """Implements Matcher for one request's output."""

    fault = ""

    def __init__(self, tokens: list[int], runs: Sequence[tuple[int, int]]) -> None:
        """Starts at the first output token.

        Args:
            tokens: the whole output.
            runs: (first, count) of forced runs in rising order.
        """
        self._tokens = tokens
        self._runs = list(reversed(runs))
        self._index = 0

    @property
    def terminated(self) -> bool:
        return self._index >= len(self._tokens)

    def accept(self, token: int) -> bool:
        accepted = not self.terminated and token == self._tokens[self._index]
        self._index += accepted
        return accepted

    def take_cost(self) -> float:
        return 0.0

    def forced(self) -> Sequence[int]:
        """Accepts and returns the rest of the forced run at the current token.

        Empty if the current token is not forced, or is the last one of its run. The model then samples it, as in production.
        """
        while self._runs and sum(self._runs[-1]) <= self._index:
            self._runs.pop()
        begun = self._runs and self._runs[-1][0] <= self._index
        end = min(sum(self._runs[-1]), len(self._tokens)) if begun else self._index
        if end - self._index < 2:
            return ()
        tokens, self._index = self._tokens[self._index : end], end
        return tokens


class ScriptBook:
    """Implements GrammarBook, with all grammars compiled. `jumps` is whether forced tokens are added without sampling."""

    def __init__(self, script: Script, jumps: bool) -> None:
        self._script, self._jumps = script, jumps

    def open(self, spec: GrammarSpec, tenant: bytes = b"") -> ScriptMatcher:
        index = int(spec.source)
        return ScriptMatcher(self._script.output(index).tolist(), self._script.forced(index) if self._jumps else ())
