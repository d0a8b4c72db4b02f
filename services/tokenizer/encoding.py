"""Encodes the texts of requests: short texts of several requests in one call, long texts in pieces with limited memory.

A lane is a task that runs one encoding call at a time in a thread. If a lane is free, a short request is encoded immediately.
Requests that arrive while all lanes are busy are encoded together by the next free lane. Batches therefore form only under load,
and no request waits until a batch is full.

A text in pieces gets the same ids as a text that is encoded as a whole. A piece ends where boundaries.py allows a cut. A text is
refused if it has no such position within limits.MAX_WORD_CHARS characters. Encoding stops when a text has more tokens than its
request can use.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from threading import Event
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer
from rootstock_llm.services.tokenizer.boundaries import METASPACE, Boundaries

PIECE_CHARS = 1 << 16  # desired length of a piece of a long text; the piece ends at an allowed cut near this length
SLICE_CHARS = 1 << 18  # characters that TokenLowerBound processes at a time
_BLANKS = re.compile(r"[^\S\r\n]+")  # also matches four control characters
_DENOMINATOR = 1 << 40  # TokenLowerBound counts in units of 1 / _DENOMINATOR tokens

Encode = Callable[[Sequence[str], bool], list[list[int]]]  # (texts, add_special_tokens) → ids of each text


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The ids of a text. If the text exceeds the token limit: its first ids or no ids, and a lower bound of its token count."""

    ids: Sequence[int]
    at_least: int = 0  # lower bound of the text's token count if the text exceeds the limit; 0: `ids` is complete


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """The texts of one request, and its token limit."""

    texts: Sequence[str]
    add_special_tokens: bool
    max_tokens: int = 0  # limit of tokens for each text; 0: unlimited
    truncates: bool = False  # True: a text above the limit gets its first max_tokens ids; False: it gets no ids

    @property
    def chars(self) -> int:
        """Number of characters in all texts."""
        return sum(map(len, self.texts))

    def limited(self, ids: Sequence[int]) -> EncodedText:
        """Applies max_tokens to the ids of a text. `ids` may lack the text's last ids if it has more than max_tokens ids."""
        if not self.max_tokens or len(ids) <= self.max_tokens:
            return EncodedText(ids)
        return EncodedText(ids[: self.max_tokens] if self.truncates else (), len(ids))


Waiting = tuple[EncodeJob, asyncio.Future[list[list[int]]]]  # a job in the queue, and the ids of each of its texts


class EncodeQueue:
    """The queue of short requests, and the lanes (tasks) that encode them in the executor's threads. Used on one event loop."""

    def __init__(
        self,
        encode: Encode,
        executor: Executor,
        *,
        lanes: int,
        max_texts: int,
        max_chars: int,
        observe_texts: Callable[[float], None],
    ) -> None:
        self._encode = _panics_as_errors(encode)
        self._executor = executor
        self._lanes = lanes
        self._max_texts = max_texts
        self._max_chars = max_chars
        self._observe_texts = observe_texts
        self._waiting: deque[Waiting] = deque()
        self._working = 0  # number of running lanes
        self._tasks: set[asyncio.Task[None]] = set()  # references to running lanes, which prevent their garbage collection

    async def encode(self, job: EncodeJob) -> list[EncodedText]:
        """Encodes the texts of a job. Raises the tokenizer's exception if it fails."""
        done: asyncio.Future[list[list[int]]] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, done))
        if self._working < self._lanes:
            self._working += 1
            lane = asyncio.create_task(self._work())
            self._tasks.add(lane)
            lane.add_done_callback(self._tasks.discard)
        return [job.limited(ids) for ids in await done]

    async def _work(self) -> None:
        # The lane ends in the iteration of the event loop in which it finds the queue empty, so a later job starts a new lane.
        try:
            await self._drain()
        finally:
            self._working -= 1

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._take():
            texts = [text for job, _ in batch for text in job.texts]
            self._observe_texts(len(texts))
            try:
                ids = await loop.run_in_executor(self._executor, self._encode, texts, batch[0][0].add_special_tokens)
            except Exception as error:
                await self._fail(batch, error)
                continue
            _hand_out(batch, ids)

    def _take(self) -> list[Waiting]:
        """Removes and returns the first waiting jobs that fit into one call, or [] if none waits. Drops cancelled jobs.

        If the first job exceeds the limits of a call, the result is only this job.
        """
        batch: list[Waiting] = []
        texts = chars = 0
        while self._waiting:
            job, done = self._waiting[0]
            if done.cancelled():
                self._waiting.popleft()
                continue
            texts, chars = texts + len(job.texts), chars + job.chars
            same_kind = not batch or job.add_special_tokens == batch[0][0].add_special_tokens
            if batch and not (same_kind and texts <= self._max_texts and chars <= self._max_chars):
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _fail(self, batch: list[Waiting], error: Exception) -> None:
        """Fails the only job of a batch. Encodes each of several jobs again in a separate call, so that only faulty jobs fail."""
        if len(batch) == 1:
            _, done = batch[0]
            if not done.done():
                done.set_exception(error)
            return
        loop = asyncio.get_running_loop()
        for job, done in batch:
            try:
                ids = await loop.run_in_executor(self._executor, self._encode, job.texts, job.add_special_tokens)
            except Exception as job_error:
                await self._fail([(job, done)], job_error)
            else:
                _hand_out([(job, done)], ids)


def _panics_as_errors(encode: Encode) -> Encode:
    """Returns `encode` with RuntimeError for a panic of the tokenizers library, which is a BaseException but no Exception."""

    def encoded(texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        try:
            return encode(texts, add_special_tokens)
        except Exception:
            raise
        except BaseException as panic:
            raise RuntimeError(f"the tokenizer has panicked: {panic}") from panic

    return encoded


def _hand_out(batch: list[Waiting], ids: list[list[int]]) -> None:
    at = 0
    for job, done in batch:
        if not done.done():
            done.set_result(ids[at : at + len(job.texts)])
        at += len(job.texts)


class UncuttableText(Exception):
    """A text has more than MAX_WORD_CHARS characters without a position at which it may be cut. The request is refused."""


class _NoStitch(Exception):
    """A run of blanks cannot be cut at this position."""


class EncodingStopped(Exception):
    """The caller has set `stopped` during the encoding."""


class PieceEncoder:
    """Encodes long texts in pieces with one tokenizer. Thread-safe: calls share only the cache of Boundaries."""

    def __init__(
        self, tokenizer: HfTokenizer, piece_chars: int = PIECE_CHARS, max_word_chars: int = limits.MAX_WORD_CHARS
    ) -> None:
        self._tokenizer = tokenizer
        self._piece_chars = piece_chars
        self._max_word_chars = max_word_chars
        self._boundaries = Boundaries(tokenizer)
        self._lower_bound = TokenLowerBound(tokenizer)
        self._before, self._after = _special_ids(tokenizer)

    def encode(self, job: EncodeJob, stopped: Event) -> list[EncodedText]:
        """Encodes the texts of a job in order. Texts that fit together in one piece are encoded in parallel.

        Raises:
            UncuttableText: a text cannot be cut into pieces.
            EncodingStopped: `stopped` was set.
        """
        found: list[EncodedText] = []
        for group in self._groups(job.texts):
            if len(group) == 1:
                found.append(self._encode(group[0], job, stopped))
            else:
                found += [job.limited(array("I", ids)) for ids in self._tokenizer.encode_batch(group, job.add_special_tokens)]
            if stopped.is_set():
                raise EncodingStopped
        return found

    def _groups(self, texts: Sequence[str]) -> Iterator[list[str]]:
        group: list[str] = []
        for text in texts:
            if group and sum(map(len, group)) + len(text) > self._piece_chars:
                yield group
                group = []
            group.append(text)
        yield group

    def _encode(self, text: str, job: EncodeJob, stopped: Event) -> EncodedText:
        """Encodes a text of the job in pieces. Raises UncuttableText or EncodingStopped."""
        if job.max_tokens and not job.truncates:
            at_least = self._lower_bound.of(text)
            if at_least > job.max_tokens:
                return EncodedText((), at_least)
        try:
            ids = self._joined(text, job, True, stopped)
        except _NoStitch:
            ids = self._joined(text, job, False, stopped)
        return job.limited(ids)

    def _joined(self, text: str, job: EncodeJob, among_blanks: bool, stopped: Event) -> Sequence[int]:
        """Returns all ids of the text, or only the first ids if there are more than the job can use.

        Args:
            among_blanks: whether long runs of blanks may be cut.
        """
        ids = array("I", self._before if job.add_special_tokens else ())
        for piece in self._pieces(text, among_blanks, stopped):
            ids.extend(piece)
            if job.max_tokens and len(ids) > job.max_tokens:
                return ids
        ids.extend(self._after if job.add_special_tokens else ())
        return ids

    def _pieces(self, text: str, among_blanks: bool, stopped: Event) -> Iterator[list[int]]:
        """Yields the ids of each piece.

        A piece that ends among blanks is yielded after _stitched() has checked it together with the next piece.

        Raises:
            UncuttableText, EncodingStopped: as encode().
            _NoStitch: a run of blanks cannot be cut.
        """
        at, unconfirmed = 0, None  # `unconfirmed`: ids of a piece that ends among blanks and is not checked yet
        before: tuple[str, list[int]] = ("", [])  # the last piece and its ids, so that equal consecutive pieces are encoded once
        while at < len(text):
            if stopped.is_set():
                raise EncodingStopped
            end = self._end(text, at, among_blanks)
            piece = text[at + 1 : end] if at and self._boundaries.drops_blank else text[at:end]
            if piece != before[0]:
                before = (piece, self._tokenizer.encode_batch([piece], False)[0])
            ids = before[1].copy()
            if unconfirmed is not None:
                dropped = self._stitched(unconfirmed, ids)
                if dropped:
                    at -= dropped
                    continue
                yield unconfirmed
            unconfirmed = None if end == len(text) or self._boundaries.allows(text, end) else ids
            if unconfirmed is None:
                yield ids
            at = end

    def _stitched(self, before: list[int], ids: list[int]) -> int:
        """Checks that the ids of two pieces, cut among blanks, are the ids of their joined text.

        Returns:
            0 if they are. Otherwise, removes the last token of `before` and returns its length in characters. The next piece must
            begin earlier by this length.

        Raises:
            _NoStitch: the run of blanks cannot be cut here.
        """
        if len(before) < 2 or not ids:
            raise _NoStitch
        if self._boundaries.stitches(before[-1], ids[0]):
            return 0
        length = self._boundaries.blanks_in(before.pop())
        if not length or not self._boundaries.blanks_in(before[-1]):
            raise _NoStitch
        return length

    def _end(self, text: str, begin: int, among_blanks: bool) -> int:
        """Returns the end of the piece that begins at `begin`. Raises UncuttableText."""
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
        raise UncuttableText

    def _is_among_blanks(self, text: str, begin: int, at: int) -> bool:
        """Returns whether `at` is within a run of blanks that may be cut.

        A run of blanks between two line breaks may not be cut, because the white space up to the last line break may be one word.
        """
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
    """Returns the special ids that the tokenizer puts before and after every text."""
    marked = tokenizer.inner.encode("a", add_special_tokens=True)
    plain = tokenizer.encode_batch(["a"], False)[0]
    before = next((at for at, special in enumerate(marked.special_tokens_mask) if not special), 0)
    return marked.ids[:before], marked.ids[before + len(plain) :]


class TokenLowerBound:
    """Computes a lower bound of a text's token count without encoding the text.

    Every byte is in a token. Let `L(b)` be the length of the longest token of the vocabulary that contains the byte `b`. Then
    each byte `b` adds at least `1 / L(b)` tokens. The bound is 0 if normalization or the model may drop characters.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        # Whether to count only ASCII bytes that precede an ASCII byte, because normalization may merge other characters.
        self._ascii_only = False
        # int64[256]: tokens that one occurrence of each byte adds, in units of 1 / _DENOMINATOR, rounded down
        self._shares: NDArray[np.int64] = np.zeros(256, np.int64)
        if self._keeps_characters(tokenizer):
            self._shares = _shares(tokenizer)

    def of(self, text: str) -> int:
        """Returns the lower bound of the text's token count."""
        if not self._shares.any():
            return 0
        counts = np.zeros(256, np.int64)
        for at in range(0, len(text), SLICE_CHARS):
            data = np.frombuffer(text[at : at + SLICE_CHARS].encode(), np.uint8)
            if self._ascii_only:
                ascii_ = data < 0x80
                data = data[:-1][ascii_[:-1] & ascii_[1:]]
            counts += np.bincount(data, minlength=256)
        return -(-sum(int(count) * int(share) for count, share in zip(counts, self._shares, strict=True)) // _DENOMINATOR)

    def _keeps_characters(self, tokenizer: HfTokenizer) -> bool:
        model, kept = tokenizer.inner.model, True
        for kind in _kinds(tokenizer.inner.normalizer):
            self._ascii_only |= kind in ("NFC", "NFKC", "NFD", "NFKD")
            kept &= kind in ("NFC", "NFKC", "NFD", "NFKD", "Prepend", "Replace ▁")
        for kind in _kinds(tokenizer.inner.pre_tokenizer):
            kept &= kind in ("ByteLevel", "Metaspace", "Digits", "Split Isolated")
        whole = tokenizer.is_byte_level or getattr(model, "byte_fallback", False)
        return kept and whole and type(model).__name__ == "BPE"


def _shares(tokenizer: HfTokenizer) -> NDArray[np.int64]:
    longest, single = [0] * 256, set()
    for data in _token_bytes(tokenizer):
        if len(data) == 1:
            single.add(data[0])
        for byte in set(data):
            longest[byte] = max(longest[byte], len(data))
    for token in tokenizer.inner.get_added_tokens_decoder().values():
        if token.lstrip or token.rstrip:
            single -= {byte for byte in range(256) if byte >= 0x80 or chr(byte).isspace()}
    # A byte that is not a token by itself may be dropped from the text.
    return np.array([_DENOMINATOR // longest[byte] if byte in single else 0 for byte in range(256)], np.int64)


def _token_bytes(tokenizer: HfTokenizer) -> Iterator[bytes]:
    """Yields the byte strings that each token may represent."""
    for token in tokenizer.inner.get_added_tokens_decoder().values():
        yield token.content.encode()
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.inner.id_to_token(token_id)
        if text is None:
            continue
        if tokenizer.is_byte_level:
            yield tokenizer.token_bytes(token_id) or b""
        elif len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            yield bytes([int(text[3:5], 16)])
        else:
            yield text.encode()
            yield text.replace(METASPACE, " ").encode()


def _kinds(step: Any) -> Iterator[str]:
    """Yields the kinds of the steps of a normalizer or pre-tokenizer."""
    waiting = [] if step is None else [json.loads(step.__getstate__())]
    while waiting:
        spec = waiting.pop()
        if spec["type"] == "Sequence":
            waiting += spec.get("normalizers") or spec.get("pretokenizers") or []
        elif spec["type"] == "Split":
            yield f"Split {'Isolated' if not spec['invert'] else 'inverted'}" if spec["behavior"] != "Removed" else "removed"
        elif spec["type"] == "Replace":
            yield "Replace " + spec["content"] if spec["pattern"] == {"String": " "} else "Replace"
        else:
            yield spec["type"]
