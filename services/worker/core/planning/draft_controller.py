"""Chooses the number of draft tokens for decode rows, and the requests for which a draft model proposes draft tokens.

The chosen number gives the most output tokens per second, by the measured times of steps and the measured acceptance of draft
tokens. A draft model must compute every token of the requests that get draft tokens. Drafting is therefore limited to a few
requests while almost no draft token is accepted, or while steps have too many rows for draft tokens. The times come from step
results, not from a clock, so that the same calls give the same plans. docs/design/scheduler.md#rows-of-several-tokens has the
rules.
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
FADE_OF_ALL = 0.98  # factor of the earlier results of all requests together when the result of a verification is added
# Smallest assumed acceptance of a request with fewer than FEW verifications. The acceptance of other requests alone would be a
# poor estimate for it.
ASSUMED_ACCEPTANCE = 0.6
MARGIN = 1.02  # the number of draft tokens changes if the better number gives more tokens per second by this factor
# Draft tokens pay if a step whose draft tokens are all accepted gives more tokens per second than plain decoding by this factor.
PAYS = 1.1
# Number of steps without draft tokens after which one step gets some, as a probe. The second value applies while drafting is
# limited because almost no draft token is accepted.
PROBE_EVERY, PROBE_EVERY_FUTILE = 32, 80
RARELY = 16  # factor of PROBE_EVERY if draft tokens do not pay
# After every FORGET_AFTER choices for a bucket, the costs of the next smaller and the next larger choice are measured again.
FORGET_AFTER = 1024
# An unknown cost is measured in a step only if the probability that the drafter proposes nothing is below this value.
PROBABLY_EMPTY = 0.5
FEW = 2  # a mean cost or an acceptance is used from this number of measurements on
# LATEST: smallest weight of a new cost in the mean. A cost above OUTLIER times the mean counts as OUTLIER times the mean.
LATEST, OUTLIER = 0.05, 4.0
# After this number of measurements without draft tokens, a change of their mean scales the costs of steps with draft tokens.
# After this number of consecutive steps with draft tokens, the mean cost without draft tokens is measured again.
STEADY = 20
# After n >= MISSES verifications in a row without an accepted token, a request gets no draft tokens for min(2 ** n, MOST_PAUSE)
# steps.
MISSES, MOST_PAUSE = 4, 64
BUCKETS = 32  # classes of steps, by the bit length of the number of rows
# The first FIRSTS verifications of each request decide whether drafting is limited (FUTILE). FADE_OF_FIRSTS is the factor of
# earlier results.
FIRSTS, FADE_OF_FIRSTS = 3, 0.95
FUTILE = 1 / 8  # drafting is limited while a smaller share of the requests' first verifications has an accepted token
WORTHWHILE = 1 / 2  # RIGHT_RUN accepted tokens in a row raise that share to at least this value, which ends the limit
CROWDED = 256  # drafting is limited after this number of consecutive steps with too many rows for draft tokens
# Limit of may_add_request(). A request with draft tokens counts if it had an accepted token in its last MISSES verifications, or
# if it has had fewer than MISSES verifications.
MOST_LIMITED = 2
RIGHT_RUN = 3  # number of consecutive accepted draft tokens of one request that shows that drafting works


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
            by_model: whether a draft model proposes the draft tokens. Drafting can then be limited to a few requests.
        """
        assert most > 0, "the executor drafts"
        self._adaptive, self._can_limit = adaptive, adaptive and by_model
        self._choices = (*(choice for choice in CHOICES if choice < most), most)
        # Sums of accepted and of verified draft tokens with fading weights, by slot and position, and the sums of all requests.
        self._hits, self._tries = np.zeros((2, num_slots, most))
        self._all_hits, self._all_tries = np.full(most, ASSUMED_ACCEPTANCE), np.ones(most)
        # By slot: consecutive verifications without an accepted token, remaining steps of a pause, consecutive accepted tokens,
        # and verifications (counted up to FIRSTS).
        self._misses, self._pauses, self._runs, self._firsts = np.zeros((4, num_slots), dtype=np.int64)
        # Share of the requests' first verifications with an accepted token; consecutive steps with too many rows for draft
        # tokens.
        self._right_firsts, self._crowded = 1.0, 0
        self._proposes = np.ones(num_slots)  # by slot: probability that the drafter proposes tokens
        self._seconds = np.zeros((BUCKETS, len(self._choices)))  # mean cost of a step in seconds, by bucket and choice
        self._seen = np.zeros((BUCKETS, len(self._choices)), dtype=np.int64)  # number of measurements in each mean
        self._empty_seconds = np.zeros(BUCKETS)  # mean cost in seconds of a step for which the drafter ran and proposed nothing
        self._num_empty = np.zeros(BUCKETS, dtype=np.int64)  # number of measurements in this mean
        self._chosen = np.full(BUCKETS, len(self._choices) - 1)  # index of the last choice, by bucket
        # By bucket: number of choices, and number of steps with draft tokens since the last step without draft tokens.
        self._choices_made, self._drafted_steps = np.zeros((2, BUCKETS), dtype=np.int64)
        self._plain_steps = 0  # steps without draft tokens since the last step with draft tokens
        self._was_right = False  # whether a draft token was accepted since the last choice

    def begin(self, slot: int) -> None:
        """Resets the measurements of a slot, because another request begins in it."""
        self._hits[slot] = self._tries[slot] = 0.0
        self._misses[slot] = self._pauses[slot] = self._runs[slot] = self._firsts[slot] = 0
        self._proposes[slot] = 1.0

    @property
    def is_limited(self) -> bool:
        """Whether drafting is limited to a few requests. If so, may_add_request() decides for each new request."""
        return self._is_futile or (self._can_limit and self._crowded >= CROWDED)

    def may_add_request(self, drafting: Sequence[int]) -> bool:
        """Returns whether one more request may get draft tokens while drafting is limited.

        Both of these numbers must be below a limit:

        - running requests that get draft tokens: below 2 * MOST_LIMITED;
        - requests among these with an accepted token in their last MISSES verifications, or with fewer than MISSES verifications:
          below MOST_LIMITED.

        Args:
            drafting: slots of the running requests that get draft tokens.
        """
        return len(drafting) < 2 * MOST_LIMITED and int((self._misses[drafting] < MISSES).sum()) < MOST_LIMITED

    @property
    def _is_futile(self) -> bool:
        """Whether almost no draft token of recent requests was accepted."""
        return self._can_limit and self._right_firsts < FUTILE

    def rest(self) -> None:
        """Resets the count of crowded steps, because no request runs."""
        self._crowded = 0

    def crowded(self, slots: I64) -> I64:
        """Counts a step with too many rows for draft tokens. Returns 0 draft tokens for each row."""
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
        if not self._is_futile:
            paused = self._pauses[slots] > 0
            self._pauses[slots[paused]] -= 1
            most = np.where(paused, 0, most)
        if not most.any():
            return most
        bucket = len(slots).bit_length()
        choice = self._choice(bucket, slots, most)
        self._choices_made[bucket] += 1
        if self._choices_made[bucket] % FORGET_AFTER == 0:  # the stored costs may be outdated
            beside = [index for index in (choice - 1, choice + 1) if 0 <= index < len(self._choices)]
            self._seen[bucket, beside] = 0
        if choice or self._seen[bucket, 0] < FEW:
            self._plain_steps, self._chosen[bucket] = 0, choice
        elif self._probes(bucket, len(slots), most):
            self._plain_steps, choice = 0, min(2, len(self._choices) - 1)
        else:
            self._plain_steps, self._chosen[bucket] = self._plain_steps + 1, 0
        self._was_right = False
        return np.minimum(most, self._choices[choice])

    def learn(self, plan: BatchPlan, slots: I64, drafted: I64, accepted: I64, seconds: float) -> None:
        """Records the cost of a committed step and the acceptance of its draft tokens.

        The cost is recorded for the planned number of draft tokens, even if the drafter proposed fewer tokens. If the drafter
        proposed nothing for all rows, the cost is recorded in a separate mean.

        Args:
            plan: the step.
            slots: slots of the rows for which draft tokens were planned. Rows whose request has lost its lease are left out.
            drafted: number of draft tokens of each of these rows.
            accepted: number of accepted draft tokens of each of these rows.
            seconds: duration of the step; 0 if unknown.
        """
        assert len(slots) == len(drafted) == len(accepted), "the columns have equal lengths"
        if seconds > 0 and not plan.num_extend and plan.num_rows:
            bucket = plan.num_rows.bit_length()
            if len(drafted) and not drafted.any():
                _average(self._empty_seconds, self._num_empty, bucket, seconds)
            else:
                self._record_cost(bucket, int(plan.drafts.max(initial=0)), seconds)
        was_futile = self._is_futile
        for slot, proposed, hits in zip(slots.tolist(), drafted.tolist(), accepted.tolist(), strict=True):
            self._record_row(slot, proposed, hits)
        if self._is_futile is not was_futile:
            self._pauses[:] = 0

    def _right(self, slots: I64, most: I64) -> F64:
        """Returns the probability that the draft tokens of a row are accepted up to each position, as float64[rows, positions].

        The probability is 0 beyond the row's `most`.
        """
        of_all: F64 = self._all_hits / self._all_tries
        fresh = self._tries[slots, :1] < FEW
        before = of_all if self._is_futile else np.where(fresh, np.maximum(of_all, ASSUMED_ACCEPTANCE), of_all)
        each = (self._hits[slots] + before) / (self._tries[slots] + 1)
        right: F64 = np.cumprod(each, axis=1, dtype=np.float64)
        right[np.arange(right.shape[1]) >= most[:, None]] = 0
        return right

    def _choice(self, bucket: int, slots: I64, most: I64) -> int:
        """Returns the index in `_choices` of the number of draft tokens that gives the most output tokens per second.

        The previous choice is kept if another one is not clearly faster (MARGIN).

        A number whose cost is unknown is tried first, unless the drafter probably proposes nothing (see PROBABLY_EMPTY).
        """
        seconds, seen = self._seconds[bucket], self._seen[bucket]
        allowed = range(next(index for index, number in enumerate(self._choices) if number >= most.max()) + 1)
        if not seen.any() and not self._num_empty[bucket]:
            return allowed[-1]
        empty = float(np.prod(1.0 - self._proposes[slots[most > 0]]))
        unknown = next((index for index in allowed if seen[index] < FEW and (empty < PROBABLY_EMPTY or not index)), None)
        if unknown is not None:
            return unknown
        empty_cost = self._empty_seconds[bucket] if self._num_empty[bucket] >= FEW else seconds[0]
        costs = empty * empty_cost + (1.0 - empty) * np.where(seconds > 0, seconds, empty_cost)
        costs[0] = seconds[0]
        right = self._right(slots, most) * self._proposes[slots, None]
        rates = [float(len(slots) + right[:, : self._choices[index]].sum()) / float(costs[index]) for index in allowed]
        best = max(allowed, key=lambda index: rates[index])
        before = int(self._chosen[bucket])
        return before if before in allowed and rates[before] * MARGIN >= rates[best] else best

    def _probes(self, bucket: int, num_rows: int, most: I64) -> bool:
        """Returns whether a step for which no draft tokens were chosen gets some as a probe.

        Probes are periodic. They are rarer if draft tokens would not pay even if all of them were accepted (see PAYS). The step
        after an accepted token is also a probe. While drafting is limited because almost no token is accepted, costs do not
        matter, because few requests get draft tokens.
        """
        if self._is_futile:
            return self._was_right or self._plain_steps >= PROBE_EVERY_FUTILE
        seconds = self._seconds[bucket]
        paying = any(
            PAYS * num_rows * seconds[index] < (num_rows + np.minimum(most, number).sum()) * seconds[0]
            for index, number in enumerate(self._choices)
            if number
        )
        return self._was_right or self._plain_steps >= PROBE_EVERY if paying else self._plain_steps >= RARELY * PROBE_EVERY

    def _record_cost(self, bucket: int, drafted: int, seconds: float) -> None:
        """Records the cost of a step.

        The cost of steps without draft tokens changes if the machine slows down or contexts grow. The costs of steps with draft
        tokens are then multiplied by the same factor, because such steps are rare at that time.
        """
        index = next(index for index, choice in enumerate(self._choices) if choice >= drafted)
        self._drafted_steps[bucket] = self._drafted_steps[bucket] + 1 if index else 0
        # The mean cost without draft tokens is outdated and must be measured again.
        if index and self._drafted_steps[bucket] >= STEADY:
            self._seen[bucket, 0] = min(self._seen[bucket, 0], FEW)
        before = float(self._seconds[bucket, 0]) if not index and self._seen[bucket, 0] >= STEADY else 0.0
        _average(self._seconds[bucket], self._seen[bucket], index, seconds)
        if before:
            dearer = float(self._seconds[bucket, 0]) / before
            self._seconds[bucket, 1:] *= dearer
            self._empty_seconds[bucket] *= dearer

    def _update_expected(self, slot: int, drafted: int, hits: int) -> None:
        """Updates the share of first verifications with an accepted token, which decides whether drafting is limited (FUTILE)."""
        if drafted and self._firsts[slot] < FIRSTS:
            self._firsts[slot] += 1
            self._right_firsts += (1 - FADE_OF_FIRSTS) * ((hits > 0) - self._right_firsts)
        self._runs[slot] += hits
        if self._runs[slot] >= RIGHT_RUN:
            self._right_firsts = max(self._right_firsts, WORTHWHILE)
        if hits < drafted:
            self._runs[slot] = 0

    def _record_row(self, slot: int, drafted: int, hits: int) -> None:
        """Records the verification of one row with `drafted` draft tokens, of which `hits` were accepted."""
        assert 0 <= hits <= drafted, "accepted tokens are draft tokens"
        self._proposes[slot] = FADE * self._proposes[slot] + (1 - FADE) * (drafted > 0)
        tried = min(drafted, hits + 1)
        self._was_right |= hits > 0
        self._update_expected(slot, drafted, hits)
        self._hits[slot, :tried] *= FADE
        self._tries[slot, :tried] = self._tries[slot, :tried] * FADE + 1
        self._hits[slot, :hits] += 1
        self._all_hits[:tried] *= FADE_OF_ALL
        self._all_tries[:tried] = self._all_tries[:tried] * FADE_OF_ALL + 1
        self._all_hits[:hits] += 1
        if not drafted or (not hits and self._pauses[slot]):
            return  # the row had no draft tokens, or the step was planned before the pause began
        self._misses[slot] = 0 if hits else self._misses[slot] + 1
        if self._misses[slot] >= MISSES and not self._is_futile:
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
