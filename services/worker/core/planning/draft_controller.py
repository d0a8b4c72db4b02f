"""Chooses the number of draft tokens for decode rows, and the requests for which a draft model drafts.

The chosen number gives the most output tokens per second, by the measured times of steps and the measured acceptance of draft
tokens. A draft model has to compute every token of its requests. While almost no draft token is accepted, or while steps have too
many rows for draft tokens, it therefore drafts for a few requests only. The times come from step results, not from a clock, so
that the same calls give the same plans. docs/design/scheduler.md#rows-of-several-tokens has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.core.contracts.plan import BatchPlan

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

CHOICES = (0, 1, 2, 4, 7)  # possible numbers of draft tokens per row, in addition to the configured maximum
FADE = 0.8  # factor of the earlier results of a request when the result of a verification is added
FADE_OF_ALL = 0.98  # the same factor for the results of all requests together
# Smallest assumed acceptance of a request with fewer than FEW verifications, because the acceptance of other requests says little
# about it.
HOPE = 0.6
MARGIN = 1.02  # another number of draft tokens is chosen if its tokens per second are higher by this factor
# Draft tokens pay if a step in which all of them are accepted has more tokens per second than plain decoding by this factor.
WORTH = 1.1
# Steps without draft tokens after which a step gets some as a probe; the second value applies if few draft tokens are accepted.
PROBE_EVERY, PROBE_EVERY_IN_VAIN = 32, 80
SELDOM = 16  # factor of PROBE_EVERY if draft tokens do not pay
FORGET_AFTER = 1024  # choices for a bucket after which the costs of the next lower and higher number are measured again
# If the drafter proposes nothing for a step with at least this probability, the step does not measure an unknown cost.
SILENT = 0.5
FEW = 2  # number of measurements from which on a cost or an acceptance is used
# The smallest weight of a step's cost in the mean. A cost above OUTLIER times the mean counts as OUTLIER times the mean.
LATEST, OUTLIER = 0.05, 4.0
# After this number of measurements without draft tokens, a change of their mean scales the costs of steps with draft tokens.
# After this number of steps in a row with draft tokens, the mean is outdated and is measured again.
STEADY = 20
# After n >= MISSES verifications in a row without an accepted token, a request gets no draft tokens for min(2 ** n, MOST_PAUSE)
# steps.
MISSES, MOST_PAUSE = 4, 64
BUCKETS = 32  # classes of steps, by the bit length of the number of rows
# The first FIRSTS verifications of each request predict the acceptance of later requests. FADE_OF_FIRSTS is the factor of earlier
# results.
FIRSTS, FADE_OF_FIRSTS = 3, 0.95
IN_VAIN = 1 / 8  # drafting is limited if a smaller share of the first verifications has an accepted token
WORTHWHILE = 1 / 2  # smallest value of this share after RIGHT_RUN accepted tokens in a row of one request, which ends the limit
CROWDED = 256  # drafting is limited after this number of steps in a row with too many rows for draft tokens
FEW_HEARD = 2  # while drafting is limited: number of requests with draft tokens and fewer than MISSES misses
RIGHT_RUN = 3  # number of accepted draft tokens in a row of one request that is not an accident


class DraftController:
    """Measures the costs of steps and the acceptance of draft tokens, and chooses the number of draft tokens per row.

    Plans call begin(), choose(), crowded() and rest(); commits call learn().
    """

    def __init__(self, num_slots: int, most: int, adaptive: bool = True, by_model: bool = False) -> None:
        """Starts without measurements.

        Args:
            num_slots: number of slots.
            most: largest number of draft tokens of a row.
            adaptive: whether the number is chosen by measurements; otherwise every row gets `most`.
            by_model: whether a draft model drafts, which has to compute every token of the requests that get draft tokens.
        """
        assert most > 0, "the executor drafts"
        self._adaptive, self._chooses_whom = adaptive, adaptive and by_model
        self._choices = (*(choice for choice in CHOICES if choice < most), most)
        # Sums of accepted and of verified draft tokens with fading weights, by slot and position, and the sums of all requests.
        self._hits, self._tries = np.zeros((2, num_slots, most))
        self._all_hits, self._all_tries = np.full(most, HOPE), np.ones(most)
        # By slot: verifications in a row without an accepted token, remaining steps of a pause, accepted tokens in a row, and
        # verifications, counted up to FIRSTS.
        self._misses, self._pauses, self._runs, self._firsts = np.zeros((4, num_slots), dtype=np.int64)
        # Share of the requests' first verifications with an accepted token; steps in a row with too many rows for draft tokens.
        self._right_firsts, self._crowded = 1.0, 0
        self._speaks = np.ones(num_slots)  # by slot: probability that the drafter proposes tokens
        self._seconds = np.zeros((BUCKETS, len(self._choices)))  # mean cost of a step in seconds, by bucket and choice
        self._seen = np.zeros((BUCKETS, len(self._choices)), dtype=np.int64)  # number of measurements in each mean
        self._silence = np.zeros(BUCKETS)  # mean cost in seconds of a step for which the drafter ran and proposed nothing
        self._silences = np.zeros(BUCKETS, dtype=np.int64)  # number of measurements in this mean
        self._chosen = np.full(BUCKETS, len(self._choices) - 1)  # index of the last choice, by bucket
        # By bucket: number of choices, and steps with draft tokens since the last step without draft tokens.
        self._choices_made, self._guessing = np.zeros((2, BUCKETS), dtype=np.int64)
        self._without = 0  # steps without draft tokens since the last step with draft tokens
        self._was_right = False  # whether a draft token was accepted since the last plan

    def begin(self, slot: int) -> None:
        """Resets the state of a slot, because another request begins in it."""
        self._hits[slot] = self._tries[slot] = 0.0
        self._misses[slot] = self._pauses[slot] = self._runs[slot] = self._firsts[slot] = 0
        self._speaks[slot] = 1.0

    @property
    def hears_few(self) -> bool:
        """Whether drafting is limited, so that hears_another() decides whether a new request gets draft tokens."""
        return self._is_in_vain or (self._chooses_whom and self._crowded >= CROWDED)

    def hears_another(self, heard: Sequence[int]) -> bool:
        """Returns whether one more request may get draft tokens while drafting is limited.

        This is the case if fewer than 2 * FEW_HEARD running requests get draft tokens, and fewer than FEW_HEARD of these have had
        an accepted token in their last MISSES verifications.

        Args:
            heard: slots of the running requests that get draft tokens.
        """
        return len(heard) < 2 * FEW_HEARD and int((self._misses[heard] < MISSES).sum()) < FEW_HEARD

    @property
    def _is_in_vain(self) -> bool:
        """Whether almost no draft token of recent requests was accepted."""
        return self._chooses_whom and self._right_firsts < IN_VAIN

    def rest(self) -> None:
        """Resets the count of crowded steps, because no request runs."""
        self._crowded = 0

    def crowded(self, slots: I64) -> I64:
        """Returns zero draft tokens for each row of a step with too many rows for draft tokens, and counts the step."""
        self._crowded += 1
        self._pauses[slots] -= self._pauses[slots] > 0
        return np.zeros(len(slots), dtype=np.int64)

    def choose(self, slots: I64, most: I64) -> I64:
        """Returns the number of draft tokens of each row, limited by the row's entry in `most`."""
        assert len(slots) == len(most) and len(slots), "each row has a limit"
        self._crowded = 0
        if not self._adaptive:
            return np.minimum(most, self._choices[-1])
        most = np.minimum(most, self._choices[-1])
        if not self._is_in_vain:
            paused = self._pauses[slots] > 0
            self._pauses[slots[paused]] -= 1
            most = np.where(paused, 0, most)
        if not most.any():
            return most
        bucket = len(slots).bit_length()
        choice = self._choice(bucket, slots, most)
        self._choices_made[bucket] += 1
        if self._choices_made[bucket] % FORGET_AFTER == 0:  # an early measurement may have been untypical
            beside = [index for index in (choice - 1, choice + 1) if 0 <= index < len(self._choices)]
            self._seen[bucket, beside] = 0
        if choice or self._seen[bucket, 0] < FEW:
            self._without, self._chosen[bucket] = 0, choice
        elif self._probes(bucket, len(slots), most):
            self._without, choice = 0, min(2, len(self._choices) - 1)
        else:
            self._without, self._chosen[bucket] = self._without + 1, 0
        self._was_right = False
        return np.minimum(most, self._choices[choice])

    def learn(self, plan: BatchPlan, slots: I64, drafted: I64, accepted: I64, seconds: float) -> None:
        """Records the cost of a committed step and the acceptance of its draft tokens.

        The cost is recorded for the chosen number of draft tokens, even if the drafter proposed fewer tokens. If the drafter
        proposed nothing for any row, the cost is recorded separately.

        Args:
            plan: the step.
            slots: slots of the rows for which draft tokens were planned, without rows whose request has ended.
            drafted: number of draft tokens of each of these rows.
            accepted: number of accepted draft tokens of each of these rows.
            seconds: duration of the step; 0 if unknown.
        """
        assert len(slots) == len(drafted) == len(accepted), "the columns have equal lengths"
        if seconds > 0 and not plan.num_extend and plan.num_rows:
            bucket = plan.num_rows.bit_length()
            if len(drafted) and not drafted.any():
                _average(self._silence, self._silences, bucket, seconds)
            else:
                self._took(bucket, int(plan.drafts.max(initial=0)), seconds)
        was_in_vain = self._is_in_vain
        for slot, guesses, hits in zip(slots.tolist(), drafted.tolist(), accepted.tolist(), strict=True):
            self._note(slot, guesses, hits)
        if self._is_in_vain is not was_in_vain:
            self._pauses[:] = 0

    def _right(self, slots: I64, most: I64) -> F64:
        """Returns the probability that the draft tokens of a row are accepted up to each position, as float64[rows, positions].

        The probability is 0 beyond the row's `most`.
        """
        of_all: F64 = self._all_hits / self._all_tries
        fresh = self._tries[slots, :1] < FEW
        before = of_all if self._is_in_vain else np.where(fresh, np.maximum(of_all, HOPE), of_all)
        each = (self._hits[slots] + before) / (self._tries[slots] + 1)
        right: F64 = np.cumprod(each, axis=1, dtype=np.float64)
        right[np.arange(right.shape[1]) >= most[:, None]] = 0
        return right

    def _choice(self, bucket: int, slots: I64, most: I64) -> int:
        """Returns the index of the number of draft tokens with the most output tokens per second.

        A number whose cost is unknown is tried first, unless the drafter probably proposes nothing for the step (see SILENT).
        """
        seconds, seen = self._seconds[bucket], self._seen[bucket]
        allowed = range(next(index for index, number in enumerate(self._choices) if number >= most.max()) + 1)
        if not seen.any() and not self._silences[bucket]:
            return allowed[-1]
        silent = float(np.prod(1.0 - self._speaks[slots[most > 0]]))
        unknown = next((index for index in allowed if seen[index] < FEW and (silent < SILENT or not index)), None)
        if unknown is not None:
            return unknown
        asking = self._silence[bucket] if self._silences[bucket] >= FEW else seconds[0]
        costs = silent * asking + (1.0 - silent) * np.where(seconds > 0, seconds, asking)
        costs[0] = seconds[0]
        right = self._right(slots, most) * self._speaks[slots, None]
        rates = [float(len(slots) + right[:, : self._choices[index]].sum()) / float(costs[index]) for index in allowed]
        best = max(allowed, key=lambda index: rates[index])
        before = int(self._chosen[bucket])
        return before if before in allowed and rates[before] * MARGIN >= rates[best] else best

    def _probes(self, bucket: int, num_rows: int, most: I64) -> bool:
        """Returns whether a step for which no draft tokens were chosen gets some as a probe.

        Probes are periodic. They are rarer if draft tokens do not pay even if all of them are accepted (see WORTH). After an
        accepted token, the next step is a probe, too. While drafting is limited because almost no token is accepted, costs are
        not considered, because few requests get draft tokens.
        """
        if self._is_in_vain:
            return self._was_right or self._without >= PROBE_EVERY_IN_VAIN
        seconds = self._seconds[bucket]
        paying = any(
            WORTH * num_rows * seconds[index] < (num_rows + np.minimum(most, number).sum()) * seconds[0]
            for index, number in enumerate(self._choices)
            if number
        )
        return self._was_right or self._without >= PROBE_EVERY if paying else self._without >= SELDOM * PROBE_EVERY

    def _took(self, bucket: int, drafted: int, seconds: float) -> None:
        """Records the cost of a step.

        If the cost of steps without draft tokens changes, because the machine slows down or contexts grow, the costs of steps
        with draft tokens are scaled by the same factor, because they are measured rarely.
        """
        index = next(index for index, choice in enumerate(self._choices) if choice >= drafted)
        self._guessing[bucket] = self._guessing[bucket] + 1 if index else 0
        if index and self._guessing[bucket] >= STEADY:  # the cost without draft tokens is outdated and must be measured again
            self._seen[bucket, 0] = min(self._seen[bucket, 0], FEW)
        before = float(self._seconds[bucket, 0]) if not index and self._seen[bucket, 0] >= STEADY else 0.0
        _average(self._seconds[bucket], self._seen[bucket], index, seconds)
        if before:
            dearer = float(self._seconds[bucket, 0]) / before
            self._seconds[bucket, 1:] *= dearer
            self._silence[bucket] *= dearer

    def _tell_of_others(self, slot: int, guesses: int, hits: int) -> None:
        """Updates the expected acceptance of later requests with the verification of one row."""
        if guesses and self._firsts[slot] < FIRSTS:
            self._firsts[slot] += 1
            self._right_firsts += (1 - FADE_OF_FIRSTS) * ((hits > 0) - self._right_firsts)
        self._runs[slot] += hits
        if self._runs[slot] >= RIGHT_RUN:
            self._right_firsts = max(self._right_firsts, WORTHWHILE)
        if hits < guesses:
            self._runs[slot] = 0

    def _note(self, slot: int, guesses: int, hits: int) -> None:
        """Records the verification of one row with `guesses` draft tokens, of which `hits` were accepted."""
        assert 0 <= hits <= guesses, "accepted tokens are draft tokens"
        self._speaks[slot] = FADE * self._speaks[slot] + (1 - FADE) * (guesses > 0)
        tried = min(guesses, hits + 1)
        self._was_right |= hits > 0
        self._tell_of_others(slot, guesses, hits)
        self._hits[slot, :tried] *= FADE
        self._tries[slot, :tried] = self._tries[slot, :tried] * FADE + 1
        self._hits[slot, :hits] += 1
        self._all_hits[:tried] *= FADE_OF_ALL
        self._all_tries[:tried] = self._all_tries[:tried] * FADE_OF_ALL + 1
        self._all_hits[:hits] += 1
        if not guesses or (not hits and self._pauses[slot]):
            return  # the row had no draft tokens, or the step was planned before the pause began
        self._misses[slot] = 0 if hits else self._misses[slot] + 1
        if self._misses[slot] >= MISSES and not self._is_in_vain:
            self._pauses[slot] = min(MOST_PAUSE, 1 << int(self._misses[slot]))


def _average(means: F64, counts: I64, index: int, seconds: float) -> None:
    """Adds a measurement to the mean at `index` and counts it in `counts`.

    A measurement above OUTLIER times the mean counts as OUTLIER times the mean.
    """
    seen, mean = int(counts[index]), float(means[index])
    if seen >= FEW:
        seconds = min(seconds, OUTLIER * mean)
    means[index] = mean + max(1 / (seen + 1), LATEST) * (seconds - mean)
    counts[index] = seen + 1
