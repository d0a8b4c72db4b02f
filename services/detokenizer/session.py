"""What one Decode stream knows: its open requests. Plain calls, no I/O; one caller at a time.

A request's state is made by DecodeOpen and freed by its finished row, by `closes`, or with the session.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from rootstock.v1 import detokenizer_pb2 as pb
from services.detokenizer.incremental import IncrementalDetokenizer
from services.detokenizer.metrics import DetokenizerMetrics
from services.detokenizer.stop_hold import StopHold
from services.shared import limits
from services.shared.hf_tokenizer import HfTokenizer
from services.shared.log import fields

logger = logging.getLogger(__name__)


class BadBatch(ValueError):
    """The message breaks the contract of detokenizer.proto. The text names the field."""


class TooManyOpen(Exception):
    """The stream has as many open requests as it may have."""


class _Request:
    """The text of one request: decoded, held back at stop strings, and without the characters given out elsewhere before."""

    def __init__(self, tokenizer: HfTokenizer, opened: pb.DecodeOpen) -> None:
        skip_special = opened.skip_special_tokens if opened.HasField("skip_special_tokens") else True
        self._decoder = IncrementalDetokenizer(tokenizer, opened.prompt_tail, skip_special)
        self._hold = StopHold(opened.stop, opened.include_stop)
        self._to_skip = opened.emitted_chars
        self._replayed = self._unseen(self._hold.push(self._decoder.push(opened.replay_ids)))

    def push(self, ids: list[int]) -> str:
        replayed, self._replayed = self._replayed, ""
        return replayed + self._unseen(self._hold.push(self._decoder.push(ids)))

    def finish(self, matched_stop: str) -> str:
        return self._unseen(self._hold.push(self._decoder.finish()) + self._hold.finish(matched_stop))

    def _unseen(self, text: str) -> str:
        skipped = min(self._to_skip, len(text))
        self._to_skip -= skipped
        return text[skipped:]


class Session:
    """Answers batches in order. Raises BadBatch or TooManyOpen, after which the stream must end."""

    def __init__(self, tokenizer: HfTokenizer, max_open: int, metrics: DetokenizerMetrics) -> None:
        self._tokenizer = tokenizer
        self._max_open = max_open
        self._metrics = metrics
        self._requests: dict[int, _Request] = {}

    def answer(self, batch: pb.DecodeBatch) -> pb.TextBatch:
        _check(batch)
        for opened in batch.opens:
            self._open(opened)
        result = pb.TextBatch(seq=batch.seq)
        chars = held = 0
        for handle, ids, finished, matched_stop in _rows(batch):
            text = self._decode(handle, ids, finished, matched_stop)
            if text is None:
                result.unknown.append(handle)
                continue
            result.handles.append(handle)
            result.texts.append(text)
            chars += len(text)
            held += bool(ids) and not text
        for handle in batch.closes:
            self._forget(handle)
        self._metrics.count(tokens=len(batch.token_ids), chars=chars, held_rows=held, unknown_rows=len(result.unknown))
        return result

    def close(self) -> None:
        """Forgets every request."""
        self._metrics.open_requests.dec(len(self._requests))
        self._requests.clear()

    def _open(self, opened: pb.DecodeOpen) -> None:
        self._forget(opened.handle)
        if len(self._requests) >= self._max_open:
            raise TooManyOpen(f"opens: this stream may have {self._max_open} open requests")
        try:
            self._requests[opened.handle] = _Request(self._tokenizer, opened)
        except Exception:
            self._failed(opened.handle)
            return
        self._metrics.open_requests.inc()
        logger.debug("opened", extra=fields(request_id=opened.request_id, replayed_tokens=len(opened.replay_ids)))
        self._metrics.replayed_tokens.inc(len(opened.replay_ids))

    def _decode(self, handle: int, ids: list[int], finished: bool, matched_stop: str) -> str | None:
        """None for a handle that is not open, or whose decoding failed: one request's fault leaves the others alone."""
        request = self._requests.get(handle)
        if request is None:
            return None
        try:
            text = request.push(ids)
            if finished:
                text += request.finish(matched_stop)
        except Exception:
            self._failed(handle)
            self._forget(handle)
            return None
        if finished:
            self._forget(handle)
        return text

    def _failed(self, handle: int) -> None:
        self._metrics.failed_rows.inc()
        logger.exception("decoding failed", extra=fields(handle=handle))

    def _forget(self, handle: int) -> None:
        if self._requests.pop(handle, None) is not None:
            self._metrics.open_requests.dec()


def _check(batch: pb.DecodeBatch) -> None:
    rows = len(batch.handles)
    if len(batch.counts) != rows:
        raise BadBatch(f"counts: {len(batch.counts)} values for {rows} handles")
    if len(batch.finished) != rows:
        raise BadBatch(f"finished: {len(batch.finished)} values for {rows} handles")
    if len(batch.matched_stops) != rows:
        raise BadBatch(f"matched_stops: {len(batch.matched_stops)} values for {rows} handles")
    if sum(batch.counts) != len(batch.token_ids):
        raise BadBatch(f"token_ids: {len(batch.token_ids)} values where counts say {sum(batch.counts)}")
    for opened in batch.opens:
        if len(opened.stop) > limits.MAX_STOP_STRINGS:
            raise BadBatch(f"opens.stop: {len(opened.stop)} stop strings, at most {limits.MAX_STOP_STRINGS}")
        if any(len(stop) > limits.MAX_STOP_STRING_CHARS for stop in opened.stop):
            raise BadBatch(f"opens.stop: a stop string is longer than {limits.MAX_STOP_STRING_CHARS} characters")


def _rows(batch: pb.DecodeBatch) -> Iterator[tuple[int, list[int], bool, str]]:
    at = 0
    token_ids = list(batch.token_ids)
    rows = zip(batch.handles, batch.counts, batch.finished, batch.matched_stops, strict=True)
    for handle, count, finished, matched_stop in rows:
        yield handle, token_ids[at : at + count], finished, matched_stop
        at += count
