"""PrefillAdder: how much more may be extended in the step that is being planned (reference 2 §5, §9.4).

Three budgets in tokens: total (KV that admitted requests may come to need), input (tokens of this step), chunk (where
prompts are cut). It answers; the scheduler acts. Made anew for every planning pass.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

CLIP_MAX_NEW_TOKENS = 4096


class AddResult(enum.IntEnum):
    CONTINUE = 0
    NO_TOKEN = 1  # the KV pool is spoken for: batch_is_full
    OTHER = 2  # this step has enough


@dataclass(frozen=True, slots=True)
class RunningRow:
    """remaining: output tokens still to come at most; held: tokens of KV that finishing gives back."""

    remaining: int
    held: int
    ignore_eos: bool


class PrefillAdder:
    """num_decode_rows: decode rows that ride along in this step; they take from the input and chunk budgets, which keep
    one page at least, so that no number of decodes starves an extend."""

    def __init__(
        self,
        page_size: int,
        rows: list[RunningRow],
        new_token_ratio: float,
        max_prefill_tokens: int,
        chunked_prefill_size: int,
        num_decode_rows: int,
    ) -> None:
        self._page_size = page_size
        self._rows = rows
        self._ratio = new_token_ratio
        self._reserved = sum(min(row.remaining, CLIP_MAX_NEW_TOKENS) for row in rows) * new_token_ratio
        self._input = max(max_prefill_tokens - num_decode_rows, page_size)
        self._chunk = max(chunked_prefill_size - num_decode_rows, page_size) if chunked_prefill_size else None
        self._pending = 0
        self._empty = True

    def chunk(self, start: int, remaining: int) -> int:
        """Tokens of an extend at `start` that this step takes: all that remain, or a page-aligned part, or 0."""
        if self._chunk is None:
            return remaining if remaining <= self._input or self._empty else 0
        room = min(self._input, self._chunk)
        if remaining <= room:
            return remaining
        end = (start + room) // self._page_size * self._page_size
        return max(end - start, 0)

    def admit(self, available: int, start: int, extend: int, max_new: int, ignore_eos: bool) -> tuple[AddResult, int]:
        """Whether a waiting request may begin, and with how many tokens.

        available: tokens of KV that are free or evictable with the request's hit locked. max_new: outputs to come.
        """
        need = self._ceil(extend) + min(max_new, CLIP_MAX_NEW_TOKENS)
        if ignore_eos:
            if not self._fits_until_finishes(available, extend, max_new):
                return AddResult.NO_TOKEN, 0
        elif need >= available - self._reserved:
            return AddResult.NO_TOKEN, 0
        if self._input <= 0:
            return AddResult.OTHER, 0
        count = self.chunk(start, extend)
        return (AddResult.CONTINUE, count) if count > 0 else (AddResult.OTHER, 0)

    def added(self, count: int, remaining: int, max_new: int, ignore_eos: bool) -> None:
        """`count` tokens went into the plan; `remaining` stay to be extended. The KV of `count` is already allocated."""
        self._empty = False
        self._input -= count
        if self._chunk is not None:
            self._chunk -= count
        self._reserved += self._ceil(remaining) + min(max_new, CLIP_MAX_NEW_TOKENS)
        self._pending += self._ceil(remaining)
        self._rows.append(RunningRow(max_new, count + remaining, ignore_eos))

    @property
    def exhausted(self) -> bool:
        return self._input <= 0 or (self._chunk is not None and self._chunk <= 0)

    def _fits_until_finishes(self, available: int, extend: int, max_new: int) -> bool:
        """Plays all rows forward: when each finishes (those that may stop early: after `ratio` of what they could still
        give) it returns its KV; at no such moment may the rest have grown beyond what is free."""
        rows = [(r.remaining if r.ignore_eos else int(r.remaining * self._ratio), r.held) for r in self._rows]
        rows.append((max_new, extend))
        rows.sort()
        free = available - self._pending - self._ceil(extend)
        for i, (steps, held) in enumerate(rows):
            alive = len(rows) - i
            if free - steps * alive <= alive * self._page_size:
                return False
            free += held
        return True

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self._page_size) * self._page_size
