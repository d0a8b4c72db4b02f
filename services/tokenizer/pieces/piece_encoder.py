"""Long texts encoded in pieces, up to as many tokens as are wanted: the same ids as in one go, in bounded memory.

A piece ends where the text may be cut (boundaries). Where there is no such place for limits.MAX_WORD_CHARS, the text is refused.
Thread-safe; each call keeps all that it needs.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event

from services.shared import limits
from services.shared.hf_tokenizer import HfTokenizer
from services.tokenizer.pieces.boundaries import Boundaries
from services.tokenizer.pieces.fewest_tokens import FewestTokens

PIECE_CHARS = 1 << 16
_BLANKS = re.compile(r"[^\S\r\n]+")  # and four control characters more


class NoPlaceToCut(Exception):
    """So many characters of a text can only be encoded in one go."""


class _NoStitch(Exception):
    """A run of blanks cannot be cut."""


class Stopped(Exception):
    """Nobody waits for it any more."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """most: tokens, 0 for no limit. begins: of a text that has more, the first `most` are wanted."""

    most: int = 0
    begins: bool = False


@dataclass(frozen=True, slots=True)
class Encoded:
    """ids: all of the text's, or the first, or none. at_least: how many tokens a text with more than was wanted has at least; 0
    where ids are all."""

    ids: Sequence[int]
    at_least: int = 0


def limited(ids: Sequence[int], wanted: Wanted) -> Encoded:
    """All ids of a text → what is wanted of them."""
    if not wanted.most or len(ids) <= wanted.most:
        return Encoded(ids)
    return Encoded(ids[: wanted.most] if wanted.begins else (), len(ids))


class PieceEncoder:
    def __init__(
        self, tokenizer: HfTokenizer, piece_chars: int = PIECE_CHARS, max_word_chars: int = limits.MAX_WORD_CHARS
    ) -> None:
        self._tokenizer = tokenizer
        self._piece_chars = piece_chars
        self._max_word_chars = max_word_chars
        self._boundaries = Boundaries(tokenizer)
        self._fewest = FewestTokens(tokenizer)
        self._before, self._after = _special_ids(tokenizer)

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool, wanted: Wanted, stopped: Event) -> list[Encoded]:
        """In order. Those that are no longer than a piece go together, over the cores. Raises NoPlaceToCut, Stopped."""
        found: list[Encoded] = []
        for group in self._groups(texts):
            if len(group) == 1:
                found.append(self.encode(group[0], add_special_tokens, wanted, stopped))
            else:
                found += [limited(array("I", ids), wanted) for ids in self._tokenizer.encode_batch(group, add_special_tokens)]
            if stopped.is_set():
                raise Stopped
        return found

    def _groups(self, texts: Sequence[str]) -> Iterator[list[str]]:
        group: list[str] = []
        for text in texts:
            if group and sum(map(len, group)) + len(text) > self._piece_chars:
                yield group
                group = []
            group.append(text)
        yield group

    def encode(self, text: str, add_special_tokens: bool, wanted: Wanted, stopped: Event) -> Encoded:
        """Raises NoPlaceToCut, Stopped."""
        if wanted.most and not wanted.begins:
            fewest = self._fewest.of(text)
            if fewest > wanted.most:
                return Encoded((), fewest)
        try:
            ids = self._joined(text, add_special_tokens, wanted.most, True, stopped)
        except _NoStitch:
            ids = self._joined(text, add_special_tokens, wanted.most, False, stopped)
        return limited(ids, wanted)

    def _joined(self, text: str, add_special_tokens: bool, most: int, among_blanks: bool, stopped: Event) -> Sequence[int]:
        """All ids, or more than `most`."""
        ids = array("I", self._before if add_special_tokens else ())
        for piece in self._pieces(text, among_blanks, stopped):
            ids.extend(piece)
            if most and len(ids) > most:
                return ids
        ids.extend(self._after if add_special_tokens else ())
        return ids

    def _pieces(self, text: str, among_blanks: bool, stopped: Event) -> Iterator[list[int]]:
        """The ids of each. One that ends among blanks is held until the next one is found to go on from it."""
        at, held = 0, None
        before: tuple[str, list[int]] = ("", [])  # the last piece: a text that repeats itself is encoded once
        while at < len(text):
            if stopped.is_set():
                raise Stopped
            end = self._end(text, at, among_blanks)
            piece = text[at + 1 : end] if at and self._boundaries.drops_blank else text[at:end]
            if piece != before[0]:
                before = (piece, self._tokenizer.encode_batch([piece], False)[0])
            ids = before[1].copy()
            if held is not None:
                dropped = self._stitched(held, ids)
                if dropped:
                    at -= dropped
                    continue
                yield held
            held = None if end == len(text) or self._boundaries.allows(text, end) else ids
            if held is None:
                yield ids
            at = end

    def _stitched(self, held: list[int], ids: list[int]) -> int:
        """0 where they go on from each other. Else a token of the first is dropped, and this is its length: the next one has to
        begin there. Raises _NoStitch."""
        if len(held) < 2 or not ids:
            raise _NoStitch
        if self._boundaries.stitches(held[-1], ids[0]):
            return 0
        length = self._boundaries.blanks_in(held.pop())
        if not length or not self._boundaries.blanks_in(held[-1]):
            raise _NoStitch
        return length

    def _end(self, text: str, begin: int, among_blanks: bool) -> int:
        """Of the piece that begins here. Raises NoPlaceToCut."""
        goal = begin + self._piece_chars
        if goal >= len(text):
            return len(text)
        if among_blanks and self._is_among_blanks(text, begin, goal):
            return goal
        for at in range(goal, begin + self._piece_chars // 2, -1):
            if self._boundaries.allows(text, at):
                return at
        for at in range(goal + 1, min(len(text), begin + self._max_word_chars)):
            if self._boundaries.allows(text, at):
                return at
        if len(text) - begin <= self._max_word_chars:
            return len(text)
        raise NoPlaceToCut

    def _is_among_blanks(self, text: str, begin: int, at: int) -> bool:
        """Whether there are blanks alone on both sides, and no line breaks in the white space both before and behind them: up to
        the last one it may all be one word."""
        margin = 2 * self._boundaries.max_token_chars + 2
        if not self._boundaries.allows_blanks or at - margin < begin or text[at - margin : at + margin] != " " * 2 * margin:
            return False
        run = text[begin:at]
        space = run[len(run.rstrip()) :]
        if not any(char in space for char in "\r\n"):
            return True
        blanks = _BLANKS.match(text, at)
        return blanks is None or text[blanks.end() : blanks.end() + 1] not in ("\r", "\n")


def _special_ids(tokenizer: HfTokenizer) -> tuple[list[int], list[int]]:
    """What stands before and behind every text."""
    marked = tokenizer.inner.encode("a", add_special_tokens=True)
    plain = tokenizer.encode_batch(["a"], False)[0]
    before = next((at for at, special in enumerate(marked.special_tokens_mask) if not special), 0)
    return marked.ids[:before], marked.ids[before + len(plain) :]
