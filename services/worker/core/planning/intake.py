"""Applies sampled tokens to their requests: output, logprobs, grammar state, tokens that the grammar forces, and the end.

Writes requests, and uses no slots and no pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.grammar import Matcher
from services.worker.core.contracts.messages import ErrorCode, FinishReason
from services.worker.core.contracts.plan import StepResult
from services.worker.core.requests.finish import FinishDecision, TextRules, check_fault, check_finished, refused
from services.worker.core.requests.request import Request

_OUTSIDE_GRAMMAR = FinishDecision(
    FinishReason.ABORT, error=ErrorCode.INTERNAL, message="the sampled token does not fit the request's grammar"
)
_GIVEN_OUTSIDE_GRAMMAR = refused("the output does not fit the request's grammar", "output_ids")
_NO_VECTOR = FinishDecision(FinishReason.ABORT, error=ErrorCode.INTERNAL, message="the step gave no vector for this request")
_NO_SCORE = FinishDecision(FinishReason.ABORT, error=ErrorCode.INTERNAL, message="the step gave no score for this request")


@dataclass(slots=True)
class Taken:
    """The consequences of applied tokens. Indices are those of the given requests."""

    endings: dict[int, FinishDecision] = field(default_factory=dict)
    jumped: list[int] = field(default_factory=list)  # requests whose grammar has added tokens
    num_tokens: int = 0  # tokens appended to outputs


class Intake:
    """Applies tokens and decides which requests end."""

    def __init__(self, vocab_size: int, rules: TextRules) -> None:
        self._vocab_size = vocab_size
        self._rules = rules

    def take(
        self,
        requests: list[Request],
        tokens: NDArray[np.int32],
        look: NDArray[np.bool_],
        rows: NDArray[np.int64],
        result: StepResult,
    ) -> Taken:
        """Applies tokens to requests, in parallel columns.

        Args:
            requests: the requests.
            tokens: int32[n], the next token of each request.
            look: bool[n], whether the request may end or needs its grammar with this token. Other requests only get the token.
            rows: int64[n], row of each token in the result.
            result: the step's result, for faults, logprobs, vectors and scores.
        """
        assert len(requests) == len(tokens) == len(look) == len(rows), "columns of the same rows"
        taken = Taken()
        looked = np.flatnonzero(look).tolist()
        for at in looked:
            ending = self._before_output(requests[at], int(tokens[at]), int(rows[at]), result)
            if ending is not None:
                taken.endings[at] = ending
        if taken.endings:
            for at, (request, token) in enumerate(zip(requests, tokens.tolist(), strict=True)):
                if at not in taken.endings:
                    request.progress.output_ids.append(token)
        else:
            for request, token in zip(requests, tokens.tolist(), strict=True):
                request.progress.output_ids.append(token)
        taken.num_tokens = len(requests) - len(taken.endings)
        if result.logprobs:
            self._take_logprobs(requests, rows, result, taken)
        for at in looked:
            if at not in taken.endings:
                self._after_output(requests[at], at, taken)
        return taken

    def take_given(self, request: Request) -> Taken:
        """Applies the given output of a request that has its matcher, as if the last token had just been sampled."""
        ids, num_followed = request.progress.output_ids, request.progress.num_followed
        assert num_followed < len(ids), "a matcher has yet to take the last token"
        taken = Taken()
        matcher = request.matcher
        if matcher is not None and not all(matcher.accept(token) for token in ids[num_followed:-1]):
            taken.endings[0] = _refused(matcher, _GIVEN_OUTSIDE_GRAMMAR)
        else:
            self._after_output(request, 0, taken, _GIVEN_OUTSIDE_GRAMMAR)
        if matcher is not None:
            matcher.take_cost()  # so that many resumed requests do not count as one slow step
        return taken

    def take_one(self, request: Request, token: int, row: int, result: StepResult) -> Taken:
        """Applies one token to one request, which may end."""
        one, here = np.array([token], dtype=np.int32), np.array([row], dtype=np.int64)
        return self.take([request], one, np.ones(1, dtype=np.bool_), here, result)

    def _before_output(self, request: Request, token: int, row: int, result: StepResult) -> FinishDecision | None:
        """Returns the ending of a request that gets no token: after a fault, or because it ends with its prompt."""
        params = request.params
        if params.samples:
            return check_fault(token, self._vocab_size, result.faults.get(row))
        if row in result.faults:
            return check_fault(0, self._vocab_size, result.faults[row])
        if params.embedding is not None:
            vector = result.embeddings.get(row)
            return _NO_VECTOR if vector is None else FinishDecision(FinishReason.EMBEDDED, embedding=vector)
        if params.score is not None:
            values = result.label_logprobs.get(row)
            return _NO_SCORE if values is None else FinishDecision(FinishReason.SCORED, label_logprobs=values)
        return FinishDecision(FinishReason.LENGTH)

    def _take_logprobs(self, requests: list[Request], rows: NDArray[np.int64], result: StepResult, taken: Taken) -> None:
        for at, row in enumerate(rows.tolist()):
            if requests[at].wants_logprobs and at not in taken.endings and row in result.logprobs:
                requests[at].progress.logprobs.append(result.logprobs[row])

    def _after_output(self, request: Request, at: int, taken: Taken, outside: FinishDecision = _OUTSIDE_GRAMMAR) -> None:
        """Advances the grammar by the newest token and checks whether the request ends.

        Args:
            request: the request.
            at: its index in `taken`.
            taken: the consequences, which are extended.
            outside: ending if the grammar does not allow the token.
        """
        matcher = request.matcher
        if matcher is None:
            ending = check_finished(request, self._rules)
        elif not matcher.accept(request.progress.output_ids[-1]):
            ending = _refused(matcher, outside)
        else:
            ending = check_finished(request, self._rules, matcher.terminated)
            if ending is None and request.jump:
                ending = self._jump(request, at, taken)
        if ending is not None:
            taken.endings[at] = ending

    def _jump(self, request: Request, at: int, taken: Taken) -> FinishDecision | None:
        """Appends the tokens that the grammar forces, up to the end of the request. Returns the ending, or None."""
        matcher = request.matcher
        assert matcher is not None
        forced = matcher.forced()
        for place, token in enumerate(forced, 1):
            request.progress.output_ids.append(token)
            taken.num_tokens += 1
            ending = check_finished(request, self._rules, place == len(forced) and matcher.terminated)
            if ending is not None:
                return ending
        if forced:
            taken.jumped.append(at)
        return None


def _refused(matcher: Matcher, outside: FinishDecision) -> FinishDecision:
    if matcher.fault:
        return refused(matcher.fault, "grammar")
    return outside
