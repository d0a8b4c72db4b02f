"""What a worker has said of one choice: ids, log probabilities, a vector, and how it ended. Everything that another worker needs
to go on with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rootstock.v1 import common_pb2 as pb
from rootstock.v1 import worker_pb2
from services.gateway.request.generation import Generation
from services.gateway.request.logprobs import LogprobTable

TIERS = ("device", "host", "storage")


@dataclass(frozen=True, slots=True)
class Ending:
    """A complete answer. Counts are the worker's own: in a session prompt_tokens are the whole context's.

    stop_reason: the matched stop string, stop pattern or stop token id; None for the end of sequence or of a grammar.
    matched: the same, but with the end of sequence's token id. retractions: how often it lost its memory to others.
    verified_rows, drafted_tokens, accepted_tokens: see worker.proto. accepted_prediction_tokens, rejected_prediction_tokens: at
    all workers that it was on, up to the tokens that came. cached_by_tier: cached_tokens by where they were; None where none
    was cached, and of a worker that has one tier.
    """

    finish_reason: str  # "stop", "length" or "abort"
    stop_reason: str | int | None
    matched: str | int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_ms: int
    retractions: int
    verified_rows: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    cached_by_tier: Mapping[str, int] | None = None


WeightsName = tuple[str, str, str]  # model, revision and tokenizer, as a worker's hello names them


@dataclass(frozen=True, slots=True)
class Progress:
    """What has come of a choice, as far as another gateway needs it to go on. ids: of its output, which has not ended with them.
    decoded: of these, whose text has come from a detokenizer; chars: of that text. shown: ids whose text has been taken.
    logprobs: of all ids, where they are wanted. weights, numerics: what the output is of, see Placement; None and "" where nobody
    has said."""

    ids: Sequence[int] = ()
    decoded: int = 0
    chars: int = 0
    shown: int = 0
    logprobs: Sequence[worker_pb2.LogprobRows] = ()
    weights: WeightsName | None = None
    numerics: str = ""


class ChoiceOutput:
    """ids: all output ids so far; a detokenizer's stream reads the same list. logprobs: of these, where they are wanted.
    prompt_logprobs: from position max(1, prompt_from) on. verdict: the worker's ending, None while it goes on."""

    __slots__ = (
        "_embedding",
        "_generation",
        "_label_logprobs",
        "_predicted",
        "_predicted_before",
        "_prefilled",
        "ids",
        "logprobs",
        "prompt_logprobs",
        "verdict",
    )

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.ids: list[int] = []
        self.logprobs = LogprobTable()
        self.prompt_logprobs = LogprobTable()
        self._embedding: Sequence[float] | None = None
        self._label_logprobs: Sequence[float] | None = None
        self._predicted = self._predicted_before = 0, 0  # accepted and rejected, at its worker and at those that it has left
        self._prefilled: worker_pb2.Finish | None = None  # what the worker said that has computed the prompt for another one
        self.verdict: Ending | None = None

    @property
    def lacks_logprobs(self) -> bool:
        """Some are wanted that have not come."""
        return self._generation.wants_logprobs and len(self.logprobs) != len(self.ids)

    @property
    def _predictions(self) -> tuple[int, int]:
        """Guesses by its prediction that were right, and those that were not, wherever it was."""
        before, here = self._predicted_before, self._predicted
        return before[0] + here[0], before[1] + here[1]

    def vector(self) -> NDArray[np.float32]:
        """float32[dimensions], little-endian, of a request for one that is complete."""
        assert self._embedding is not None, "the worker ends a request for a vector with one"
        return np.array(self._embedding, dtype="<f4")

    def label_logprobs(self) -> NDArray[np.float64]:
        """Returns float64[labels] of a complete score."""
        assert self._label_logprobs is not None, "the worker ends a request for a score with one"
        return np.array(self._label_logprobs, dtype=np.float64)

    def fits(self, finish: worker_pb2.Finish) -> bool:
        """Whether an ending has what was asked for: a log probability for each label of a score."""
        sampling = self._generation.sampling
        return not sampling.HasField("score") or len(finish.label_logprobs) == len(sampling.score.label_token_ids)

    def extend(self, ids: Sequence[int]) -> None:
        self.ids += ids

    def resume(self, ids: Sequence[int], logprobs: Sequence[worker_pb2.LogprobRows]) -> None:
        """What had come elsewhere. Raises ValueError for rows that do not fit."""
        self.ids += ids
        for rows in logprobs:
            self.logprobs.extend(rows)

    def add_logprobs(self, rows: worker_pb2.LogprobRows) -> None:
        """Of the next output tokens. Raises ValueError for rows that do not fit."""
        self.logprobs.extend(rows)

    def add_prompt_logprobs(self, rows: worker_pb2.LogprobRows) -> None:
        """Of the next prompt tokens. Raises ValueError for rows that do not fit."""
        self.prompt_logprobs.extend(rows)

    def predicted(self, accepted: int, rejected: int) -> None:
        """What guesses by its prediction have come to at its worker so far, up to the tokens that are here."""
        self._predicted = accepted, rejected

    def leave_worker(self) -> None:
        """What it said of a prompt that it did not finish is void."""
        self._predicted_before, self._predicted = self._predictions, (0, 0)
        if not self.ids:
            self.prompt_logprobs = LogprobTable()

    def handed_over(self, finish: worker_pb2.Finish) -> None:
        """Another worker goes on with it: what its prompt has cost counts as this one says."""
        if self._prefilled is None:
            self._prefilled = finish

    def finish(self, finish: worker_pb2.Finish) -> None:
        """The worker's terminal output, of an answer that is complete."""
        ending = _ending_of(finish, self._generation.stop_token_ids, self._predictions)
        if (first := self._prefilled) is not None:
            ending = replace(ending, cached_tokens=first.cached_tokens, cached_by_tier=_by_tier(first), queue_ms=first.queue_ms)
        self.verdict = _without_output(ending) if self._generation.hidden else ending
        if finish.reason == pb.FINISH_REASON_EMBEDDED:
            self._embedding = finish.embedding
        if finish.reason == pb.FINISH_REASON_SCORED:
            self._label_logprobs = finish.label_logprobs


_FINISH_REASONS = {pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_ABORT: "abort"}


def _ending_of(finish: worker_pb2.Finish, stop_token_ids: frozenset[int], predicted: tuple[int, int]) -> Ending:
    """predicted: tokens accepted and rejected."""
    matched: str | int | None = None
    if finish.reason in (pb.FINISH_REASON_MATCHED_STRING, pb.FINISH_REASON_MATCHED_REGEX):
        matched = finish.matched_stop
    elif finish.reason == pb.FINISH_REASON_MATCHED_TOKEN and finish.HasField("matched_token"):
        matched = finish.matched_token
    is_end_of_sequence = isinstance(matched, int) and matched not in stop_token_ids
    return Ending(
        finish_reason=_FINISH_REASONS.get(finish.reason, "stop"),
        stop_reason=None if is_end_of_sequence else matched,
        matched=matched,
        prompt_tokens=finish.prompt_tokens,
        cached_tokens=finish.cached_tokens,
        completion_tokens=finish.completion_tokens,
        queue_ms=finish.queue_ms,
        retractions=finish.retractions,
        verified_rows=finish.verified_rows,
        drafted_tokens=finish.drafted_tokens,
        accepted_tokens=finish.accepted_tokens,
        accepted_prediction_tokens=predicted[0],
        rejected_prediction_tokens=predicted[1],
        cached_by_tier=_by_tier(finish),
    )


def _by_tier(finish: worker_pb2.Finish) -> dict[str, int] | None:
    """As SGLang has them, which knows no peers; those only where something came from one."""
    found = dict(zip(TIERS, (finish.cached_device_tokens, finish.cached_host_tokens, finish.cached_storage_tokens), strict=True))
    if finish.cached_peer_tokens:
        found["peer"] = finish.cached_peer_tokens
    return found if any(found.values()) else None


def _without_output(ending: Ending) -> Ending:
    """The ending of an answer whose tokens are not shown."""
    reason = "abort" if ending.finish_reason == "abort" else "length"
    return replace(ending, finish_reason=reason, stop_reason=None, matched=None, completion_tokens=0)
