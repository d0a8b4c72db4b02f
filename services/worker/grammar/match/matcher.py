"""The position of a request in its grammar, on top of xgrammar's matcher. Used only on the scheduler loop's thread.

If a matcher exceeds the CPU time of its meter or xgrammar fails, the matcher sets `fault` and accepts no more tokens, and its
request ends. This is rare, because each grammar has passed a trial. ForcedText tokenizes text that a grammar determines.
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

# Smallest number of characters of a jump. One character is nearly always one token, and sampling it is as fast as a jump.
MIN_CHARS = 2
TOO_SLOW = "the grammar has become too expensive: computing the allowed next tokens takes too long"
BROKEN = "the grammar's matcher has failed: an internal error, see the worker's log"
MAX_BACKLOG = 256  # tokens by which the byte cursor may lag at most; limits the CPU time that it needs to catch up in one step
# Smallest number of tokens of a jump. A jump of one token saves nothing, because it costs one step, as sampling does.
MIN_FORCED = 2
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MatcherSetup:
    """Constants that all matchers of a worker share."""

    tokens: tuple[bytes, ...]  # bytes of each token
    num_words: int  # uint32 words of a mask
    stop_mask: NDArray[np.uint32]  # mask that allows only the stop ids
    last_word: np.uint32  # bits of a mask's last word that belong to token ids
    textless: frozenset[int]  # ids without text, which no grammar allows: special tokens and padding, except stop ids
    forced: ForcedText | None  # tokenizes forced text; None: jumps are disabled

    @classmethod
    def of(cls, vocabulary: Vocabulary, forced: ForcedText | None) -> MatcherSetup:
        size = len(vocabulary.tokens)
        stop_mask = np.zeros(vocabulary.num_words, np.uint32)
        for token in vocabulary.stop_ids:
            stop_mask[token >> 5] |= np.uint32(1 << (token & 31))
        textless = frozenset(index for index, text in enumerate(vocabulary.tokens) if not text) - frozenset(vocabulary.stop_ids)
        last_word = np.uint32(0xFFFFFFFF if size % 32 == 0 else (1 << size % 32) - 1)
        return cls(vocabulary.tokens, vocabulary.num_words, stop_mask, last_word, textless, forced)


class XgrammarMatcher:
    """Implements core.contracts.grammar.Matcher and fills masks.

    on_overrun() is called when the meter overruns. If it returns True, the meter is reset; otherwise, `fault` is set.
    """

    def __init__(self, compiled: Compiled, setup: MatcherSetup, meter: StepMeter, on_overrun: Callable[[], bool]) -> None:
        import xgrammar  # imported at first use, because it takes seconds

        self._matcher = xgrammar.GrammarMatcher(compiled.grammar)
        self._setup = setup
        self._meter = meter
        self._on_overrun = on_overrun
        self._cursor = ByteCursor(compiled.by_bytes) if setup.forced is not None and compiled.by_bytes is not None else None
        self._cursor_backlog: list[int] = []  # accepted tokens that the cursor has not read yet
        self._mask = np.zeros((1, setup.num_words), np.uint32)
        self._row: NDArray[np.uint32] = self._mask[0]
        self._mask_is_current = False
        self._terminated: bool | None = None  # cached value of `terminated`; None: unknown, because a token was accepted
        self._fault = ""
        self._cost_s = 0.0  # CPU seconds since the last take_cost()

    @property
    def fault(self) -> str:
        """The reason why the matcher accepts no more tokens; "" if it has no fault."""
        return self._fault

    @property
    def terminated(self) -> bool:
        """Whether a stop token was accepted, or the output is complete and only a stop token could follow."""
        if self._terminated is None:
            try:
                ended = self._matcher.is_terminated()
                self._terminated = ended or (self._matcher.is_completed() and self._only_stops_follow())
            except Exception:
                self._set_fault()
        return bool(self._terminated)

    def accept(self, token: int) -> bool:
        if self._fault:
            return False
        started = time.thread_time()
        try:
            accepted = self._advances(token)
        except Exception:
            self._set_fault()
            return False
        self._meter.step()
        if accepted:
            self._position_changed([token])
            if len(self._cursor_backlog) >= MAX_BACKLOG:
                self._catch_up()
        self._spend(time.thread_time() - started)
        return accepted

    def mask(self) -> NDArray[np.uint32]:
        """Returns the mask of the tokens that may come next, uint32[words]. Valid until the next accept() or forced().

        After the end of the output, the mask allows the stop ids. If xgrammar fails, the mask allows all tokens, and accept()
        refuses each of them.
        """
        if not self._mask_is_current:
            started = time.thread_time()
            try:
                self._fill()
            except Exception:
                self._set_fault()
            self._spend(time.thread_time() - started)
        return self._row

    def fill_after(self, tokens: Sequence[int], masks: NDArray[np.uint32], until: float) -> int:
        """Fills the masks of the positions after each draft token. The matcher's position does not change.

        The CPU time is not added to the matcher's meter, because the client did not choose to draft.

        Args:
            tokens: draft tokens in order.
            masks: uint32[>= len(tokens), words]; the first rows are filled.
            until: value of time.thread_time() after which no mask is filled.

        Returns:
            The number of filled masks. It is smaller than the number of tokens if a token is not allowed or ends the output, or
            if `until` has passed.
        """
        taken = filled = 0
        try:
            for token in tokens if not self._fault else ():
                if time.thread_time() > until or not self._advances(token):
                    break
                taken += 1
                if self._matcher.is_terminated():
                    break
                self._matcher.fill_next_token_bitmask(masks.view(np.int32), filled)
                masks[filled, -1] &= self._setup.last_word
                filled += 1
        except Exception:
            logger.exception("could not fill the masks after draft tokens; the draft tokens are not verified")
        self._roll_back(taken)
        return filled

    def _advances(self, token: int) -> bool:
        """Advances xgrammar's matcher by a token. Returns False if the grammar does not allow the token."""
        if not 0 <= token < len(self._setup.tokens) or token in self._setup.textless or self._matcher.is_terminated():
            return False
        return bool(self._matcher.accept_token(token))

    def _roll_back(self, count: int) -> None:
        if count:
            try:
                self._matcher.rollback(count)
            except Exception:
                self._set_fault()

    @property
    def needs_fill(self) -> bool:
        """Whether the mask of the present position is not filled yet, so that a batch may fill it."""
        return not self._mask_is_current and not self._matcher.is_terminated()

    @property
    def raw(self) -> xgrammar.GrammarMatcher:
        """xgrammar's matcher, for filling a batch of masks. The caller must not change it."""
        return self._matcher

    def set_mask(self, mask: NDArray[np.uint32]) -> None:
        """Copies a mask that a batch has filled for the present position."""
        self._row[:] = mask
        self._row[-1] &= self._setup.last_word
        self._mask_is_current = True

    def take_cost(self) -> float:
        """Returns the seconds of CPU time that were spent since the last call."""
        cost, self._cost_s = self._cost_s, 0.0
        return cost

    def charge(self, seconds: float) -> None:
        """Adds CPU time to the meter. If the meter overruns, calls on_overrun() and resets the meter or sets the fault."""
        before = self._meter.overrun
        self._meter.spend(seconds)
        if not self._meter.overrun or before:
            return
        if self._on_overrun():
            self._meter.reset()
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
            self._set_fault()
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
        """Advances the cursor to the matcher's position and returns it. Returns None if there is no cursor or it fails."""
        if self._cursor is not None:
            try:
                self._cursor.advance(b"".join([self._setup.tokens[token] for token in self._cursor_backlog]))
            except Exception:
                self._drop_cursor()
            self._cursor_backlog.clear()
        return self._cursor

    def _drop_cursor(self) -> None:
        """Drops the failed cursor. Must be called in an exception handler. The request continues without jumps."""
        logger.exception("the byte matcher has failed; the request continues without jumps")
        self._cursor = None
        self._cursor_backlog.clear()

    def _accept_forced(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Accepts forced tokens and returns the accepted tokens.

        The last token is accepted only if the output ends after it; otherwise, the tokenizer might merge it with the following
        text. If fewer than MIN_FORCED tokens remain, no token is accepted.
        """
        taken = 0
        for token in tokens:
            if token in self._setup.textless or not self._matcher.accept_token(token):
                break
            taken += 1
        if taken and taken == len(tokens):
            self._position_changed(())
            if not self.terminated:
                self._matcher.rollback(1)
                taken -= 1
        if 0 < taken < MIN_FORCED:
            self._matcher.rollback(taken)
            taken = 0
        self._position_changed(tokens[:taken])
        return tuple(tokens[:taken])

    def _position_changed(self, tokens: Sequence[int]) -> None:
        self._mask_is_current = False
        self._terminated = None
        if self._cursor is not None:
            self._cursor_backlog.extend(tokens)

    def _spend(self, seconds: float) -> None:
        self._cost_s += seconds
        self.charge(seconds)

    def _set_fault(self) -> None:
        """Sets the fault after an exception of xgrammar. Must be called in the exception handler."""
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
    """Tokenizes text that a grammar determines.

    If the tokenizer adds a space to the first word of a text, an anchor token is put before the text and removed from the result.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor_id = tokenizer.anchor_id
        self._anchor = "" if tokenizer.anchor_id is None else tokenizer.decode([tokenizer.anchor_id], False)

    def tokens(self, data: bytes) -> list[int]:
        """Returns the tokens of bytes that must come next. Empty if the bytes have fewer than MIN_CHARS characters."""
        text = _whole_characters(data)
        if len(text) < MIN_CHARS:
            return []
        (ids,) = self._tokenizer.encode_batch([self._anchor + text], False)
        if self._anchor_id is None:
            return ids
        return ids[1:] if ids and ids[0] == self._anchor_id else []


def _whole_characters(data: bytes) -> str:
    """Returns the text up to the first incomplete character.

    The bytes may end inside a character. If the last accepted token ended inside a character, the bytes begin inside it, and the
    result is "".
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()
