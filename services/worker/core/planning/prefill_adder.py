"""PrefillAdder: how much more may be extended in the step that is being planned (docs/design/scheduler.md#admission-and-budgets).

Budgets in tokens: total (KV that admitted requests may come to need), input (tokens of this step), chunk (where prompts
are cut), logprob (prompt tokens whose logprobs are computed). It answers; the scheduler acts. Made anew for every pass.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CLIP_MAX_NEW_TOKENS = 4096
MIN_CHUNK_SHARE = 8  # however many rows decode, a chunk keeps one part in so many of its full size
MIN_PACED_SHARE = 32  # and however slow it is
FADES = 0.7  # of what steps took before, with each further one
OUTLIER = 4.0  # times what steps took before that one counts as, at most
BUCKETS = 32
MOST_TOKENS = 1 << 30  # of a step, whatever time it has


class AddResult(enum.IntEnum):
    CONTINUE = 0
    NO_TOKEN = 1  # the KV pool is spoken for: batch_is_full
    OTHER = 2  # this step has enough


@dataclass(frozen=True, slots=True)
class RunningRows:
    """Columns of running requests. remaining: int64[n], output tokens still to come at most; held: int64[n], tokens of KV that
    finishing gives back; ignore_eos: bool[n]."""

    remaining: NDArray[np.int64]
    held: NDArray[np.int64]
    ignore_eos: NDArray[np.bool_]


NO_ROWS = RunningRows(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_))


def adapted_chunk(chunked_prefill_size: int, page_size: int, num_decoding: int, half_at: int) -> int:
    """The chunk size beside `num_decoding` rows that wait for their next token: half at `half_at` of them (0: never less).
    Whole pages, one at least; 0 stays 0."""
    if not chunked_prefill_size or not half_at:
        return chunked_prefill_size
    size = max(chunked_prefill_size * half_at // (half_at + num_decoding), chunked_prefill_size // MIN_CHUNK_SHARE)
    return max(size // page_size * page_size, page_size)


class ChunkPace:
    """How many tokens a step may extend while rows decode, so that they wait no longer than they are to for their next one; by
    what steps have taken lately. A step takes what one of its decode rows alone takes, or of the fewest rows where it has none,
    and a time for each extended token, which grows with the prompts' contexts and follows them. Times are between the commits
    that the caller names, so the same calls give the same chunks."""

    def __init__(self) -> None:
        self._extended = self._seconds = 0.0  # of steps lately, by how late; large ones say more than small ones
        self._decode_s = [0.0] * BUCKETS  # of a step of decode rows alone, by the bit length of their number; 0: nobody knows

    def took(self, extended: int, rows: int, seconds: float, least: int) -> None:
        """A step has extended so many tokens, beside so many decode rows. least: of fewer tokens it says nothing of what one
        takes."""
        assert extended >= 0 and rows >= 0, "counts of a step"
        if seconds <= 0:
            return
        if not extended:
            before = self._decode_s[rows.bit_length()]
            now = FADES * before + (1 - FADES) * min(seconds, OUTLIER * before) if before else seconds
            self._decode_s[rows.bit_length()] = now
        elif extended >= least:
            own = seconds - min(self._alone_s(rows) if rows else self._least_s(), seconds / 2)
            if self._extended:
                own = min(own, OUTLIER * extended * self._seconds / self._extended)
            self._extended, self._seconds = FADES * self._extended + extended, FADES * self._seconds + own

    @property
    def is_known(self) -> bool:
        """What a token takes."""
        return self._extended > 0

    def steps(self, within_s: float, decoding: int, size: int) -> int:
        """Of so many tokens each, or somewhat fewer, that come to within_s with a step of so many decode rows; 1 at least. What a
        token takes is known."""
        step_s = size * self._seconds / self._extended + self._least_s()
        return max(math.ceil(min((within_s - self._alone_s(decoding)) / step_s, MOST_TOKENS)), 1)

    def tokens(self, within_s: float, decoding: int, steps: int) -> int:
        """Of each of so many steps, 0 for the one that the decode rows have, so that all come to within_s. What a token takes is
        known. Where decode rows take most of that, as long as they do, and within_s at most: shorter chunks would come to little
        but more steps."""
        alone = self._alone_s(decoding)
        left = max(within_s - alone - steps * self._least_s(), min(alone, within_s))
        return int(min(left / max(steps, 1) / self._seconds * self._extended, MOST_TOKENS))

    def _alone_s(self, rows: int) -> float:
        """Of no more rows than that, as far as it is known."""
        return next((seconds for seconds in self._decode_s[rows.bit_length() : 0 : -1] if seconds), 0.0)

    def _least_s(self) -> float:
        """What a step takes that does as good as nothing, as far as it is known."""
        return min((seconds for seconds in self._decode_s if seconds), default=0.0)


def paced_chunk(chunked_prefill_size: int, page_size: int, tokens: int) -> int:
    """The chunk size where a step may extend so many tokens. Whole pages; one part in so many of the full size, and one page, at
    least; 0 stays 0."""
    if not chunked_prefill_size:
        return 0
    size = min(max(tokens, chunked_prefill_size // MIN_PACED_SHARE), chunked_prefill_size)
    return max(size // page_size * page_size, page_size)


class PrefillAdder:
    """chunked_prefill_size: 0 if prompts are not cut. num_decode_rows: decode rows that ride along in this step; they take
    from the input and chunk budgets, which keep one page at least, so that no number of decodes starves an extend. set_aside:
    tokens of KV for rows that are yet to be added."""

    def __init__(
        self,
        page_size: int,
        rows: RunningRows,
        new_token_ratio: float,
        max_prefill_tokens: int,
        chunked_prefill_size: int,
        num_decode_rows: int,
        max_requests: int,
        max_logprob_tokens: int,
    ) -> None:
        assert len(rows.remaining) == len(rows.held) == len(rows.ignore_eos), "columns of the same rows"
        self._page_size = page_size
        self._rows = rows
        self._ratio = new_token_ratio
        self._added: list[tuple[int, int, bool]] = []  # remaining, held, ignore_eos of rows of this step
        outputs = float(np.minimum(rows.remaining, CLIP_MAX_NEW_TOKENS).sum()) if len(rows.remaining) else 0.0
        self._reserved = outputs * new_token_ratio
        self._input = max(max_prefill_tokens - num_decode_rows, page_size)
        self._chunk = max(chunked_prefill_size - num_decode_rows, page_size) if chunked_prefill_size else None
        self._logprobs = max_logprob_tokens
        self._requests_left = max_requests or None
        self._pending = 0
        self._empty = True
        self.set_aside = 0

    def chunk(self, start: int, remaining: int, logprobs: bool) -> int:
        """Tokens of an extend at `start` that this step takes: all that remain, or a page-aligned part, or 0. logprobs:
        those of the extended tokens are wanted, so they are cut to that budget too."""
        assert start >= 0 and remaining > 0, "an extend with nothing left to compute"
        if self._requests_left == 0:
            return 0
        if self._chunk is None and not logprobs:
            return remaining if remaining <= self._input or self._empty else 0
        room = self._input if self._chunk is None else min(self._input, self._chunk)
        if logprobs:
            room = min(room, self._logprobs)
        if remaining <= room:
            return remaining
        end = (start + room) // self._page_size * self._page_size
        return max(end - start, 0)

    def admit(
        self, available: int, start: int, extend: int, max_new: int, ignore_eos: bool, logprobs: bool
    ) -> tuple[AddResult, int]:
        """Whether a waiting request may begin, and with how many tokens.

        available: tokens of KV that are free or evictable with the request's hit locked. max_new: outputs to come.
        """
        available -= self.set_aside
        need = self._ceil(extend) + min(max_new, CLIP_MAX_NEW_TOKENS)
        if ignore_eos:
            if not self._fits_until_finishes(available, extend, max_new):
                return AddResult.NO_TOKEN, 0
        elif need >= available - self._reserved:
            return AddResult.NO_TOKEN, 0
        if self._input <= 0:
            return AddResult.OTHER, 0
        count = self.chunk(start, extend, logprobs)
        return (AddResult.CONTINUE, count) if count > 0 else (AddResult.OTHER, 0)

    def added(self, count: int, remaining: int, max_new: int, ignore_eos: bool, logprobs: bool) -> None:
        """`count` tokens went into the plan; `remaining` stay to be extended. The KV of `count` is already allocated."""
        assert count > 0 and remaining >= 0, "a row computes a token, and no more than are left"
        self._empty = False
        self._input -= count
        self._logprobs -= count if logprobs else 0
        if self._requests_left is not None:
            self._requests_left -= 1
            assert self._requests_left >= 0, "more rows than a step may have"
        if self._chunk is not None:
            self._chunk -= count
        self._reserved += self._ceil(remaining) + min(max_new, CLIP_MAX_NEW_TOKENS)
        self._pending += self._ceil(remaining)
        assert not logprobs or self._logprobs >= 0, "more prompt logprobs than a step may compute"
        self._added.append((max_new, count + remaining, ignore_eos))

    @property
    def exhausted(self) -> bool:
        return self._input <= 0 or (self._chunk is not None and self._chunk <= 0) or self._requests_left == 0

    def _fits_until_finishes(self, available: int, extend: int, max_new: int) -> bool:
        """Plays all rows forward: when each finishes (those that may stop early: after `ratio` of what they could still
        give) it returns its KV; at no such moment may the rest have grown beyond what is free."""
        running = self._rows
        left = np.where(running.ignore_eos, running.remaining, (running.remaining * self._ratio).astype(np.int64))
        added = [(more if ignores else int(more * self._ratio), held) for more, held, ignores in self._added]
        late = np.array([*added, (max_new, extend)], dtype=np.int64)
        steps = np.concatenate([left, late[:, 0]])
        order = np.argsort(steps, kind="stable")
        steps, held = steps[order], np.concatenate([running.held, late[:, 1]])[order]
        alive = np.arange(len(steps), 0, -1)
        free = available - self._pending - self._ceil(extend) + np.cumsum(held) - held
        return bool((free - steps * alive > alive * self._page_size).all())

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self._page_size) * self._page_size
