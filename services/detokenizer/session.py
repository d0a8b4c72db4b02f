"""The open requests of one Decode stream, and the metrics of all streams. No I/O. Calls of one session must not overlap.

DecodeOpen creates the state of a request. The session frees the state after the request's finished row, after a failed row, when
the request's handle is in `closes` or is opened again, or when the session ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rootstock_llm.protos import detokenizer_pb2 as pb
from rootstock_llm.services.detokenizer.text import IncrementalDetokenizer, StopStringBuffer
from rootstock_llm.services.shared import limits
from rootstock_llm.services.shared.hf_tokenizer import HfTokenizer
from rootstock_llm.services.shared.observe.log_fields import fields, trace_fields

if TYPE_CHECKING:
    from rootstock_llm.services.shared.observe.spans import Attributes, Span, Tracing

FINISHED, FAILED, CLOSED = "finish", "failure", "close"  # values of the span attribute rootstock.ended_by
_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)

logger = logging.getLogger(__name__)


class DetokenizerMetrics:
    """The metrics of the service, all named rootstock_detokenizer_*."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "rootstock_detokenizer_"
        self.batches = Counter(prefix + "batches", "Decoded batches.", registry=registry)
        self.tokens = Counter(prefix + "tokens", "Token ids in decoded batches, without replayed token ids.", registry=registry)
        self.chars = Counter(prefix + "chars", "Characters of decoded text sent to gateways.", registry=registry)
        self.held_rows = Counter(
            prefix + "held_rows",
            "Rows with token ids but no text: their special tokens are skipped, or their text may belong to a stop string or an"
            " incomplete character.",
            registry=registry,
        )
        self.replayed_tokens = Counter(
            prefix + "replayed_tokens", "Token ids decoded again to rebuild the state of requests.", registry=registry
        )
        self.unknown_rows = Counter(
            prefix + "unknown_rows", "Rows whose handle was not open or whose decoding failed.", registry=registry
        )
        self.failed_rows = Counter(prefix + "failed_rows", "Requests whose decoding failed with an exception.", registry=registry)
        self.streams = Gauge(prefix + "streams", "Open Decode streams.", registry=registry)
        self.open_requests = Gauge(prefix + "open_requests", "Open requests of all streams.", registry=registry)
        self.seconds = Histogram(prefix + "batch_seconds", "Seconds to decode one batch.", buckets=_BUCKETS_S, registry=registry)

    def count(self, tokens: int, chars: int, held_rows: int, unknown_rows: int) -> None:
        """Counts one decoded batch."""
        self.batches.inc()
        self.tokens.inc(tokens)
        self.chars.inc(chars)
        self.held_rows.inc(held_rows)
        self.unknown_rows.inc(unknown_rows)


class BadBatch(ValueError):
    """A message violates the contract of detokenizer.proto. The error names the field; the stream must end."""


class TooManyOpen(Exception):
    """A stream would have more open requests than its limit; the stream must end."""


class _Request:
    """The decoding state of one request and its span.

    A request that moved here from another stream replays its ids and skips the characters that the other stream has already sent
    (`DecodeOpen.emitted_chars`).
    """

    def __init__(self, tokenizer: HfTokenizer, opened: pb.DecodeOpen) -> None:
        self.log_fields = _log_fields(opened)
        self._span: Span | None = None  # only of a traced request
        self._num_ids = 0  # output ids that this stream has decoded, without replayed ids
        skip_special = opened.skip_special_tokens if opened.HasField("skip_special_tokens") else True
        self._decoder = IncrementalDetokenizer(tokenizer, opened.prompt_tail, skip_special, opened.kept_tokens)
        # Buffers text that may become a stop string. Only for a request with stop strings.
        self._stops = StopStringBuffer(opened.stop, opened.include_stop) if opened.stop else None
        self._to_skip = opened.emitted_chars  # characters still to skip, because an earlier stream has sent them
        # Text of the replayed ids that no stream has sent. The next push() returns it.
        self._replayed = self._decode(opened.replay_ids)

    def push(self, ids: list[int]) -> str:
        self._num_ids += len(ids)
        replayed, self._replayed = self._replayed, ""
        return replayed + self._decode(ids)

    def finish(self, matched_stop: str) -> str:
        text = self._unsent(self._decoder.finish())
        return text if self._stops is None else text + self._skipping(self._stops.finish(matched_stop))

    def begin_span(self, tracing: Tracing, opened: pb.DecodeOpen) -> None:
        """Starts a span if the request is traced."""
        attributes: Attributes = {"rootstock.request_id": opened.request_id, "rootstock.replayed_tokens": len(opened.replay_ids)}
        self._span = tracing.under("detokenize", opened.traceparent, attributes)

    def end_span(self, ended_by: str) -> None:
        """Ends the span, if there is one.

        Args:
            ended_by: FINISHED, FAILED or CLOSED.
        """
        if self._span is not None:
            self._span.set({"rootstock.tokens": self._num_ids, "rootstock.ended_by": ended_by})
            if ended_by == FAILED:
                self._span.fail("decoding_failed")
            self._span.end()

    def _decode(self, ids: Sequence[int]) -> str:
        """Returns the text to send after these ids. Marks are not searched for stop strings, as in the worker."""
        decoder, stops = self._decoder, self._stops
        if stops is None or decoder.mark_ids.isdisjoint(ids):
            return self._unsent(decoder.push(ids))
        out: list[str] = []
        first = 0
        for at, token_id in enumerate(ids):
            if token_id in decoder.mark_ids:
                out.append(self._unsent(decoder.push(ids[first:at]) + decoder.finish()))
                out.append(self._skipping(stops.push_mark(decoder.push(ids[at : at + 1]) + decoder.finish())))
                first = at + 1
        out.append(self._unsent(decoder.push(ids[first:])))
        return "".join(out)

    def _unsent(self, text: str) -> str:
        """Returns the text to send, without text that is or may become a stop string or that another stream has sent."""
        return self._skipping(text if self._stops is None else self._stops.push(text))

    def _skipping(self, text: str) -> str:
        skipped = min(self._to_skip, len(text))
        self._to_skip -= skipped
        return text[skipped:]


class Session:
    """Decodes the batches of one stream in order. The stream's handler owns it and closes it when the stream ends."""

    def __init__(
        self, tokenizer: HfTokenizer, max_open: int, metrics: DetokenizerMetrics, tracing: Tracing | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._max_open = max_open
        self._metrics = metrics
        self._tracing = tracing
        self._requests: dict[int, _Request] = {}

    def decode(self, batch: pb.DecodeBatch) -> pb.TextBatch:
        """Returns the new text of each row. A row whose decoding fails is listed as unknown and does not affect other rows.

        Raises:
            BadBatch: the batch violates the contract.
            TooManyOpen: the stream would have more open requests than its limit.
        """
        _check(batch)
        for opened in batch.opens:
            self._open(opened)
        result = pb.TextBatch(seq=batch.seq)
        chars = buffered_rows = 0
        for handle, ids, finished, matched_stop in _rows(batch):
            text = self._decode_row(handle, ids, finished, matched_stop)
            if text is None:
                result.unknown.append(handle)
                continue
            result.handles.append(handle)
            result.texts.append(text)
            chars += len(text)
            buffered_rows += bool(ids) and not text
        for handle in batch.closes:
            self._close_request(handle, CLOSED)
        self._metrics.count(tokens=len(batch.token_ids), chars=chars, held_rows=buffered_rows, unknown_rows=len(result.unknown))
        return result

    def close(self) -> None:
        """Frees the state of every request."""
        self._metrics.open_requests.dec(len(self._requests))
        for request in self._requests.values():
            request.end_span(CLOSED)
        self._requests.clear()

    def _open(self, opened: pb.DecodeOpen) -> None:
        self._close_request(opened.handle, CLOSED)
        if len(self._requests) >= self._max_open:
            raise TooManyOpen(f"opens: this stream already has {self._max_open} open requests, which is the limit")
        try:
            request = _Request(self._tokenizer, opened)
        except Exception:
            self._report_failure(opened.handle, _log_fields(opened))
            return
        if self._tracing is not None:
            request.begin_span(self._tracing, opened)
        self._requests[opened.handle] = request
        self._metrics.open_requests.inc()
        logger.debug("request opened", extra=fields(**request.log_fields, replayed_tokens=len(opened.replay_ids)))
        self._metrics.replayed_tokens.inc(len(opened.replay_ids))

    def _decode_row(self, handle: int, ids: list[int], finished: bool, matched_stop: str) -> str | None:
        """Returns the new text of a request, or None if its handle is not open or its decoding fails."""
        request = self._requests.get(handle)
        if request is None:
            return None
        try:
            text = request.push(ids)
            if finished:
                text += request.finish(matched_stop)
        except Exception:
            self._report_failure(handle, request.log_fields)
            self._close_request(handle, FAILED)
            return None
        if finished:
            self._close_request(handle, FINISHED)
        return text

    def _report_failure(self, handle: int, log_fields: dict[str, str]) -> None:
        self._metrics.failed_rows.inc()
        logger.exception("decoding failed", extra=fields(**log_fields, handle=handle))

    def _close_request(self, handle: int, ended_by: str) -> None:
        request = self._requests.pop(handle, None)
        if request is not None:
            request.end_span(ended_by)
            self._metrics.open_requests.dec()


def _log_fields(opened: pb.DecodeOpen) -> dict[str, str]:
    return {"request_id": opened.request_id, **trace_fields(opened.traceparent)}


def _check(batch: pb.DecodeBatch) -> None:
    rows = len(batch.handles)
    if len(batch.counts) != rows:
        raise BadBatch(f"counts: {len(batch.counts)} values for {rows} handles")
    if len(batch.finished) != rows:
        raise BadBatch(f"finished: {len(batch.finished)} values for {rows} handles")
    if len(batch.matched_stops) != rows:
        raise BadBatch(f"matched_stops: {len(batch.matched_stops)} values for {rows} handles")
    if sum(batch.counts) != len(batch.token_ids):
        raise BadBatch(f"token_ids: {len(batch.token_ids)} values, but counts add up to {sum(batch.counts)}")
    for opened in batch.opens:
        if len(opened.stop) > limits.MAX_STOP_STRINGS:
            raise BadBatch(f"opens.stop: {len(opened.stop)} stop strings, at most {limits.MAX_STOP_STRINGS}")
        if len(opened.kept_tokens) > limits.MAX_KEPT_TOKENS:
            raise BadBatch(f"opens.kept_tokens: {len(opened.kept_tokens)} tokens, at most {limits.MAX_KEPT_TOKENS}")
        if any(len(stop) > limits.MAX_STOP_STRING_CHARS for stop in opened.stop):
            raise BadBatch(f"opens.stop: a stop string is longer than {limits.MAX_STOP_STRING_CHARS} characters")


def _rows(batch: pb.DecodeBatch) -> Iterator[tuple[int, list[int], bool, str]]:
    first = 0
    token_ids = list(batch.token_ids)
    rows = zip(batch.handles, batch.counts, batch.finished, batch.matched_stops, strict=True)
    for handle, count, finished, matched_stop in rows:
        yield handle, token_ids[first : first + count], finished, matched_stop
        first += count
