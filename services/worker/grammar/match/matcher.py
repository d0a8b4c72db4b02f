"""One request's place in its grammar, over xgrammar's matcher. Used on the loop's thread alone.

A matcher whose work costs more CPU time than its meter bears, or whose library fails, accepts nothing more: the request that
owns it ends, and `fault` says why. The trial before has made that rare.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from services.worker.grammar.compile.byte_cursor import ByteCursor
from services.worker.grammar.compile.compiled import Compiled
from services.worker.grammar.compile.vocabulary import Vocabulary
from services.worker.grammar.match.forced_text import ForcedText
from services.worker.text.step_meter import StepMeter

if TYPE_CHECKING:
    import xgrammar

TOO_SLOW = "the grammar has become too expensive: working out which tokens may come next takes too long"
BROKEN = "the grammar's matcher has failed: an internal error, see the worker's log"
MAX_UNSEEN = 256  # tokens: what is followed at once is paid for at once
MIN_FORCED = 2  # a jump costs a step that extends; one token is as fast sampled

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MatcherSetup:
    """What all matchers of a worker share. tokens: the bytes of each. last_word: bits of a mask's last word that stand for
    token ids. silent: ids that no grammar allows (special tokens, padding), but for stop ids. forced: None switches jumps off."""

    tokens: tuple[bytes, ...]
    num_words: int
    stop_mask: NDArray[np.uint32]
    last_word: np.uint32
    silent: frozenset[int]
    forced: ForcedText | None

    @classmethod
    def of(cls, vocabulary: Vocabulary, forced: ForcedText | None) -> MatcherSetup:
        size = len(vocabulary.tokens)
        stop_mask = np.zeros(vocabulary.num_words, np.uint32)
        for token in vocabulary.stop_ids:
            stop_mask[token >> 5] |= np.uint32(1 << (token & 31))
        silent = frozenset(index for index, text in enumerate(vocabulary.tokens) if not text) - frozenset(vocabulary.stop_ids)
        last_word = np.uint32(0xFFFFFFFF if size % 32 == 0 else (1 << size % 32) - 1)
        return cls(vocabulary.tokens, vocabulary.num_words, stop_mask, last_word, silent, forced)


class XgrammarMatcher:
    """Implements core.grammar.Matcher, and gives masks. on_overrun is called when the meter overruns, until it returns
    False: what the matcher has cost is borne while it does not."""

    def __init__(self, compiled: Compiled, setup: MatcherSetup, meter: StepMeter, on_overrun: Callable[[], bool]) -> None:
        import xgrammar  # imported only where it is wanted

        self._matcher = xgrammar.GrammarMatcher(compiled.grammar)
        self._setup = setup
        self._meter = meter
        self._on_overrun = on_overrun
        self._cursor = ByteCursor(compiled.by_bytes) if setup.forced is not None and compiled.by_bytes is not None else None
        self._unseen: list[int] = []  # accepted tokens that the cursor has yet to follow
        self._mask = np.zeros((1, setup.num_words), np.uint32)
        self._row: NDArray[np.uint32] = self._mask[0]
        self._mask_is_current = False
        self._terminated: bool | None = None  # None: to be worked out
        self._fault = ""
        self._cost_s = 0.0

    @property
    def fault(self) -> str:
        """Why nothing is accepted any more; empty while all is well."""
        return self._fault

    @property
    def terminated(self) -> bool:
        """A stop token was accepted, or the output is complete and only a stop token could follow."""
        if self._terminated is None:
            try:
                ended = self._matcher.is_terminated()
                self._terminated = ended or (self._matcher.is_completed() and self._only_stops_follow())
            except Exception:
                self._break()
        return bool(self._terminated)

    def accept(self, token: int) -> bool:
        if self._fault:
            return False
        started = time.thread_time()
        try:
            accepted = self._takes(token)
        except Exception:
            self._break()
            return False
        self._meter.step()
        if accepted:
            self._moved([token])
            if len(self._unseen) >= MAX_UNSEEN:
                self._catch_up()
        self._spend(time.thread_time() - started)
        return accepted

    def mask(self) -> NDArray[np.uint32]:
        """uint32[words], the tokens that may come next; overwritten after the next accept. After the end: stop ids. Where that
        cannot be worked out: every token, so that one is sampled, and refused with the fault."""
        if not self._mask_is_current:
            started = time.thread_time()
            try:
                self._fill()
            except Exception:
                self._break()
            self._spend(time.thread_time() - started)
        return self._row

    def look_ahead(self, tokens: Sequence[int], masks: NDArray[np.uint32], until: float) -> int:
        """Masks of the places behind each of the tokens, if they come next: into rows of masks, uint32[>= len(tokens), words].
        Returns how many: fewer than tokens where one is not allowed, or is the last, or time.thread_time() is past `until`.
        Nothing is accepted, and what it costs is not the request's cost: whether its tokens are guessed is not its choice."""
        taken = filled = 0
        try:
            for token in tokens if not self._fault else ():
                if time.thread_time() > until or not self._takes(token):
                    break
                taken += 1
                if self._matcher.is_terminated():
                    break
                self._matcher.fill_next_token_bitmask(masks.view(np.int32), filled)
                masks[filled, -1] &= self._setup.last_word
                filled += 1
        except Exception:
            logger.exception("looking ahead in a grammar has failed: what is guessed there is not verified")
        self._take_back(taken)
        return filled

    def _takes(self, token: int) -> bool:
        """Advances the library's matcher, where it may."""
        if not 0 <= token < len(self._setup.tokens) or token in self._setup.silent or self._matcher.is_terminated():
            return False
        return bool(self._matcher.accept_token(token))

    def _take_back(self, count: int) -> None:
        if count:
            try:
                self._matcher.rollback(count)
            except Exception:
                self._break()

    @property
    def needs_fill(self) -> bool:
        """Whether mask() has work to do that a batch can do as well."""
        return not self._mask_is_current and not self._matcher.is_terminated()

    @property
    def raw(self) -> xgrammar.GrammarMatcher:
        """For filling a batch of masks, which changes nothing in it."""
        return self._matcher

    def adopt(self, mask: NDArray[np.uint32]) -> None:
        """Takes a mask that was filled elsewhere for the state that the matcher is in."""
        self._row[:] = mask
        self._row[-1] &= self._setup.last_word
        self._mask_is_current = True

    def take_cost(self) -> float:
        """Seconds of CPU time spent here since this was last asked."""
        cost, self._cost_s = self._cost_s, 0.0
        return cost

    def charge(self, seconds: float) -> None:
        """Adds to what the meter is owed."""
        before = self._meter.overrun
        self._meter.spend(seconds)
        if not self._meter.overrun or before:
            return
        if self._on_overrun():
            self._meter.forgive()
        else:
            self._fault = self._fault or TOO_SLOW

    def forced(self) -> Sequence[int]:
        forced = self._setup.forced
        if forced is None or self._cursor is None or self._fault or self.terminated:
            return ()
        started = time.thread_time()
        tokens: tuple[int, ...] = ()
        data = self._forced_bytes()
        try:
            tokens = self._accept_forced(forced.tokens(data)) if data else ()
        except Exception:
            self._break()
        self._spend(time.thread_time() - started)
        return tokens

    def _forced_bytes(self) -> bytes:
        cursor = self._catch_up()
        try:
            return b"" if cursor is None else cursor.forced()
        except Exception:
            self._drop_cursor()
            return b""

    def _catch_up(self) -> ByteCursor | None:
        """The cursor, at the matcher's place."""
        if self._cursor is not None:
            try:
                self._cursor.advance(b"".join([self._setup.tokens[token] for token in self._unseen]))
            except Exception:
                self._drop_cursor()
            self._unseen.clear()
        return self._cursor

    def _drop_cursor(self) -> None:
        """While an exception is handled: a cursor that fails costs its request nothing but the jumps."""
        logger.exception("the grammar over bytes has failed: this request goes on without jumps")
        self._cursor = None
        self._unseen.clear()

    def _accept_forced(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """As many as the grammar takes. The last may merge with text that is to come: it counts only if none can come, which
        is never so where the search for forced bytes has stopped short."""
        taken = 0
        for token in tokens:
            if token in self._setup.silent or not self._matcher.accept_token(token):
                break
            taken += 1
        if taken and taken == len(tokens):
            self._moved(())
            if not self.terminated:
                self._matcher.rollback(1)
                taken -= 1
        if 0 < taken < MIN_FORCED:
            self._matcher.rollback(taken)
            taken = 0
        self._moved(tokens[:taken])
        return tuple(tokens[:taken])

    def _moved(self, tokens: Sequence[int]) -> None:
        self._mask_is_current = False
        self._terminated = None
        if self._cursor is not None:
            self._unseen.extend(tokens)

    def _spend(self, seconds: float) -> None:
        self._cost_s += seconds
        self.charge(seconds)

    def _break(self) -> None:
        """While an exception of the library is handled."""
        logger.exception("a grammar's matcher has failed; its request ends")
        self._fault = self._fault or BROKEN
        self._terminated = False
        self._row[:] = 0xFFFFFFFF
        self._row[-1] &= self._setup.last_word
        self._mask_is_current = True

    def _only_stops_follow(self) -> bool:
        return not np.any(self.mask() & ~self._setup.stop_mask)

    def _fill(self) -> None:
        if self._matcher.is_terminated():
            self._row[:] = self._setup.stop_mask
        else:
            self._matcher.fill_next_token_bitmask(self._mask.view(np.int32), 0)
            self._row[-1] &= self._setup.last_word
        self._mask_is_current = True
