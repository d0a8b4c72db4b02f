"""The position of a request in its grammar, on top of xgrammar's matcher. Used only on the loop's thread.

If a matcher costs more CPU time than its meter allows, or the library fails, it accepts no more tokens. Its request then ends,
and `fault` has the reason. The trial before makes this rare. ForcedText converts text that a grammar determines into tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.worker.grammar.compile.byte_cursor import ByteCursor
from rootstock_llm.services.worker.grammar.compile.grammar_compiler import Compiled
from rootstock_llm.services.worker.grammar.compile.vocabulary import Vocabulary
from rootstock_llm.services.worker.text.step_meter import StepMeter

if TYPE_CHECKING:
    import xgrammar


from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer

MIN_CHARS = 2  # a shorter text is nearly always one token, for which a jump does not pay
TOO_SLOW = "the grammar has become too expensive: working out which tokens may come next takes too long"
BROKEN = "the grammar's matcher has failed: an internal error, see the worker's log"
MAX_UNSEEN = 256  # tokens that the cursor may lag behind; this limits the CPU time of catching up in one step
MIN_FORCED = 2  # tokens of a jump, which costs an extend step; sampling a single token is as fast
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MatcherSetup:
    """Constants that all matchers of a worker share."""

    tokens: tuple[bytes, ...]  # bytes of each token
    num_words: int  # uint32 words of a mask
    stop_mask: NDArray[np.uint32]  # the stop ids
    last_word: np.uint32  # bits of a mask's last word that represent token ids
    silent: frozenset[int]  # ids that no grammar allows: special tokens and padding, except stop ids
    forced: ForcedText | None  # tokenizes forced text, or None if jumps are disabled

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
    """Implements core.contracts.grammar.Matcher and fills masks.

    on_overrun is called when the meter overruns. If it returns True, the meter is reset. If it returns False, the matcher has a
    fault from then on.
    """

    def __init__(self, compiled: Compiled, setup: MatcherSetup, meter: StepMeter, on_overrun: Callable[[], bool]) -> None:
        import xgrammar  # imported at first use, because it takes seconds

        self._matcher = xgrammar.GrammarMatcher(compiled.grammar)
        self._setup = setup
        self._meter = meter
        self._on_overrun = on_overrun
        self._cursor = ByteCursor(compiled.by_bytes) if setup.forced is not None and compiled.by_bytes is not None else None
        self._unseen: list[int] = []  # accepted tokens that the cursor has not followed yet
        self._mask = np.zeros((1, setup.num_words), np.uint32)
        self._row: NDArray[np.uint32] = self._mask[0]
        self._mask_is_current = False
        self._terminated: bool | None = None  # as last computed, or None if a token was accepted since then
        self._fault = ""
        self._cost_s = 0.0

    @property
    def fault(self) -> str:
        """The reason why the matcher accepts no more tokens; "" without a fault."""
        return self._fault

    @property
    def terminated(self) -> bool:
        """Whether a stop token was accepted, or the output is complete and only a stop token could follow."""
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
        """Returns the tokens that may come next, uint32[words]. The mask is valid until the next accept().

        After the end it has the stop ids. If the library fails, it has all tokens, and any sampled token is refused.
        """
        if not self._mask_is_current:
            started = time.thread_time()
            try:
                self._fill()
            except Exception:
                self._break()
            self._spend(time.thread_time() - started)
        return self._row

    def look_ahead(self, tokens: Sequence[int], masks: NDArray[np.uint32], until: float) -> int:
        """Fills the masks after each of the tokens, as if they came next. No token is accepted.

        The CPU time is not charged to the request, because drafting is not its choice.

        Args:
            tokens: draft tokens.
            masks: uint32[>= len(tokens), words], whose first rows are filled.
            until: time.thread_time() at which the work stops.

        Returns:
            The number of filled masks. It is smaller than the number of tokens if a token is not allowed or ends the output, or
            the time is over.
        """
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
            logger.exception("looking ahead in a grammar has failed; later draft tokens are not verified")
        self._take_back(taken)
        return filled

    def _takes(self, token: int) -> bool:
        """Advances the library's matcher by a token. Returns False if the grammar does not allow it."""
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
        """Whether mask() would fill a mask, which a batch can do as well."""
        return not self._mask_is_current and not self._matcher.is_terminated()

    @property
    def raw(self) -> xgrammar.GrammarMatcher:
        """xgrammar's matcher, for filling a batch of masks, which does not change it."""
        return self._matcher

    def adopt(self, mask: NDArray[np.uint32]) -> None:
        """Takes a mask that was filled in a batch for the present state."""
        self._row[:] = mask
        self._row[-1] &= self._setup.last_word
        self._mask_is_current = True

    def take_cost(self) -> float:
        """Returns the seconds of CPU time spent since the last call."""
        cost, self._cost_s = self._cost_s, 0.0
        return cost

    def charge(self, seconds: float) -> None:
        """Adds CPU time to the meter, and handles its overrun."""
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
        """Advances the cursor to the matcher's position and returns it. None without a cursor, or if it fails."""
        if self._cursor is not None:
            try:
                self._cursor.advance(b"".join([self._setup.tokens[token] for token in self._unseen]))
            except Exception:
                self._drop_cursor()
            self._unseen.clear()
        return self._cursor

    def _drop_cursor(self) -> None:
        """Drops the cursor after its failure, in an exception handler. The request continues without jumps."""
        logger.exception("the grammar over bytes has failed; the request continues without jumps")
        self._cursor = None
        self._unseen.clear()

    def _accept_forced(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Accepts forced tokens and returns the accepted ones.

        The last token is taken back unless the output ends after it, because the tokenizer might merge it with the text that
        follows. Fewer than MIN_FORCED tokens are all taken back.
        """
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
        """Sets the fault after an exception of the library, in its handler."""
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


class ForcedText:
    """Tokenizes forced text.

    If the tokenizer adds a space to the first word of a text, the text gets an anchor token before it, which is then removed.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor_id = tokenizer.anchor_id
        self._anchor = "" if tokenizer.anchor_id is None else tokenizer.decode([tokenizer.anchor_id], False)

    def tokens(self, data: bytes) -> list[int]:
        """Returns the tokens of bytes that must come next, as if the text ended after them. Empty below MIN_CHARS characters."""
        text = _whole_characters(data)
        if len(text) < MIN_CHARS:
            return []
        (ids,) = self._tokenizer.encode_batch([self._anchor + text], False)
        if self._anchor_id is None:
            return ids
        return ids[1:] if ids and ids[0] == self._anchor_id else []


def _whole_characters(data: bytes) -> str:
    """Returns the text up to the first incomplete character.

    The bytes may end inside a character. They may also begin inside one, if the last token ended there; the result is then "".
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()
