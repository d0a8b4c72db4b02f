"""Grammars of a simulation: each allows what its request says, and leaves no choice where the trace has forced runs."""

from __future__ import annotations

from collections.abc import Sequence

from services.sim.core.trace.script import Script
from services.sim.core.trace.trace import Trace
from services.worker.core.contracts.sampling import GrammarKind, GrammarSpec


def grammar_of(trace: Trace, index: int) -> GrammarSpec | None:
    """Of the request at a place of the trace, which is all that the grammar says."""
    return GrammarSpec(GrammarKind.EBNF, str(index)) if trace.requests[index].forced else None


class ScriptMatcher:
    """A core.grammar.Matcher."""

    fault = ""

    def __init__(self, tokens: list[int], runs: Sequence[tuple[int, int]]) -> None:
        """tokens: the whole output. runs: (first, count), rising; none: nothing is forced."""
        self._tokens = tokens
        self._runs = list(reversed(runs))
        self._place = 0

    @property
    def terminated(self) -> bool:
        return self._place >= len(self._tokens)

    def accept(self, token: int) -> bool:
        accepted = not self.terminated and token == self._tokens[self._place]
        self._place += accepted
        return accepted

    def take_cost(self) -> float:
        return 0.0

    def forced(self) -> Sequence[int]:
        """A single token is left to the model, as in life."""
        while self._runs and sum(self._runs[-1]) <= self._place:
            self._runs.pop()
        begun = self._runs and self._runs[-1][0] <= self._place
        end = min(sum(self._runs[-1]), len(self._tokens)) if begun else self._place
        if end - self._place < 2:
            return ()
        tokens, self._place = self._tokens[self._place : end], end
        return tokens


class ScriptBook:
    """A core.grammar.GrammarBook in which every grammar is compiled. jumps: whether forced text is taken over unsampled."""

    def __init__(self, script: Script, jumps: bool) -> None:
        self._script, self._jumps = script, jumps

    def open(self, spec: GrammarSpec, tenant: bytes = b"") -> ScriptMatcher:
        index = int(spec.source)
        return ScriptMatcher(self._script.output(index).tolist(), self._script.forced(index) if self._jumps else ())
