"""How many guesses the decode rows of a step get: as many as pay, by what such steps have cost and what guesses have come to. And
whom somebody guesses for at all, where that costs something of every token: few, while it is in vain.

The core has no clock. Costs are those that results carry, so the same log gives the same plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.worker.core.contracts.plan import BatchPlan

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

CHOICES = (0, 1, 2, 4, 7)  # guesses of a row, and the most that is allowed
FADE = 0.8  # of what is known of a request, at each guess of it
FADE_OF_ALL = 0.98
HOPE = 0.6  # share of right guesses of a request before there were a few, at least: what others ask says little of it
MARGIN = 1.02  # by how much another number has to be better than the one before
WORTH = 1.1  # by how much right guesses have to be better than none, to be tried while others are chosen
PROBE_EVERY, PROBE_EVERY_IN_VAIN = 32, 80  # steps without guesses, although there might be some, between two with
SELDOM = 16  # so many times as seldom where even right guesses would not pay
FORGET_AFTER = 1024  # steps of so many rows, after which costs of one guess more or fewer count as unknown
SILENT = 0.5  # chance of a step without guesses, from which on what they cost is not tried for its own sake
FEW = 2  # steps of a kind after which it is known what they cost
LATEST, OUTLIER = 0.05, 4.0  # weight of a step's cost, and how many times the mean one counts at most
STEADY = 20  # steps without guesses, from which on what they cost says how fast the machine is
MISSES, MOST_PAUSE = 4, 64  # guesses of a request that were wrong at once, and steps without one then: twice as many each time
BUCKETS = 32
FIRSTS, FADE_OF_FIRSTS = 3, 0.95  # steps with guesses of a request that tell of all others, and what is kept at each of what was
IN_VAIN = 1 / 8  # share of these that were right, below which few are guessed for
WORTHWHILE = 1 / 2  # the share that is taken then, once some request is found whose guesses are right
CROWDED = 256  # steps one after another that had too many rows for guesses, from which on few are guessed for
FEW_HEARD = 2  # so many at once
RIGHT_RUN = 3  # guesses of a request, one after another, whose being right is no accident


class DraftController:
    """Written by plans (begin, choose, crowded) and commits (learn). most: guesses of a row; adaptive: False for always so many.
    by_model: who drafts computes something of every token of whom it guesses for."""

    def __init__(self, num_slots: int, most: int, adaptive: bool = True, by_model: bool = False) -> None:
        assert most > 0, "somebody drafts"
        self._adaptive, self._chooses_whom = adaptive, adaptive and by_model
        self._choices = (*(choice for choice in CHOICES if choice < most), most)
        self._hits, self._tries = np.zeros((2, num_slots, most))
        self._all_hits, self._all_tries = np.full(most, HOPE), np.ones(most)
        self._misses, self._pauses, self._runs, self._firsts = np.zeros((4, num_slots), dtype=np.int64)
        self._right_firsts, self._crowded = 1.0, 0
        self._speaks = np.ones(num_slots)  # how likely it is that there are guesses where some may be
        self._seconds = np.zeros((BUCKETS, len(self._choices)))
        self._seen = np.zeros((BUCKETS, len(self._choices)), dtype=np.int64)
        self._silence = np.zeros(BUCKETS)  # seconds of a step that might have had guesses, and had none
        self._silences = np.zeros(BUCKETS, dtype=np.int64)
        self._chosen = np.full(BUCKETS, len(self._choices) - 1)  # of the step before, by number of rows
        self._choices_made, self._guessing = np.zeros((2, BUCKETS), dtype=np.int64)  # _guessing: steps since one without guesses
        self._without = 0  # steps without guesses since one with
        self._was_right = False  # some guess, since the last plan

    def begin(self, slot: int) -> None:
        """Another request is in the slot."""
        self._hits[slot] = self._tries[slot] = 0.0
        self._misses[slot] = self._pauses[slot] = self._runs[slot] = self._firsts[slot] = 0
        self._speaks[slot] = 1.0

    @property
    def hears_few(self) -> bool:
        """No more requests are to be guessed for than hears_another says."""
        return self._is_in_vain or (self._chooses_whom and self._crowded >= CROWDED)

    def hears_another(self, heard: Sequence[int]) -> bool:
        """heard: slots of those that run and are guessed for. Whose guesses were wrong all along take nobody's place, unless they
        are as many again."""
        return len(heard) < 2 * FEW_HEARD and int((self._misses[heard] < MISSES).sum()) < FEW_HEARD

    @property
    def _is_in_vain(self) -> bool:
        return self._chooses_whom and self._right_firsts < IN_VAIN

    def rest(self) -> None:
        """Nobody runs: what made the crowd is over."""
        self._crowded = 0

    def crowded(self, slots: I64) -> I64:
        """Guesses of each row of a step that has too many rows for any."""
        self._crowded += 1
        self._pauses[slots] -= self._pauses[slots] > 0
        return np.zeros(len(slots), dtype=np.int64)

    def choose(self, slots: I64, most: I64) -> I64:
        """Guesses of each row, no more than `most` of it."""
        assert len(slots) == len(most) and len(slots), "a bound for each row"
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
        if self._choices_made[bucket] % FORGET_AFTER == 0:  # an early cost may have been no usual one
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
        """slots: of rows that were to have guesses and whose request is there, with how many there were and how many were right.
        seconds: what the step took; 0 where that is not known. It is the cost of the number that was chosen, however many were
        then guessed; or that of asking, where none of them was."""
        assert len(slots) == len(drafted) == len(accepted), "columns of the same rows"
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
        """[rows, guesses]: how likely it is that a row's guesses are right up to each one; 0 beyond its most."""
        of_all: F64 = self._all_hits / self._all_tries
        fresh = self._tries[slots, :1] < FEW
        before = of_all if self._is_in_vain else np.where(fresh, np.maximum(of_all, HOPE), of_all)
        each = (self._hits[slots] + before) / (self._tries[slots] + 1)
        right: F64 = np.cumprod(each, axis=1, dtype=np.float64)
        right[np.arange(right.shape[1]) >= most[:, None]] = 0
        return right

    def _choice(self, bucket: int, slots: I64, most: I64) -> int:
        """The number that gives the most tokens a second; one whose cost is not known is tried, unless there are hardly guesses
        to try it with."""
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
        """Whether a step that is to have no guesses has some nevertheless: now and then, and soon again while they are right.
        Seldom where even right ones would not pay; in vain that is not asked: it is few who have any."""
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
        """A machine that gets slower, or contexts that get longer, make all steps dearer: those with guesses, which are seldom
        seen where others are chosen, too."""
        index = next(index for index, choice in enumerate(self._choices) if choice >= drafted)
        self._guessing[bucket] = self._guessing[bucket] + 1 if index else 0
        if index and self._guessing[bucket] >= STEADY:  # what steps without cost was long ago: it is learned again first
            self._seen[bucket, 0] = min(self._seen[bucket, 0], FEW)
        before = float(self._seconds[bucket, 0]) if not index and self._seen[bucket, 0] >= STEADY else 0.0
        _average(self._seconds[bucket], self._seen[bucket], index, seconds)
        if before:
            dearer = float(self._seconds[bucket, 0]) / before
            self._seconds[bucket, 1:] *= dearer
            self._silence[bucket] *= dearer

    def _tell_of_others(self, slot: int, guesses: int, hits: int) -> None:
        """What the request's guesses let expect of those of requests to come."""
        if guesses and self._firsts[slot] < FIRSTS:
            self._firsts[slot] += 1
            self._right_firsts += (1 - FADE_OF_FIRSTS) * ((hits > 0) - self._right_firsts)
        self._runs[slot] += hits
        if self._runs[slot] >= RIGHT_RUN:
            self._right_firsts = max(self._right_firsts, WORTHWHILE)
        if hits < guesses:
            self._runs[slot] = 0

    def _note(self, slot: int, guesses: int, hits: int) -> None:
        assert 0 <= hits <= guesses, "what is right was guessed"
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
            return  # nothing was wrong; or it was planned before the rest began
        self._misses[slot] = 0 if hits else self._misses[slot] + 1
        if self._misses[slot] >= MISSES and not self._is_in_vain:
            self._pauses[slot] = min(MOST_PAUSE, 1 << int(self._misses[slot]))


def _average(means: F64, counts: I64, index: int, seconds: float) -> None:
    """One more of what `means` has at that place; one that is far from the others counts as less far."""
    seen, mean = int(counts[index]), float(means[index])
    if seen >= FEW:
        seconds = min(seconds, OUTLIER * mean)
    means[index] = mean + max(1 / (seen + 1), LATEST) * (seconds - mean)
    counts[index] = seen + 1
