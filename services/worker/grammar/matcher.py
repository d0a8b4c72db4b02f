"""One request's place in its grammar, over xgrammar's matcher. Used on the loop's thread alone.

A matcher whose masks or accepts cost more CPU time than its meter bears accepts nothing more: the request that owns it
ends, and `fault` says why. The trial before has made that rare.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xgrammar
from numpy.typing import NDArray

from services.worker.grammar.forced_text import ForcedText
from services.worker.grammar.grammar_limits import StepMeter
from services.worker.grammar.vocabulary import Vocabulary

TOO_SLOW = "the grammar has become too expensive: working out which tokens may come next takes too long"
MIN_FORCED = 2  # a jump costs a step that extends; one token is as fast sampled


@dataclass(frozen=True, slots=True)
class MatcherSetup:
    """What all matchers of a worker share. last_word: bits of a mask's last word that stand for token ids.
    silent: ids that no grammar allows (special tokens, padding), stop ids excepted. forced: None switches jumps off."""

    vocab_size: int
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
        return cls(size, vocabulary.num_words, stop_mask, last_word, silent, forced)


class XgrammarMatcher:
    """Implements core.grammar.Matcher, and gives masks."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, setup: MatcherSetup, meter: StepMeter) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._setup = setup
        self._meter = meter
        self._mask = np.zeros((1, setup.num_words), np.uint32)
        self._row: NDArray[np.uint32] = self._mask[0]
        self._mask_is_current = False
        self._terminated: bool | None = None  # None: to be worked out

    @property
    def fault(self) -> str:
        """Why nothing is accepted any more; empty while all is well."""
        return TOO_SLOW if self._meter.overrun else ""

    @property
    def terminated(self) -> bool:
        """A stop token was accepted, or the output is complete and only a stop token could follow."""
        if self._terminated is None:
            self._terminated = self._matcher.is_terminated() or (self._matcher.is_completed() and self._only_stops_follow())
        return self._terminated

    def accept(self, token: int) -> bool:
        setup = self._setup
        if self._meter.overrun or not 0 <= token < setup.vocab_size or token in setup.silent or self._matcher.is_terminated():
            return False
        started = time.thread_time()
        accepted: bool = self._matcher.accept_token(token)
        self._meter.token()
        self._meter.spend(time.thread_time() - started)
        if accepted:
            self._moved()
        return accepted

    def mask(self) -> NDArray[np.uint32]:
        """uint32[words], the tokens that may come next; overwritten after the next accept. After the end: stop ids."""
        if not self._mask_is_current:
            started = time.thread_time()
            self._fill()
            self._meter.spend(time.thread_time() - started)
        return self._row

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

    def forced(self) -> Sequence[int]:
        forced = self._setup.forced
        if forced is None or self._meter.overrun or self.terminated:
            return ()
        started = time.thread_time()
        tokens = self._accept_forced(forced.tokens(self._matcher))
        self._meter.spend(time.thread_time() - started)
        return tokens

    def _accept_forced(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """As many as the grammar takes. The last may merge with text that is to come: it counts only if none can come."""
        taken = 0
        for token in tokens:
            if token in self._setup.silent or not self._matcher.accept_token(token):
                break
            taken += 1
            if taken == len(tokens):
                self._moved()
                if not self.terminated:
                    self._matcher.rollback(1)
                    taken -= 1
        if 0 < taken < MIN_FORCED:
            self._matcher.rollback(taken)
            taken = 0
        self._moved()
        return tuple(tokens[:taken])

    def _moved(self) -> None:
        self._mask_is_current = False
        self._terminated = None

    def _only_stops_follow(self) -> bool:
        return not np.any(self.mask() & ~self._setup.stop_mask)

    def _fill(self) -> None:
        if self._matcher.is_terminated():
            self._row[:] = self._setup.stop_mask
        else:
            self._matcher.fill_next_token_bitmask(self._mask.view(np.int32), 0)
            self._row[-1] &= self._setup.last_word
        self._mask_is_current = True
